"""Redraws docs/experiment_compare.png, experiment_sparse.png and noise_gradient.png from bench/results.

python bench/studies/experiment_plot.py
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, read
from bench.studies.noise_gradient import on_noise
from paw.tools.experiment.compare import summarise
from paw.tools.experiment.figures import comparison, evaluations

TEXT_COLUMNS = ("variant", "stage", "class", "loss", "commit", "paw", "torch", "device")


def records(result_name: str) -> list[dict[str, Any]]:
    """The rows of a result. Cells are numbers except in TEXT_COLUMNS, and None if empty."""
    result = []
    for text_record in read(RESULTS / f"{result_name}.csv"):
        record: dict[str, Any] = {}
        for column, cell in text_record.items():
            if column in TEXT_COLUMNS:
                record[column] = cell
            else:
                record[column] = float(cell) if cell else None
        result.append(record)
    return result


def main() -> None:
    figures = {"noise_gradient": on_noise(records("noise_gradient"))}
    for result_name in ("experiment_compare", "experiment_sparse"):
        run_records = records(result_name)
        figures[result_name] = comparison(evaluations(run_records), summarise(run_records))
    for result_name, figure in figures.items():
        figure.savefig(ROOT / "docs" / f"{result_name}.png", dpi=150)


if __name__ == "__main__":
    main()
