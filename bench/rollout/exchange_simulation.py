"""What an update of many tokens costs one rank of up to 512. No other rank runs: a simulation.

    python bench/rollout/exchange_simulation.py [--tokens 160000000] [--ranks 8 64 512]

One process is the first of so many ranks, with the code that a rank runs. What the others would
send is made up, at the sizes of bench/rollout/exchange.py. The numbers of turns and the placement
of rows are computed in full; rows are counted, not sent. Writes
bench/results/exchange_simulated.csv: the processor seconds for the numbers of all turns, the GiB
that they take, and for rows, the MiB that a rank plays, gets, and has to compute at most.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, cpu_name, write
from bench.rollout.exchange import MEMBERS, PROMPT, RESPONSE, TURNS, episodes, resident_gib
from paw.algo.advantages import gigpo
from paw.algo.placement import Chain, place
from paw.algo.rows import INTEGERS, REALS, share_scalars
from paw.algo.samples import minibatches, to_samples
from paw.algo.world_model import select
from paw.types import AwayTrajectory, EpisodeSummary, Group, Sample, Task, Trajectory, as_ids

TOKEN_BYTES = 4 + 2 * 4 * RESPONSE / (PROMPT + RESPONSE)
"""An id, and two float32 (log-probs of the sampler and of the trainer) for each response token."""
MINIBATCHES = 4


class OneOfMany:
    """Ranks of which only this one runs. The others have turns of the usual sizes."""

    def __init__(self, rank: int, turns_of_rank: list[int]) -> None:
        self.rank = rank
        self.world_size = len(turns_of_rank)
        self._turns_of_rank = turns_of_rank
        self._rng = np.random.default_rng(0)
        self.received_bytes = 0

    def gather(self, item: Any, kind: Any = None) -> list[Any]:
        return [item] * self.world_size

    def gather_array(self, array: np.ndarray) -> list[np.ndarray]:
        columns = len(array) // self._turns_of_rank[self.rank]
        parts = [self._part(turns, columns, array.dtype) for turns in self._turns_of_rank]
        parts[self.rank] = array
        self.received_bytes += sum(part.nbytes for part in parts) - array.nbytes
        return parts

    def exchange_arrays(self, parts: Any) -> list[np.ndarray]:
        raise NotImplementedError("rows are counted, not sent")

    def _part(self, turns: int, columns: int, dtype: Any) -> np.ndarray:
        if dtype == np.int32:
            part = np.zeros((turns, INTEGERS), np.int32)
            for column, mean in enumerate((PROMPT, RESPONSE, 3, 20)):
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


def simulate(tokens: int, world_size: int) -> dict[str, Any]:
    groups = make_groups(round(tokens / (PROMPT + RESPONSE) / TURNS), world_size)
    turns_of_rank = [0] * world_size
    for group in groups:
        for trajectory in group.trajectories:
            rank = getattr(trajectory, "rank", 0)
            turns_of_rank[rank] += len(trajectory.turns)
    ranks = OneOfMany(0, turns_of_rank)

    def share(samples: list[Sample]) -> None:
        share_scalars(samples, ranks, anchors="equality", share_prefixes=True)

    before_gib = resident_gib()
    start = time.process_time()
    samples = to_samples(
        groups,
        separator_ids=[1, 2, 3],
        encode_observation=lambda text: as_ids([1] * 20),
        invalid_penalty=0.1,
        share=share,
    )
    shared_s = time.process_time() - start

    start = time.process_time()
    for sample, advantage in zip(samples, gigpo(samples), strict=True):
        sample.advantage = advantage
        sample.entropy = sample.prefix_order % 997 / 997
    chosen = select(samples, alpha=0.6, weight="adaptive", reward_max=1.0, n_groups=len(groups))
    for sample, weight in zip(samples, chosen.weights, strict=True):
        sample.wm_weight = weight
    algorithm_s = time.process_time() - start

    start = time.process_time()
    got, most = placed(samples, world_size)
    placement_s = time.process_time() - start
    mib = TOKEN_BYTES / 2**20
    return {
        "simulated_ranks": world_size,
        "tokens": sum(row_tokens(sample) for sample in samples),
        "turns": len(samples),
        "received_mib": round(ranks.received_bytes / 2**20, 1),
        "numbers_gib": round(resident_gib() - before_gib, 3),
        "share_s": round(shared_s, 2),
        "advantages_s": round(algorithm_s, 2),
        "placement_s": round(placement_s, 2),
        "played_mib": round(mib * sum(row_tokens(s) for s in samples if s.holder == 0), 1),
        "rows_got_mib": round(mib * max(got), 1),
        "rows_mib": round(mib * max(most), 1),
    }


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
            turns = int(rng.integers(30, TURNS + 1))
            if rank == 0:
                played[member].turns = played[member].turns[:turns]
                members.append(played[member])
                continue
            summary = EpisodeSummary(turns, turns, turns * RESPONSE, 0.0, won=False, score=None)
            members.append(AwayTrajectory(task, member, summary, rank=rank, failure=None))
        groups.append(Group(task, members, index))
    return groups


def placed(samples: list[Sample], world_size: int) -> tuple[list[int], list[int]]:
    """Place the rows of each mini-batch. Returns the tokens that each rank gets, and computes."""
    got = [0] * world_size
    most = [0] * world_size
    size = -(-len(samples) // MINIBATCHES)
    for minibatch in minibatches(samples, size=size, seed=0):
        chains = [chain_of(sample) for sample in minibatch]
        destinations = place(chains, world_size=world_size, share_prefixes=False, budget=16384)
        for chain, destination in zip(chains, destinations, strict=True):
            most[destination] += chain.tokens
            if destination != chain.holder:
                got[destination] += chain.tokens
    return got, most


def chain_of(sample: Sample) -> Chain:
    tokens = row_tokens(sample)
    return Chain(
        holder=sample.holder,
        group=sample.group,
        order=sample.prefix_order,
        tokens=tokens,
        shared=0,
        work=tokens + 3.3e-5 * tokens**2,
    )


def row_tokens(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


if __name__ == "__main__":
    main()
