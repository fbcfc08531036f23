"""What a run writes about itself: metrics.jsonl and samples.jsonl.

The names and what they mean: paw/metric_list.py.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any

from paw.errors import UserError, clean, shown
from paw.files import fsync, open_append, write_file, writing

Metrics = Mapping[str, Any]


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends one JSON object per update to metrics.jsonl, and sampled episodes to samples.jsonl.

    Lines reach the system as they are written, and the disk with `sync`: log an update, and sync,
    before saving its checkpoint. On resume the files are cut back to the checkpoint's step, so that
    they end up equal to an uninterrupted run's but for time/* and perf/*.
    """

    def __init__(self, run_dir: Path, *, resume_step: int | None = None) -> None:
        """`resume_step` is the step of the checkpoint resumed; None a new run, -1 one that starts its files anew.

        Raises UserError where the folder holds another run, or the disk refuses.
        """
        self.history: list[dict[str, Any]] = []
        """Every update logged, those of the resumed run included, as JSON has it (null for non-finite)."""
        self.lost: list[str] = []
        """What the files of the resumed run lack, one sentence each."""
        paths = [run_dir / "metrics.jsonl", run_dir / "samples.jsonl"]
        with writing(f"to run directory {run_dir}"):
            run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                from paw.state.resume import gaps, rewind

                self.history = rewind(paths[0], resume_step, self.lost)
                # Samples are of evaluations: one that has not reached its line will be repeated.
                rewind(
                    paths[1],
                    resume_step if self.evaluated(resume_step) else resume_step - 1,
                    self.lost,
                )
                self.lost += gaps(paths[0], self.history, resume_step)
            elif used := [path for path in paths if path.exists() and path.stat().st_size]:
                raise UserError(
                    f"{used[0]} already holds a run: go on with --resume auto, or set another --run.name"
                )
            self._metrics, self._samples = map(open_append, paths)
            fsync(run_dir)

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of update `step`: numbers or one-element tensors; NaN and infinities become null.

        If it is the newest one's, they are an evaluation that its line lacked: the file is replaced
        by one with it.
        """
        named = {
            clean(name): value for name, value in metrics.items() if name != "step"
        }  # a callback's may be
        record = _plain({"step": step, **named})
        if self.history and self.history[-1]["step"] == step:
            before = self.history.pop()
            record = {
                name: value for name, value in before.items() if not name.startswith("eval/")
            } | record
            path = Path(str(self._metrics.name))
            with writing(path):
                write_file(path, b"".join(map(_line, [*self.history, record])))
                self._metrics.close()
                self._metrics = open_append(path)
        else:
            _append(self._metrics, record)
        self.history.append(record)

    def restore(self) -> list[str]:
        """Write the files anew that were deleted or replaced since they were opened; returns a sentence for each.

        The metrics are those in memory. Of samples.jsonl what was there before is lost.
        """
        notes = []
        metrics, samples = Path(str(self._metrics.name)), Path(str(self._samples.name))
        if not _is_at(self._metrics, metrics):
            with writing(metrics):
                write_file(metrics, b"".join(map(_line, self.history)))
                self._metrics.close()
                self._metrics = open_append(metrics)
            notes.append(f"{metrics} was deleted or replaced: all its lines are written anew")
        if not _is_at(self._samples, samples):
            with writing(samples):
                self._samples.close()
                self._samples = open_append(samples)
            notes.append(f"{samples} was deleted or replaced: what is there now is added to")
        return notes

    def evaluated(self, step: int) -> bool:
        """Whether the line of update `step` has an evaluation in which not every episode failed."""
        return any("eval/success" in record for record in self.history if record["step"] == step)

    def sync(self) -> None:
        """What was logged is on the disk, whatever happens to the power."""
        for file in (self._metrics, self._samples):
            with writing(file.name):
                try:
                    os.fsync(file.fileno())
                except OSError as error:
                    if error.errno != errno.EINVAL:  # a device, such as /dev/null
                        raise

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Append something worth reading, such as one episode's turns, to samples.jsonl."""
        _append(self._samples, _plain({"step": step, **record}))

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._samples.close()


def _is_at(file: FileIO, path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def metrics_problem(metrics: Any) -> str:
    """What is wrong with the first metric that a callback may have added and no line can hold; "" if nothing is."""
    if not isinstance(metrics, dict):
        return f"run.metrics is {shown(metrics)}; it must be a dict"
    for name, value in metrics.items():
        what = f"metrics[{shown(name)}]"
        if not isinstance(name, str):
            return f"{what}: the name must be a text"
        try:
            plain = _plain({"value": value})["value"]
            size = float(value) if isinstance(value, int | float) else 0.0
        except Exception:  # whatever a number of one's own raises
            plain, size = None, None
        is_clock = name.startswith("time/")
        if size is None or (is_clock and not isinstance(plain, int | float)):
            return f"{what} is {shown(value)}; it must be a number that fits a float"
    return ""


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it: numpy's and torch's scalars are numbers; NaN, infinities and integers beyond a float null."""
    text = json.dumps(
        record, default=lambda scalar: scalar.item() if hasattr(scalar, "item") else str(scalar)
    )
    return json.loads(text, parse_constant=lambda _: None, parse_int=_int)


def _int(digits: str) -> int | None:
    return int(digits) if math.isfinite(float(digits)) else None


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _append(file: FileIO, record: Mapping[str, Any]) -> None:
    rest = memoryview(_line(record))
    with writing(file.name):
        while rest:  # a disk that fills up takes a part
            rest = rest[file.write(rest) :]
