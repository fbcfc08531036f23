"""The logs of a run: metrics.jsonl, samples.jsonl and episodes.jsonl.

paw/metric_list.py has the names and meanings of the metrics.
"""

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any

from paw.errors import UserError, clean, short_repr
from paw.io.files import fsync, open_append, write_file, writing
from paw.rundir.resume import cut, gaps, rewind

Metrics = Mapping[str, Any]
Record = dict[str, Any]
"""A line of metrics.jsonl as JSON values (null for a number that is not finite)."""


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends one JSON object per update to metrics.jsonl, sampled episodes of evaluations to
    samples.jsonl, and those of training to episodes.jsonl.

    `open_log` makes it. Lines reach the operating system as they are written, and reach the disk
    with `sync`. Log an update and sync before you save its checkpoint.
    """

    def __init__(
        self,
        metrics: FileIO,
        samples: FileIO,
        episodes: FileIO,
        *,
        history: list[Record],
        lost: list[str],
    ) -> None:
        self.history = history
        """Every update logged so far, including those before the run was resumed."""
        self.lost = lost
        """Sentences about what is missing in the files of the resumed run."""
        self._metrics = metrics
        self._samples = samples
        self._episodes = episodes

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of update `step`: numbers or one-element tensors.

        NaN and infinities become null. If the newest line already belongs to update `step`, the
        metrics are its missing evaluation, and the file is replaced by one whose last line includes
        it.
        """
        named: Record = {"step": step}
        for name, value in metrics.items():
            if name != "step":
                named[clean(name)] = value  # a callback may use any name
        record = _plain(named)
        if self.history and self.history[-1]["step"] == step:
            self._add_to_last_line(record)
        else:
            _append(self._metrics, record)
            self.history.append(record)

    def _add_to_last_line(self, record: Record) -> None:
        """Add `record` to the newest line, replacing its evaluation if it has one."""
        newest = self.history.pop()
        merged = {name: value for name, value in newest.items() if not name.startswith("eval/")}
        merged.update(record)
        path = _path(self._metrics)
        with writing(path):
            write_file(path, _lines([*self.history, merged]))
            self._metrics.close()
            self._metrics = open_append(path)
        self.history.append(merged)

    def restore(self) -> list[str]:
        """Rewrite the files that were deleted or replaced since they were opened.

        Returns a sentence for each. The metrics come from memory. The earlier content of the other
        files is lost.
        """
        messages = []
        metrics_path = _path(self._metrics)
        if not _is_at(self._metrics, metrics_path):
            with writing(metrics_path):
                write_file(metrics_path, _lines(self.history))
                self._metrics.close()
                self._metrics = open_append(metrics_path)
            messages.append(
                f"{metrics_path} was deleted or replaced: all its lines were written again"
            )
        self._samples = _reopened(self._samples, messages)
        self._episodes = _reopened(self._episodes, messages)
        return messages

    def evaluated(self, step: int) -> bool:
        """Whether the line of update `step` has an evaluation with an episode that did not fail."""
        return _evaluated(self.history, step)

    def sync(self) -> None:
        """Make sure that everything logged is on disk, where it survives a power cut."""
        for file in (self._metrics, self._samples, self._episodes):
            with writing(file.name):
                try:
                    os.fsync(file.fileno())
                except OSError as error:
                    if error.errno != errno.EINVAL:  # a device, such as /dev/null
                        raise

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Append a record for people to read, such as an episode's turns, to samples.jsonl."""
        _append(self._samples, _plain({"step": step, **record}))

    def episodes(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append training episodes of update `step`, which have only JSON values."""
        for record in records:
            _append(self._episodes, {"step": step, **record})

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._samples.close()
        self._episodes.close()


def open_log(run_dir: Path, *, resume_step: int | None = None) -> MetricsLog:
    """Open the log files of a run directory, which is made if it is missing.

    `resume_step` is the step of the resumed checkpoint, None for a new run, -1 for one that starts
    over. The files are cut back to that step, so that in the end they equal those of an
    uninterrupted run, except for time/* and perf/*. Raises UserError if the folder holds another
    run or the disk refuses.
    """
    metrics = run_dir / "metrics.jsonl"
    samples = run_dir / "samples.jsonl"
    episodes = run_dir / "episodes.jsonl"
    history: list[Record] = []
    lost: list[str] = []
    with writing(f"to run directory {run_dir}"):
        run_dir.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            for path in (metrics, samples, episodes):
                if path.exists() and path.stat().st_size:
                    raise UserError(
                        f"{path} already holds a run: continue it with --resume auto, "
                        "or set another --run.name"
                    )
        else:
            history = rewind(metrics, resume_step, lost)
            # Samples come from evaluations. An evaluation that is not in its line yet will be
            # repeated.
            sampled_step = resume_step
            if not _evaluated(history, resume_step):
                sampled_step -= 1
            rewind(samples, sampled_step, lost)
            cut(episodes, resume_step)
            lost += gaps(metrics, history, resume_step)
        metrics_file = open_append(metrics)
        samples_file = open_append(samples)
        episodes_file = open_append(episodes)
        fsync(run_dir)
    return MetricsLog(metrics_file, samples_file, episodes_file, history=history, lost=lost)


def _evaluated(history: list[Record], step: int) -> bool:
    return any("eval/success" in record for record in history if record["step"] == step)


def _path(file: FileIO) -> Path:
    return Path(str(file.name))


def _reopened(file: FileIO, messages: list[str]) -> FileIO:
    """Return the file, or a new one with a message if it was deleted or replaced."""
    path = _path(file)
    if _is_at(file, path):
        return file
    with writing(path):
        file.close()
        reopened = open_append(path)
    messages.append(f"{path} was deleted or replaced: new lines are added to what is there now")
    return reopened


def _is_at(file: FileIO, path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def metrics_problem(metrics: Any) -> str:
    """Return what is wrong with the first metric that cannot be logged, or "" if all can be.

    Such a metric may come from a callback.
    """
    if not isinstance(metrics, dict):
        return f"run.metrics is {short_repr(metrics)}; it must be a dict"
    for name, value in metrics.items():
        key = f"metrics[{short_repr(name)}]"
        if not isinstance(name, str):
            return f"{key}: the name must be a string"
        if not _can_be_logged(name, value):
            return f"{key} is {short_repr(value)}; it must be a number that fits a float"
    return ""


def _can_be_logged(name: str, value: Any) -> bool:
    try:
        plain_value = _plain({"value": value})["value"]
        if isinstance(value, int | float):
            float(value)
    except Exception:  # a user's number type may raise anything
        return False
    # The run adds seconds to the values of time/.
    return not name.startswith("time/") or isinstance(plain_value, int | float)


def _plain(record: Mapping[str, Any]) -> Record:
    """Return the record as JSON values. Scalars of numpy and torch become numbers.

    NaN, infinities and integers too large for a float become null.
    """
    text = json.dumps(record, default=_scalar)
    return json.loads(text, parse_constant=lambda _: None, parse_int=_int)


def _scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    return str(value)


def _int(digits: str) -> int | None:
    if not math.isfinite(float(digits)):
        return None
    return int(digits)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _lines(records: list[Record]) -> bytes:
    return b"".join(_line(record) for record in records)


def _append(file: FileIO, record: Mapping[str, Any]) -> None:
    unwritten = memoryview(_line(record))
    with writing(file.name):
        while unwritten:  # a disk that fills up takes only part of it
            unwritten = unwritten[file.write(unwritten) :]
