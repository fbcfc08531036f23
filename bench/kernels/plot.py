"""The plots of docs/kernels.md, from a table of compare.py, roofline.py or triton_aot.py of this folder.

Measured is solid and filled; predicted is dashed and hollow, and its title says so.
"""

import csv
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

Rows = list[dict[str, str]]
OURS = "#0072B2"  # Okabe-Ito
COLOURS = {
    "naive": "#999999",
    "naive_fp32": "#666666",
    "torch_compile": "#E69F00",
    "torch_linear_ce": "#F0A0C0",
    "prime_rl_style": "#CC79A7",
    "liger_grpo": "#8C6D31",
    "liger_triton": "#D55E00",
    "liger_cute": "#B8860B",
    "cut_cross_entropy": "#009E73",
    "quack": "#56B4E9",
}
BOTH = "forward + backward"
STATISTICS = "statistics + backward"
HEAD = "Llama-3.1-8B"
"""The head of the plots of a GPU."""


def read(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw(path: Path, folder: Path) -> list[Path]:
    """Draws what the table has data for; returns the pictures."""
    rows = read(path)
    if "tile" in rows[0]:
        rows_before = read(path.with_name("triton_aot_before.csv"))
        return [save(tiles(rows_before, rows), folder / "kernels_tile.png")]

    timed = [row for row in rows if row.get("ms")]
    measured = [row for row in timed if row["kind"] == "measured"]
    if measured and not measured[0]["cuda"]:
        return [save(cpu(measured), folder / "kernels_cpu.png")]

    predicted = timed
    if measured:
        predicted = read(path.with_name("kernels_predicted.csv"))
    predicted = [row for row in predicted if row["kind"] == "prediction" and row["ms"]]
    return [
        save(time(measured, predicted), folder / "kernels_time.png"),
        save(memory(measured, predicted), folder / "kernels_memory.png"),
        save(live(measured, predicted), folder / "kernels_live.png"),
    ]


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def panel(measured: Rows, title: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    source = "Prediction for one H200, nothing was run"
    if measured:
        source = f"{measured[0]['device']} (dashed: predicted for an H200)"
    axes.set_title(f"{source}\n{title}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def token_counts(rows: Rows) -> list[int]:
    """The T at which the head of the plots was run, ascending."""
    return sorted({int(row["T"]) for row in rows if row["head"] == HEAD})


def tokens_axis(axes: Axes, counts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count // 1024}k" for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Tokens T")


def by_tokens(rows: Rows, name: str, share: str = "1.0") -> Rows:
    """Forward + backward of an implementation at HEAD with that share of live rows, by T.

    Without the rows that were known to be dead before the forward.
    """
    columns = {"head": HEAD, "implementation": name, "mode": BOTH, "live": share}
    chosen = []
    for row in rows:
        if row["dead"] != "known" and matches(row, columns):
            chosen.append(row)
    return sorted(chosen, key=lambda row: int(row["T"]))


def matches(row: dict[str, str], columns: dict[str, str]) -> bool:
    """Whether the row has these values in these columns."""
    return all(row[name] == value for name, value in columns.items())


def best_of_ours(rows: Rows) -> str:
    """The backend that took the least time at HEAD, over all T; "" if there is none."""
    names = {row["implementation"] for row in rows if row["implementation"].startswith("paw[")}
    total_ms = {}
    for name in sorted(names):
        timed = by_tokens(rows, name)
        if timed:
            total_ms[name] = sum(float(row["ms"]) for row in timed)
    return min(total_ms, key=total_ms.__getitem__, default="")


def measured_last(measured: Rows, predicted: Rows) -> list[Rows]:
    """The tables to draw, the measured one over the predicted one."""
    return [predicted, measured] if measured else [predicted]


def line(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    colour: str,
    *,
    predicted: bool,
    strong: bool = True,
    text: str | None = None,
) -> None:
    axes.plot(
        xs,
        ys,
        marker="o",
        markersize=4,
        markerfacecolor="white" if predicted else colour,
        color=colour,
        linestyle="--" if predicted else "-",
        linewidth=2.2 if strong else 1.3,
        label=text,
    )


class End(NamedTuple):
    """The last point of a curve, and the name to write beside it."""

    x: float
    y: float
    text: str
    colour: str


def label_ends(axes: Axes, ends: list[End], gap: float = 0.05) -> None:
    """Writes the names beside the last points, moved apart if they would overlap.

    `gap`: the least distance of two names, as a share of the axis.
    """
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end.y)
    heights = []  # of the names, as shares of the axis
    for end in ends:
        if axes.get_yscale() == "log":
            heights.append(math.log(end.y / low) / math.log(high / low))
        else:
            heights.append((end.y - low) / (high - low))

    for _ in range(200):
        for i, (below, above) in enumerate(pairwise(heights)):
            if above - below < gap:
                heights[i : i + 2] = (below + above - gap) / 2, (below + above + gap) / 2

    for end, height in zip(ends, heights, strict=True):
        leader = {
            "arrowstyle": "-",
            "color": end.colour,
            "linewidth": 0.5,
            "shrinkB": 4,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            end.text,
            (end.x, end.y),
            color=end.colour,
            fontsize=8,
            arrowprops=leader,
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
        )


def limits(axes: Axes, values: list[float], ticks: list[float]) -> None:
    """A logarithmic axis around the values, with plain numbers at those of `ticks` that it
    shows."""
    low = min(values) / 1.3
    high = max(values) * 1.3
    visible_ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set(yscale="log", ylim=(low, high))
    axes.set_yticks(visible_ticks, [f"{tick:g}" for tick in visible_ticks])
    axes.yaxis.set_minor_locator(NullLocator())


def time(measured: Rows, predicted: Rows) -> Figure:
    """Microseconds a token against T: ours at three shares of live rows, each peer at 1."""
    figure, axes = panel(measured, f"Forward + backward, {HEAD} head, bf16")
    ends: list[End] = []
    values: list[float] = []
    for rows in measured_last(measured, predicted):
        ours = best_of_ours(rows)
        curves = [(name, "1.0") for name in COLOURS]
        curves += [(ours, share) for share in ("1.0", "0.4", "0.1")]
        if rows is predicted and measured:  # peers that were measured need no prediction
            curves = [(name, share) for name, share in curves if name == ours]

        for name, share in curves:
            timed = by_tokens(rows, name, share)
            if not timed:
                continue
            xs = [int(row["T"]) for row in timed]
            ys = [1e3 * float(row["ms"]) / int(row["T"]) for row in timed]
            colour = OURS if name == ours else COLOURS[name]
            line(axes, xs, ys, colour, predicted=rows is predicted, strong=name == ours)
            values += ys
            if rows is predicted and name == ours:
                cautious = [1e3 * float(row["ms_cautious"]) / int(row["T"]) for row in timed]
                axes.fill_between(xs, ys, cautious, color=OURS, alpha=0.12, linewidth=0)
            if rows is (measured or predicted):
                text = f"{name}, f = {float(share):g}" if name == ours else name
                ends.append(End(xs[-1], ys[-1], text, colour))

    tokens_axis(axes, token_counts(measured or predicted))
    axes.set_ylabel("µs per token")
    limits(axes, values, [0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100])
    label_ends(axes, ends)
    return figure


def memory(measured: Rows, predicted: Rows) -> Figure:
    """GiB against T, beside those of the full logits and of a float32 dW."""
    figure, axes = panel(measured, f"Memory over the inputs, results included, {HEAD} head, bf16")
    ends: list[End] = []
    values: list[float] = []
    for rows in measured_last(measured, predicted):
        ours = best_of_ours(rows)
        for name in (*COLOURS, ours):
            counted = [row for row in by_tokens(rows, name) if row["peak_mib"]]
            if not counted:
                continue
            xs = [int(row["T"]) for row in counted]
            ys = [float(row["peak_mib"]) / 1024 for row in counted]
            colour = OURS if name == ours else COLOURS[name]
            line(axes, xs, ys, colour, predicted=rows is predicted, strong=name == ours)
            values += ys
            if rows is (measured or predicted):
                ends.append(End(xs[-1], ys[-1], name, colour))

    counts = token_counts(measured or predicted)
    first = next(row for row in predicted if row["head"] == HEAD)
    D, V = int(first["D"]), int(first["V"])
    logits_gib = [2 * T * V / 2**30 for T in counts]
    d_weight_gib = [4 * D * V / 2**30 for _ in counts]
    for ys, text in ((logits_gib, "logits, bf16"), (d_weight_gib, "dW, float32")):
        axes.plot(counts, ys, ":", color="#666666", linewidth=1.3)
        ends.append(End(counts[-1], ys[-1], text, "#666666"))
        values += ys

    tokens_axis(axes, counts)
    axes.set_ylabel("GiB")
    limits(axes, values, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
    label_ends(axes, ends)
    return figure


def live(measured: Rows, predicted: Rows) -> Figure:
    """Time over that with every row live, against the share f of live rows, at two T."""
    figure, axes = panel(
        measured, f"Forward + backward against the share of rows with a gradient, {HEAD} head, bf16"
    )
    axes.plot([0, 1], [1 / 3, 1], ":", color="#666666", linewidth=1.3, label="(1 + 2f) / 3")
    for rows in measured_last(measured, predicted):
        ours = best_of_ours(rows)
        for T, colour in (("4096", "#E69F00"), ("32768", OURS)):
            columns = {"head": HEAD, "T": T, "mode": BOTH, "implementation": ours}
            ms_by_share = {}
            for row in rows:
                if row["dead"] != "known" and matches(row, columns):
                    ms_by_share[float(row["live"])] = float(row["ms"])
            if 1.0 not in ms_by_share:
                continue
            xs = sorted(ms_by_share)
            ys = [ms_by_share[share] / ms_by_share[1.0] for share in xs]
            text = f"{ours}, T {int(T) // 1024}k"
            if rows is predicted:
                text += ", prediction"
            line(axes, xs, ys, colour, predicted=rows is predicted, text=text)
    axes.axhline(1, color="#999999", linewidth=1)
    axes.annotate(
        "peers: dense, whatever f", (0.3, 1), xytext=(0, 4), textcoords="offset points", fontsize=8
    )
    axes.set(
        xlim=(0, 1.02),
        ylim=(0, 1.1),
        xlabel="Share of rows with a gradient, f",
        ylabel="Time over its own at f = 1",
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    return figure


def cpu(rows: Rows) -> Figure:
    """Bars: the row operation, then forward + backward of each shape that more than one
    implementation ran."""
    groups = [group for group in cpu_groups(rows) if len(group.names) > 1]
    heights = [len(group.names) for group in groups]
    # One under the other, so that a telephone shows them at a size that can be read.
    figure, grid = plt.subplots(
        len(groups),
        1,
        figsize=(4.6, 0.2 * sum(heights) + 0.4 * len(groups) + 0.5),
        dpi=150,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    first = rows[0]
    threads = "1 thread" if first["threads"] == "1" else f"{first['threads']} threads"
    figure.suptitle(
        f"{first['device']}, {threads}\ntorch {first['torch']}, float32: median ms", fontsize=9
    )

    for axes, group in zip(np.atleast_1d(grid), groups, strict=True):
        colours = [OURS if name.startswith("paw") else "#BBBBBB" for name in group.names]
        bars = axes.barh(group.names, group.ms, color=colours)
        labels = [f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}" for ms in group.ms]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        axes.set_title(group.title, loc="left", fontsize=9)
        axes.set_ylim(len(group.names) - 0.5, -0.5)
        axes.margins(x=0.16)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.xaxis.set_visible(False)
    return figure


class Bars(NamedTuple):
    """A group of bars, the shortest first."""

    title: str
    names: list[str]
    ms: list[float]


def make_bars(rows: Rows, title: str) -> Bars:
    rows = sorted(rows, key=lambda row: float(row["ms"]))
    names = []
    for row in rows:
        name = row["implementation"]
        if row["live"] not in ("", "1.0"):
            name += f", f = {float(row['live']):g}"
        names.append(name)
    return Bars(title, names, [float(row["ms"]) for row in rows])


def cpu_groups(rows: Rows) -> list[Bars]:
    """The row operation; then of each shape forward + backward, and statistics + backward."""
    groups = []
    row_operation = [row for row in rows if row["mode"] == "row statistics"]
    if row_operation:
        shape = f"{row_operation[0]['T']} x {int(row_operation[0]['V']):,}"
        groups.append(make_bars(row_operation, f"row statistics, {shape}"))

    for head in dict.fromkeys(row["head"] for row in rows if row["mode"] == BOTH):
        of_head = [row for row in rows if row["head"] == head]
        both = []
        for row in of_head:
            is_shown = row["live"] == "1.0" or row["implementation"].startswith("paw[cpu")
            if row["mode"] == BOTH and row["dead"] != "known" and row["ms"] and is_shown:
                both.append(row)
        statistics = [row for row in of_head if row["mode"] == STATISTICS]
        shape = f"T {both[0]['T']}, D {both[0]['D']}, V {int(both[0]['V']):,}"
        groups.append(make_bars(both, f"{BOTH}, {shape}"))
        groups.append(make_bars(statistics, f"{STATISTICS}, {shape}"))
    return groups


def tiles(rows_before: Rows, rows_now: Rows) -> Figure:
    """Instructions that a warp spends on a tile, in both versions of the forward kernel."""
    key = ("triton", "arch", "dtype", "kernel", "V", "D", "bias", "gradients", "softcap")
    tiles_now = {}
    for row in rows_now:
        if row["table"] == "yes" and row["tile"]:
            tiles_now[tuple(row[name] for name in key)] = int(row["tile"])

    figure, axes = plt.subplots(figsize=(4.6, 4.8), dpi=150, layout="constrained")
    names = []
    for position, row in enumerate(rows_before):
        old = int(row["tile"])
        new = tiles_now[tuple(row[name] for name in key)]
        is_first = position == 0  # a label for all bars of a colour
        axes.barh(position - 0.19, old, 0.36, color="#BBBBBB", label="before" if is_first else None)
        axes.barh(position + 0.19, new, 0.36, color=OURS, label="now" if is_first else None)
        change = f"{new / old - 1:.0%}".replace("-", "\N{MINUS SIGN}")
        axes.text(new, position + 0.19, f" {new:,} ({change})", va="center", fontsize=8)
        name = f"{row['arch']}, D {row['D']},\nV {int(row['V']):,}"
        if row["bias"] == "True":
            name += ", bias"
        if row["gradients"] == "False":
            name += ", no gradients"
        names.append(name)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(
        ylim=(len(names) - 0.5, -0.5), xlim=(0, 3100), xlabel="Instructions a warp spends on a tile"
    )
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"Compiled by Triton {rows_before[0]['triton']}, not run", loc="left", fontsize=9
    )
    return figure
