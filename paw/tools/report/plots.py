"""The report's figures. Each is drawn once, saved as PNG on white, and inlined as SVG in the page's
colours.

The colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart.
Several runs also differ in dash pattern.
"""

import io
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paw.errors import clean
from paw.tools.report.rundir import Run, Series

Size = tuple[float, float]
"""Width and height, inches."""
INK = "#23282e"
MUTED = "#69717b"
GRID = "#dfe2e6"
BLUE = "#0072b2"
VERMILLION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
ORANGE = "#e69f00"
SKY = "#56b4e9"
PALETTE = [BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY]
DASHES: list = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5))]
PHASES = {"rollout": BLUE, "score": SKY, "update": VERMILLION, "sync": GREEN, "eval": PURPLE}
"""Colours of the training phases."""
CSS_NAMES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "rule",
    BLUE: "blue",
    VERMILLION: "vermillion",
    GREEN: "green",
    PURPLE: "purple",
    ORANGE: "orange",
    SKY: "sky",
}
"""The page's CSS variable for each colour."""
STYLE: Any = {
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "paw",
    "figure.constrained_layout.use": True,
    # Task types come from the environment, so a `$` in one is text, not mathematics.
    "text.parse_math": False,
}
styled = matplotlib.rc_context(STYLE)
"""Decorator that runs a function with the report's style."""


@styled
def learning_curve(runs: Sequence[Run], size: Size, *, kind: str | None = None) -> Figure | None:
    """Draw success on evaluation games with its 95 % Wilson interval.

    A single run also shows its training games. With `kind`, draws success in tasks of that kind,
    without interval and legend. Returns None if no run has evaluated them.
    """
    evaluation = "eval/success" if kind is None else f"eval/success_{kind}"
    training = "success/all" if kind is None else f"success/{kind}"
    if not any(evaluation in run.metrics for run in runs):
        return None

    figure, axes = _axes(size)
    for index, run in enumerate(runs):
        if len(runs) == 1 and training in run.metrics:
            _training_curve(axes, run.series(training), thin=0.2 if kind is None else 0.0)

        steps, values = run.series(evaluation)
        if not steps:
            continue
        colour, dash = look(index)
        steps_with_interval = steps if kind is None else []
        alpha = 0.16 if len(runs) < 4 else 0.08
        band_steps = _interval_band(axes, run, steps_with_interval, color=colour, alpha=alpha)
        label = printable(run.name)
        if len(runs) == 1:
            label = "unseen games, 95% interval" if band_steps else "unseen games"
        style = {"color": colour, "linestyle": dash, "label": label}
        axes.plot(steps, np.multiply(values, 100), **style, **MEASURED_POINTS)

    axes.set(xlabel="Update", ylabel="Success rate (%)", ylim=(0, 100))
    if kind is None:
        legend(axes)
    return figure


MEASURED_POINTS: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 3.6}
"""How a curve of evaluations is drawn."""


def _training_curve(axes: Axes, series: Series, *, thin: float) -> None:
    window = _window(series)
    label = f"training games ({window}-update mean)" if window > 1 else "training games"
    _smoothed(axes, series, 100, thin=thin, color=VERMILLION, linewidth=1.4, label=label)


def _interval_band(
    axes: Axes, run: Run, steps: list[int], *, color: str, alpha: float
) -> list[int]:
    """Draw the interval of the evaluations as a band. Returns the steps that have an interval."""
    lows = run.metrics.get("eval/ci_low", {})
    highs = run.metrics.get("eval/ci_high", {})
    band_steps = [step for step in steps if step in lows and step in highs]
    low = [100 * lows[step] for step in band_steps]
    high = [100 * highs[step] for step in band_steps]
    axes.fill_between(band_steps, low, high, color=color, alpha=alpha, linewidth=0)
    return band_steps


@styled
def success_by_kind(runs: Sequence[Run], size: Size) -> Figure | None:
    """Draw bars by task type: first and last evaluation of a single run, or the last of each run.

    Returns None if no task type was evaluated.
    """
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.kinds))[:12]
    if not kinds:
        return None

    bars = []  # (label, colour, function from a metric's key to its value)
    if len(runs) == 1:
        bars.append(("first evaluation", SKY, runs[0].first))
        bars.append(("last evaluation", BLUE, runs[0].last))
    else:
        for i, run in enumerate(runs):
            colour, _ = look(i)
            bars.append((printable(run.name), colour, run.last))

    figure, axes = _axes(size)
    thickness = 0.76 / len(bars)
    for index, (label, colour, value_of) in enumerate(bars):
        values = [value_of(f"eval/success_{kind}") for kind in kinds]
        positions = np.arange(len(kinds)) + (index - (len(bars) - 1) / 2) * thickness
        widths = [100 * (value or 0) for value in values]
        container = axes.barh(positions, widths, height=thickness * 0.9, color=colour, label=label)
        if len(bars) * len(kinds) <= 24:
            texts = ["–" if value is None else f"{100 * value:.0f}" for value in values]
            axes.bar_label(container, texts, padding=2, fontsize=8, color=INK)

    axes.set(xlabel="Success rate (%)", xlim=(0, 106))
    axes.set_xticks(range(0, 101, 25))
    name_bars(axes, list(map(printable, kinds)))
    legend(axes)
    return figure


