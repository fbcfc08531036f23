"""The plots of docs/kernels.md, from a table written by compare.py, roofline.py or triton_aot.py in this folder.

Measured curves are solid with filled markers. Predicted curves are dashed with hollow markers, and
the title says so.
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

Records = list[dict[str, str]]
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
"""The head shown in the plots of a GPU."""


def read(path: Path) -> Records:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw(path: Path, folder: Path) -> list[Path]:
    """Draws every plot that the table has data for. Returns the pictures."""
    records = read(path)
    if "tile" in records[0]:
        rows_before = read(path.with_name("triton_aot_before.csv"))
        return [save(tiles(rows_before, records), folder / "kernels_tile.png")]

    timed_records = [record for record in records if record.get("ms")]
    measured = [record for record in timed_records if record["kind"] == "measured"]
    if measured and not measured[0]["cuda"]:
        return [save(cpu(measured), folder / "kernels_cpu.png")]

    predicted = timed_records
    if measured:
        predicted = read(path.with_name("kernels_predicted.csv"))
    predicted = [record for record in predicted if record["kind"] == "prediction" and record["ms"]]
    return [
        save(time(measured, predicted), folder / "kernels_time.png"),
        save(memory(measured, predicted), folder / "kernels_memory.png"),
        save(live(measured, predicted), folder / "kernels_live.png"),
    ]


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def panel(measured: Records, title: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    source = "Prediction for one H200, nothing was run"
    if measured:
        source = f"{measured[0]['device']} (dashed: predicted for an H200)"
    axes.set_title(f"{source}\n{title}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def token_counts(records: Records) -> list[int]:
    """The values of T at which HEAD was run, in ascending order."""
    return sorted({int(record["T"]) for record in records if record["head"] == HEAD})


def tokens_axis(axes: Axes, counts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count // 1024}k" for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Tokens T")


def by_tokens(records: Records, implementation: str, live_share: str = "1.0") -> Records:
    """Records of forward + backward of an implementation at HEAD with that share of live rows, by
    T.

    Leaves out the cases in which dead rows were known before the forward.
    """
    columns = {"head": HEAD, "implementation": implementation, "mode": BOTH, "live": live_share}
    chosen = []
    for record in records:
        if record["dead"] != "known" and matches(record, columns):
            chosen.append(record)
    return sorted(chosen, key=lambda record: int(record["T"]))


def matches(record: dict[str, str], columns: dict[str, str]) -> bool:
    """Whether the record has these values in these columns."""
    return all(record[column] == expected for column, expected in columns.items())


def best_of_ours(records: Records) -> str:
    """The backend that took the least time at HEAD, over all T; "" if there is none."""
    our_backends = {
        record["implementation"]
        for record in records
        if record["implementation"].startswith("paw[")
    }
    total_ms = {}
    for backend in sorted(our_backends):
        timed_records = by_tokens(records, backend)
        if timed_records:
            total_ms[backend] = sum(float(record["ms"]) for record in timed_records)
    return min(total_ms, key=total_ms.__getitem__, default="")


def measured_last(measured: Records, predicted: Records) -> list[Records]:
    """The tables in drawing order, so that the measured one lies over the predicted one."""
    return [predicted, measured] if measured else [predicted]


def line(
    axes: Axes,
    x_values: Sequence[float],
    y_values: Sequence[float],
    colour: str,
    *,
    predicted: bool,
    strong: bool = True,
    label: str | None = None,
) -> None:
    axes.plot(
        x_values,
        y_values,
        marker="o",
        markersize=4,
        markerfacecolor="white" if predicted else colour,
        color=colour,
        linestyle="--" if predicted else "-",
        linewidth=2.2 if strong else 1.3,
        label=label,
    )


class End(NamedTuple):
    """The last point of a curve, and the name to write beside it."""

    x: float
    y: float
    text: str
    colour: str


def label_ends(axes: Axes, curve_ends: list[End], gap: float = 0.05) -> None:
    """Writes the names beside the last points, and moves them apart if they would overlap.

    `gap`: the least distance between two names, as a share of the axis.
    """
    lowest, highest = axes.get_ylim()
    curve_ends = sorted(curve_ends, key=lambda curve_end: curve_end.y)
    heights = []  # of the names, as shares of the axis
    for curve_end in curve_ends:
        if axes.get_yscale() == "log":
            heights.append(math.log(curve_end.y / lowest) / math.log(highest / lowest))
        else:
            heights.append((curve_end.y - lowest) / (highest - lowest))

    for _ in range(200):
        for index, (lower, upper) in enumerate(pairwise(heights)):
            if upper - lower < gap:
                heights[index : index + 2] = (lower + upper - gap) / 2, (lower + upper + gap) / 2

    for curve_end, height in zip(curve_ends, heights, strict=True):
        leader = {
            "arrowstyle": "-",
            "color": curve_end.colour,
            "linewidth": 0.5,
            "shrinkB": 4,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            curve_end.text,
            (curve_end.x, curve_end.y),
            color=curve_end.colour,
            fontsize=8,
            arrowprops=leader,
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
        )


def limits(axes: Axes, values: list[float], ticks: list[float]) -> None:
    """Makes the y axis logarithmic and fits it to the values, with plain numbers at the visible
    `ticks`."""
    lowest = min(values) / 1.3
    highest = max(values) * 1.3
    visible_ticks = [tick for tick in ticks if lowest <= tick <= highest]
    axes.set(yscale="log", ylim=(lowest, highest))
    axes.set_yticks(visible_ticks, [f"{tick:g}" for tick in visible_ticks])
    axes.yaxis.set_minor_locator(NullLocator())


def time(measured: Records, predicted: Records) -> Figure:
    """Microseconds per token against T: ours at three shares of live rows, each peer at 1."""
    figure, axes = panel(measured, f"Forward + backward, {HEAD} head, bf16")
    curve_ends: list[End] = []
    values: list[float] = []
    for records in measured_last(measured, predicted):
        our_backend = best_of_ours(records)
        curves = [(implementation, "1.0") for implementation in COLOURS]
        curves += [(our_backend, live_share) for live_share in ("1.0", "0.4", "0.1")]
        if records is predicted and measured:  # peers that were measured need no prediction
            curves = [curve for curve in curves if curve[0] == our_backend]

        for implementation, live_share in curves:
            timed_records = by_tokens(records, implementation, live_share)
            if not timed_records:
                continue
            x_values = [int(record["T"]) for record in timed_records]
            y_values = [1e3 * float(record["ms"]) / int(record["T"]) for record in timed_records]
            is_ours = implementation == our_backend
            colour = OURS if is_ours else COLOURS[implementation]
            is_predicted = records is predicted
            line(axes, x_values, y_values, colour, predicted=is_predicted, strong=is_ours)
            values += y_values
            if is_predicted and is_ours:
                cautious = [
                    1e3 * float(record["ms_cautious"]) / int(record["T"])
                    for record in timed_records
                ]
                axes.fill_between(x_values, y_values, cautious, color=OURS, alpha=0.12, linewidth=0)
            if records is (measured or predicted):
                label = implementation
                if is_ours:
                    label += f", f = {float(live_share):g}"
                curve_ends.append(End(x_values[-1], y_values[-1], label, colour))

    tokens_axis(axes, token_counts(measured or predicted))
    axes.set_ylabel("µs per token")
    limits(axes, values, [0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100])
    label_ends(axes, curve_ends)
    return figure


def memory(measured: Records, predicted: Records) -> Figure:
    """GiB against T, with the GiB of the full logits and of a float32 dW for comparison."""
    figure, axes = panel(measured, f"Memory over the inputs, results included, {HEAD} head, bf16")
    curve_ends: list[End] = []
    values: list[float] = []
    for records in measured_last(measured, predicted):
        our_backend = best_of_ours(records)
        for implementation in (*COLOURS, our_backend):
            counted = [
                record for record in by_tokens(records, implementation) if record["peak_mib"]
            ]
            if not counted:
                continue
            x_values = [int(record["T"]) for record in counted]
            y_values = [float(record["peak_mib"]) / 1024 for record in counted]
            is_ours = implementation == our_backend
            colour = OURS if is_ours else COLOURS[implementation]
            is_predicted = records is predicted
            line(axes, x_values, y_values, colour, predicted=is_predicted, strong=is_ours)
            values += y_values
            if records is (measured or predicted):
                curve_ends.append(End(x_values[-1], y_values[-1], implementation, colour))

    counts = token_counts(measured or predicted)
    first_record = next(record for record in predicted if record["head"] == HEAD)
    D = int(first_record["D"])
    V = int(first_record["V"])
    logits_gib = [2 * T * V / 2**30 for T in counts]
    d_weight_gib = [4 * D * V / 2**30 for _ in counts]
    for y_values, label in ((logits_gib, "logits, bf16"), (d_weight_gib, "dW, float32")):
        axes.plot(counts, y_values, ":", color="#666666", linewidth=1.3)
        curve_ends.append(End(counts[-1], y_values[-1], label, "#666666"))
        values += y_values

    tokens_axis(axes, counts)
    axes.set_ylabel("GiB")
    limits(axes, values, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
    label_ends(axes, curve_ends)
    return figure


def live(measured: Records, predicted: Records) -> Figure:
    """Time relative to that with every row live, against the share f of live rows, at two T."""
    figure, axes = panel(
        measured, f"Forward + backward against the share of rows with a gradient, {HEAD} head, bf16"
    )
    axes.plot([0, 1], [1 / 3, 1], ":", color="#666666", linewidth=1.3, label="(1 + 2f) / 3")
    for records in measured_last(measured, predicted):
        our_backend = best_of_ours(records)
        for T, colour in (("4096", "#E69F00"), ("32768", OURS)):
            columns = {"head": HEAD, "T": T, "mode": BOTH, "implementation": our_backend}
            ms_by_share = {}
            for record in records:
                if record["dead"] != "known" and matches(record, columns):
                    ms_by_share[float(record["live"])] = float(record["ms"])
            if 1.0 not in ms_by_share:
                continue
            x_values = sorted(ms_by_share)
            y_values = [ms_by_share[live_share] / ms_by_share[1.0] for live_share in x_values]
            label = f"{our_backend}, T {int(T) // 1024}k"
            if records is predicted:
                label += ", prediction"
            line(axes, x_values, y_values, colour, predicted=records is predicted, label=label)
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


def cpu(records: Records) -> Figure:
    """Bars of the row operation, then of forward + backward for each shape that more than one
    implementation ran."""
    groups = [bar_group for bar_group in cpu_groups(records) if len(bar_group.names) > 1]
    heights = [len(bar_group.names) for bar_group in groups]
    # Panels are stacked so that they can be read on a phone.
    figure, panels = plt.subplots(
        len(groups),
        1,
        figsize=(4.6, 0.2 * sum(heights) + 0.4 * len(groups) + 0.5),
        dpi=150,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    first_record = records[0]
    threads = "1 thread" if first_record["threads"] == "1" else f"{first_record['threads']} threads"
    figure.suptitle(
        f"{first_record['device']}, {threads}\ntorch {first_record['torch']}, float32: median ms",
        fontsize=9,
    )

    for axes, bar_group in zip(np.atleast_1d(panels), groups, strict=True):
        colours = [OURS if name.startswith("paw") else "#BBBBBB" for name in bar_group.names]
        bars = axes.barh(bar_group.names, bar_group.ms, color=colours)
        labels = [f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}" for ms in bar_group.ms]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        axes.set_title(bar_group.title, loc="left", fontsize=9)
        axes.set_ylim(len(bar_group.names) - 0.5, -0.5)
        axes.margins(x=0.16)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.xaxis.set_visible(False)
    return figure


class Bars(NamedTuple):
    """A group of bars, shortest first."""

    title: str
    names: list[str]
    ms: list[float]


def make_bars(records: Records, title: str) -> Bars:
    records = sorted(records, key=lambda record: float(record["ms"]))
    bar_names = []
    for record in records:
        bar_name = record["implementation"]
        if record["live"] not in ("", "1.0"):
            bar_name += f", f = {float(record['live']):g}"
        bar_names.append(bar_name)
    return Bars(title, bar_names, [float(record["ms"]) for record in records])


def cpu_groups(records: Records) -> list[Bars]:
    """The row operation, then forward + backward and statistics + backward of each shape."""
    groups = []
    row_operation = [record for record in records if record["mode"] == "row statistics"]
    if row_operation:
        shape = f"{row_operation[0]['T']} x {int(row_operation[0]['V']):,}"
        groups.append(make_bars(row_operation, f"row statistics, {shape}"))

    for head_name in dict.fromkeys(record["head"] for record in records if record["mode"] == BOTH):
        of_head = [record for record in records if record["head"] == head_name]
        both_passes = []
        for record in of_head:
            is_shown = record["live"] == "1.0" or record["implementation"].startswith("paw[cpu")
            if record["mode"] == BOTH and record["dead"] != "known" and record["ms"] and is_shown:
                both_passes.append(record)
        statistics = [record for record in of_head if record["mode"] == STATISTICS]
        shape = f"T {both_passes[0]['T']}, D {both_passes[0]['D']}, V {int(both_passes[0]['V']):,}"
        groups.append(make_bars(both_passes, f"{BOTH}, {shape}"))
        groups.append(make_bars(statistics, f"{STATISTICS}, {shape}"))
    return groups


def tiles(rows_before: Records, rows_now: Records) -> Figure:
    """Instructions that a warp spends on a tile in both versions of the forward kernel."""
    key_columns = ("triton", "arch", "dtype", "kernel", "V", "D", "bias", "gradients", "softcap")
    tiles_now = {}
    for record in rows_now:
        if record["table"] == "yes" and record["tile"]:
            tiles_now[tuple(record[bar_name] for bar_name in key_columns)] = int(record["tile"])

    figure, axes = plt.subplots(figsize=(4.6, 4.8), dpi=150, layout="constrained")
    bar_names = []
    for position, record in enumerate(rows_before):
        old_count = int(record["tile"])
        new_count = tiles_now[tuple(record[bar_name] for bar_name in key_columns)]
        is_first = position == 0  # a label for all bars of a colour
        axes.barh(
            position - 0.19, old_count, 0.36, color="#BBBBBB", label="before" if is_first else None
        )
        axes.barh(position + 0.19, new_count, 0.36, color=OURS, label="now" if is_first else None)
        change = f"{new_count / old_count - 1:.0%}".replace("-", "\N{MINUS SIGN}")
        axes.text(new_count, position + 0.19, f" {new_count:,} ({change})", va="center", fontsize=8)
        bar_name = f"{record['arch']}, D {record['D']},\nV {int(record['V']):,}"
        if record["bias"] == "True":
            bar_name += ", bias"
        if record["gradients"] == "False":
            bar_name += ", no gradients"
        bar_names.append(bar_name)
    axes.set_yticks(range(len(bar_names)), bar_names, fontsize=7)
    axes.set(
        ylim=(len(bar_names) - 0.5, -0.5),
        xlim=(0, 3100),
        xlabel="Instructions a warp spends on a tile",
    )
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"Compiled by Triton {rows_before[0]['triton']}, not run", loc="left", fontsize=9
    )
    return figure
