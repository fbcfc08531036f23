"""The finished runs of an experiment on its evaluation games at another temperature, such as the paper's 0.4.

    python bench/study_t04.py EXPERIMENT --variants grpo,paw [--temperature 0.4]

Adds to bench/results/experiment_t04.csv what is not there yet, a line a run, and prints the paired differences to the
first variant with 95 % Student intervals.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import RESULTS, evaluate, read, write
from paw.tools.experiment.results import paired

CSV = RESULTS / "experiment_t04.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("experiment", type=Path, help="the folder an experiment was written to")
    parser.add_argument("--variants", default="grpo,paw")
    parser.add_argument("--temperature", type=float, default=0.4)
    options = parser.parse_args()
    variants, rows = options.variants.split(","), list[dict[str, Any]](read(CSV) if CSV.exists() else [])
    known = {(row["variant"], row["seed"], float(row["temperature"])) for row in rows}
    for run in sorted(options.experiment.glob("runs/*")):
        variant, _, seed = run.name.rpartition("-")
        done = (variant, seed, options.temperature) in known or not (run / "hf" / "config.json").exists()
        if variant in variants and not done:
            info = json.loads((run / "run.json").read_text())
            about = {name: info.get(name, "") for name in ("commit", "paw", "torch", "device")}
            found = evaluate(run, "--eval.temperature", options.temperature)
            rows.append({"variant": variant, "seed": seed, **found, **about})
            write(CSV, rows)
    chosen = [row for row in rows if float(row["temperature"]) == options.temperature]
    success = {
        name: {int(row["seed"]): float(row["success"]) for row in chosen if row["variant"] == name} for name in variants
    }
    for variant, by_seed in success.items():
        difference = paired(success[variants[0]], by_seed)
        print(f"{variant}: {len(by_seed)} seeds, mean {fmean(by_seed.values()):.3f}, {difference}")


if __name__ == "__main__":
    main()
