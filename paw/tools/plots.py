"""The report's figures, each drawn once, saved as PNG on white, and inlined as SVG that follows the page's colours:
those of Okabe and Ito, told apart with any colour vision; several runs also differ in dash pattern."""

import io
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paw.errors import clean
from paw.tools.rundir import Run, Series

Size = tuple[float, float]
"""Width and height, inches."""
INK, MUTED, GRID = "#23282e", "#69717b", "#dfe2e6"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
PALETTE = [BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY]
DASHES: list = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5))]
PHASES = {"rollout": BLUE, "score": SKY, "update": VERMILLION, "sync": GREEN, "eval": PURPLE}
CSS_NAMES = {
    INK: "ink", MUTED: "muted", GRID: "rule", BLUE: "blue", VERMILLION: "vermillion", GREEN: "green",
    PURPLE: "purple", ORANGE: "orange", SKY: "sky",
}  # fmt: skip
STYLE: Any = {
    "font.size": 9, "axes.labelsize": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "legend.fontsize": 8.5,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.edgecolor": GRID, "xtick.color": GRID, "ytick.color": GRID, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "ytick.left": False, "legend.frameon": False,
    "lines.solid_capstyle": "round", "svg.fonttype": "none", "svg.hashsalt": "paw",
    "figure.constrained_layout.use": True,
    # Task types come from the environment: a `$` in one is text, not mathematics.
    "text.parse_math": False,
}  # fmt: skip
styled = matplotlib.rc_context(STYLE)


@styled
def learning_curve(runs: Sequence[Run], size: Size, *, kind: str | None = None) -> Figure | None:
    """Success on evaluation games with its 95 % Wilson interval; one run also shows its training games. Of one `kind`
    of task: a chart without interval and legend."""
    whole, single = kind is None, len(runs) == 1
    evaluation, training = ("eval/success", "success/all") if whole else (f"eval/success_{kind}", f"success/{kind}")
    if not any(evaluation in run.metrics for run in runs):
        return None
    figure, axes = _axes(size)
    for index, run in enumerate(runs):
        colour, dash = look(index)
        if single and training in run.metrics:
            played = run.series(training)
            window = _window(played)
            label = f"training games ({window}-update mean)" if window > 1 else "training games"
            _smoothed(axes, played, 100, thin=0.2 if whole else 0.0, color=VERMILLION, linewidth=1.4, label=label)
        steps, values = run.series(evaluation)
        if not steps:
            continue
        low, high = (run.metrics.get(f"eval/ci_{side}", {}) for side in ("low", "high"))
        band = [step for step in steps if whole and step in low and step in high]
        low, high = ([100 * side[step] for step in band] for side in (low, high))
        axes.fill_between(band, low, high, color=colour, alpha=0.16 if len(runs) < 4 else 0.08, linewidth=0)
        label = printable(run.name) if not single else "unseen games, 95% interval" if band else "unseen games"
        shown = np.multiply(values, 100)
        axes.plot(steps, shown, color=colour, linestyle=dash, linewidth=2, marker="o", markersize=3.6, label=label)
    axes.set(xlabel="Update", ylabel="Success rate (%)", ylim=(0, 100))
    if whole:
        legend(axes)
    return figure


@styled
def success_by_kind(runs: Sequence[Run], size: Size) -> Figure | None:
    """Bars per task type: first against last evaluation of one run, last evaluations of several."""
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.kinds))[:12]
    if not kinds:
        return None
    bars = [(printable(run.name), look(i)[0], run.last) for i, run in enumerate(runs)]
    if len(runs) == 1:
        bars = [("first evaluation", SKY, runs[0].first), ("last evaluation", BLUE, runs[0].last)]
    figure, axes = _axes(size)
    thickness = 0.76 / len(bars)
    for index, (label, colour, read) in enumerate(bars):
        values = [read(f"eval/success_{kind}") for kind in kinds]
        places = np.arange(len(kinds)) + (index - (len(bars) - 1) / 2) * thickness
        shown = [100 * (value or 0) for value in values]
        drawn = axes.barh(places, shown, height=thickness * 0.9, color=colour, label=label)
        if len(bars) * len(kinds) <= 24:
            texts = ["–" if value is None else f"{100 * value:.0f}" for value in values]
            axes.bar_label(drawn, texts, padding=2, fontsize=8, color=INK)
    axes.set(xlabel="Success rate (%)", xlim=(0, 106))
    axes.set_xticks(range(0, 101, 25))
    name_bars(axes, list(map(printable, kinds)))
    legend(axes)
    return figure


