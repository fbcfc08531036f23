"""A run directory read back for the report; forgives what a crash leaves half-written."""

import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paw.errors import UserError, masked
from paw.files import json_object, text_of, update_of
from paw.keys import flatten
from paw.state.record import read_info

Series = tuple[list[int], list[float]]
"""Steps (updates) in increasing order, and the value at each."""


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    name: str
    metrics: dict[str, dict[int, float]]
    """Values by step, in increasing order. Finite numbers only; of a step written twice (a resumed run) the later."""
    samples: list[dict[str, Any]]
    config_text: str
    config: dict[str, Any]
    """config.toml flattened to dotted keys; empty where it cannot be read."""
    info: dict[str, Any]
    """run.json."""
    unreadable: int
    """Lines of metrics.jsonl and samples.jsonl that were not JSON objects."""

    def series(self, key: str) -> Series:
        found = self.metrics.get(key, {})
        return list(found), list(found.values())

    def first(self, key: str, count: int = 1) -> float | None:
        """Mean of the first `count` values, None without any."""
        return _mean(self.series(key)[1][:count])

    def last(self, key: str, count: int = 1) -> float | None:
        """Mean of the last `count` values, None without any."""
        return _mean(self.series(key)[1][-count:])

    def at(self, key: str, step: int) -> float | None:
        """The value at one step, None where it was not logged."""
        return self.metrics.get(key, {}).get(step)

    @property
    def updates(self) -> int:
        """Updates done, as far as the metrics tell."""
        return max(step for found in self.metrics.values() for step in found)

    @property
    def finished(self) -> bool:
        """Whether it ended by itself, whatever became of its report."""
        ended = self.info.get("ended")
        return isinstance(ended, dict) and ended.get("how") == "finished"

    @property
    def kinds(self) -> list[str]:
        """Task types with an evaluation, in the order of the log."""
        return [key.removeprefix("eval/success_") for key in self.metrics if key.startswith("eval/success_")][:12]


def load_run(run_dir: Path) -> Run:
    """Read `run_dir`; everything but metrics.jsonl may be missing or damaged. UserError where it holds no metrics."""
    path = _metrics_file(run_dir)
    lines, unreadable = _json_lines(path)
    metrics: dict[str, dict[int, float]] = {}
    for step, line in _by_step(lines):
        for key, value in line.items():
            if key != "step" and type(value) in (int, float) and abs(value) <= sys.float_info.max:
                metrics.setdefault(key, {})[step] = float(value)
    if not metrics:
        raise UserError(f"{path}: holds no metrics; the run stopped before its first update was logged")
    samples, unreadable_samples = _json_lines(run_dir / "samples.jsonl")
    config_text, config = masked(text_of(run_dir / "config.toml")), {}  # an older version wrote passwords
    with suppress(ValueError, RecursionError):
        config = flatten(tomllib.loads(config_text))
    unreadable += unreadable_samples
    return Run(run_dir.resolve().name, metrics, samples, config_text, config, read_info(run_dir), unreadable)


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run: a dict for each update, in order, `{"step": 10, "reward/mean": 3.1, ...}`.

    A metric that was not measured in an update is absent; one that was no finite number is None. `run` is the run's
    directory, which may be of a run in progress. Raises UserError if it holds no metrics.
    """
    lines, _ = _json_lines(_metrics_file(Path(run)))
    return [{"step": step} | line for step, line in _by_step(lines)]


def _metrics_file(run_dir: Path) -> Path:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory; give the folder that holds metrics.jsonl")
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir}: no metrics.jsonl in it; give the folder of a run that did at least one update")
    return path


def _by_step(lines: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """(update, its metrics) in the order of updates; of an update written twice (a resumed run) the later values."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        step = update_of(line)
        if step is not None:
            by_step.setdefault(step, {}).update(line)
    return sorted(by_step.items())


def _json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file, one a line, and the number of unreadable ones."""
    found = [json_object(line) for line in text_of(path).split("\n") if line.strip()]
    objects = [value for value in found if value is not None]
    return objects, len(found) - len(objects)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