@styled
def pass_at_k(runs: Sequence[Run], size: Size, env: str = "") -> Figure | None:
    """Draw pass@k over k with its interval: first and last evaluation of a single run, or the last
    of each run.

    With the label of one of several environments, it is that of its games. Returns None if no run
    has several attempts at each game.
    """
    curves = []  # (label, colour, dash pattern, run, step)
    for index, run in enumerate(runs):
        steps, _ = run.series(f"eval/pass_at_2_{env}" if env else "eval/pass_at_2")
        if not steps:
            continue
        colour, dash = look(index)
        if len(runs) > 1:
            curves.append((printable(run.name), colour, dash, run, steps[-1]))
            continue
        if len(steps) > 1:
            curves.append((f"update {steps[0]}", SKY, "-", run, steps[0]))
        curves.append((f"update {steps[-1]}", BLUE, "-", run, steps[-1]))
    if not curves:
        return None

    figure, axes = _axes(size)
    ticks: set[int] = set()
    for label, colour, dash, run, step in curves:
        values = run.attempts_at(step, env)
        ticks |= values.keys()
        low = [100 * interval[0] for _, interval in values.values()]
        high = [100 * interval[1] for _, interval in values.values()]
        axes.fill_between(list(values), low, high, color=colour, alpha=0.16, linewidth=0)
        shares = [100 * value for value, _ in values.values()]
        style = {"color": colour, "linestyle": dash, "label": label}
        axes.plot(list(values), shares, **style, **MEASURED_POINTS)

    axes.set(xlabel="Attempts k", ylabel="pass@k (%)", ylim=(0, 100), xscale="log")
    axes.set_xticks(sorted(ticks), [str(k) for k in sorted(ticks)])
    axes.set_xticks([], minor=True)
    legend(axes)
    return figure


@styled
def metric(
    runs: Sequence[Run], key: str, label: str, size: Size, *, percent: bool = False
) -> Figure | None:
    """Draw one metric over the updates: the moving mean, and under it single values as a thin line.

    If there are several runs, draws only the means. Returns None if no run has the metric.
    """
    if not any(key in run.metrics for run in runs):
        return None

    figure, axes = _axes(size)
    _draw_metric(axes, runs, key, label, percent=percent)
    return figure


def _draw_metric(
    axes: Axes, runs: Sequence[Run], key: str, label: str, *, percent: bool = False
) -> None:
    for index, run in enumerate(runs):
        if key not in run.metrics:
            continue
        colour, dash = look(index)
        _smoothed(
            axes,
            run.series(key),
            factor=100 if percent else 1,
            thin=0.25 if len(runs) == 1 else 0.0,
            color=colour,
            label=printable(run.name),
            linestyle=dash,
            linewidth=1.8,
            marker="o" if len(run.metrics[key]) == 1 else "",
        )

    axes.set(xlabel="Update", ylabel=label)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2), min(high, 102))
    if len(runs) > 1:
        legend(axes)


@styled
def panels(runs: Sequence[Run], keys: Sequence[str], size: Size) -> Figure:
    """Draw each metric in its own axes, side by side. `size` is that of one.

    Metrics that no run has yet leave their axes empty.
    """
    width, height = size
    figure = Figure((width * len(keys), height))
    all_axes = figure.subplots(1, len(keys), squeeze=False)[0]
    for axes, key in zip(all_axes, keys, strict=True):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        percent = "success" in key
        _draw_metric(axes, runs, key, f"{key} (%)" if percent else key, percent=percent)
    return figure


@styled
def phase_times(runs: Sequence[Run], size: Size) -> Figure | None:
    """Draw seconds per update by phase: over the updates of a single run, or the mean of each run.

    Returns None if no phase was timed.
    """
    phases = [phase for phase in PHASES if any(f"time/{phase}" in run.metrics for run in runs)]
    if not phases:
        return None

    figure, axes = _axes(size)
    if len(runs) == 1:
        _phase_times_over_updates(axes, runs[0], phases)
    else:
        _phase_times_of_runs(axes, runs, phases)
    legend(axes)
    return figure