@styled
def metric(runs: Sequence[Run], key: str, label: str, size: Size, *, percent: bool = False) -> Figure | None:
    """One metric over the updates: each value thin, the moving mean thick; the mean alone for several runs."""
    if not any(key in run.metrics for run in runs):
        return None
    figure, axes = _axes(size)
    factor = 100 if percent else 1
    for index, run in enumerate(runs):
        colour, dash = look(index)
        if key in run.metrics:
            line = {"linestyle": dash, "linewidth": 1.8, "marker": "o" if len(run.metrics[key]) == 1 else ""}
            thin = 0.25 if len(runs) == 1 else 0.0
            _smoothed(axes, run.series(key), factor, thin=thin, color=colour, label=printable(run.name), **line)
    axes.set(xlabel="Update", ylabel=label)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2), min(high, 102))
    if len(runs) > 1:
        legend(axes)
    return figure


@styled
def phase_times(runs: Sequence[Run], size: Size) -> Figure | None:
    """Seconds an update by phase: over the updates for one run (means of up to 40 bins), the whole run for several."""
    phases = [phase for phase in PHASES if any(f"time/{phase}" in run.metrics for run in runs)]
    if not phases:
        return None
    figure, axes = _axes(size)
    if len(runs) == 1:
        updates = max(runs[0].updates, 1)
        edges = np.append(np.arange(0.5, updates + 0.5, -(-updates // 40)), updates + 0.5)
        widths, places = np.diff(edges), (edges[1:] + edges[:-1]) / 2
        bottom = np.zeros(len(places))
        total = sum(sum(runs[0].series(f"time/{phase}")[1]) for phase in phases)
        for phase in phases:
            steps, seconds = runs[0].series(f"time/{phase}")
            share = sum(seconds) / total if total else 0.0
            height = np.histogram(steps, edges, weights=seconds)[0] / widths
            axes.bar(places, height, widths * 0.86, bottom, color=PHASES[phase], label=f"{phase} {share:.0%}")
            bottom += height
        axes.set(xlabel="Update", ylabel="Time (s per update)")
    else:
        left = np.zeros(len(runs))
        for phase in phases:
            width = [sum(run.series(f"time/{phase}")[1]) / max(run.updates, 1) for run in runs]
            axes.barh(range(len(runs)), width, 0.6, left, color=PHASES[phase], label=phase)
            left += width
        axes.set(xlabel="Time (s per update)")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        name_bars(axes, [printable(run.name) for run in runs])
    legend(axes)
    return figure


@styled
def to_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element for an HTML page, without outside references, colours from the page's variables.

    `name` keeps ids of several figures apart; `description`, already escaped, is read to those who cannot see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<(metadata|style).*?</\1>", "", buffer.getvalue(), flags=re.DOTALL)
    [(view, body)] = re.findall(r'<svg\s[^>]*(viewBox="[^"]*")[^>]*>(.*)', svg, re.DOTALL)
    body = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in CSS_NAMES.items():
        body = body.replace(colour, f"var(--{variable})")
    return f'<svg {view} role="img" aria-label="{description}">{body}'


def _axes(size: Size) -> tuple[Figure, Axes]:
    figure = Figure(size)
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _smoothed(axes: Axes, series: Series, factor: float, *, thin: float, color: str, **line: Any) -> None:
    """The centred moving mean times `factor` as a line; the values themselves under it, at the opacity `thin`."""
    steps, values = series
    window = _window(series)
    if window > 1 and thin:
        axes.plot(steps, np.multiply(values, factor), color=color, linewidth=0.7, alpha=thin)
    axes.plot(steps, factor * moving_mean(values, window), color=color, **line)


def moving_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Centred; at both ends over the part of the window that exists."""
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _window(series: Series) -> int:
    """Updates in the moving mean of a curve."""
    return max(1, min(20, len(series[0]) // 12))


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Horizontal bars, the first at the top, with their names and a grid that fits them."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()


def legend(axes: Any) -> None:
    """Above the axes, where it hides no data, in as many columns as its texts leave room for."""
    texts = axes.get_legend_handles_labels()[1]
    if texts:
        widest = 0.4 + 0.075 * max(map(len, texts))  # inches, about
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=max(1, int(axes.figure.get_figwidth() / widest)),
            columnspacing=1.2, handlelength=1.4, handletextpad=0.5, borderaxespad=0.2,
        )  # fmt: skip


def look(index: int) -> tuple[str, object]:
    return PALETTE[index % len(PALETTE)], DASHES[index % len(DASHES)]


printable = partial(clean, limit=28)
"""Text from outside as a label."""
