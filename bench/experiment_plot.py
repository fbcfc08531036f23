"""docs/experiment_compare.png anew from bench/results/experiment_compare.csv, as `paw experiment compare` draws it.

python bench/experiment_plot.py
"""

import csv
from pathlib import Path

from paw.tools.experiment.compare import summarise
from paw.tools.experiment.figures import comparison, evaluations

ROOT = Path(__file__).parents[1]
TEXT = ("variant", "commit", "paw", "torch", "device")


def main() -> None:
    with (ROOT / "bench" / "results" / "experiment_compare.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    records = [{k: v if k in TEXT else float(v) if v else None for k, v in line.items()} for line in lines]
    differences = {variant: found["difference"] for variant, found in summarise(records).items()}
    shown = {variant: difference for variant, difference in differences.items() if difference}
    figure = comparison(evaluations(records), shown, "Success on unseen games")
    figure.savefig(ROOT / "docs" / "experiment_compare.png", dpi=150)


if __name__ == "__main__":
    main()
