"""What it costs two ranks to exchange an update's episodes: rows of tokens as arrays, or everything as JSON.

    python bench/rollout/exchange.py [--tokens 10000000]

Random rows of the sizes that ALFWorld has under the paper's limits: prompts of 450 tokens,
responses of 100, observations of 20, 50 turns an episode, 4 characters a token in texts. Two
processes over gloo, new ones for each of the two ways. Writes bench/results/exchange_cpu.csv: for
each rank the seconds from a common start, by the clock and of a processor, and the GiB of the
process: without any episode, at most, and at the end with the episodes of both.
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
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, cpu_name, write
from paw.build import join_ranks
from paw.rollouts.base import RolloutResult, RolloutStats
from paw.rollouts.exchange import exchange
from paw.types import Group, Outcome, Task, Trajectory, Turn, as_ids

RANKS = 2
MEMBERS = 8
"""Episodes of a task."""
TURNS = 50
PROMPT = 450
"""Mean tokens, here and in the next two."""
RESPONSE = 100
OBSERVATION = 20
WAYS = ("json", "arrays")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--tokens", type=int, default=10_000_000, help="prompts and responses, of both ranks"
    )
    parser.add_argument("--way", choices=WAYS, help="one of the ranks")
    options = parser.parse_args()
    if options.way:
        return measure(options.way, options.tokens)
    versions = {"cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__}
    rows = []
    for way in WAYS:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        arguments = ("--way", way, "--tokens", str(options.tokens))
        command = [sys.executable, *torchrun, __file__, *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        of_ranks = [json.loads(line) for line in output.splitlines()]
        of_ranks.sort(key=lambda row: row["rank"])
        print(*of_ranks, sep="\n", flush=True)
        rows += [row | versions for row in of_ranks]
    write(RESULTS / "exchange_cpu.csv", rows)


def measure(way: str, tokens: int) -> None:
    """In one of the ranks: make its episodes, exchange them, print a line."""
    task_count = round(tokens / (PROMPT + RESPONSE) / TURNS / MEMBERS)
    tasks = [Task(f"task/{i}") for i in range(task_count)]
    ranks = join_ranks(torch.device("cpu"))
    base_gib = resident_gib()
    played = episodes(tasks[ranks.rank :: RANKS], ranks.rank), RolloutStats()
    turns = turns_of(played)
    count = sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns)
    last_logp = turns[-1].sampled_logp
    del turns

    ranks.gather(0)  # a common start
    start = time.perf_counter()
    cpu_start = time.process_time()
    parts = ranks.gather(played, RolloutResult) if way == "json" else exchange(played, tasks, ranks)
    wall_s = time.perf_counter() - start
    cpu_s = time.process_time() - cpu_start

    del played
    gc.collect()
    assert (turns_of(parts[ranks.rank])[-1].sampled_logp == last_logp).all()
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = {
        "way": way,
        "rank": ranks.rank,
        "tokens": sum(ranks.gather(count)),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "base_gib": round(base_gib, 2),
        "peak_gib": round(peak_gib, 2),
        "end_gib": round(resident_gib(), 2),
    }
    os.write(1, f"{json.dumps(row)}\n".encode())  # one call, so that lines of ranks do not mix
    ranks.close()
    os._exit(0)


def episodes(tasks: list[Task], seed: int) -> list[Group]:
    """A group of random episodes for each task."""
    rng = np.random.default_rng(seed)

    def length(mean: int) -> int:
        return max(1, round(rng.normal(mean, 0.2 * mean)))

    def turn() -> Turn:
        prompt = length(PROMPT)
        response = length(RESPONSE)
        observation = length(OBSERVATION)
        logp, entropy = -rng.exponential(size=(2, response)).astype(np.float32)
        return Turn(
            prompt_ids=as_ids(rng.integers(150_000, size=prompt)),
            response_ids=as_ids(rng.integers(150_000, size=response)),
            sampled_logp=logp,
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


def turns_of(played: RolloutResult) -> list[Turn]:
    groups, _ = played
    turns = []
    for group in groups:
        for trajectory in group.trajectories:
            turns += trajectory.turns
    return turns


def resident_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


if __name__ == "__main__":
    main()
