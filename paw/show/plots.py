"""The report's figures. Each is drawn once, saved as PNG on white, and inlined as SVG that follows the page's colours.

Colours are those of Okabe and Ito, told apart with any colour vision; several runs also differ in dash pattern.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paw.show.rundir import Run

INK, MUTED, GRID = "#23282e", "#69717b", "#dfe2e6"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
PALETTE = [BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY]
DASHES: list = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5))]
PHASES = {"rollout": BLUE, "score": SKY, "update": VERMILLION, "sync": GREEN, "eval": PURPLE}
CSS_NAMES = {
    INK: "ink", MUTED: "muted", GRID: "rule", BLUE: "blue", VERMILLION: "vermillion", GREEN: "green",
    PURPLE: "purple", ORANGE: "orange", SKY: "sky",
}  # fmt: skip
STYLE = {
    "font.size": 9, "axes.labelsize": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "legend.fontsize": 8.5,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.edgecolor": GRID, "xtick.color": GRID, "ytick.color": GRID, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "ytick.left": False, "legend.frameon": False,
    "lines.solid_capstyle": "round", "svg.fonttype": "none", "svg.hashsalt": "paw", "figure.constrained_layout.use": True,
    # Task types come from the environment: a `$` in one is text, not mathematics.
    "text.parse_math": False,
}  # fmt: skip
styled = matplotlib.rc_context(STYLE)


def smoothing_window(count: int) -> int:
    """Updates in the moving mean of a curve of `count` updates."""
    return max(1, min(20, count // 12))


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Centred moving mean; at both ends over the part of the window that exists."""
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


@styled
def learning_curve(runs: Sequence[Run], size: tuple[float, float]) -> Figure | None:
    """Success on evaluation games with its 95 % Wilson interval; one run also shows its training games."""
    if not any(run.series("eval/success")[0] for run in runs):
        return None
    figure, axes = _axes(size)
    for index, run in enumerate(runs):
        colour, dash = _look(index)
        if len(runs) == 1:
            steps, values = run.series("success/all")
            if steps:
                window = smoothing_window(len(steps))
                axes.plot(steps, np.multiply(values, 100), color=VERMILLION, linewidth=0.7, alpha=0.22)
                label = f"training games, mean over {window} updates" if window > 1 else "training games"
                axes.plot(steps, 100 * smooth(values, window), color=VERMILLION, linewidth=1.4, label=label)
        steps, values = run.series("eval/success")
        if not steps:
            continue
        band = [s for s in steps if run.at("eval/ci_low", s) is not None and run.at("eval/ci_high", s) is not None]
        low, high = ([100 * (run.at(f"eval/ci_{side}", s) or 0) for s in band] for side in ("low", "high"))
        label = "unseen games, 95% interval" if len(runs) == 1 and band else "unseen games"
        if len(runs) > 1:
            label = _label(run.name)
        axes.fill_between(band, low, high, color=colour, alpha=0.16 if len(runs) < 4 else 0.08, linewidth=0)
        shown = np.multiply(values, 100)
        axes.plot(steps, shown, color=colour, linestyle=dash, linewidth=2.2, marker="o", markersize=4, label=label)
        if len(runs) == 1:
            for at in {0, len(steps) - 1}:
                side = -9 if at == 0 and len(steps) > 1 and values[1] >= values[0] else 7
                axes.annotate(
                    f"{shown[at]:.1f}%", (steps[at], shown[at]), (0, side), textcoords="offset points", color=colour,
                    ha="center" if len(steps) == 1 else ("left" if at == 0 else "right"),
                    va="top" if side < 0 else "bottom", fontsize=10, fontweight="bold",
                )  # fmt: skip
    axes.set(xlabel="Update", ylabel="Success rate (%)", ylim=(0, 100))
    _legend(axes, columns=2)
    return figure


@styled
def success_by_kind(runs: Sequence[Run], size: tuple[float, float]) -> Figure | None:
    """Bars per task type: first against last evaluation of one run, last evaluations of several."""
    kinds = _kinds(runs)
    if not kinds:
        return None
    if len(runs) == 1:
        keys = [f"eval/success_{kind}" for kind in kinds]
        bars = [
            ("first evaluation", SKY, [runs[0].first(key) for key in keys]),
            ("last evaluation", BLUE, [runs[0].last(key) for key in keys]),
        ]
    else:
        bars = [
            (_label(run.name), _look(i)[0], [run.last(f"eval/success_{kind}") for kind in kinds])
            for i, run in enumerate(runs)
        ]
    figure, axes = _axes(size)
    thickness = 0.76 / len(bars)
    for index, (label, colour, values) in enumerate(bars):
        places = np.arange(len(kinds)) + (index - (len(bars) - 1) / 2) * thickness
        shown = [100 * (value or 0) for value in values]
        axes.barh(places, shown, height=thickness * 0.9, color=colour, label=label)
        for place, width, value in zip(places, shown, values, strict=True):
            text = "–" if value is None else f"{width:.0f}"
            if len(bars) * len(kinds) <= 24:
                axes.text(width + 1.2, place, text, va="center", fontsize=8, color=INK)
    axes.set(xlabel="Success rate (%)", xlim=(0, 106))
    axes.set_xticks(range(0, 101, 25))
    axes.set_yticks(range(len(kinds)), [_label(kind) for kind in kinds])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    _legend(axes, columns=2)
    return figure


