"""Steps a second of WebShop on one core: 128 sessions over one generated catalogue take turns, as in a rollout.

    python bench/webshop_steps.py [--products 3000] [--steps 40000]

Writes bench/results/webshop_steps.csv. A step is what training asks of the environment each turn: the prompt, in the
paper's style, and the answer's effect. `random` clicks anything, or searches for the type of product or for a product's
title. `buyer` is the rule-based one. Exit code 1 below the target, by processor time: a busy machine slows the clock.
"""

import argparse
import datetime
import os
import platform
import random
import sys
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import RESULTS, write
from bench.kernels import commit, cpu_name
from paw.envs.base import admissible_responses, train_tasks
from paw.envs.settings import WebshopConfig
from paw.envs.webshop.factory import WebshopEnv, WebshopFactory

SESSIONS = 128
TARGET = 2000
"""Steps a second of processor time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--products", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "webshop_steps.csv")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    started = time.perf_counter()
    factory = WebshopFactory(WebshopConfig(eval_split="test", max_turns=15, products=options.products))
    loading, rows = time.perf_counter() - started, []
    for play in ("random", "buyer"):
        rows.append({"play": play, "sessions": SESSIONS, **measure(factory, play, options.steps)})
        print(rows[-1])
    about = {
        "products": options.products,
        "load_s": f"{loading:.2f}",
        "device": cpu_name(),
        "cores": 1,
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "bm25s": metadata.version("bm25s"),
        "rapidfuzz": metadata.version("rapidfuzz"),
        "date": datetime.date.today().isoformat(),
        "commit": commit("paw/envs/webshop", "paw/envs/search/retrieval"),
    }
    write(options.out, [row | about for row in rows])
    return int(min(row["steps_cpu_s"] for row in rows) < TARGET)


def measure(factory: WebshopFactory, play: str, steps: int) -> dict[str, float]:
    """Steps by the clock and by processor time, the share of episodes won, their mean score and length."""
    rng, tasks = random.Random(0), iter(train_tasks(factory, 0, steps, 0))
    environments = [factory.make() for _ in range(SESSIONS)]
    for environment in environments:
        environment.reset(next(tasks))
    ended = []
    started, processor = time.perf_counter(), time.process_time()
    for step in range(steps):
        environment = environments[step % SESSIONS]
        environment.context()
        outcome = environment.step(environment.oracle() if play == "buyer" else clicks(environment, rng))
        if outcome.done:
            ended.append(outcome)
            environment.reset(next(tasks))
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    return {
        "steps": steps,
        "steps_s": round(steps / seconds),
        "steps_cpu_s": round(steps / processor),
        "episodes": len(ended),
        "won": round(sum(outcome.won for outcome in ended) / len(ended), 4),
        "score": round(sum(outcome.score or 0.0 for outcome in ended) / len(ended), 4),
        "length": round(steps / len(ended), 2),
    }


def clicks(environment: WebshopEnv, rng: random.Random) -> str:
    goal = environment.session.goal
    found = admissible_responses(environment)
    if not found or rng.random() < 0.1:
        return environment.format_action(f"search[{rng.choice([goal.product.query, goal.product.title])}]")
    return rng.choice(found)


if __name__ == "__main__":
    sys.exit(main())
