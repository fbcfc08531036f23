"""What a run writes about itself: metrics.jsonl and samples.jsonl.

Names: reward/mean success/{all,<kind>} policy/{loss,clip_frac,kl,entropy} wm/{loss,lambda,selected_frac,masked_frac}
critic/{loss,grad_norm,clip_frac,explained_variance} optim/{lr,grad_norm,gradient_frac,skipped}
time/{rollout,score,update,sync,eval} [s] perf/{tokens_per_s,peak_gib}
health/{env_failures,groups_dropped,groups_mixed,prompts_truncated,texts_cut,threads_lost,valid_actions,
sampler_mismatch} eval/{success,success_<kind>,games,failures,return,steps}.
A name is absent where it was not measured: never 0 in its place.
"""

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Self

from paw.errors import UserError, clean
from paw.files import cause, fsync, json_object, open_append, update_of, write_file

Metrics = Mapping[str, Any]
OLDER = {"wm/live_frac": "optim/gradient_frac"}


class MetricsLog:
    """Appends one JSON object per update to metrics.jsonl, and sampled episodes to samples.jsonl.

    Lines reach the system as they are written, and the disk with `sync`. Log an update, and sync, before saving its
    checkpoint: on resume the files are cut back to the checkpoint's step, so that they end up equal to an uninterrupted
    run's but for time/* and perf/*.

    `resume_step` is the step of the checkpoint resumed: later lines go. None is a new run, which refuses to write over
    another one; -1 starts the files anew. Raises UserError where the folder holds another run, or the disk refuses.
    """

    def __init__(self, run_dir: Path, *, resume_step: int | None = None) -> None:
        self.history: list[dict[str, Any]] = []
        """Every update logged, those of the resumed run included, as JSON has it (null for non-finite)."""
        self.lost: list[str] = []
        """What the files of the resumed run lack, one sentence each."""
        paths = [run_dir / "metrics.jsonl", run_dir / "samples.jsonl"]
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                self.history = self._rewind(paths[0], resume_step)
                # Samples are of evaluations: one that has not reached its line will be repeated.
                self._rewind(paths[1], resume_step if self.evaluated(resume_step) else resume_step - 1)
                self.lost += _gaps(paths[0], [record["step"] for record in self.history], resume_step)
            elif used := [path for path in paths if path.exists() and path.stat().st_size]:
                raise UserError(f"{used[0]} already holds a run: go on with --resume auto, or set another --run.name")
            self._metrics, self._samples = map(open_append, paths)
            fsync(run_dir)
        except OSError as error:
            raise UserError(f"cannot write to run directory {run_dir}: {cause(error)}") from error

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of update `step`: numbers or one-element tensors; NaN and infinities become null.

        If it is the newest one's, they are an evaluation that its line lacked: the file is replaced by one with it.
        """
        record = {"step": step, **{clean(name): _jsonable(value) for name, value in metrics.items()}}
        if self.history and self.history[-1]["step"] == step:
            before = self.history.pop()
            record = {name: value for name, value in before.items() if not name.startswith("eval/")} | record
            self._replace([*self.history, record])
        else:
            _append(self._metrics, _line(record))
        self.history.append(record)

    def evaluated(self, step: int) -> bool:
        """Whether the line of update `step` has an evaluation in which not every episode failed."""
        return any("eval/success" in record for record in self.history if record["step"] == step)

    def sync(self) -> None:
        """What was logged is on the disk, whatever happens to the power."""
        for file in (self._metrics, self._samples):
            try:
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # a device, such as /dev/null
                    raise UserError(f"cannot write {file.name}: {cause(error)}") from None

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Append something worth reading, such as one episode's turns, to samples.jsonl."""
        _append(self._samples, _line({"step": step, **_jsonable(record)}))

    def _replace(self, records: list[dict[str, Any]]) -> None:
        path = Path(str(self._metrics.name))
        try:
            write_file(path, b"".join(map(_line, records)))
            self._metrics.close()
            self._metrics = open_append(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {cause(error)}") from None

    def _rewind(self, path: Path, step: int) -> list[dict[str, Any]]:
        """Drop lines after `step`, and the torn one a kill may have left; returns what stays."""
        if not path.is_file():
            return []
        kept: list[dict[str, Any]] = []
        broken: list[int] = []

        def copy(new: IO[bytes]) -> None:
            with path.open("rb") as old:
                for number, line in enumerate(old, 1):
                    record = json_object(line)
                    update = update_of(record)
                    if not line.endswith(b"\n"):
                        continue
                    if record is None or update is None:
                        broken.append(number)
                    elif update <= step:
                        new.write(line)
                        kept.append(today(record))

        write_file(path, copy)
        if broken:
            self.lost.append(f"{path}: {len(broken)} lines are no update's and go, the first is line {broken[0]}")
        return kept

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def today(record: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl under the names of today."""
    renamed = {name: re.sub("^world/", "wm/", name) for name in record}
    return {OLDER.get(name, name): record[old] for old, name in renamed.items()}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _append(file: FileIO, line: bytes) -> None:
    try:
        rest = memoryview(line)
        while rest:  # a disk that fills up takes a part
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise UserError(f"cannot write {file.name}: {cause(error)}") from None


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return _jsonable(value.item())  # numpy and torch scalars


def _gaps(path: Path, steps: list[int], last: int) -> Iterator[str]:
    """A sentence where lines of the updates 0 to `last` are missing."""
    missing = sorted(set(range(last + 1)).difference(steps))
    runs = [[step for _, step in run] for _, run in groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0])]
    if missing:
        which = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:9])
        which += ", ..." if len(runs) > 9 else ""
        yield f"{path} lacks {len(missing)} of {last + 1} lines (updates {which}); the run goes on without them"
