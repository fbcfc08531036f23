"""The experiments' figures: curves with bands over seeds, differences with intervals.

Loads matplotlib.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paw.tools.experiment.results import Interval, Record, interval
from paw.tools.report.plots import MUTED, PALETTE, legend, look, name_bars, printable, styled

PALE = "#b9c0c8"
"""Colour of the curves without a name."""
Curve = dict[int, Interval]
"""The mean over seeds with its interval, by update."""


def evaluations(records: Sequence[Record]) -> dict[str, Curve]:
    """Return the evaluation curve of each variant.

    `records` are the lines of compare.csv, measured or read back.
    """
    prefix = "eval_"
    steps: set[int] = set()
    for row in records:
        for key in row:
            if key.startswith(prefix):
                steps.add(int(key.removeprefix(prefix)))

    curves: dict[str, Curve] = {row["variant"]: {} for row in records}
    for variant, curve in curves.items():
        rows = [row for row in records if row["variant"] == variant]
        for step in sorted(steps):
            values: list[Any] = [row.get(f"{prefix}{step}") for row in rows]
            if None not in values:
                curve[step] = interval(values)
    return curves


@styled
def comparison(curves: Mapping[str, Curve], summary: Mapping[str, Any]) -> Figure:
    """Plot success over the updates by variant, beside each variant's paired difference to the
    first.

    Values are shares. If there are more than five variants, only the first two, and those whose
    interval excludes zero, have a colour. Bands are drawn for at most three coloured variants. If
    no variant has a difference, only the curves are drawn.
    """
    baseline, *others = curves
    differences: dict[str, Interval] = {}
    for variant in others:
        if summary[variant]["difference"]:
            differences[variant] = summary[variant]["difference"]
    coloured = _coloured_variants(list(curves), differences)

    if not differences:
        figure = Figure((5.6, 3.9))
        _draw_curves(figure.subplots(), curves, coloured)
        return figure

    figure = Figure((9.6, max(3.9, 1.4 + 0.28 * len(curves))))
    curves_axes, differences_axes = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _draw_curves(curves_axes, curves, coloured)
    _draw_differences(differences_axes, differences, coloured, baseline)
    return figure


def _coloured_variants(variants: list[str], differences: Mapping[str, Interval]) -> list[str]:
    """Return the variants with their own colour, in the order of the colours."""
    if len(variants) <= 5:
        return variants

    coloured = variants[:2]
    for variant, difference in differences.items():
        if difference.low is None or difference.high is None or variant in coloured:
            continue
        if difference.low > 0 or difference.high < 0:
            coloured.append(variant)
    return coloured[: len(PALETTE)]


def _draw_curves(axes: Axes, curves: Mapping[str, Curve], coloured: list[str]) -> None:
    for index, variant in enumerate(coloured):
        draw(axes, curves[variant], index, variant, 100, band=len(coloured) <= 3)

    label: str | None = "others"
    for variant, curve in curves.items():
        if variant in coloured:
            continue
        means = [100 * point.mean for point in curve.values()]
        axes.plot(list(curve), means, color=PALE, linewidth=1.4, label=label, zorder=1.5)
        label = None  # one legend entry for all of them

    axes.set(xlabel="Update", ylabel="Success on unseen games (%)", ylim=(0, None))
    legend(axes)


def _draw_differences(
    axes: Axes, differences: Mapping[str, Interval], coloured: list[str], baseline: str
) -> None:
    names = []
    for row, (variant, difference) in enumerate(differences.items()):
        colour = MUTED
        if variant in coloured:
            colour, _ = look(coloured.index(variant))
        if difference.low is not None and difference.high is not None:
            axes.plot(
                [100 * difference.low, 100 * difference.high],
                [row, row],
                color=colour,
                linewidth=1.8,
            )
        axes.plot(100 * difference.mean, row, "o", color=colour, markersize=6)
        names.append(f"{printable(variant)} ({difference.n} seeds)")

    axes.axvline(0, color=MUTED, linewidth=1)
    name_bars(axes, names)
    axes.set(
        xlabel=f"Success after training, less {baseline} (points)",
        ylim=(len(differences) - 0.5, -0.5),
    )


def draw(
    axes: Axes, curve: Curve, index: int, label: str, factor: float, *, band: bool = True
) -> None:
    """Draw a mean over seeds and, with `band`, its interval.

    The band is cut off at impossible values: below 0 if no mean is negative, and above 100 %.
    """
    colour, dash = look(index)
    means = [factor * point.mean for point in curve.values()]
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.plot(
        list(curve),
        means,
        color=colour,
        linestyle=dash,
        linewidth=1.8,
        marker="o" if len(curve) < 12 else "",
        markersize=3.5,
        label=printable(label),
    )
    if not band:
        return

    steps = []
    lows = []
    highs = []
    for step, point in curve.items():
        if point.low is not None:
            steps.append(step)
            lows.append(factor * point.low)
            highs.append(factor * (point.high or 0))
    if not steps:
        return
    floor = 0 if min(means) >= 0 else -np.inf
    ceiling = 100 if factor == 100 else np.inf
    axes.fill_between(
        steps,
        np.clip(lows, floor, None),
        np.clip(highs, None, ceiling),
        color=colour,
        alpha=0.1,
        linewidth=0,
    )
