"""What an update's episodes cost each rank if every rank gets all of them, and if each holds only its rows.

    python bench/rollout/exchange.py [--tokens 16000000] [--ranks 1 2 4]

Rows are random, with ALFWorld's sizes under the paper's limits: prompts of 450 tokens, responses of
100, observations of 20, 50 turns per episode, and texts of 4 characters per token. Each measurement
starts new processes, connected by gloo. They share what they have played, compute samples and
advantages, and make the micro-batches of the scoring pass and of the optimizer's pass. With "all",
every rank first gets the turns of all ranks. Writes bench/results/exchange_cpu.csv: for each rank,
the wall and processor seconds since a common start, and the GiB of the process before the update,
at its peak and at the end. A first update, of one group per rank, is not measured.
"""

import argparse
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, cpu_name, write
from paw.algo.advantages import grpo
from paw.algo.batches import Batch, micro_batches
from paw.algo.packing import Packing
from paw.algo.rows import compute_by_group, share_scalars
from paw.algo.samples import to_samples
from paw.algo.shared_samples import SharedSamples, assign
from paw.build import join_ranks
from paw.distributed.ranks import Ranks
from paw.rollouts.base import RolloutResult, RolloutStats
from paw.rollouts.exchange import gather_turns
from paw.rollouts.summaries import share_summaries
from paw.types import Group, Outcome, Sample, Task, Trajectory, Turn, as_ids

