"""The records of `paw profile`: as a table, as the paper's Figure 5, as CSV.

A record is one phase of one repeat of one variant. Times are medians over repeats; memory, tokens and live share were
measured once for each variant and are the same in all its repeats.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Column, Table

from paw.tools.plots import BLUE, INK, PHASES, SKY, styled

Record = dict[str, Any]
"""A line of profile.csv: variant, repeat, phase, and what was measured."""
STAGES = ("score", "update", "sync")
"""The phases after the rollout."""
ENOUGH = 6
"""Repeats that a 95 % interval of a median takes: even the range of n holds it with probability 1 - 2^(1 - n) only."""


def pick(records: list[Record], variant: str, phases: Sequence[str], key: str = "seconds") -> np.ndarray:
    """[repeats] sums of `key` over the phases."""
    repeats = range(1, records[-1]["repeat"] + 1)
    own = [record for record in records if record["variant"] == variant and record["phase"] in phases]
    return np.array([sum(record.get(key, 0.0) for record in own if record["repeat"] == r) for r in repeats])


def memory_gib(records: list[Record], variant: str) -> tuple[float, float]:
    """Peak, and average moment, after the rollout."""
    keys = ("peak_gib", "mean_gib", "seconds")
    peaks, means, seconds = ([np.median(pick(records, variant, [phase], key)) for phase in STAGES] for key in keys)
    return float(max(peaks)), float(np.average(means, weights=seconds))


def overhead(base: np.ndarray, other: np.ndarray) -> list[float]:
    """Median over the repeats of `other` over `base`, less 1, in per cent, and its 95 % bootstrap interval.

    A ratio within a repeat: what else the machine does then slows both. Fewer than ENOUGH repeats: their range.
    """
    ratios = other / base
    ends = np.array([ratios.min(), ratios.max()])
    if len(ratios) >= ENOUGH:
        draws = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
        ends = np.percentile(np.median(draws, 1), [2.5, 97.5])
    return [100 * float(r) - 100 for r in (np.median(ratios), *ends)]


def table(records: list[Record]) -> Table:
    """Medians over the repeats, what the second variant adds in the median repeat, and in Figure 5 (Qwen2.5-1.5B)."""
    variants, phases = (list(dict.fromkeys(record[key] for record in records)) for key in ("variant", "phase"))
    step = "step" if "rollout" in phases else "after the rollout"
    repeats = records[-1]["repeat"]
    spread = "95 % interval" if repeats >= ENOUGH else f"range of {repeats}"
    columns = ("", *variants, f"PaW adds [{spread}]", "the paper")
    shown = Table(*(Column(escape(name), no_wrap=True) for name in columns), box=SIMPLE)

    def times(label: str, which: Sequence[str], key: str = "seconds", paper: str = "") -> None:
        a, b = (pick(records, variant, which, key) for variant in variants)
        told = np.median(a) > 1e-3 and (a != b).any()
        added = "{:+.1f} % [{:+.1f}, {:+.1f}]".format(*overhead(a, b)) if told else ""
        shown.add_row(label, f"{np.median(a):.3f}", f"{np.median(b):.3f}", added, paper)

    def plain(label: str, form: str, values: Sequence[float], paper: str = "") -> None:
        a, b = values
        shown.add_row(label, form.format(a), form.format(b), f"{100 * b / a - 100:+.1f} %" if a else "", paper)

    for phase in phases:
        times(f"{phase}, s", [phase])
    times(f"{step}, s", phases, paper="+2.1 %")
    times("update, CPU s", ["update"], "cpu_seconds")
    times(f"{step}, CPU s", phases, "cpu_seconds")
    peaks, means = zip(*(memory_gib(records, variant) for variant in variants), strict=True)
    plain("peak memory, GiB", "{:.4g}", peaks, "+2.4 %")
    plain("average memory, GiB", "{:.4g}", means)
    plain("tokens processed", "{:,.0f}", [pick(records, variant, STAGES, "tokens")[0] for variant in variants])
    plain(
        "head tokens with a gradient",
        "{:.3f}",
        [pick(records, variant, STAGES, "gradient_frac")[0] for variant in variants],
    )
    return shown


@styled
def chart(records: list[Record], title: str) -> Figure:
    """Figure 5: seconds of a step by phase (medians), and memory, of both variants."""
    variants, phases = (list(dict.fromkeys(record[key] for record in records)) for key in ("variant", "phase"))
    figure = Figure((7.2, 3.4))
    times, memory = figure.subplots(1, 2)
    bottom = np.zeros(2)
    for phase in phases:
        heights = [np.median(pick(records, variant, [phase])) for variant in variants]
        times.bar(variants, heights, 0.55, bottom, color=PHASES[phase], label=phase)
        bottom += heights
    for place, total in enumerate(bottom):
        times.text(place, total, f"{total:.3g} s", ha="center", va="bottom", color=INK)
    times.set(ylabel="Time of a step (s)", ylim=(0, 1.12 * bottom.max()))
    peaks, means = zip(*(memory_gib(records, variant) for variant in variants), strict=True)
    for shift, label, heights, colour in ((-0.18, "peak", peaks, BLUE), (0.18, "average", means, SKY)):
        bars = memory.bar(np.arange(2) + shift, heights, 0.33, color=colour, label=label)
        memory.bar_label(bars, fmt="%.3g", color=INK)
    memory.set(xticks=range(2), xticklabels=variants, ylabel="Memory after the rollout (GiB)", ymargin=0.12)
    for axes in (times, memory):
        axes.tick_params(axis="x", labelcolor=INK)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, handlelength=1.0, columnspacing=0.9)
    figure.suptitle(title, fontsize=9, color=INK)
    return figure
