"""The finished runs of a study on its evaluation games at another temperature, such as the paper's 0.4.

    python bench/study_t04.py STUDY --arms grpo,paw [--temperature 0.4]

Adds to bench/results/experiment_t04.csv what is not there yet, a line a run, and prints the paired differences to the
first arm with 95 % Student intervals.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from paw.tools.experiment.stats import paired

ROOT = Path(__file__).parents[1]
CSV = ROOT / "bench" / "results" / "experiment_t04.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="the folder a study was written to")
    parser.add_argument("--arms", default="grpo,paw")
    parser.add_argument("--temperature", type=float, default=0.4)
    options = parser.parse_args()
    rows = list(csv.DictReader(CSV.open())) if CSV.exists() else []
    known = {(row["arm"], row["seed"], float(row["temperature"])) for row in rows}
    arms = options.arms.split(",")
    for run in sorted(options.study.glob("runs/*")):
        arm, _, seed = run.name.rpartition("-")
        if arm not in arms or (arm, seed, options.temperature) in known or not (run / "hf" / "config.json").exists():
            continue
        command = [
            sys.executable,
            "-m",
            "paw",
            "eval",
            str(run),
            "--json",
            "--eval.temperature",
            str(options.temperature),
        ]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
        info = json.loads((run / "run.json").read_text())
        about = {name: info.get(name, "") for name in ("commit", "paw", "torch", "device")}
        values = {name: round(found[name], 4) for name in ("temperature", "success", "ci_low", "ci_high", "games")}
        rows.append({"arm": arm, "seed": seed, **values, **about})
        print(f"{run.name}: {values['success']:.3f}", file=sys.stderr, flush=True)
        with CSV.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    chosen = [row for row in rows if float(row["temperature"]) == options.temperature]
    success = {arm: {row["seed"]: float(row["success"]) for row in chosen if row["arm"] == arm} for arm in arms}
    base = success[arms[0]]
    for arm in arms:
        mean, difference = fmean(success[arm].values()), paired(base, success[arm])
        print(f"{arm}: {len(success[arm])} seeds, mean {mean:.3f}, {difference}")


if __name__ == "__main__":
    main()
