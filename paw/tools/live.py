"""The view of a run: a live one on a terminal, one plain line per update anywhere else. A callback of `paw.train`."""

import math
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
from paw.rollout.success import success_text

if TYPE_CHECKING:
    from paw.run import Run

LINE = {
    "reward/mean": "reward {:.3g}", "success/all": "success {:.1%}", "eval": "eval {}",
    "wm/lambda": "lambda {:.3f}", "policy/loss": "policy {:.3g}", "wm/loss": "world {:.3g}",
    "policy/entropy": "entropy {:.3g}", "policy/kl": "kl {:.3g}", "optim/grad_norm": "grad {:.3g}",
    "health/valid_actions": "valid {:.0%}", "seconds": "{:.1f} s", "perf/tokens_per_s": "{:,.0f} tok/s",
    "perf/peak_gib": "{:.1f} GiB", "left": "left {}",
}  # fmt: skip
"""The plain line of an update: metric -> how it is written."""
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
"""Rows of the live view, in the same form."""
TROUBLE = {
    "optim/skipped": "steps skipped {:.0f}", "health/env_failures": "environment failures {:.0f}",
    "health/groups_dropped": "groups dropped {:.0f}", "health/threads_lost": "threads lost {:.0f}",
}  # fmt: skip
"""Shown where it is not 0."""


class LiveView:
    """Progress of a run on the first rank's terminal.

    What the run prints meanwhile appears above the live part. It also shows `run.progress`, a text such as
    "episodes 3/16".
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._unicode = self.console.encoding.lower().startswith("utf")
        self._metrics: dict[str, Any] = {}
        self._eval: list[str] = []
        self._trend: dict[str, deque[float]] = {name: deque(maxlen=24) for name in ("reward/mean", "success/all")}
        self._seconds: deque[float] = deque(maxlen=10)
        self._live: Live | None = None

    def on_start(self, run: "Run") -> None:
        """The first update's time counts from here."""
        self._run, self._step, self._total = run, run.step, run.config.run.updates
        self._began = self._last = time.monotonic()
        if run.ranks.first and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self._frame, console=self.console, refresh_per_second=2)
            self._live.start()

    def on_end(self, run: "Run") -> None:
        if self._live:
            self._live.stop()

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        """Show the update's metrics; a name that is absent, or null, is left out."""
        if not run.ranks.first:
            return
        now = time.monotonic()
        if run.step > self._step:
            self._seconds.append(now - self._last)
        self._last, self._step = now, run.step
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self._metrics = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if self._seconds:
            left = sum(self._seconds) / len(self._seconds) * (self._total - self._step)
            self._metrics |= {"seconds": self._seconds[-1], "left": str(timedelta(seconds=round(left)))}
        if "eval/games" in metrics:
            self._metrics["eval"] = success_text({name.removeprefix("eval/"): value for name, value in metrics.items()})
            shares = self._kinds("eval/success_", " {:.1%}")
            self._eval = [self._metrics["eval"], *self._texts(shares), f"at update {self._step}"]
        for name, values in self._trend.items():
            if name in self._metrics:
                values.append(self._metrics[name])
        if self._live:
            self._live.refresh()
        else:
            done = f"step {self._step:>{len(str(self._total))}}/{self._total}"
            line = "  ".join([done, *self._texts(LINE | self._trouble())])
            self.console.print(self._text(line, style=""), soft_wrap=True)

    def _texts(self, forms: dict[str, str]) -> list[str]:
        """The metrics that are there, each as its form writes it."""
        texts = [form.format(self._metrics[name]) for name, form in forms.items() if name in self._metrics]
        return texts if self._unicode else [text.replace("λ", "lambda") for text in texts]

    def _frame(self) -> Group:
        elapsed = str(timedelta(seconds=int(time.monotonic() - self._began)))
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"update {self._step}/{self._total}", style="bold"),
            ProgressBar(total=self._total, completed=self._step, width=max(10, min(40, self.console.width - 50))),
            Text(elapsed, style="dim"),
            Text("".join(self._texts({"left": "{} left"})), style="dim"),
            Text(self._run.progress, style="dim"),
        )
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")

        def row(label: str, *parts: str, style: str = "") -> None:
            if any(parts):
                table.add_row(label, self._text("  ".join(filter(None, parts)), style=style))

        row("reward", *self._texts({"reward/mean": "{:<6.3g}"}), self._spark("reward/mean"), style="bold")
        success = self._texts({"success/all": "{:<6.1%}"})
        row("success", *success, self._spark("success/all", top=1.0), style="bold green")
        row("by kind", *self._texts(self._kinds("success/", " {:.0%}")))
        row("eval", *self._eval, style="cyan")
        for label, forms in ROWS.items():
            row(label, *self._texts(forms))
        if self._run.signal.requested:
            row(
                "stopping",
                f"{self._run.signal.name}: finishing this update, then saving (again: stop now)",
                style="bold",
            )
        row("trouble", *self._texts(self._trouble()), style="yellow")
        return Group(bar, table)

    def _text(self, text: str, *, style: str) -> Text:
        """Task types and failures are an environment's own words."""
        text, encoding = clean(text, LINE_CHARS), self.console.encoding
        return Text(text.encode(encoding, "replace").decode(encoding), style)

    def _kinds(self, prefix: str, form: str) -> dict[str, str]:
        """The metrics of task types, and how they are written. A name may hold braces."""
        names = [name for name in self._metrics if name.startswith(prefix) and name != "success/all"]
        escape = str.maketrans({"{": "{{", "}": "}}"})
        return {name: name.removeprefix(prefix).translate(escape) + form for name in names}

    def _trouble(self) -> dict[str, str]:
        return {name: form for name, form in TROUBLE.items() if self._metrics.get(name)}

    def _spark(self, name: str, top: float | None = None) -> str:
        """The last values as little bars, from 0 (or the lowest, if below) to `top` or the highest."""
        values = self._trend[name]
        if len(values) < 2 or not self._unicode:
            return ""
        low, high = min(0.0, *values), top or max(values)
        span = (high - low) or 1.0
        return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span))] for value in values)
