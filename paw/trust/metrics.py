"""What a run says about itself: metrics.jsonl and samples.jsonl on disk, optional trackers, and a view of progress.

Names: reward/mean success/{all,<kind>} policy/{loss,clip_frac,kl,entropy} world/{loss,lambda,selected_frac,masked_frac,
live_frac} optim/{lr,grad_norm,skipped} time/{rollout,score,update,sync,eval} [s] perf/{tokens_per_s,peak_gib}
health/{env_failures,groups_dropped,groups_mixed,valid_actions,sampler_mismatch} eval/{success,success_<kind>,return,
steps}.
"""

import importlib.util
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paw.errors import UserError

Metrics = Mapping[str, Any]


class MetricsLog:
    """Appends one JSON object per update to metrics.jsonl, and sampled episodes to samples.jsonl.

    Lines are flushed as they are written. Log an update before saving its checkpoint: on resume the files are cut back
    to the checkpoint's step, so that they end up equal to an uninterrupted run's but for time/* and perf/*.

    Args:
        run_dir: made if missing.
        resume_step: step of the checkpoint resumed; later lines go. None is a new run, which refuses to write over
            another one; -1 starts the files anew.
        trackers: any of "tensorboard", "wandb", "trackio".
        config: what the trackers store as the run's configuration.

    Raises:
        UserError: the folder holds another run, a tracker is not installed, or the disk refuses.
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
        self._paths = {name: run_dir / f"{name}.jsonl" for name in ("metrics", "samples")}
        self._files: dict[str, IO[str]] = {}
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            for name, path in self._paths.items():
                if resume_step is not None:
                    kept = _rewind(path, resume_step)
                    self.history = kept if name == "metrics" else self.history
                elif path.exists() and path.stat().st_size:
                    raise UserError(f"{path} already holds a run: go on with --resume auto, or set another --run.name")
            for name, path in self._paths.items():
                self._files[name] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write to run directory {run_dir}: {error.strerror}") from error
        self._trackers = [_TRACKERS[name](run_dir, resume_step, dict(config or {})) for name in trackers]

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of update `step`: numbers or one-element tensors; NaN and infinities become null."""
        record = {"step": step, **{name: _jsonable(value) for name, value in metrics.items()}}
        self._append("metrics", record)
        self.history.append(record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        for track, _ in self._trackers:
            track(step, numbers)

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Append something worth reading, such as one episode's turns, to samples.jsonl."""
        self._append("samples", {"step": step, **_jsonable(record)})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for _, finish in self._trackers:
            finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            self._files[name].write(json.dumps(record, allow_nan=False) + "\n")
            self._files[name].flush()
        except OSError as error:
            raise UserError(f"cannot write {self._paths[name]}: {error.strerror}") from error


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
            try:
                record = json.loads(line)
            except ValueError:
                continue
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
    run = wandb.init(
        project="paw",
        name=run_dir.name,
        id=id_file.read_text().strip() if resume_step is not None and id_file.exists() else None,
        resume="allow",
        dir=str(run_dir),
        config=config,
        settings=wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
        ),
    )
    id_file.write_text(run.id)
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _trackio(run_dir: Path, resume_step: int | None, config: dict[str, Any]) -> Tracker:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import trackio  # pyright: ignore[reportMissingImports]

    run = trackio.init(
        project="paw",
        name=run_dir.name,
        config=config,
        resume="never" if resume_step is None else "allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return lambda step, numbers: run.log(numbers, step=step), run.finish


_TRACKERS: dict[str, Callable[[Path, int | None, dict[str, Any]], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}


# --- progress ------------------------------------------------------------------------------------------------------


class LiveView:
    """Progress of a run: a live view on a terminal, one plain line per update anywhere else.

    Args:
        total: updates of the whole run.
        start: updates done before (resume).
        mode: "auto" looks at the console; "off" prints nothing (ranks other than 0).
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        mode: Literal["auto", "live", "plain", "off"] = "auto",
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        fits = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode = mode if mode != "auto" else "live" if fits else "plain"
        self.total, self.step = total, start
        self._metrics: dict[str, Any] = {}
        self._eval: tuple[int, dict[str, Any]] | None = None
        self._trend: dict[str, deque[float]] = {name: deque(maxlen=24) for name in ("reward/mean", "success/all")}
        self._seconds: deque[float] = deque(maxlen=10)
        self._began = self._last = time.monotonic()
        self._unicode = self.console.encoding.lower().startswith("utf")
        self._live: Live | None = None
        self._phase = ""

    def __enter__(self) -> Self:
        self._began = self._last = time.monotonic()
        if self.mode == "live":
            self._live = Live(get_renderable=self._frame, console=self.console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def header(self, lines: Iterable[str]) -> None:
        """Lines said once, when training begins: recipe, model, device. The first update's time counts from here."""
        self._last = time.monotonic()
        for line in lines:
            self.message(line)

    def message(self, text: str) -> None:
        """One line in passing, above the live part."""
        if self.mode != "off":
            style = "yellow" if text.startswith("warning") else ""
            self.console.print(Text(text, style=style), soft_wrap=True)

    def progress(self, phase: str) -> Callable[[int, int], None]:
        """A callback (done, total) that shows how far `phase` has come, on a terminal."""

        def show(done: int, total: int) -> None:
            self._phase = f"{phase} {done}/{total}" if done < total else ""

        return show

    def update(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of update `step`; a name that is absent, or null, is left out."""
        now = time.monotonic()
        if step > self.step:
            self._seconds.append(now - self._last)
        self._last, self.step = now, step
        self._metrics = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        evaluation = {name.removeprefix("eval/"): v for name, v in self._metrics.items() if name.startswith("eval/")}
        if evaluation:
            self._eval = step, evaluation
        for name, values in self._trend.items():
            if name in self._metrics:
                values.append(self._metrics[name])
        if self._live is not None:
            self._live.refresh()
        elif self.mode == "plain":
            self.message(self._line())

    def _get(self, name: str, form: str) -> str:
        """One metric as text, "" where it is absent. `form` is a format string: "kl {:.3g}"."""
        return form.format(self._metrics[name]) if name in self._metrics else ""

    def _time_left(self) -> str:
        if not self._seconds:
            return ""
        left = sum(self._seconds) / len(self._seconds) * (self.total - self.step)
        return str(timedelta(seconds=round(left)))

    def _line(self) -> str:
        parts = [
            f"step {self.step:>{len(str(self.total))}}/{self.total}",
            self._get("reward/mean", "reward {:.3g}"),
            self._get("success/all", "success {:.1%}"),
            self._get("eval/success", "eval {:.1%}"),
            self._get("world/lambda", "lambda {:.3f}"),
            self._get("policy/loss", "policy {:.3g}"),
            self._get("world/loss", "world {:.3g}"),
            self._get("policy/entropy", "entropy {:.3g}"),
            self._get("policy/kl", "kl {:.3g}"),
            self._get("optim/grad_norm", "grad {:.3g}"),
            self._get("health/valid_actions", "valid {:.0%}"),
            f"{self._seconds[-1]:.1f} s" if self._seconds else "",
            self._get("perf/tokens_per_s", "{:,.0f} tok/s"),
            self._get("perf/peak_gib", "{:.1f} GiB"),
            f"left {self._time_left()}" if self._seconds else "",
        ]
        return "  ".join(part for part in parts if part)

    def _frame(self) -> Group:
        elapsed = str(timedelta(seconds=int(time.monotonic() - self._began)))
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"update {self.step}/{self.total}", style="bold"),
            ProgressBar(total=self.total, completed=self.step, width=max(10, min(40, self.console.width - 50))),
            Text(elapsed, style="dim"),
            Text(f"{self._time_left()} left" if self._seconds else "", style="dim"),
            Text(self._phase, style="dim"),
        )
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, parts, style in self._rows():
            text = "  ".join(part for part in parts if part)
            if text:
                table.add_row(label, Text(text, style=style))
        return Group(bar, table)

    def _rows(self) -> list[tuple[str, list[str], str]]:
        get = self._get
        kinds = [n for n in self._metrics if n.startswith("success/") and n != "success/all"]
        at, evaluation = self._eval or (0, {})
        times = {name: value for name, value in self._metrics.items() if name.startswith("time/")}
        problems = [
            get(name, form)
            for name, form in (
                ("optim/skipped", "steps skipped {:.0f}"),
                ("health/env_failures", "environment failures {:.0f}"),
                ("health/groups_dropped", "groups dropped {:.0f}"),
            )
            if self._metrics.get(name)
        ]
        return [
            ("reward", [get("reward/mean", "{:<6.3g}"), self._spark("reward/mean")], "bold"),
            ("success", [get("success/all", "{:<6.1%}"), self._spark("success/all", top=1.0)], "bold green"),
            ("by kind", [get(name, name.removeprefix("success/") + " {:.0%}") for name in kinds], ""),
            (
                "eval",
                [f"{n.removeprefix('success_')} {v:.1%}" for n, v in evaluation.items() if n.startswith("success")]
                + ([f"at update {at}"] if evaluation else []),
                "cyan",
            ),
            (
                "world",
                [
                    get("world/lambda", ("λ" if self._unicode else "lambda") + " {:.3f}"),
                    get("world/loss", "loss {:.3g}"),
                    get("world/selected_frac", "selected {:.0%}"),
                    get("world/live_frac", "live {:.0%}"),
                ],
                "",
            ),
            (
                "policy",
                [
                    get("policy/loss", "loss {:.3g}"),
                    get("policy/kl", "kl {:.3g}"),
                    get("policy/entropy", "entropy {:.3g}"),
                    get("policy/clip_frac", "clipped {:.1%}"),
                    get("health/valid_actions", "valid {:.0%}"),
                ],
                "",
            ),
            ("optim", [get("optim/lr", "lr {:.3g}"), get("optim/grad_norm", "grad norm {:.3g}")], ""),
            ("time", [get(name, name.removeprefix("time/") + " {:.1f} s") for name in times], ""),
            ("speed", [get("perf/tokens_per_s", "{:,.0f} tokens/s"), get("perf/peak_gib", "peak {:.1f} GiB")], ""),
            ("trouble", problems, "yellow"),
        ]

    def _spark(self, name: str, top: float | None = None) -> str:
        """The last values as little bars, from 0 (or the lowest, if below) to `top` or the highest."""
        values = self._trend[name]
        if len(values) < 2 or not self._unicode:
            return ""
        low, high = min(0.0, *values), top or max(values)
        span = (high - low) or 1.0
        return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span))] for value in values)
