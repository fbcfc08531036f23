"""Train the quickstart with several seeds, each with a model and a warm-up of its own; write the table and the curve.

    python bench/studies/quickstart_seeds.py --seeds 0 1 2 3 [--runs runs/seeds] [--recipe quickstart-long]
    python bench/studies/quickstart_seeds.py --alone runs/quickstart

The second command writes the minutes of a run that had the machine to itself (`make train`) to
quickstart_alone.csv. The first writes bench/results/quickstart.csv (one line an evaluation, with
device and versions), quickstart_t04.csv (the same games before and after training, at the paper's
temperature of 0.4) and docs/learning_curve.png; for another recipe two files of its name, such as
quickstart_long.csv and quickstart_long_t04.csv. Seeds that already have a finished run there are
read, not trained again.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).parents[2]))
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from bench.common import RESULTS, ROOT, evaluate, flags, paw, write
from paw.errors import UserError, to_stderr
from paw.tools.report.plots import PALETTE, styled
from paw.tools.report.rundir import Run, load_run

RECIPES = ("quickstart", "quickstart-long", "terminal-quickstart")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "seeds")
    parser.add_argument("--recipe", choices=RECIPES, default="quickstart")
    parser.add_argument(
        "--alone", type=Path, help="directory of a run that had the machine to itself"
    )
    options = parser.parse_args()
    if options.alone:
        write(RESULTS / "quickstart_alone.csv", [minutes(load_run(options.alone))])
        return
    rows = []
    rows_t04 = []
    for seed in options.seeds:
        folder = options.runs / f"seed-{seed}"
        if not (folder / "report.html").exists():
            train(options.recipe, seed, folder)
        run = load_run(folder)
        of_seed = evaluations(seed, run)
        rows += of_seed
        rows_t04 += evaluations_t04(seed, run, folder)

        before, after = of_seed[0]["success"], of_seed[-1]["success"]
        print(f"seed {seed}: {before:.1%} -> {after:.1%} ({after - before:+.1%})")
    name = options.recipe.replace("-", "_")
    write(RESULTS / f"{name}.csv", rows)
    write(RESULTS / f"{name}_t04.csv", rows_t04)
    if name == "quickstart":
        draw(rows)


def train(recipe: str, seed: int, folder: Path) -> None:
    """Trains on two processes, with a model and warm-up of that seed."""
    settings = {
        "run.dir": folder.parent,
        "run.name": folder.name,
        "run.seed": seed,
        "warmup.seed": seed,
    }
    paw("train", recipe, "--gpus", 2, *flags(settings))


def evaluations(seed: int, run: Run) -> list[dict[str, Any]]:
    """A row for each evaluation during the run."""
    rows = []
    steps, _ = run.series("eval/success")
    for step in steps:
        row: dict[str, Any] = {"seed": seed, "update": step}
        for name in ("success", "ci_low", "ci_high", "games"):
            row[name] = round(run.at(f"eval/{name}", step) or 0.0, 4)
        rows.append(row | versions(run))
    return rows


def evaluations_t04(seed: int, run: Run, folder: Path) -> list[dict[str, Any]]:
    """Rows for the start model and the trained one at a temperature of 0.4."""
    rows = []
    for when, model in (("before", run.info["start"]), ("after", folder / "hf")):
        success = evaluate(model, "--recipe", folder / "config.toml", "--eval.temperature", 0.4)
        rows.append({"seed": seed, "when": when, **success, **versions(run)})
    return rows


def minutes(run: Run) -> dict[str, Any]:
    """Minutes of a run with its warm-up, and of the warm-up alone."""
    warmup_s = run.info["warmup_s"]
    total_s = warmup_s + run.info["wall_s"]
    row = {"minutes": round(total_s / 60, 1), "warm-up": round(warmup_s / 60, 1)}
    return row | versions(run)


def versions(run: Run) -> dict[str, str]:
    """Code, device and head that a run was made with."""
    return {
        "commit": run.info["commit"],
        "paw": run.info["paw"],
        "torch": run.info["torch"],
        "device": run.info["device"],
        "head": run.info["backend"],
    }


@styled
def draw(rows: list[dict[str, Any]]) -> None:
    """Success over updates with its interval, a curve for each seed."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    seeds = sorted({row["seed"] for row in rows})
    for colour, seed in zip(PALETTE, seeds, strict=False):
        of_seed = [row for row in rows if row["seed"] == seed]
        updates = [row["update"] for row in of_seed]
        low = [row["ci_low"] for row in of_seed]
        high = [row["ci_high"] for row in of_seed]
        success = [row["success"] for row in of_seed]
        axes.fill_between(updates, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(updates, success, "o-", color=colour, markersize=3, label=f"seed {seed}")
    axes.set(xlabel="Update", ylabel="Success on unseen games", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(loc="lower right")
    figure.savefig(ROOT / "docs" / "learning_curve.png")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        to_stderr(str(error))
        sys.exit(2)
