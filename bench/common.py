"""What the scripts of this folder share: where results lie, how they are written, the `paw` command."""

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A CSV with the columns of all rows, in the order in which they first come."""
    columns = dict.fromkeys(key for row in rows for key in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def paw(*words: object) -> str:
    """The standard output of `paw WORDS`."""
    command = [sys.executable, "-m", "paw", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def evaluate(model: Path | str, *words: object) -> dict[str, float]:
    """Success of a model on its evaluation games, with its interval."""
    found = json.loads(paw("eval", model, *words, "--json"))
    return {
        name: round(found[name], 4)
        for name in ("temperature", "success", "ci_low", "ci_high", "games")
    }
