"""Train the quickstart with several seeds, each with a model and a warm-up of its own; write the table and the curve.

    python bench/studies/quickstart_seeds.py --seeds 0 1 2 3 [--runs runs/seeds] [--recipe quickstart-long]
    python bench/studies/quickstart_seeds.py --alone runs/quickstart

The second command writes the minutes of a run that had the machine to itself (`make train`) to
quickstart_alone.csv. The first writes bench/results/quickstart.csv (one line an evaluation, with
device and versions), quickstart_t04.csv (the same games before and after at the paper's temperature
of 0.4) and docs/learning_curve.png; of the other recipe quickstart_long.csv and
quickstart_long_t04.csv. Seeds that already have a finished run there are read, not trained again.
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

from bench.common import RESULTS, ROOT, evaluate, paw, write
from paw.errors import UserError, to_stderr
from paw.tools.report.plots import PALETTE, styled
from paw.tools.report.rundir import Run, load_run


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "seeds")
    parser.add_argument("--recipe", choices=["quickstart", "quickstart-long"], default="quickstart")
    parser.add_argument(
        "--alone", type=Path, help="directory of a run that had the machine to itself"
    )
    options = parser.parse_args()
    if options.alone:
        write(RESULTS / "quickstart_alone.csv", [minutes(load_run(options.alone))])
        return
    rows, cooler = [], []
    for seed in options.seeds:
        folder = options.runs / f"seed-{seed}"
        if not (folder / "report.html").exists():
            where = ("--run.dir", options.runs, "--run.name", folder.name)
            paw(
                "train",
                options.recipe,
                "--gpus",
                2,
                *where,
                "--run.seed",
                seed,
                "--warmup.seed",
                seed,
            )
        run = load_run(folder)
        about = described(run)
        evaluated = [{"seed": seed, "update": step} for step in run.series("eval/success")[0]]
        for row in evaluated:
            for name in ("success", "ci_low", "ci_high", "games"):
                row[name] = round(run.at(f"eval/{name}", row["update"]) or 0.0, 4)
            row |= about
        for when, model in (("before", run.info["start"]), ("after", folder / "hf")):
            success = evaluate(model, "--recipe", folder / "config.toml", "--eval.temperature", 0.4)
            cooler.append({"seed": seed, "when": when, **success, **about})
        first, last = evaluated[0]["success"], evaluated[-1]["success"]
        print(f"seed {seed}: {first:.1%} -> {last:.1%} ({last - first:+.1%})")
        rows += evaluated
    name = options.recipe.replace("-", "_")
    write(RESULTS / f"{name}.csv", rows)
    write(RESULTS / f"{name}_t04.csv", cooler)
    if name == "quickstart":
        draw(rows)


def minutes(run: Run) -> dict[str, Any]:
    """Minutes of a run with its warm-up, and of the warm-up alone."""
    warmup_s = run.info["warmup_s"]
    total_s = warmup_s + run.info["wall_s"]
    row = {"minutes": round(total_s / 60, 1), "warm-up": round(warmup_s / 60, 1)}
    return row | described(run)


def described(run: Run) -> dict[str, str]:
    """What a run was made with."""
    return {
        "commit": run.info["commit"],
        "paw": run.info["paw"],
        "torch": run.info["torch"],
        "device": run.info["device"],
        "head": run.info["backend"],
    }


@styled
def draw(rows: list[dict]) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    for colour, seed in zip(PALETTE, sorted({row["seed"] for row in rows}), strict=False):
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
