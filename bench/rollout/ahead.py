"""What rollouts that run ahead of training save: the same updates with rollout.ahead = 0 and 1, over one vLLM server.

    python bench/rollout/ahead.py [--updates 8] [--repeats 3] [overrides of `paw train quickstart`]
    python bench/rollout/ahead.py --learn 0 1 2

Trainer and server have a core each. The model has seen one step of the quickstart's warm-up, so
that it does not end its responses: OPTIONS make an update take about as long as its episodes do.
The server is started once; runs take turns. Writes bench/results/ahead_cpu.csv, the median seconds
of each run's updates and of their phases (but the first two and the last, when the pipeline fills
and empties), and prints the ratio of the medians.

The second command trains the quickstart with seeds 0, 1 and 2 on episodes that are all one update
old, the oldest that rollout.ahead = 1 allows, and writes bench/results/ahead_learning.csv; the same
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

from bench.common import RESULTS, ROOT, cpu_name, paw, write
from paw import run as runs
from paw import train
from paw.recipe import load
from paw.rollouts.engines.servers import Servers, vllm_command
from paw.rollouts.scheduler import Played, Rollouts
from paw.tools.rundir import load_run

FILL = 2
MODEL = {"warmup.max_steps": 1, "warmup.hidden_size": 128}
OPTIONS = {"rollout.tasks": 8, "rollout.group_size": 4, "env.max_turns": 6, "rollout.max_response_tokens": 48,
           "eval.every": 0, "eval.games": 1}  # fmt: skip
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
    model = Path(paw("warmup", "quickstart", *words(MODEL)).splitlines()[-1])
    os.environ["OMP_NUM_THREADS"] = "1"
    limits, rows = load("quickstart").rollout, []
    context = limits.max_prompt_tokens + OPTIONS["rollout.max_response_tokens"]
    with tempfile.TemporaryDirectory() as name:
        command = vllm_command(
            model, max_model_len=context, dtype="float32", on_cpu=True, entropy=True
        )
        server_core, trainer_core = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, {server_core})  # what is started has it too
        servers = Servers(command, [[]], Path(name))
        os.sched_setaffinity(0, {trainer_core})
        try:
            servers.wait()
            common = (
                "--model.path",
                model,
                "--run.dir",
                name,
                "--run.threads",
                1,
                "--run.updates",
                options.updates,
            )
            common += ("--engine.type", "server", "--engine.urls", json.dumps(servers.urls))
            common += (*words(OPTIONS), *overrides)
            for run in range(2 * options.repeats):
                ahead = run % 2
                paw(
                    "train",
                    "quickstart",
                    *common,
                    "--rollout.ahead",
                    ahead,
                    "--run.name",
                    f"run-{run}",
                )
                text = (Path(name) / f"run-{run}" / "metrics.jsonl").read_text(encoding="utf-8")
                lines = [json.loads(line) for line in text.splitlines()][1 + FILL : -1]
                seconds = {
                    phase: median(line[f"time/{phase}"] for line in lines) for phase in PHASES
                }
                row = {
                    "ahead": ahead,
                    "repeat": run // 2,
                    "seconds": sum(seconds.values()),
                } | seconds
                row = {key: round(value, 3) for key, value in row.items()}
                rows.append(row | {"cpu": cpu_name(), "torch": torch.__version__})
                print(*(f"{key} {value:g}" for key, value in row.items()), flush=True)
        finally:
            servers.close()
    write(RESULTS / "ahead_cpu.csv", rows)
    zero, one = (
        median(row["seconds"] for row in rows if row["ahead"] == ahead) for ahead in (0, 1)
    )
    print(
        f"an update takes {zero:.2f} s with ahead = 0 and {one:.2f} s with 1: {zero / one:.2f} times the speed"
    )


def words(options: dict[str, Any]) -> list[Any]:
    return [word for key, value in options.items() for word in (f"--{key}", value)]


class Late(Rollouts):
    """Plays each update's episodes with the weights of the update before."""

    def training(self, step: int, count: int, progress: Any = None) -> Played:
        now = self.__dict__.pop("next", None) or super().training(step, count, progress)
        self.next = super().training(step + 1, count, progress)
        return now


def learn(seeds: list[int]) -> None:
    rows = []
    runs.Run.make_rollouts = lambda run: Late(
        run.factory, run.engine, run.chat, run.config, run.ranks
    )  # type: ignore[method-assign]
    for seed in seeds:
        folder = ROOT / "runs" / "late" / f"seed-{seed}"
        if not (folder / "report.html").exists():
            model = paw("warmup", "quickstart-long", "--warmup.seed", seed).splitlines()[-1]
            own = {
                "run.dir": str(folder.parent),
                "run.name": folder.name,
                "run.seed": seed,
                "model.path": model,
            }
            train(load("quickstart-long", own))
        run = load_run(folder)
        about = {
            "torch": run.info["torch"],
            "device": run.info["device"],
            "head": run.info["backend"],
        }
        for step in run.series("eval/success")[0]:
            found = {
                name: run.at(f"eval/{name}", step) or 0.0
                for name in ("success", "ci_low", "ci_high", "games")
            }
            rows.append(
                {"seed": seed, "update": step}
                | {name: round(v, 4) for name, v in found.items()}
                | about
            )
        print(f"seed {seed}: {rows[-7]['success']:.1%} -> {rows[-1]['success']:.1%}", flush=True)
    write(RESULTS / "ahead_learning.csv", rows)


if __name__ == "__main__":
    main()
