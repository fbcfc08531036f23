"""What rollouts ahead of training save: the same updates with rollout.ahead 0 and 1, over one vLLM server.

    python bench/rollout/ahead.py [--updates 8] [--repeats 3] [overrides of `paw train quickstart`]
    python bench/rollout/ahead.py --learn 0 1 2

The trainer and the server have a core each. The model has had a single step of the quickstart's
warm-up, so it does not end its responses; with OPTIONS, an update then takes about as long as its
episodes. The server is started once, and the runs take turns. Writes bench/results/ahead_cpu.csv:
for each run, the median seconds of an update and of its phases. The first two updates and the last,
in which the pipeline fills and empties, are left out. Prints the ratio of the medians.

The second command trains the quickstart with seeds 0, 1 and 2 on episodes that are all one update
old, the oldest that rollout.ahead = 1 allows. It writes bench/results/ahead_learning.csv. The same
seeds with ahead = 0 are in quickstart_long.csv (bench/studies/quickstart_seeds.py).
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, evaluations_during, flags, paw, write
from paw import run as runs
from paw import train
from paw.config.recipe import load
from paw.rollouts.base import RolloutResult
from paw.rollouts.engines.servers import Servers, vllm_command
from paw.rollouts.scheduler import Rollouts
from paw.tools.report.rundir import load_run

FILL = 2
"""Number of updates in which the pipeline fills."""
MODEL = {"warmup.max_steps": 1, "warmup.hidden_size": 128}
OPTIONS = {
    "rollout.tasks": 8,
    "rollout.group_size": 4,
    "env.max_turns": 6,
    "rollout.max_response_tokens": 48,
    "eval.every": 0,
    "eval.games": 1,
}
PHASES = ("rollout", "score", "update", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learn", type=int, nargs="+", metavar="SEED")
    options, overrides = parser.parse_known_args()
    if options.learn:
        return learn(options.learn)
    compare_speed(options.updates, options.repeats, overrides)


def compare_speed(updates: int, repeats: int, overrides: list[str]) -> None:
    """Trains with ahead = 0 and 1 in turn. The server has one core, the trainer another."""
    model_path = Path(paw("warmup", "quickstart", *flags(MODEL)).splitlines()[-1])
    os.environ["OMP_NUM_THREADS"] = "1"
    max_prompt = load("quickstart").rollout.max_prompt_tokens
    context = max_prompt + OPTIONS["rollout.max_response_tokens"]
    command = vllm_command(
        model_path, max_model_len=context, dtype="float32", on_cpu=True, entropy=True
    )
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server_core, trainer_core = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, {server_core})  # the server inherits it
        servers = Servers(command, [[]], folder)
        os.sched_setaffinity(0, {trainer_core})
        try:
            servers.wait()
            settings = OPTIONS | {
                "model.path": model_path,
                "run.dir": folder,
                "run.threads": 1,
                "run.updates": updates,
                "engine.type": "server",
                "engine.urls": json.dumps(servers.urls),
            }
            for number in range(2 * repeats):
                repeat, ahead = divmod(number, 2)
                run_name = f"run-{number}"
                paw(
                    "train",
                    "quickstart",
                    *flags(settings),
                    *overrides,
                    *flags({"rollout.ahead": ahead, "run.name": run_name}),
                )
                seconds = phase_seconds(folder / run_name / "metrics.jsonl")
                record = {
                    "ahead": ahead,
                    "repeat": repeat,
                    "seconds": sum(seconds.values()),
                    **seconds,
                }
                record = {column: round(value, 3) for column, value in record.items()}
                print(*(f"{column} {value:g}" for column, value in record.items()), flush=True)
                records.append(record | {"cpu": cpu_name(), "torch": torch.__version__})
        finally:
            servers.close()
    write(RESULTS / "ahead_cpu.csv", records)
    show_ratio(records)


def show_ratio(records: list[dict[str, Any]]) -> None:
    """Prints the median seconds of an update with ahead = 0 and 1."""
    without_s = median(record["seconds"] for record in records if record["ahead"] == 0)
    ahead_s = median(record["seconds"] for record in records if record["ahead"] == 1)
    print(
        f"an update takes {without_s:.2f} s with ahead = 0 and {ahead_s:.2f} s with 1:"
        f" {without_s / ahead_s:.2f} times the speed"
    )


def phase_seconds(metrics: Path) -> dict[str, float]:
    """The median seconds of each phase over the updates of a run, except the first FILL and the
    last."""
    logged = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    updates = logged[1 + FILL : -1]  # the first line is the evaluation before training
    return {phase: median(update[f"time/{phase}"] for update in updates) for phase in PHASES}


class LateRollouts(Rollouts):
    """Plays each update's episodes with the weights of the previous update."""

    waiting: RolloutResult | None = None
    """The episodes of the next update."""

    def training(self, step: int, count: int, progress: Any = None) -> RolloutResult:
        result = self.waiting or super().training(step, count, progress)
        self.waiting = None
        self.waiting = super().training(step + 1, count, progress)
        return result


def make_late_rollouts(run: runs.Run) -> LateRollouts:
    return LateRollouts(run.factory, run.engine, run.chat, run.config, run.ranks)


def learn(seeds: list[int]) -> None:
    """Trains quickstart-long on episodes that are one update old.

    The results of a seed whose run is finished are only read.
    """
    runs.Run.make_rollouts = make_late_rollouts  # type: ignore[method-assign]
    records = []
    for seed in seeds:
        folder = ROOT / "runs" / "late" / f"seed-{seed}"
        if not (folder / "report.html").exists():
            start_model = paw("warmup", "quickstart-long", "--warmup.seed", seed).splitlines()[-1]
            overrides = {
                "run.dir": str(folder.parent),
                "run.name": folder.name,
                "run.seed": seed,
                "model.path": start_model,
            }
            train(load("quickstart-long", overrides))
        run = load_run(folder)
        versions = {
            "torch": run.info["torch"],
            "device": run.info["device"],
            "head": run.info["backend"],
        }
        of_seed = [record | versions for record in evaluations_during(run, seed)]
        success_before = of_seed[0]["success"]
        success_after = of_seed[-1]["success"]
        print(f"seed {seed}: {success_before:.1%} -> {success_after:.1%}", flush=True)
        records += of_seed
    write(RESULTS / "ahead_learning.csv", records)


if __name__ == "__main__":
    main()
