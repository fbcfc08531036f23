"""What an update of many tokens costs one rank of up to 512. No other rank runs: a simulation.

    python bench/rollout/exchange_simulation.py [--tokens 160000000] [--ranks 8 64 512]

One process is the first of so many ranks, with the code that a rank runs. What the others would
send is made up, at the sizes of bench/rollout/exchange.py. The numbers of turns and the placement
of rows are computed in full; rows are counted, not sent. Writes
bench/results/exchange_simulated.csv: the processor seconds of each part (`own_s` makes the samples
of the turns that the rank has played), the MiB of the numbers of all turns, and for rows, the MiB
that a rank plays, gets, and has to compute at most.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, cpu_name, write
from bench.rollout.exchange import (
    BUDGET,
    MEMBERS,
    OBSERVATION,
    PROMPT,
    RESPONSE,
    TURNS,
    episodes,
)
from paw.algo.advantages import gigpo
from paw.algo.packing import Packing
from paw.algo.rows import INTEGERS, REALS, compute_by_group, share_scalars
from paw.algo.samples import to_samples
from paw.algo.sequences import minibatches
from paw.algo.shared_samples import Columns, SharedSamples
from paw.algo.shares import share_sequences
from paw.algo.world_model import select
from paw.rollouts.base import RolloutStats
from paw.rollouts.summaries import share_summaries
from paw.types import AwayTrajectory, EpisodeSummary, Group, Task, Trajectory, as_ids

TOKEN_BYTES = 4 + 2 * 4 * RESPONSE / (PROMPT + RESPONSE)
"""An id, and two float32 (log-probs of the sampler and of the trainer) for each response token."""
LEAST_TURNS = 30
"""Of an episode; TURNS is the most."""
MINIBATCHES = 16


class OneOfMany:
    """Ranks of which only this one runs. The others have turns of the usual sizes."""

    def __init__(self, rank: int, turns_of_rank: list[int]) -> None:
        self.rank = rank
        self.world_size = len(turns_of_rank)
        self.turns_of_rank = turns_of_rank
        """How many turns each rank has numbers of."""
        self._rng = np.random.default_rng(0)
        self.received_bytes = 0

    def gather(self, item: Any, kind: Any = None) -> list[Any]:
        """As if all others sent the same."""
        data = to_json(item)
        adapter = TypeAdapter(kind or type(item))
        items = [adapter.validate_json(data) for _ in self.turns_of_rank]
        self.received_bytes += len(data) * (self.world_size - 1)
        return items

    def gather_array(self, array: np.ndarray) -> list[np.ndarray]:
        columns = len(array) // self.turns_of_rank[self.rank]
        parts = [self._part(turns, columns, array.dtype) for turns in self.turns_of_rank]
        parts[self.rank] = array
        self.received_bytes += sum(part.nbytes for part in parts) - array.nbytes
        return parts

    def exchange_arrays(self, parts: Any) -> list[np.ndarray]:
        raise NotImplementedError("rows are counted, not sent")

    def run_on_all(self, make: Callable[[], Any]) -> Any:
        return make()

    def _part(self, turns: int, columns: int, dtype: Any) -> np.ndarray:
        if dtype == np.int32:
            part = np.zeros((turns, INTEGERS), np.int32)
            for column, mean in enumerate((PROMPT, RESPONSE, 3, OBSERVATION)):
                lengths = self._rng.normal(mean, 0.2 * mean, turns)
                part[:, column] = np.maximum(1, lengths.round())
            return part.reshape(-1)
        if dtype == np.float64 and columns == REALS:
            part = np.zeros((turns, REALS))
            part[:, 2] = self._rng.integers(0, 2, turns)
            return part.reshape(-1)
        if dtype == np.float64:
            return self._rng.random(turns)
        return self._rng.integers(0, 256, turns * columns).astype(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=160_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--of", type=int, help="simulate this number of ranks, in this process")
    options = parser.parse_args()
    if options.of:
        print(json.dumps(simulate(options.tokens, options.of)), flush=True)
        return
    versions = {"cpu": cpu_name(), "python": platform.python_version()}
    rows = []
    for count in options.ranks:
        arguments = ("--tokens", str(options.tokens), "--of", str(count))
        command = [sys.executable, __file__, *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(output, end="", flush=True)
        rows.append(json.loads(output) | versions)
    write(RESULTS / "exchange_simulated.csv", rows)


class Clock:
    """Measures the process's time of parts that follow one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._started = time.process_time()

    def stop(self, part: str) -> None:
        """Note the time of a part. The next begins."""
        self.seconds[part] = round(time.process_time() - self._started, 3)
        self.start()