@styled
def kind_curves(runs: Sequence[Run], size: tuple[float, float]) -> Figure | None:
    """Small multiples, one task type each: evaluations, and for one run the training games behind them."""
    kinds = _kinds(runs)
    if not kinds or max(len(run.series("eval/success")[0]) for run in runs) < 2:
        return None
    columns = min(3, len(kinds))
    rows = -(-len(kinds) // columns)
    figure = Figure((size[0], 0.5 + 1.15 * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(kinds) :]:
        axes.set_visible(False)
    for axes, kind in zip(grid.flat, kinds, strict=False):
        for index, run in enumerate(runs):
            colour, dash = _look(index)
            steps, values = run.series(f"success/{kind}")
            if len(runs) == 1 and steps:
                shown = 100 * smooth(values, smoothing_window(len(steps)))
                axes.plot(steps, shown, color=VERMILLION, linewidth=1.0, alpha=0.75)
            steps, values = run.series(f"eval/success_{kind}")
            axes.plot(
                steps, np.multiply(values, 100), color=colour, linestyle=dash, linewidth=1.8, marker="o", markersize=2.5
            )
        axes.set_title(_label(kind), loc="left", fontsize=9, color=INK)
        axes.set(ylim=(0, 104), yticks=(0, 50, 100))
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    figure.supylabel("Success rate (%)", fontsize=9, color=MUTED)
    figure.supxlabel("Update", fontsize=9, color=MUTED)
    return figure


@styled
def metric(
    runs: Sequence[Run], key: str, label: str, size: tuple[float, float], *, percent: bool = False
) -> Figure | None:
    """One metric over the updates: each value thin, the moving mean thick."""
    if not any(run.series(key)[0] for run in runs):
        return None
    figure, axes = _axes(size)
    factor = 100 if percent else 1
    for index, run in enumerate(runs):
        colour, dash = _look(index)
        steps, values = run.series(key)
        if not steps:
            continue
        window = smoothing_window(len(steps))
        if window > 1:
            axes.plot(steps, np.multiply(values, factor), color=colour, linewidth=0.7, alpha=0.25)
        marker = "o" if len(steps) == 1 else ""
        shown = factor * smooth(values, window)
        axes.plot(steps, shown, color=colour, linestyle=dash, linewidth=1.8, marker=marker, label=_label(run.name))
    axes.set(xlabel="Update", ylabel=label)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2), min(high, 102))
    if len(runs) > 1:
        _legend(axes, columns=2)
    return figure


@styled
def phase_times(runs: Sequence[Run], size: tuple[float, float]) -> Figure | None:
    """Seconds an update by phase: over the updates for one run (means of up to 40 bins), the whole run for several."""
    phases = [phase for phase in PHASES if any(run.series(f"time/{phase}")[0] for run in runs)]
    if not phases:
        return None
    figure, axes = _axes(size)
    if len(runs) == 1:
        updates = max(runs[0].updates, 1)
        edges = np.linspace(0.5, updates + 0.5, min(updates, 40) + 1)
        widths, places = np.diff(edges), (edges[1:] + edges[:-1]) / 2
        bottom = np.zeros(len(places))
        for phase in phases:
            steps, seconds = runs[0].series(f"time/{phase}")
            height = np.histogram(steps, edges, weights=seconds)[0] / widths
            axes.bar(places, height, widths * 0.86, bottom, color=PHASES[phase], label=phase)
            bottom += height
        axes.set(xlabel="Update", ylabel="Time (s per update)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    else:
        left = np.zeros(len(runs))
        for phase in phases:
            width = [sum(run.series(f"time/{phase}")[1]) / max(run.updates, 1) for run in runs]
            axes.barh(range(len(runs)), width, 0.6, left, color=PHASES[phase], label=phase)
            left += width
        axes.set_yticks(range(len(runs)), [_label(run.name) for run in runs])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set(xlabel="Time (s per update)")
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
    _legend(axes, columns=len(phases))
    return figure


@styled
def save_png(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, facecolor="white")


@styled
def to_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element for an HTML page: no outside reference, colours from the page's CSS variables.

    `name` keeps the ids of several figures apart; `description`, plain text without markup, is read to those who cannot see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    body = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in CSS_NAMES.items():
        body = body.replace(colour, f"var(--{variable})")
    return f'<svg {view.group()} role="img" aria-label="{description}">{body}'


def _axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(size)
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _legend(axes: Axes, *, columns: int) -> None:
    """Above the axes, where it hides no data."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, columnspacing=1.2, handlelength=1.4,
            handletextpad=0.5, borderaxespad=0.2,
        )  # fmt: skip


def _look(index: int) -> tuple[str, object]:
    return PALETTE[index % len(PALETTE)], DASHES[index % len(DASHES)]


def _kinds(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(kind for run in runs for kind in run.kinds))[:12]


def _label(text: str) -> str:
    """Text from outside as a label: printable and short."""
    text = "".join(c for c in text if c.isprintable())
    return text if len(text) <= 28 else text[:27] + "…"
