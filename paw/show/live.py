"""Progress of a run on the terminal: a live view, or one plain line per update where there is no terminal."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paw.trust.metrics import Metrics


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