def simulate(tokens: int, world_size: int) -> dict[str, Any]:
    turns = (LEAST_TURNS + TURNS) / 2
    groups = make_groups(round(tokens / (PROMPT + RESPONSE) / turns), world_size)
    turns_of_rank = count_turns(groups, world_size)
    ranks: Any = OneOfMany(0, turns_of_rank)
    clock = Clock()
    tell_episodes(groups, ranks)
    clock.stop("episodes_s")

    def share(samples: SharedSamples) -> None:
        clock.stop("own_s")
        share_scalars(samples, ranks, anchors="equality", share_prefixes=True)
        clock.stop("numbers_s")

    samples = to_samples(
        groups,
        separator_ids=[1, 2, 3],
        encode_observation=lambda text: as_ids([1] * OBSERVATION),
        invalid_penalty=0.1,
        share=share,
    )
    assert isinstance(samples, SharedSamples)
    clock.start()
    ranks.turns_of_rank = turns_of_groups(samples.column("group"), world_size)
    samples.assign("advantage", compute_by_group(samples, gigpo, ranks))
    clock.stop("advantages_s")
    samples.assign("entropy", np.random.default_rng(2).random(len(samples)))
    clock.start()
    chosen = select(samples, alpha=0.6, weight="adaptive", reward_max=1.0, n_groups=len(groups))
    samples.assign("wm_weight", chosen.weights)
    clock.stop("selection_s")
    played = row_tokens(samples)[samples.held()].sum()
    got, most = placed(samples, world_size)
    clock.stop("placement_s")

    mib = TOKEN_BYTES / 2**20
    return {
        "simulated_ranks": world_size,
        "tokens": int(row_tokens(samples).sum()),
        "turns": len(samples),
        "own_turns": turns_of_rank[0],
        "received_mib": round(ranks.received_bytes / 2**20, 1),
        "columns_mib": round(columns_bytes(samples) / 2**20, 1),
        **clock.seconds,
        "sum_s": round(sum(clock.seconds.values()), 2),
        "played_mib": round(mib * float(played), 1),
        "rows_got_mib": round(mib * float(got.max()), 1),
        "rows_mib": round(mib * float(most.max()), 1),
    }


def count_turns(groups: Sequence[Group], world_size: int) -> list[int]:
    """Turns that each rank played."""
    turns_of_rank = [0] * world_size
    for group in groups:
        for trajectory in group.trajectories:
            turns_of_rank[getattr(trajectory, "rank", 0)] += len(trajectory.turns)
    return turns_of_rank


def columns_bytes(samples: SharedSamples) -> int:
    columns = (getattr(samples.columns, field.name) for field in fields(Columns))
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def turns_of_groups(group: np.ndarray, world_size: int) -> list[int]:
    """Return how many turns each rank computes advantages for."""
    starts = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    sizes = np.diff(np.append(starts, len(group)))
    turns = np.bincount(starts * world_size // len(group), sizes, minlength=world_size)
    return turns.astype(int).tolist()


def tell_episodes(groups: list[Group], ranks: Any) -> None:
    """Exchange the summaries of episodes, as after a rollout."""
    own: list[Group] = []
    for group in groups:
        played = [t for t in group.trajectories if not isinstance(t, AwayTrajectory)]
        if played:
            own.append(Group(group.task, played, group.index))
    share_summaries((own, RolloutStats()), [group.task for group in groups], ranks)


def make_groups(episode_count: int, world_size: int) -> list[Group]:
    """Episodes of 30 to 50 turns, in blocks; those of the first rank with tokens, others without."""
    rng = np.random.default_rng(1)
    group_count = episode_count // MEMBERS
    groups: list[Group] = []
    for index in range(group_count):
        task = Task(f"task/{index}")
        played: list[Trajectory] = []
        if index * world_size < group_count:  # the first rank plays some of its members
            played = episodes([task], index)[0].trajectories
        members: list[Trajectory] = []
        for member in range(MEMBERS):
            rank = (index * MEMBERS + member) * world_size // (group_count * MEMBERS)
            turns = int(rng.integers(LEAST_TURNS, TURNS + 1))
            if rank == 0:
                played[member].turns = played[member].turns[:turns]
                members.append(played[member])
                continue
            summary = EpisodeSummary(turns, turns, turns * RESPONSE, 0.0, won=False, score=None)
            members.append(AwayTrajectory(task, member, summary, rank=rank, failure=None))
        groups.append(Group(task, members, index))
    return groups


def placed(samples: SharedSamples, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Place the rows of the scoring pass, then of each mini-batch.

    Returns the tokens that each rank gets for the mini-batches, and computes, both [ranks].
    """
    packing = Packing(budget=BUDGET, quadratic=3.3e-5)
    share = partial(share_sequences, packing=packing, world_size=world_size)
    move(samples, share(samples, with_observation=False, skip_without_loss=False))
    got = np.zeros(world_size)
    most = np.zeros(world_size)
    for minibatch in minibatches(samples, size=-(-len(samples) // MINIBATCHES), seed=0):
        assert isinstance(minibatch, SharedSamples)
        shares = share(minibatch, with_observation=True, skip_without_loss=True)
        tokens = row_tokens(minibatch)
        holders = minibatch.column("holder").copy()
        move(minibatch, shares)
        new_holders = minibatch.column("holder")
        most += np.bincount(new_holders, tokens, minlength=world_size)
        got += np.bincount(new_holders, tokens * (new_holders != holders), minlength=world_size)
    return got, most


def move(samples: SharedSamples, shares: Any) -> None:
    """Note where rows go. Here each turn is a chain."""
    samples.set_holder(shares.chain_starts, shares.chain_ranks)


def row_tokens(samples: SharedSamples) -> np.ndarray:
    return samples.column("prompt_length") + samples.column("response_length")


if __name__ == "__main__":
    main()
