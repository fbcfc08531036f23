"""What it costs two ranks to tell each other an update's episodes: rows of tokens as arrays, or everything as JSON.

    python bench/rollout/exchange.py [--tokens 10000000]

Random rows of the sizes that ALFWorld has under the paper's limits: prompts of 450 tokens,
responses of 100, observations of 20, 50 turns an episode, 4 characters a token in texts. Two
processes over gloo, which end after each of the two ways. Writes bench/results/exchange_cpu.csv: of
each rank the seconds from a common start, by the clock and of a processor, and GiB of the process
without any episode, at most, and in the end with everybody's episodes.
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
from paw.rollouts.episode import Played, RolloutStats
from paw.rollouts.exchange import exchange
from paw.types import Group, Outcome, Task, Trajectory, Turn

RANKS, MEMBERS, TURNS = 2, 8, 50
PROMPT, RESPONSE, OBSERVATION = 450, 100, 20
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
    rows = []
    for way in WAYS:
        start = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            __file__,
        ]
        words = [sys.executable, *start, "--way", way, "--tokens", str(options.tokens)]
        told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows += sorted(map(json.loads, told.splitlines()), key=lambda row: row["rank"])
        print(*rows[-RANKS:], sep="\n", flush=True)
    about = {"cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__}
    write(RESULTS / "exchange_cpu.csv", [row | about for row in rows])


def measure(way: str, tokens: int) -> None:
    """In one of the ranks: make its episodes, exchange them, print a line."""
    tasks = [
        Task(f"task/{i}") for i in range(round(tokens / (PROMPT + RESPONSE) / TURNS / MEMBERS))
    ]
    ranks = join_ranks(torch.device("cpu"), episodes=len(tasks) * MEMBERS)
    base = resident_gib()
    own = episodes(tasks[ranks.rank :: RANKS], ranks.rank), RolloutStats()
    count = sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns_of(own))
    last = [turn.sampled_logp for turn in turns_of(own)][-1]
    ranks.gather(0)
    started, worked = time.perf_counter(), time.process_time()
    parts = ranks.gather(own, Played) if way == "json" else exchange(own, tasks, ranks)
    seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    del own
    gc.collect()
    assert turns_of(parts[ranks.rank])[-1].sampled_logp == last
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sizes = {
        "wall_s": seconds,
        "cpu_s": cpu,
        "base_gib": base,
        "peak_gib": peak,
        "end_gib": resident_gib(),
    }
    found = {"way": way, "rank": ranks.rank, "tokens": sum(ranks.gather(count))}
    found |= {name: round(size, 2) for name, size in sizes.items()}
    os.write(1, f"{json.dumps(found)}\n".encode())
    ranks.close()
    os._exit(0)


def episodes(tasks: list[Task], seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)

    def turn() -> Turn:
        prompt, response, observation = (
            max(1, round(rng.normal(size, 0.2 * size))) for size in (PROMPT, RESPONSE, OBSERVATION)
        )
        logp, entropy = -rng.exponential(size=(2, response)).astype(np.float32)
        return Turn(
            prompt_ids=rng.integers(150_000, size=prompt).tolist(),
            response_ids=rng.integers(150_000, size=response).tolist(),
            sampled_logp=logp.tolist(),
            entropy=(-entropy).tolist(),
            prompt="look " * (4 * prompt // 5),
            response="look " * (4 * response // 5),
            outcome=Outcome("look " * (4 * observation // 5), 0.0, done=False, won=False),
            anchor="look " * (4 * observation // 5),
            version=3,
        )

    return [
        Group(task, [Trajectory(task, m, [turn() for _ in range(TURNS)]) for m in range(MEMBERS)])
        for task in tasks
    ]


def turns_of(played: Played) -> list[Turn]:
    return [
        turn
        for group in played[0]
        for trajectory in group.trajectories
        for turn in trajectory.turns
    ]


def resident_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


if __name__ == "__main__":
    main()
