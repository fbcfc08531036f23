"""What an update of many tokens costs one of up to 512 ranks. A simulation: no other rank runs.

    python bench/rollout/exchange_simulation.py [--tokens 160000000] [--ranks 8 64 512]

A single process acts as the first rank and runs a rank's own code. What the other ranks would send
is made up, with the sizes of bench/rollout/exchange.py. The columns of all turns and the placement
of rows are computed in full; the rows themselves are counted instead of sent. Writes
bench/results/exchange_simulated.csv: the processor seconds of each part (`own_s` makes the samples
of the turns that the rank has played), the MiB of the columns of all turns, and the MiB of rows
that a rank plays, and that it gets and computes at most.
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
"""A token id, plus two float32 per response token: the sampler's and the trainer's log-probs."""
LEAST_TURNS = 30
"""The fewest turns of an episode; TURNS is the most."""
MINIBATCHES = 16


class OneOfMany:
    """A group of ranks of which only one runs. The others have turns of the usual sizes."""

    def __init__(self, rank: int, turns_of_rank: list[int]) -> None:
        self.rank = rank
        self.world_size = len(turns_of_rank)
        self.turns_of_rank = turns_of_rank
        """How many turns each rank holds columns of."""
        self._rng = np.random.default_rng(0)
        self.received_bytes = 0

    def gather(self, item: Any, kind: Any = None) -> list[Any]:
        """Act as if all other ranks sent the same item."""
        encoded = to_json(item)
        adapter = TypeAdapter(kind or type(item))
        items = [adapter.validate_json(encoded) for _ in self.turns_of_rank]
        self.received_bytes += len(encoded) * (self.world_size - 1)
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
            integers = np.zeros((turns, INTEGERS), np.int32)
            for column, mean_length in enumerate((PROMPT, RESPONSE, 3, OBSERVATION)):
                lengths = self._rng.normal(mean_length, 0.2 * mean_length, turns)
                integers[:, column] = np.maximum(1, lengths.round())
            return integers.reshape(-1)
        if dtype == np.float64 and columns == REALS:
            reals = np.zeros((turns, REALS))
            reals[:, 2] = self._rng.integers(0, 2, turns)
            return reals.reshape(-1)
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
    records = []
    for rank_count in options.ranks:
        arguments = ("--tokens", str(options.tokens), "--of", str(rank_count))
        command = [sys.executable, __file__, *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(output, end="", flush=True)
        records.append(json.loads(output) | versions)
    write(RESULTS / "exchange_simulated.csv", records)


class Clock:
    """Measures the processor time of consecutive parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._started = time.process_time()

    def stop(self, part: str) -> None:
        """Record the time of a part, and start the next one."""
        self.seconds[part] = round(time.process_time() - self._started, 3)
        self.start()


def simulate(tokens: int, world_size: int) -> dict[str, Any]:
    mean_turns = (LEAST_TURNS + TURNS) / 2
    groups = make_groups(round(tokens / (PROMPT + RESPONSE) / mean_turns), world_size)
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
    received_tokens, computed_tokens = placed(samples, world_size)
    clock.stop("placement_s")

    mib_per_token = TOKEN_BYTES / 2**20
    return {
        "simulated_ranks": world_size,
        "tokens": int(row_tokens(samples).sum()),
        "turns": len(samples),
        "own_turns": turns_of_rank[0],
        "received_mib": round(ranks.received_bytes / 2**20, 1),
        "columns_mib": round(columns_bytes(samples) / 2**20, 1),
        **clock.seconds,
        "sum_s": round(sum(clock.seconds.values()), 2),
        "played_mib": round(mib_per_token * float(played), 1),
        "rows_got_mib": round(mib_per_token * float(received_tokens.max()), 1),
        "rows_mib": round(mib_per_token * float(computed_tokens.max()), 1),
    }


def count_turns(groups: Sequence[Group], world_size: int) -> list[int]:
    """The number of turns that each rank played."""
    turns_of_rank = [0] * world_size
    for group in groups:
        for trajectory in group.trajectories:
            turns_of_rank[getattr(trajectory, "rank", 0)] += len(trajectory.turns)
    return turns_of_rank


def columns_bytes(samples: SharedSamples) -> int:
    columns = (getattr(samples.columns, field.name) for field in fields(Columns))
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def turns_of_groups(group: np.ndarray, world_size: int) -> list[int]:
    """The number of turns that each rank computes advantages for."""
    starts = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    group_sizes = np.diff(np.append(starts, len(group)))
    turns = np.bincount(starts * world_size // len(group), group_sizes, minlength=world_size)
    return turns.astype(int).tolist()


def tell_episodes(groups: list[Group], ranks: Any) -> None:
    """Exchange summaries of the episodes, as after a rollout."""
    own_groups: list[Group] = []
    for group in groups:
        played: list[Trajectory] = []
        for trajectory in group.trajectories:
            if not isinstance(trajectory, AwayTrajectory):
                played.append(trajectory)
        if played:
            own_groups.append(Group(group.task, played, group.index))
    share_summaries((own_groups, RolloutStats()), [group.task for group in groups], ranks)


def make_groups(episode_count: int, world_size: int) -> list[Group]:
    """Groups of episodes of 30 to 50 turns, dealt to ranks in blocks. Only rank 0's have tokens."""
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
    """Place the rows of the scoring pass, then those of each mini-batch.

    Returns the tokens that each rank receives and those that it computes in the mini-batches, both
    [ranks].
    """
    packing = Packing(budget=BUDGET, quadratic=3.3e-5)
    share = partial(share_sequences, packing=packing, world_size=world_size)
    move(samples, share(samples, with_observation=False, skip_without_loss=False))
    received_tokens = np.zeros(world_size)
    computed_tokens = np.zeros(world_size)
    for minibatch in minibatches(samples, size=-(-len(samples) // MINIBATCHES), seed=0):
        assert isinstance(minibatch, SharedSamples)
        shares = share(minibatch, with_observation=True, skip_without_loss=True)
        tokens = row_tokens(minibatch)
        holders = minibatch.column("holder").copy()
        move(minibatch, shares)
        new_holders = minibatch.column("holder")
        computed_tokens += np.bincount(new_holders, tokens, minlength=world_size)
        received_tokens += np.bincount(
            new_holders, tokens * (new_holders != holders), minlength=world_size
        )
    return received_tokens, computed_tokens


def move(samples: SharedSamples, shares: Any) -> None:
    """Record where the rows go. Here every turn is a chain of its own."""
    samples.set_holder(shares.chain_starts, shares.chain_ranks)


def row_tokens(samples: SharedSamples) -> np.ndarray:
    return samples.column("prompt_length") + samples.column("response_length")


if __name__ == "__main__":
    main()
