"""The experiments' figures: curves with bands over seeds, differences with intervals. Loads matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paw.tools.experiment.results import Interval, Record, interval
from paw.tools.plots import MUTED, PALETTE, legend, look, name_bars, printable, styled

PALE = "#b9c0c8"
Curve = dict[int, Interval]
"""The mean over seeds with its interval, by update."""


def evaluations(records: Sequence[Record]) -> dict[str, Curve]:
    """The evaluation curve of each variant, from lines of compare.csv, or what is read back from it."""
    steps = sorted({int(key[5:]) for row in records for key in row if key.startswith("eval_")})
    curves: dict[str, Curve] = {row["variant"]: {} for row in records}
    for variant, curve in curves.items():
        for step in steps:
            values: list[Any] = [row.get(f"eval_{step}") for row in records if row["variant"] == variant]
            if None not in values:
                curve[step] = interval(values)
    return curves


@styled
def comparison(curves: Mapping[str, Curve], summary: Mapping[str, Any]) -> Figure:
    """Success (shares) over the updates by variant, and beside it each one's paired difference to the first.

    Of more than five variants only the first two and those beyond their interval have a colour; at most three, a band.
    """
    base, *others = curves
    differences = {variant: summary[variant]["difference"] for variant in others if summary[variant]["difference"]}
    told = [v for v, d in differences.items() if d.low is not None and (d.low > 0 or d.high < 0)]
    named = [base, *others] if len(curves) <= 5 else list(dict.fromkeys([base, others[0], *told]))[: len(PALETTE)]
    figure = Figure((9.6, max(3.9, 1.4 + 0.28 * len(curves))))
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    for index, variant in enumerate(named):
        draw(left, curves[variant], index, variant, 100, band=len(named) <= 3)
    for index, variant in enumerate(variant for variant in others if variant not in named):
        means, text = [100 * mean.mean for mean in curves[variant].values()], None if index else "others"
        left.plot(list(curves[variant]), means, color=PALE, linewidth=1.4, label=text, zorder=1.5)
    left.set(xlabel="Update", ylabel="Success on unseen games (%)", ylim=(0, None))
    legend(left)
    for place, (variant, found) in enumerate(differences.items()):
        colour = look(named.index(variant))[0] if variant in named else MUTED
        if found.low is not None:
            right.plot([100 * found.low, 100 * found.high], [place, place], color=colour, linewidth=1.8)
        right.plot(100 * found.mean, place, "o", color=colour, markersize=6)
    right.axvline(0, color=MUTED, linewidth=1)
    name_bars(right, [f"{printable(variant)} ({found.n} seeds)" for variant, found in differences.items()])
    right.set(xlabel=f"Success after training, less {base} (points)", ylim=(len(differences) - 0.5, -0.5))
    return figure


def draw(axes: Axes, curve: Curve, index: int, label: str, factor: float, *, band: bool = True) -> None:
    """A mean and its interval as a band, cut off where no value can lie: below 0 if no mean is, and beyond 100 %."""
    colour, dash = look(index)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    line: Any = {"color": colour, "linestyle": dash, "marker": "o" if len(curve) < 12 else "", "markersize": 3.5}
    means = [factor * mean.mean for mean in curve.values()]
    axes.plot(list(curve), means, linewidth=1.8, label=printable(label), **line)
    known = [(step, factor * of.low, factor * (of.high or 0)) for step, of in curve.items() if of.low is not None]
    if known and band:
        at, low, high = np.array(known).T
        least, most = 0 if min(means) >= 0 else -np.inf, 100 if factor == 100 else np.inf
        axes.fill_between(at, low.clip(least), high.clip(max=most), color=colour, alpha=0.1, linewidth=0)
