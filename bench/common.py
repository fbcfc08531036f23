"""What the benchmarks share: the folder of results, reading and writing them, the `paw` command, the machine's name."""

import csv
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a CSV with the columns of all rows, in the order in which they first appear."""
    columns = dict.fromkeys(key for row in rows for key in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def flags(options: Mapping[str, object]) -> list[object]:
    """Settings as words of a command line.

    >>> flags({"run.seed": 1, "run.dir": "runs"})
    ['--run.seed', 1, '--run.dir', 'runs']
    """
    words: list[object] = []
    for key, value in options.items():
        words += [f"--{key}", value]
    return words


def paw(*words: object) -> str:
    """The standard output of `paw WORDS`."""
    command = [sys.executable, "-m", "paw", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def evaluate(model: Path | str, *words: object) -> dict[str, float]:
    """Success of a model on its evaluation games, with its 95 % interval: columns of a table."""
    evaluation = json.loads(paw("eval", model, *words, "--json"))
    columns = ("temperature", "success", "ci_low", "ci_high", "games")
    return {name: round(evaluation[name], 4) for name in columns}


def commit(*measured: str) -> str:
    """The last commit that changed these paths, with "-dirty" if they have uncommitted changes.

    "unknown" without git.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", *measured]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()

    if not shutil.which("git"):
        return "unknown"
    head = git("log", "-1", "--format=%h")
    if not head:
        return "unknown"
    return f"{head}-dirty" if git("status", "--porcelain") else head


def cpu_name() -> str:
    """The processor's model name, or its architecture if the system does not give the name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()
