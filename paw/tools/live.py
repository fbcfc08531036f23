"""The live view of a run on a terminal."""

import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paw.errors import LINE_CHARS, clean
from paw.state.log import texts, trouble

if TYPE_CHECKING:
    from paw.run import Run

ROWS = {
    "world": {
        "wm/lambda": "λ {:.3f}", "wm/loss": "loss {:.3g}", "wm/selected_frac": "selected {:.0%}",
        "optim/gradient_frac": "with gradient {:.0%}",
    },
    "policy": {
        "policy/loss": "loss {:.3g}", "policy/kl": "kl {:.3g}", "policy/entropy": "entropy {:.3g}",
        "policy/clip_frac": "clipped {:.1%}", "health/valid_actions": "valid {:.0%}",
    },
    "optim": {"optim/lr": "lr {:.3g}", "optim/grad_norm": "grad norm {:.3g}"},
    "time": {f"time/{phase}": phase + " {:.1f} s" for phase in ("rollout", "score", "update", "sync", "eval")},
    "speed": {"perf/tokens_per_s": "{:,.0f} tokens/s", "perf/peak_gib": "peak {:.1f} GiB"},
}  # fmt: skip
"""Rows of the view: metric -> how it is written."""


class LiveView:
    """From its making until `stop`. What the run prints meanwhile appears above it; `run.progress` is part of it."""

    def __init__(self, run: "Run", console: Console | None = None) -> None:
        self.run, self.console = run, console or Console()
        self._unicode = self.console.encoding.lower().startswith("utf")
        self._metrics: dict[str, Any] = {}
        self._eval: list[str] = []
        self._trend: dict[str, deque[float]] = {name: deque(maxlen=24) for name in ("reward/mean", "success/all")}
        self._began = time.monotonic()
        self._live = Live(get_renderable=self.frame, console=self.console, refresh_per_second=2)
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def update(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics
        if "eval" in metrics:
            self._eval = [metrics["eval"], *self._kinds("eval/success_", " {:.1%}"), f"at update {self.run.step}"]
        for name, values in self._trend.items():
            if name in metrics:
                values.append(metrics[name])
        self._live.refresh()

    def frame(self) -> Group:
        step, total = self.run.step, self.run.config.run.updates
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"update {step}/{total}", style="bold"),
            ProgressBar(total=total, completed=step, width=max(10, min(40, self.console.width - 50))),
            Text(str(timedelta(seconds=int(time.monotonic() - self._began))), style="dim"),
            Text("".join(texts({"left": "{} left"}, self._metrics)), style="dim"),
            Text(self.run.progress, style="dim"),
        )
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()

        def row(label: str, *parts: str, style: str = "") -> None:
            if any(parts):
                table.add_row(label, self._text("  ".join(filter(None, parts)), style))

        reward, success = (texts({name: form}, self._metrics) for name, form in
                           (("reward/mean", "{:<6.3g}"), ("success/all", "{:<6.1%}")))  # fmt: skip
        row("reward", *reward, self._spark("reward/mean"), style="bold")
        row("success", *success, self._spark("success/all", top=1.0), style="bold green")
        row("by kind", *self._kinds("success/", " {:.0%}"))
        row("eval", *self._eval, style="cyan")
        for label, forms in ROWS.items():
            row(label, *texts(forms, self._metrics))
        if self.run.signal.requested:
            stopping = f"{self.run.signal.name}: finishing this update, then saving (again: stop now)"
            row("stopping", stopping, style="bold")
        row("trouble", *trouble(self._metrics), style="yellow")
        for column in (*bar.columns, *table.columns):
            column.overflow = "fold"  # rich's own ends in an ellipsis, which not every terminal can encode
        return Group(bar, table)

    def _text(self, text: str, style: str) -> Text:
        """Task types and failures are an environment's own words."""
        text = clean(text if self._unicode else text.replace("λ", "lambda"), LINE_CHARS)
        encoding = self.console.encoding
        return Text(text.encode(encoding, "replace").decode(encoding), style)

    def _kinds(self, prefix: str, form: str) -> list[str]:
        names = [name for name in self._metrics if name.startswith(prefix) and name != "success/all"]
        return [name.removeprefix(prefix) + form.format(self._metrics[name]) for name in names]

    def _spark(self, name: str, top: float | None = None) -> str:
        """The last values as little bars, from 0 (or the lowest, if below) to `top` or the highest."""
        values = self._trend[name]
        if len(values) < 2 or not self._unicode:
            return ""
        low, high = min(0.0, *values), top or max(values)
        span = (high - low) or 1.0
        return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span))] for value in values)
