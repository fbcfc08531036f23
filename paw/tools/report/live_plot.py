"""Draws metrics while runs train, in the notebook cell that trains them."""

import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paw.errors import UserError, clean, nearest, short_repr
from paw.io.files import writing
from paw.tools.report import plots
from paw.tools.report.rundir import RunReader

if TYPE_CHECKING:
    from paw.run import Run

PANEL = (3.7, 2.6)
"""Width and height of a metric's axes, inches."""
DPI = 110
REDRAW_S = 1.0
"""Minimum seconds between two drawings, each of which takes a few hundredths of a second."""


class LivePlot:
    """A callback that draws metrics while runs train, each in its own axes.

    One object may be a callback of several runs in turn, and each run gets its own curve. In a
    notebook the drawing is in the output of the cell that trains. Elsewhere, `save` writes it.
    """

    def __init__(self, *metrics: str) -> None:
        """`metrics` are names from docs/metrics.md.

        Raises UserError if there are none, or if one is not a text.
        """
        if not metrics:
            raise UserError(
                'paw.LivePlot() draws nothing; name metrics: paw.LivePlot("success/all")'
            )
        for metric in metrics:
            if not isinstance(metric, str):
                raise UserError(
                    f"paw.LivePlot: {short_repr(metric)} is not the name of a metric; "
                    'write paw.LivePlot("success/all", "wm/loss")'
                )
        self._metrics = metrics
        self._readers: dict[Path, RunReader] = {}
        self._display: Any = None
        """IPython's handle of the output that is drawn anew; None outside of a notebook."""
        self._cell = 0
        """IPython's number of the cell that has that output."""
        self._drawn = 0.0
        """Monotonic time of the last drawing."""

    def __repr__(self) -> str:
        return f"LivePlot({', '.join(map(repr, self._metrics))})"

    def on_start(self, run: "Run") -> None:
        if run.ranks.first:
            self._readers.setdefault(run.directory, RunReader(run.directory))
            self._begin_output()

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        if time.monotonic() - self._drawn > REDRAW_S:
            self._draw()

    def on_end(self, run: "Run") -> None:
        self._draw()
        if run.ranks.first and not run.failed:
            measured = self._readers[run.directory].read().metrics
            for metric in self._metrics:
                if metric not in measured:
                    hint = nearest(metric, measured) or "docs/metrics.md has all names"
                    run.say(f"paw.LivePlot: this run has no metric '{clean(metric)}'; {hint}")

    def png(self) -> bytes:
        """Return the drawing of all runs so far."""
        runs = [reader.read() for reader in self._readers.values()]
        buffer = io.BytesIO()
        figure = plots.panels(runs, self._metrics, PANEL)
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
        return buffer.getvalue()

    _repr_png_ = png  # IPython shows an object as what this returns

    def save(self, file: str | Path) -> Path:
        """Write the drawing to a PNG file, and return its path."""
        path = Path(file)
        with writing(str(path)):
            path.write_bytes(self.png())
        return path

    def _begin_output(self) -> None:
        """Begin an output in the running cell of a notebook, unless it has one."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is None or shell.execution_count == self._cell:
            return
        from IPython.display import display

        self._cell = shell.execution_count
        self._display = display(self, display_id=True)

    def _draw(self) -> None:
        if self._display is not None:
            self._display.update(self)
            self._drawn = time.monotonic()
