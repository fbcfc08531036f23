"""The experiments' figures: curves with bands over seeds, differences with intervals. Loads matplotlib."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paw.tools.experiment.stats import Interval, interval
from paw.tools.plots import BLUE, INK, MUTED, legend, look, moving_mean, printable, styled
from paw.tools.rundir import Run

Curve = tuple[list[int], list[Interval]]
"""Updates, and the mean over seeds with its interval at each."""


def average(runs: Sequence[Run], key: str, *, window: int = 1) -> Curve:
    """The curve over seeds, each seed's first smoothed by a moving mean; at the updates that all have."""
    smooth = []
    for run in runs:
        steps, values = run.series(key)
        smooth.append(dict(zip(steps, map(float, moving_mean(values, window)), strict=True)) if steps else {})
    steps = [step for step in smooth[0] if all(step in one for one in smooth)]
    return steps, [interval([one[step] for one in smooth]) for step in steps]


@styled
def comparison(curves: Mapping[str, Curve], differences: Mapping[str, Interval], base: str, label: str) -> Figure:
    """Success over the updates by arm, and beside it each arm's paired difference to the first. Values are shares."""
    figure = Figure((9.6, 3.9))
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    for index, (arm, curve) in enumerate(curves.items()):
        _band(left, curve, index, arm, 100)
    left.set(xlabel="Update", ylabel=f"{label} (%)", ylim=(0, None))
    legend(left)
    arms = [arm for arm in curves if arm in differences]
    for place, arm in enumerate(arms):
        colour, _ = look(list(curves).index(arm))
        _dot(right, differences[arm], place, colour)
    right.axvline(0, color=MUTED, linewidth=1)
    right.set_yticks(range(len(arms)), [f"{printable(arm)} ({differences[arm].n})" for arm in arms])
    right.set(xlabel=f"Success after training, difference to {base} (points)", ylim=(len(arms) - 0.5, -0.5))
    right.tick_params(axis="y", labelcolor=INK)
    right.grid(axis="x")
    right.grid(visible=False, axis="y")
    return figure


@styled
def sweeps(panels: Mapping[str, Mapping[float, Interval]], own: Mapping[str, float]) -> Figure:
    """Success (shares) over each swept key; the recipe's own value has a filled dot."""
    figure = Figure((4.2 * len(panels), 3.4))
    for axes, (key, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        values = sorted(found)
        axes.plot(values, [100 * found[value].mean for value in values], color=BLUE, linewidth=1.4)
        for value in values:
            mean, _, _, low, high = found[value]
            if low is not None and high is not None:
                axes.plot([value, value], [100 * low, 100 * high], color=BLUE, linewidth=1.4)
            fill = BLUE if value == own[key] else "white"
            axes.plot(value, 100 * mean, "o", markersize=6, markerfacecolor=fill, markeredgecolor=BLUE)
        axes.set(xlabel=key, ylabel="Success after training (%)")
    return figure


@styled
def curves(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """A panel for each metric, in it a curve for each group of runs."""
    rows = math.ceil(len(panels) / 3)
    figure = Figure((9.6, 2.5 * rows + 0.4))
    grid = list(figure.subplots(rows, 3, squeeze=False).flat)
    for axes, (label, groups) in zip(grid, panels.items(), strict=False):
        for index, (name, curve) in enumerate(groups.items()):
            _band(axes, curve, index, name, 100 if label.endswith("(%)") else 1)
        axes.set_title(label, fontsize=9, loc="left", color=INK)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes in grid[max(0, len(panels) - 3) : len(panels)]:
        axes.set_xlabel("Update")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=6)
    return figure


def _band(axes: Axes, curve: Curve, index: int, label: str, factor: float) -> None:
    (colour, dash), (steps, means) = look(index), curve
    line: Any = {"color": colour, "linestyle": dash, "marker": "o" if len(steps) < 12 else "", "markersize": 3.5}
    axes.plot(steps, [factor * mean.mean for mean in means], linewidth=1.8, label=printable(label), **line)
    known = [(step, mean.low, mean.high) for step, mean in zip(steps, means, strict=True) if mean.low is not None]
    if known:
        at, low, high = zip(*known, strict=True)
        axes.fill_between(
            at, [factor * x for x in low], [factor * x for x in high], color=colour, alpha=0.1, linewidth=0
        )


def _dot(axes: Axes, difference: Interval, place: int, colour: str) -> None:
    if difference.low is not None and difference.high is not None:
        axes.plot([100 * difference.low, 100 * difference.high], [place, place], color=colour, linewidth=1.8)
    axes.plot(100 * difference.mean, place, "o", color=colour, markersize=6)