MEMBERS = 8
"""Episodes of a task."""
TURNS = 50
PROMPT = 450
"""Mean tokens, as are the next two."""
RESPONSE = 100
OBSERVATION = 20
WAYS = ("all", "rows")
BUDGET = 16384
"""Tokens of a micro-batch."""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--tokens", type=int, default=16_000_000, help="prompts and responses, of all ranks"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--way", choices=WAYS, help="one of the ranks")
    options = parser.parse_args()
    if options.way:
        return measure(options.way, options.tokens)
    versions = {"cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__}
    records = []
    for rank_count in options.ranks:
        for way in WAYS[rank_count == 1 :]:
            processes = f"--nproc-per-node={rank_count}"
            torchrun = ("-m", "torch.distributed.run", "--standalone", processes)
            arguments = ("--way", way, "--tokens", str(options.tokens))
            command = [sys.executable, *torchrun, __file__, *arguments]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            of_ranks = [json.loads(line) for line in output.splitlines()]
            of_ranks.sort(key=lambda record: record["rank"])
            print(*of_ranks, sep="\n", flush=True)
            records += [record | versions for record in of_ranks]
    write(RESULTS / "exchange_cpu.csv", records)


def measure(way: str, tokens: int) -> None:
    """Run in one of the ranks: makes its episodes, cuts their micro-batches, prints a line."""
    task_count = round(tokens / (PROMPT + RESPONSE) / TURNS / MEMBERS)
    tasks = [Task(f"task/{i}") for i in range(task_count)]
    ranks = join_ranks(torch.device("cpu"))
    warm_up(way, ranks)
    base_gib = resident_gib()
    own_tasks = range(
        task_count * ranks.rank // ranks.world_size,
        task_count * (ranks.rank + 1) // ranks.world_size,
    )
    groups = episodes([tasks[i] for i in own_tasks], ranks.rank)
    for group, index in zip(groups, own_tasks, strict=True):
        group.index = index
    token_count = sum(group_tokens(group) for group in groups)

    ranks.gather(0)  # a common start
    started = time.perf_counter()
    cpu_start = time.process_time()
    samples, batch_tokens = cut(way, (groups, RolloutStats()), tasks, ranks)
    wall_s = time.perf_counter() - started
    cpu_s = time.process_time() - cpu_start

    del groups
    gc.collect()
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    record = {
        "way": way,
        "ranks": ranks.world_size,
        "rank": ranks.rank,
        "tokens": sum(ranks.gather(token_count)),
        "turns": len(samples),
        "batch_tokens": batch_tokens,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "base_gib": round(base_gib, 3),
        "peak_gib": round(peak_gib, 3),
        "end_gib": round(resident_gib(), 3),
    }
    os.write(1, f"{json.dumps(record)}\n".encode())  # one call, so that lines of ranks do not mix
    ranks.close()
    os._exit(0)


def warm_up(way: str, ranks: Ranks) -> None:
    """Make an update of one group per rank, which does the work that only a first update has."""
    tasks = [Task(f"first/{rank}") for rank in range(ranks.world_size)]
    groups = episodes([tasks[ranks.rank]], ranks.rank)
    groups[0].index = ranks.rank
    cut(way, (groups, RolloutStats()), tasks, ranks)


def cut(
    way: str, result: RolloutResult, tasks: list[Task], ranks: Ranks
) -> tuple[Sequence[Sample], int]:
    """Return the update's samples, and this rank's tokens in the optimizer's pass."""
    groups = [Group(task, [], index) for index, task in enumerate(tasks)]
    for rank_groups, _ in share_summaries(result, tasks, ranks):
        for group in rank_groups:
            groups[group.index].trajectories += group.trajectories
    if way == "all":
        groups = gather_turns(groups, ranks)
    is_shared = way == "rows" and ranks.world_size > 1

    def share(samples: SharedSamples) -> None:
        share_scalars(samples, ranks, anchors="nothing", share_prefixes=False)

    samples = to_samples(
        groups,
        separator_ids=[1, 2, 3],
        encode_observation=lambda text: as_ids([1] * OBSERVATION),
        invalid_penalty=0.1,
        rank=ranks.rank,
        share=share if is_shared else None,
    )
    groups.clear()
    result[0].clear()
    assign(samples, "advantage", compute_by_group(samples, grpo, ranks))

    packing = Packing(budget=BUDGET, ranks=ranks if is_shared else None)
    share_of_all = samples if is_shared else samples[ranks.rank :: ranks.world_size]
    device = torch.device("cpu")
    tokens_of(micro_batches(share_of_all, packing, with_observation=False, device=device))
    held = samples.held() if isinstance(samples, SharedSamples) else range(len(samples))
    for index in held:
        samples[index].old_logp = samples[index].sampled_logp
    assign(samples, "wm_weight", 1.0 - np.arange(len(samples)) % 2)
    batches = micro_batches(share_of_all, packing, with_observation=True, device=device)
    return samples, tokens_of(batches)


def tokens_of(batches: Iterable[Batch]) -> int:
    """Make the batches one after another, and count their tokens."""
    return sum(len(batch.input_ids) for batch in batches)


def group_tokens(group: Group) -> int:
    token_count = 0
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            token_count += len(turn.prompt_ids) + len(turn.response_ids)
    return token_count


def episodes(tasks: list[Task], seed: int) -> list[Group]:
    """A group of random episodes for each task."""
    rng = np.random.default_rng(seed)

    def length(mean: int) -> int:
        return max(1, round(rng.normal(mean, 0.2 * mean)))

    def turn() -> Turn:
        prompt = length(PROMPT)
        response = length(RESPONSE)
        observation = length(OBSERVATION)
        sampled_logp, entropy = -rng.exponential(size=(2, response)).astype(np.float32)
        return Turn(
            prompt_ids=as_ids(rng.integers(150_000, size=prompt)),
            response_ids=as_ids(rng.integers(150_000, size=response)),
            sampled_logp=sampled_logp,
            entropy=-entropy,
            prompt="look " * (4 * prompt // 5),
            response="look " * (4 * response // 5),
            outcome=Outcome("look " * (4 * observation // 5), 0.0, done=False, won=False),
            anchor="look " * (4 * observation // 5),
            version=3,
        )

    groups = []
    for task in tasks:
        members = []
        for member in range(MEMBERS):
            turns = [turn() for _ in range(TURNS)]
            members.append(Trajectory(task, member, turns))
        groups.append(Group(task, members))
    return groups


def resident_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


if __name__ == "__main__":
    main()
