"""Reads a run directory for the report.

Files that a crash left half-written are read as far as possible.
"""

import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paw.config.keys import flatten
from paw.errors import UserError, clean, masked, nearest
from paw.io.files import json_object, text_of, update_of
from paw.rundir.record import read_info
from paw.tools.report.lines import LineFile

Series = tuple[list[int], list[float]]
"""Steps (updates) in increasing order, and the value at each step."""


LARGEST = 1e300
"""Largest number that counts as finite. The range of larger ones cannot be drawn."""


@dataclass(frozen=True)
class Run:
    """The files of one run directory."""

    name: str
    metrics: dict[str, dict[int, float]]
    """Values by name and step, with steps in increasing order. Only finite numbers count. If a
    resumed run wrote a step twice, the later value counts."""
    config_text: str
    config: dict[str, Any]
    """config.toml as dotted keys; {} if it cannot be read."""
    info: dict[str, Any]
    """run.json."""
    unreadable: int
    """Lines of metrics.jsonl that were not JSON objects."""

    def series(self, key: str) -> Series:
        """Return the steps and values of a metric; both are empty if it was not logged."""
        by_step = self.metrics.get(key, {})
        return list(by_step), list(by_step.values())

    def first(self, key: str, count: int = 1) -> float | None:
        """Return the mean of the first `count` values, or None if there are none."""
        _, values = self.series(key)
        return _mean(values[:count])

    def last(self, key: str, count: int = 1) -> float | None:
        """Return the mean of the last `count` values, or None if there are none."""
        _, values = self.series(key)
        return _mean(values[-count:])

    def at(self, key: str, step: int) -> float | None:
        """Return the value at one step, or None if it was not logged."""
        return self.metrics.get(key, {}).get(step)

    def attempts_at(
        self, step: int, label: str = ""
    ) -> dict[int, tuple[float, tuple[float, float]]]:
        """Return pass@k of the evaluation of a step and its interval, by k in increasing order.

        With the label of one of several environments, it is that of its games.
        """
        suffix = f"_{label}" if label else ""
        values: dict[int, tuple[float, tuple[float, float]]] = {}
        for key in self.metrics:
            match = re.fullmatch(rf"eval/pass_at_([1-9][0-9]{{0,5}}){re.escape(suffix)}", key)
            value = self.at(key, step)
            if match and value is not None:
                name = key.removesuffix(suffix)
                low = self.at(f"{name}_low{suffix}", step)
                high = self.at(f"{name}_high{suffix}", step)
                interval = (value if low is None else low, value if high is None else high)
                values[int(match[1])] = value, interval
        return dict(sorted(values.items()))

    @property
    def labels(self) -> list[str]:
        """The labels of several environments, in the order of the recipe; [] if there is one."""
        tables = self.config.get("envs")
        tables = tables if isinstance(tables, list) else []
        return [str(table.get("label", "")) for table in tables if isinstance(table, dict)]

    @property
    def updates(self) -> int:
        """Return the number of updates done, as far as the metrics tell."""
        steps = (step for by_step in self.metrics.values() for step in by_step)
        return max(steps, default=0)

    @property
    def finished(self) -> bool:
        """Whether the run ended by itself. Its report may have failed."""
        ended = self.info.get("ended")
        return isinstance(ended, dict) and ended.get("how") == "finished"

    @property
    def kinds(self) -> list[str]:
        """Return the first 12 task types with an evaluation, in the order of the log.

        The environments of a run with several come before their task types.
        """
        prefix = "eval/success_"
        names = [key.removeprefix(prefix) for key in self.metrics if key.startswith(prefix)]
        interval = "eval/ci_low"
        names.sort(key=lambda name: f"{interval}_{name}" not in self.metrics)
        return names[:12]


class RunReader:
    """Reads a run directory again and again while the run goes on.

    Of metrics.jsonl, only what was appended is read. All files may be missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = LineFile(directory / "metrics.jsonl")
        self._lines: list[dict[str, Any]] = []
        self._unreadable = 0

    def read(self) -> Run:
        """Return the run as it is now."""
        is_rewritten, new_lines = self._file.read_new()
        if is_rewritten:
            self._lines = []
            self._unreadable = 0
        for _, line in new_lines:
            record = json_object(line)
            if record is not None:
                self._lines.append(record)
            elif line.strip():
                self._unreadable += 1

        lines = list(self._lines)
        unreadable = self._unreadable
        if self._file.incomplete_line:
            record = json_object(self._file.incomplete_line)
            lines += [record] if record is not None else []
            unreadable += record is None

        # An older version wrote passwords.
        config_text = masked(text_of(self.directory / "config.toml"))
        config: dict[str, Any] = {}
        with suppress(ValueError, RecursionError):
            config = flatten(tomllib.loads(config_text))
        return Run(
            name=self.directory.resolve().name,
            metrics=_series_of_metrics(lines),
            config_text=config_text,
            config=config,
            info=read_info(self.directory),
            unreadable=unreadable,
        )


def load_run(run_dir: Path) -> Run:
    """Read `run_dir`. All files except metrics.jsonl may be missing or damaged.

    Raises UserError if it has no metrics.
    """
    path = _metrics_file(run_dir)
    run = RunReader(run_dir).read()
    if not run.metrics:
        raise UserError(
            f"{path}: no metrics in it; the run stopped before its first update was logged"
        )
    return run


def _series_of_metrics(lines: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the finite numbers in the lines of metrics.jsonl, by metric and step."""
    metrics: dict[str, dict[int, float]] = {}
    for step, values in _by_step(lines):
        for key, value in values.items():
            is_number = type(value) in (int, float)  # not bool
            if key != "step" and is_number and abs(value) <= LARGEST:
                metrics.setdefault(key, {})[step] = float(value)
    return metrics


def metric(run: str | Path, name: str) -> dict[int, float]:
    """Return one metric by update, in order: `{0: 0.24, 20: 0.31}` for "eval/success".

    Updates in which it was not measured, or was not a finite number, are absent. `run` is the
    run's directory. The run may be in progress. Raises UserError if the run has no such metric.
    """
    by_name = load_run(Path(run)).metrics
    if name not in by_name:
        hint = nearest(name, by_name) or "docs/metrics.md has all names"
        raise UserError(f"{run}: no metric '{clean(name)}'; {hint}")
    return by_name[name]


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """Return the metrics of a run in order, a dict for each update: `{"step": 10, "reward/mean":
    3.1}`.

    A metric that was not measured in an update is absent. One that was not a finite number is None.
    `run` is the run's directory. The run may be in progress. Raises UserError if there are no
    metrics.
    """
    lines, _ = _json_lines(_metrics_file(Path(run)))
    return [{"step": step} | line for step, line in _by_step(lines)]


def _metrics_file(run_dir: Path) -> Path:
    """Return the path of metrics.jsonl. Raises UserError if it is missing."""
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir}: no such run directory; give the folder that holds metrics.jsonl"
        )
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"{run_dir}: no metrics.jsonl in it; "
            "give the folder of a run that did at least one update"
        )
    return path


def _by_step(lines: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return (update, its metrics), in the order of updates.

    If a resumed run wrote an update again, its later values count.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        step = update_of(line)
        if step is not None:
            by_step.setdefault(step, {}).update(line)
    return sorted(by_step.items())


def _json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (JSON objects of a file, one per line; number of lines that are not JSON objects)."""
    lines = [line for line in text_of(path).split("\n") if line.strip()]
    parsed = [json_object(line) for line in lines]
    objects = [value for value in parsed if value is not None]
    return objects, len(lines) - len(objects)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
