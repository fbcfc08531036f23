"""Trains the quickstart with several seeds, each with its own model and warm-up. Writes the table and the curve.

    python bench/studies/quickstart_seeds.py --seeds 0 1 2 3 [--runs runs/seeds] [--recipe quickstart-long]
    python bench/studies/quickstart_seeds.py --alone runs/quickstart

The second command writes the minutes of a run that had the machine to itself (`make train`) to
quickstart_alone.csv. The first writes bench/results/quickstart.csv (one line per evaluation, with
device and versions), quickstart_t04.csv (the same games before and after training, at the paper's
temperature of 0.4) and docs/learning_curve.png. For another recipe it writes two files of that
name, such as quickstart_long.csv and quickstart_long_t04.csv. Seeds that already have a finished
run are not trained again; their results are read.
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

from bench.common import RESULTS, ROOT, evaluate, evaluations_during, flags, paw, write
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
    records = []
    records_t04 = []
    for seed in options.seeds:
        folder = options.runs / f"seed-{seed}"
        if not (folder / "report.html").exists():
            train(options.recipe, seed, folder)
        run = load_run(folder)
        of_seed = [record | versions(run) for record in evaluations_during(run, seed)]
        records += of_seed
        records_t04 += evaluations_t04(seed, run, folder)

        before = of_seed[0]["success"]
        after = of_seed[-1]["success"]
        print(f"seed {seed}: {before:.1%} -> {after:.1%} ({after - before:+.1%})")
    result_name = options.recipe.replace("-", "_")
    write(RESULTS / f"{result_name}.csv", records)
    write(RESULTS / f"{result_name}_t04.csv", records_t04)
    if result_name == "quickstart":
        draw(records)


def train(recipe: str, seed: int, folder: Path) -> None:
    """Trains in two processes. The seed also determines the model and the warm-up."""
    settings = {
        "run.dir": folder.parent,
        "run.name": folder.name,
        "run.seed": seed,
        "warmup.seed": seed,
    }
    paw("train", recipe, "--gpus", 2, *flags(settings))


def evaluations_t04(seed: int, run: Run, folder: Path) -> list[dict[str, Any]]:
    """Rows for the start model and the trained one at a temperature of 0.4."""
    records = []
    for when, model in (("before", run.info["start"]), ("after", folder / "hf")):
        success = evaluate(model, "--recipe", folder / "config.toml", "--eval.temperature", 0.4)
        records.append({"seed": seed, "when": when, **success, **versions(run)})
    return records


def minutes(run: Run) -> dict[str, Any]:
    """Minutes of a run including its warm-up, and of the warm-up alone."""
    warmup_s = run.info["warmup_s"]
    total_s = warmup_s + run.info["wall_s"]
    record = {"minutes": round(total_s / 60, 1), "warm-up": round(warmup_s / 60, 1)}
    return record | versions(run)


def versions(run: Run) -> dict[str, str]:
    """The code, device and head of a run."""
    return {
        "commit": run.info["commit"],
        "paw": run.info["paw"],
        "torch": run.info["torch"],
        "device": run.info["device"],
        "head": run.info["backend"],
    }


@styled
def draw(records: list[dict[str, Any]]) -> None:
    """Success over updates with its interval, as a curve for each seed."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    seeds = sorted({record["seed"] for record in records})
    for colour, seed in zip(PALETTE, seeds, strict=False):
        of_seed = [record for record in records if record["seed"] == seed]
        updates = [record["update"] for record in of_seed]
        lower = [record["ci_low"] for record in of_seed]
        upper = [record["ci_high"] for record in of_seed]
        success = [record["success"] for record in of_seed]
        axes.fill_between(updates, lower, upper, color=colour, alpha=0.12, linewidth=0)
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
