"""Train the quickstart with several seeds, each with a model and a warm-up of its own; write the table and the curve.

    python bench/quickstart_seeds.py --seeds 0 1 2 3 [--runs runs/seeds]

Writes bench/results/quickstart.csv (one line an evaluation, with device and versions), quickstart_t04.csv (the same
games before and after at the paper's temperature of 0.4) and docs/learning_curve.png.
Seeds that already have a finished run there are read, not trained again.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "seeds")
    options = parser.parse_args()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    rows, cooler = [], []
    for seed in options.seeds:
        run = options.runs / f"seed-{seed}"
        if not (run / "report.html").exists():
            command = [sys.executable, "-m", "paw", "train", "quickstart", "--run.dir", str(options.runs)]
            command += ["--run.name", run.name, "--run.seed", str(seed), "--warmup.seed", str(seed)]
            subprocess.run(command, check=True, cwd=ROOT)
            (run / "commit").write_text(head)  # of the code that trained, not of the code that writes the table
        info = json.loads((run / "run.json").read_text())
        for line in (run / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if "eval/success" not in record:
                continue
            values = {name: round(record[f"eval/{name}"], 4) for name in ("success", "ci_low", "ci_high", "games")}
            # minutes: the whole run, warm-up included
            about = {
                "minutes": round((info["warmup_s"] + info["wall_s"]) / 60, 1),
                "commit": (run / "commit").read_text().strip(),
            }
            about |= {name: info[name] for name in ("paw", "torch", "device")} | {"head": info["backend"]}
            rows.append({"seed": seed, "update": record["step"], **values, **about})
        for when, model in (("before", info["start"]), ("after", str(run / "hf"))):
            cooler.append(
                {"seed": seed, "when": when, **evaluate(model, run / "config.toml", temperature=0.4), **about}
            )
    write("quickstart.csv", rows)
    write("quickstart_t04.csv", cooler)
    summarise(rows)
    draw(rows)


def evaluate(model: str, recipe: Path, *, temperature: float) -> dict:
    command = [sys.executable, "-m", "paw", "eval", model, "--recipe", str(recipe), "--json"]
    command += ["--eval.temperature", str(temperature)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    return {name: round(found[name], 4) for name in ("temperature", "success", "ci_low", "ci_high", "games")}


def write(name: str, rows: list[dict]) -> None:
    path = ROOT / "bench" / "results" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def summarise(rows: list[dict]) -> None:
    for seed in sorted({row["seed"] for row in rows}):
        mine = [row for row in rows if row["seed"] == seed]
        first, last = mine[0], mine[-1]
        gain = last["success"] - first["success"]
        print(f"seed {seed}: {first['success']:.1%} -> {last['success']:.1%} ({gain:+.1%}) in {last['minutes']} min")


def draw(rows: list[dict]) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]  # Okabe-Ito
    for index, seed in enumerate(sorted({row["seed"] for row in rows})):
        mine = [row for row in rows if row["seed"] == seed]
        updates, colour = [row["update"] for row in mine], colours[index % len(colours)]
        low, high = ([row[name] for row in mine] for name in ("ci_low", "ci_high"))
        axes.fill_between(updates, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(updates, [row["success"] for row in mine], "o-", color=colour, markersize=3, label=f"seed {seed}")
    axes.set(xlabel="Update", ylabel="Success on unseen games", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(ROOT / "docs" / "learning_curve.png")


if __name__ == "__main__":
    main()
