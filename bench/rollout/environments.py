"""Steps per second of many waiting environments: coroutines, and plain functions in threads.

    python bench/rollout/environments.py             writes bench/results/environments_cpu.csv
    chrt -f 5 python bench/rollout/environments.py   the same, if other programs compete for the core
    python bench/rollout/environments.py --profile   where the time of the first case goes

Each environment step sleeps for a second, as if it waited for a sandbox. The engine answers at
once, so the scheduler, the environments and the prompts are measured, on one core. In the set-up
cases, environments take ten seconds to set up and make one step.
"""

import argparse
import asyncio
import cProfile
import os
import pstats
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, machine_columns, write
from bench.rollout.simulation import make_chat
from paw.config.sections import Config, EnvConfig, ModelConfig, RolloutConfig
from paw.envs.base import Endless
from paw.rollouts.engines.base import Completion, Engine
from paw.rollouts.scheduler import Rollouts
from paw.types import Outcome, Task

WORDS = 1000
PROMPT_WORDS = 50
RESPONSE_TOKENS = 20
SETUP_S = 10.0
CASES = (
    # what is measured, kind of environment, env.threads, episodes, steps of each
    ("steps", "coroutine", 64, 10_000, 5),
    ("steps", "coroutine", 64, 1000, 5),
    ("steps", "plain", 64, 1000, 1),
    ("steps", "plain", 512, 1000, 5),
    ("set-up", "coroutine", 64, 128, 1),
    ("set-up", "plain", 64, 128, 1),
    ("set-up", "plain", 128, 128, 1),
)


class Instant(Engine):
    """An engine that answers every request at once with the same tokens."""

    continuous = True

    def __init__(self) -> None:
        super().__init__(None)
        self.ids = [*range(3, 2 + RESPONSE_TOKENS), 2]
        self.logp = [-1.0] * RESPONSE_TOKENS

    def step(self) -> list[Completion]:
        completions = []
        for key in self.requests:
            completions.append(Completion(key, list(self.ids), list(self.logp), entropy=None))
        self.requests.clear()
        return completions


class Plain:
    """Shows PROMPT_WORDS words in each turn, and sleeps in its steps and its set-up."""

    text = " ".join(f"w{3 + i % (WORDS - 3)}" for i in range(PROMPT_WORDS))

    def __init__(self, steps: int, step_s: float, setup_s: float) -> None:
        self.steps = steps
        self.step_s = step_s
        self.setup_s = setup_s
        self.n = 0

    def reset(self, task: Task) -> str:
        time.sleep(self.setup_s)
        self.n = 0
        return "w3"

    def context(self) -> str:
        return f"{self.text} w{3 + self.n}"

    def step(self, response: str) -> Outcome:
        time.sleep(self.step_s)
        return self.outcome()

    def outcome(self) -> Outcome:
        self.n += 1
        done = self.n == self.steps
        return Outcome("w4 w5 w6", float(done), done, done)


class Coroutine(Plain):
    async def reset(self, task: Task) -> str:
        await asyncio.sleep(self.setup_s)
        self.n = 0
        return "w3"

    async def step(self, response: str) -> Outcome:
        await asyncio.sleep(self.step_s)
        return self.outcome()


class Factory:
    name = "waits"
    reward_max = 1.0
    invalid_penalty = 0.0
    may_block = True
    runs_others_code = True

    def __init__(self, kind: str, steps: int, step_s: float, setup_s: float) -> None:
        self.environment = {"plain": Plain, "coroutine": Coroutine}[kind]
        self.arguments = (steps, step_s, setup_s)

    def tasks(self, split: str, seed: int) -> Endless:
        return Endless(lambda i: Task(f"{split}/{i}"))

    def make(self) -> Plain:
        return self.environment(*self.arguments)


def measure(what: str, kind: str, threads: int, episodes: int, steps: int) -> dict[str, Any]:
    """Play the episodes in groups of eight. Returns a row of the table."""
    setup_s = SETUP_S if what == "set-up" else 0.0
    step_s = 1.0 if what == "steps" else 0.0
    config = Config(
        model=ModelConfig(path="-"),
        env=EnvConfig(name="waits", threads=threads),
        rollout=RolloutConfig(max_prompt_tokens=512, max_response_tokens=RESPONSE_TOKENS),
    )
    factory: Any = Factory(kind, steps, step_s, setup_s)
    rollouts = Rollouts(factory, Instant(), make_chat(WORDS), config)
    tasks = [Task(f"task {number}") for number in range(episodes // 8)]

    cpu_start = time.process_time()
    started = time.perf_counter()
    groups, stats = rollouts.play_tasks(
        tasks, group_size=8, temperature=1.0, seed=0, stream="bench"
    )
    wall_s = time.perf_counter() - started
    cpu_s = time.process_time() - cpu_start
    rollouts.close()

    played = sum(len(episode.turns) for group in groups for episode in group.trajectories)
    assert played == episodes * steps and not stats.failed, stats.failures[:3]
    return {
        "what": what,
        "environments": kind,
        "threads": threads,
        "episodes": episodes,
        "steps": played,
        "step_s": step_s,
        "setup_s": setup_s,
        "wall_s": round(wall_s, 2),
        "steps_s": round(played / wall_s, 1),
        "cpu_ms": round(1e3 * cpu_s / played, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="profile the first case instead")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])

    if options.profile:
        with cProfile.Profile() as profile:
            print(measure(*CASES[0]))
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return

    records: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for case in CASES:
            record = {"repeat": repeat, **measure(*case), "load": round(os.getloadavg()[0], 1)}
            record |= machine_columns()
            print(record, flush=True)
            records.append(record)
    write(RESULTS / "environments_cpu.csv", records)


if __name__ == "__main__":
    main()
