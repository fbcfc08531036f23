"""What a run says about itself: metrics.jsonl and samples.jsonl on disk, and optional trackers.

Names: reward/mean success/{all,<kind>} policy/{loss,clip_frac,kl,entropy} world/{loss,lambda,selected_frac,masked_frac,
live_frac} critic/{loss,grad_norm,clip_frac,explained_variance} optim/{lr,grad_norm,skipped} time/{rollout,score,update,
sync,eval} [s] perf/{tokens_per_s,peak_gib} health/{env_failures,groups_dropped,groups_mixed,prompts_truncated,
texts_cut,threads_lost,valid_actions,sampler_mismatch} eval/{success,success_<kind>,games,failures,return,steps}.
A name is absent where it was not measured: never 0 in its place.
"""

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from paw.errors import UserError, clean

Metrics = Mapping[str, Any]


class MetricsLog:
    """Appends one JSON object per update to metrics.jsonl, and sampled episodes to samples.jsonl.

    Lines are flushed as they are written. Log an update before saving its checkpoint: on resume the files are cut back
    to the checkpoint's step, so that they end up equal to an uninterrupted run's but for time/* and perf/*.

    `resume_step` is the step of the checkpoint resumed: later lines go. None is a new run, which refuses to write over
    another one; -1 starts the files anew. `trackers` are any of "tensorboard", "wandb", "trackio"; they store `config`.
    Raises UserError where the folder holds another run, a tracker is not installed, or the disk refuses.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None = None,
        trackers: Iterable[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_trackers(trackers)
        self.history: list[dict[str, Any]] = []
        """Every update logged, those of the resumed run included, as JSON has it (null for non-finite)."""
        paths = [run_dir / "metrics.jsonl", run_dir / "samples.jsonl"]
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                self.history, _ = (_rewind(path, resume_step) for path in paths)
            elif used := [path for path in paths if path.exists() and path.stat().st_size]:
                raise UserError(f"{used[0]} already holds a run: go on with --resume auto, or set another --run.name")
            self._metrics, self._samples = (path.open("a", encoding="utf-8") for path in paths)
        except OSError as error:
            raise UserError(f"cannot write to run directory {run_dir}: {error.strerror}") from error
        self._trackers = [_TRACKERS[name](run_dir, resume_step, dict(config or {})) for name in trackers]

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of update `step`: numbers or one-element tensors; NaN and infinities become null."""
        record = {"step": step, **{clean(name): _jsonable(value) for name, value in metrics.items()}}
        _append(self._metrics, record)
        self.history.append(record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        for track, _ in self._trackers:
            track(step, numbers)

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Append something worth reading, such as one episode's turns, to samples.jsonl."""
        _append(self._samples, {"step": step, **_jsonable(record)})

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        for _, finish in self._trackers:
            finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _append(file: IO[str], record: Mapping[str, Any]) -> None:
    try:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
    except OSError as error:
        raise UserError(f"cannot write {file.name}: {error.strerror}") from error


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


def _rewind(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop lines after `step`, and the torn one a kill may have left, by an atomic rewrite; returns what stays."""
    if not path.exists():
        return []
    kept: list[dict[str, Any]] = []
    temp = path.with_name(f".tmp_{path.name}")
    with path.open("rb") as old, temp.open("wb") as new:
        for line in old:
            with suppress(ValueError):  # not JSON
                record = json.loads(line)
                if line.endswith(b"\n") and record["step"] <= step:
                    new.write(line)
                    kept.append(record)
        new.flush()
        os.fsync(new.fileno())
    temp.replace(path)
    return kept


# --- trackers: (run_dir, resume_step, config) -> (log(step, numbers), finish()) --------------------------------------

Tracker = tuple[Callable[[int, dict[str, Any]], None], Callable[[], None]]


def check_trackers(names: Iterable[str]) -> None:
    """Raise UserError with the install command for a tracker that is unknown or not installed; imports nothing."""
    for name in names:
        if name not in _TRACKERS:
            raise UserError(f"run.trackers: unknown tracker '{name}'; there are: {', '.join(_TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"run.trackers names '{name}', which is not installed: pip install {name}")


def _tensorboard(run_dir: Path, resume_step: int | None, config: dict[str, Any]) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=None if resume_step is None else resume_step + 1)
    writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", 0)

    def log(step: int, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(run_dir: Path, resume_step: int | None, config: dict[str, Any]) -> Tracker:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # pyright: ignore[reportMissingImports]

    id_file = run_dir / "wandb_id.txt"
    known = id_file.read_text().strip() if resume_step is not None and id_file.exists() else None
    quiet = wandb.Settings(
        console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
    )
    run = wandb.init(
        project="paw", name=run_dir.name, id=known, resume="allow", dir=str(run_dir), config=config, settings=quiet
    )
    id_file.write_text(run.id)
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _trackio(run_dir: Path, resume_step: int | None, config: dict[str, Any]) -> Tracker:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import trackio  # pyright: ignore[reportMissingImports]

    resume = "never" if resume_step is None else "allow"
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(project="paw", name=run_dir.name, config=config, resume=resume, **quiet)
    return lambda step, numbers: run.log(numbers, step=step), run.finish


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
