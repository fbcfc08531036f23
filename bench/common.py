"""Shared by the benchmarks: reading and writing results, the `paw` command, the machine's name."""

import csv
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paw.rundir.record import code_commit
from paw.tools.report.rundir import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes a CSV with the columns of all records, in the order in which they first appear."""
    columns = dict.fromkeys(column for record in records for column in record)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def flags(options: Mapping[str, object]) -> list[object]:
    """Settings as command-line arguments.

    >>> flags({"run.seed": 1, "run.dir": "runs"})
    ['--run.seed', 1, '--run.dir', 'runs']
    """
    arguments: list[object] = []
    for key, value in options.items():
        arguments += [f"--{key}", value]
    return arguments


def paw(*arguments: object) -> str:
    """The standard output of `paw ARGUMENTS`."""
    command = [sys.executable, "-m", "paw", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def evaluate(model: Path | str, *arguments: object) -> dict[str, float]:
    """Columns with a model's success on its evaluation games and the 95 % interval."""
    evaluation = json.loads(paw("eval", model, *arguments, "--json"))
    columns = ("temperature", "success", "ci_low", "ci_high", "games")
    return {column: round(evaluation[column], 4) for column in columns}


def commit(*measured: str) -> str:
    """The last commit that changed these paths, with "-dirty" if they have uncommitted changes.

    "unknown" without git.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", *measured]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()

    if not shutil.which("git"):
        return "unknown"
    last_commit = git("log", "-1", "--format=%h")
    if not last_commit:
        return "unknown"
    return f"{last_commit}-dirty" if git("status", "--porcelain") else last_commit


def evaluations_during(run: Run, seed: int) -> list[dict[str, Any]]:
    """Columns with the success, the 95 % interval and the number of games of each evaluation."""
    records = []
    updates, _ = run.series("eval/success")
    for update in updates:
        record: dict[str, Any] = {"seed": seed, "update": update}
        for metric in ("success", "ci_low", "ci_high", "games"):
            record[metric] = round(run.at(f"eval/{metric}", update) or 0.0, 4)
        records.append(record)
    return records


def machine_columns() -> dict[str, str]:
    """Columns with the processor, Python's version and the commit of paw/."""
    return {"device": cpu_name(), "python": platform.python_version(), "commit": code_commit()}


def cpu_name() -> str:
    """The processor's model name, or its architecture if the system does not give the name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()