def _phase_times_over_updates(axes: Axes, run: Run, phases: Sequence[str]) -> None:
    """Draw stacked bars: means over the updates of each of up to 40 bins."""
    updates = max(run.updates, 1)
    bin_size = -(-updates // 40)
    edges = np.append(np.arange(0.5, updates + 0.5, bin_size), updates + 0.5)
    widths = np.diff(edges)
    centres = (edges[1:] + edges[:-1]) / 2

    total_s = sum(sum(run.series(f"time/{phase}")[1]) for phase in phases)
    bottom = np.zeros(len(centres))
    for phase in phases:
        steps, seconds = run.series(f"time/{phase}")
        phase_share = sum(seconds) / total_s if total_s else 0.0
        height = np.histogram(steps, edges, weights=seconds)[0] / widths
        axes.bar(
            centres,
            height,
            widths * 0.86,
            bottom,
            color=PHASES[phase],
            label=f"{phase} {phase_share:.0%}",
        )
        bottom += height
    axes.set(xlabel="Update", ylabel="Time (s per update)")


def _phase_times_of_runs(axes: Axes, runs: Sequence[Run], phases: Sequence[str]) -> None:
    """Draw a stacked bar for each run: means over all its updates."""
    bar_starts = np.zeros(len(runs))
    for phase in phases:
        width = [sum(run.series(f"time/{phase}")[1]) / max(run.updates, 1) for run in runs]
        axes.barh(range(len(runs)), width, 0.6, bar_starts, color=PHASES[phase], label=phase)
        bar_starts += width
    axes.set(xlabel="Time (s per update)")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    name_bars(axes, [printable(run.name) for run in runs])


@styled
def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as an `<svg>` in the page's colours, without outside references.

    `name` keeps the ids of several figures apart. `description`, already escaped, is the text for
    screen readers.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<(metadata|style).*?</\1>", "", buffer.getvalue(), flags=re.DOTALL)
    [(view, body)] = re.findall(r'<svg\s[^>]*(viewBox="[^"]*")[^>]*>(.*)', svg, re.DOTALL)
    body = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in CSS_NAMES.items():
        body = body.replace(colour, f"var(--{variable})")
    return f'<svg {view} role="img" aria-label="{description}">{body}'


@styled
def save_png(figure: Figure, file: BinaryIO) -> None:
    """Write a figure on white. `to_svg` has laid it out.

    `savefig` would draw it once more to lay it out again.
    """
    figure.set_layout_engine("none")
    figure.set_dpi(150)
    figure.set_facecolor("white")
    FigureCanvasAgg(figure).print_png(file)


def _axes(size: Size) -> tuple[Figure, Axes]:
    figure = Figure(size)
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _smoothed(
    axes: Axes, series: Series, factor: float, *, thin: float, color: str, **line: Any
) -> None:
    """Draw the centred moving mean times `factor`.

    Under it, the values themselves are a thin line of opacity `thin`, unless that is 0.
    """
    steps, values = series
    window = _window(series)
    if window > 1 and thin:
        axes.plot(steps, np.multiply(values, factor), color=color, linewidth=0.7, alpha=thin)
    axes.plot(steps, factor * moving_mean(values, window), color=color, **line)


def moving_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Return [len(values)] centred means. At both ends, the window is cut off."""
    kernel = np.ones(min(window, len(values)))
    sums = np.convolve(values, kernel, "same")
    counts = np.convolve(np.ones(len(values)), kernel, "same")
    return sums / counts


def _window(series: Series) -> int:
    """Return the number of updates in the moving mean of a curve."""
    return max(1, min(20, len(series[0]) // 12))


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Give horizontal bars their names and a fitting grid, the first bar at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()


def legend(axes: Any) -> None:
    """Draw the legend above the axes, where it hides no data, in as many columns as fit."""
    _, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    column_inches = 0.4 + 0.075 * max(len(label) for label in labels)  # about
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=max(1, int(axes.figure.get_figwidth() / column_inches)),
        columnspacing=1.2,
        handlelength=1.4,
        handletextpad=0.5,
        borderaxespad=0.2,
    )


def look(index: int) -> tuple[str, Any]:
    """Return (colour, dash pattern) of the curve with this index."""
    return PALETTE[index % len(PALETTE)], DASHES[index % len(DASHES)]


printable = partial(clean, limit=28)
"""Clean a foreign text for a label, and cut it to 28 characters."""
