"""The plots of docs/kernels.md, from a table of compare.py, roofline.py or triton_aot.py of this folder.

Measured is solid and filled; predicted is dashed and hollow, and its title says so.
"""

import csv
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
BOTH, STATISTICS, HEAD = "forward + backward", "statistics + backward", "Llama-3.1-8B"


def read(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw(path: Path, folder: Path) -> list[Path]:
    """Draws what the table has data for; returns the pictures."""
    rows = read(path)
    if "tile" in rows[0]:
        return [
            save(
                tiles(read(path.with_name("triton_aot_before.csv")), rows),
                folder / "kernels_tile.png",
            )
        ]
    timed = [row for row in rows if row.get("ms")]
    measured = [row for row in timed if row["kind"] == "measured"]
    if measured and not measured[0]["cuda"]:
        return [save(cpu(measured), folder / "kernels_cpu.png")]
    predicted = timed if not measured else read(path.with_name("kernels_predicted.csv"))
    predicted = [row for row in predicted if row["kind"] == "prediction" and row["ms"]]
    pictures = {"time": time, "memory": memory, "live": live}
    return [
        save(plot(measured, predicted), folder / f"kernels_{name}.png")
        for name, plot in pictures.items()
    ]


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def panel(measured: Rows, what: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    source = "Prediction for one H200, nothing was run"
    if measured:
        source = f"{measured[0]['device']} (dashed: predicted for an H200)"
    axes.set_title(f"{source}\n{what}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def tokens_axis(axes: Axes, ts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ts, [f"{t // 1024}k" for t in ts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Tokens T")


def dense(rows: Rows, name: str) -> Rows:
    found = [
        r for r in rows if r["head"] == HEAD and r["implementation"] == name and r["mode"] == BOTH
    ]
    return sorted((r for r in found if r["live"] == "1.0"), key=lambda r: int(r["T"]))


def best_of_ours(rows: Rows) -> str:
    """The backend that took the least time at the reference head, over all T; "" if there is none."""
    names = {r["implementation"] for r in rows if r["implementation"].startswith("paw[")}
    spent = {
        name: sum(float(r["ms"]) for r in dense(rows, name))
        for name in sorted(names)
        if dense(rows, name)
    }
    return min(spent, key=spent.__getitem__, default="")


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
    style: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white"} if predicted else {}
    axes.plot(
        xs,
        ys,
        marker="o",
        markersize=4,
        color=colour,
        linewidth=2.2 if strong else 1.3,
        label=text,
        **style,
    )


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]], gap: float = 0.05) -> None:
    """Names (x, y, text, colour) beside the last points, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"
    ends = sorted(ends, key=lambda end: end[1])
    at = [
        math.log(y / low) / math.log(high / low) if log else (y - low) / (high - low)
        for _, y, _, _ in ends
    ]
    for _ in range(200):
        for i, (below, above) in enumerate(pairwise(at)):
            if above - below < gap:
                at[i : i + 2] = (below + above - gap) / 2, (below + above + gap) / 2
    for (x, y, text, colour), height in zip(ends, at, strict=True):
        leader = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.5,
            "shrinkB": 4,
            "relpos": (0, 0.5),
        }
        place = {
            "xytext": (1.03, height),
            "textcoords": "axes fraction",
            "va": "center",
            "annotation_clip": False,
        }
        axes.annotate(text, (x, y), color=colour, fontsize=8, arrowprops=leader, **place)


def limits(axes: Axes, values: list[float], ticks: list[float]) -> None:
    """A logarithmic axis around the values, with plain numbers at those of `ticks` that it shows."""
    low, high = min(values) / 1.3, max(values) * 1.3
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set(yscale="log", ylim=(low, high))
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.yaxis.set_minor_locator(NullLocator())


def time(measured: Rows, predicted: Rows) -> Figure:
    figure, axes = panel(measured, f"Forward + backward, {HEAD} head, bf16")
    ends, drawn, ts = (
        [],
        [],
        sorted({int(r["T"]) for r in (measured or predicted) if r["head"] == HEAD}),
    )
    for rows in (predicted, measured) if measured else (predicted,):
        ours = best_of_ours(rows)
        for name in (*COLOURS, ours):
            for share in ("1.0", "0.4", "0.1") if name == ours else ("1.0",):
                found = dense(
                    [
                        {**r, "live": "1.0"}
                        for r in rows
                        if r["live"] == share and r["dead"] != "known"
                    ],
                    name,
                )
                if not found or (rows is predicted and measured and name != ours):
                    continue
                xs, ys = (
                    [int(r["T"]) for r in found],
                    [1e3 * float(r["ms"]) / int(r["T"]) for r in found],
                )
                colour = OURS if name == ours else COLOURS[name]
                line(axes, xs, ys, colour, predicted=rows is predicted, strong=name == ours)
                drawn += ys
                if rows is predicted and name == ours:
                    slow = [1e3 * float(r["ms_cautious"]) / int(r["T"]) for r in found]
                    axes.fill_between(xs, ys, slow, color=OURS, alpha=0.12, linewidth=0)
                if rows is (measured or predicted):
                    ends.append(
                        (
                            xs[-1],
                            ys[-1],
                            f"{name}, f = {float(share):g}" if name == ours else name,
                            colour,
                        )
                    )
    tokens_axis(axes, ts)
    axes.set_ylabel("µs per token")
    limits(axes, drawn, [0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100])
    label_ends(axes, ends)
    return figure


def memory(measured: Rows, predicted: Rows) -> Figure:
    figure, axes = panel(measured, f"Memory over the inputs, results included, {HEAD} head, bf16")
    ends, drawn, ts = (
        [],
        [],
        sorted({int(r["T"]) for r in (measured or predicted) if r["head"] == HEAD}),
    )
    for rows in (predicted, measured) if measured else (predicted,):
        ours = best_of_ours(rows)
        for name in (*COLOURS, ours):
            found = [r for r in dense(rows, name) if r["peak_mib"]]
            if not found:
                continue
            xs, ys = [int(r["T"]) for r in found], [float(r["peak_mib"]) / 1024 for r in found]
            colour = OURS if name == ours else COLOURS[name]
            line(axes, xs, ys, colour, predicted=rows is predicted, strong=name == ours)
            drawn += ys
            if rows is (measured or predicted):
                ends.append((xs[-1], ys[-1], name, colour))
    D, V = next((int(r["D"]), int(r["V"])) for r in predicted if r["head"] == HEAD)
    for count, text in (
        ([t * V for t in ts], "logits, bf16"),
        ([2 * D * V] * len(ts), "dW, float32"),
    ):
        ys = [2 * n / 2**30 for n in count]
        axes.plot(ts, ys, ":", color="#666666", linewidth=1.3)
        ends.append((ts[-1], ys[-1], text, "#666666"))
        drawn += ys
    tokens_axis(axes, ts)
    axes.set_ylabel("GiB")
    limits(axes, drawn, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
    label_ends(axes, ends)
    return figure


def live(measured: Rows, predicted: Rows) -> Figure:
    figure, axes = panel(
        measured, f"Forward + backward against the share of rows with a gradient, {HEAD} head, bf16"
    )
    axes.plot([0, 1], [1 / 3, 1], ":", color="#666666", linewidth=1.3, label="(1 + 2f) / 3")
    for rows in (predicted, measured) if measured else (predicted,):
        ours = best_of_ours(rows)
        for T, colour in (("4096", "#E69F00"), ("32768", OURS)):
            mine = [
                r
                for r in rows
                if (r["head"], r["T"], r["implementation"], r["mode"]) == (HEAD, T, ours, BOTH)
            ]
            by_share = {float(r["live"]): float(r["ms"]) for r in mine if r["dead"] != "known"}
            if 1.0 not in by_share:
                continue
            xs = sorted(by_share)
            ys = [by_share[x] / by_share[1.0] for x in xs]
            text = f"{ours}, T {int(T) // 1024}k" + (", prediction" if rows is predicted else "")
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
    """Bars: the row operation, then forward + backward of each shape that more than one implementation ran."""
    row_op = [r for r in rows if r["mode"] == "row statistics"]
    heads = list(dict.fromkeys(r["head"] for r in rows if r["mode"] == BOTH))
    panels = (
        [bars(row_op, f"row statistics, {row_op[0]['T']} x {int(row_op[0]['V']):,}")]
        if row_op
        else []
    )
    for head in heads:
        mine = [
            r
            for r in rows
            if r["head"] == head and r["mode"] == BOTH and r["dead"] != "known" and r["ms"]
        ]
        mine = [r for r in mine if r["live"] == "1.0" or r["implementation"].startswith("paw[cpu")]
        shape = f"T {mine[0]['T']}, D {mine[0]['D']}, V {int(mine[0]['V']):,}"
        panels.append(bars(mine, f"{BOTH}, {shape}"))
        panels.append(
            bars(
                [r for r in rows if r["head"] == head and r["mode"] == STATISTICS],
                f"{STATISTICS}, {shape}",
            )
        )
    panels = [panel for panel in panels if len(panel[0]) > 1]
    heights, about = [len(names) for names, _, _ in panels], rows[0]
    # One under the other, so that a telephone shows them at a size that can be read.
    size = (4.6, 0.2 * sum(heights) + 0.4 * len(panels) + 0.5)
    figure, grid = plt.subplots(
        len(panels),
        1,
        figsize=size,
        dpi=150,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    threads = "1 thread" if about["threads"] == "1" else f"{about['threads']} threads"
    figure.suptitle(
        f"{about['device']}, {threads}\ntorch {about['torch']}, float32: median ms", fontsize=9
    )
    for axes, (names, values, title) in zip(np.atleast_1d(grid), panels, strict=True):
        colours = [OURS if name.startswith("paw") else "#BBBBBB" for name in names]
        drawn = axes.barh(names, values, color=colours)
        axes.bar_label(
            drawn,
            [f"{value:,.0f}" if value >= 100 else f"{value:#.3g}" for value in values],
            padding=3,
            fontsize=8,
        )
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.margins(x=0.16)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.xaxis.set_visible(False)
    return figure


def tiles(before: Rows, now: Rows) -> Figure:
    """Instructions that a warp spends on a tile, in both versions of the forward kernel."""
    shape = ("triton", "arch", "dtype", "kernel", "V", "D", "bias", "gradients", "softcap")
    of = {
        tuple(row[key] for key in shape): int(row["tile"])
        for row in now
        if row["table"] == "yes" and row["tile"]
    }
    figure, axes = plt.subplots(figsize=(4.6, 4.8), dpi=150, layout="constrained")
    names, version = [], before[0]["triton"]
    for place, row in enumerate(before):
        old, new = int(row["tile"]), of[tuple(row[key] for key in shape)]
        axes.barh(place - 0.19, old, 0.36, color="#BBBBBB", label="before" if not place else None)
        axes.barh(place + 0.19, new, 0.36, color=OURS, label="now" if not place else None)
        share = f"{new / old - 1:.0%}".replace("-", "\N{MINUS SIGN}")
        axes.text(new, place + 0.19, f" {new:,} ({share})", va="center", fontsize=8)
        what = ", bias" * (row["bias"] == "True") + ", no gradients" * (row["gradients"] == "False")
        names.append(f"{row['arch']}, D {row['D']},\nV {int(row['V']):,}{what}")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(
        ylim=(len(names) - 0.5, -0.5), xlim=(0, 3100), xlabel="Instructions a warp spends on a tile"
    )
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Compiled by Triton {version}, not run", loc="left", fontsize=9)
    return figure


def bars(rows: Rows, title: str) -> tuple[list[str], list[float], str]:
    rows = sorted(rows, key=lambda row: float(row["ms"]))
    names = [
        f"{r['implementation']}, f = {float(r['live']):g}"
        if r["live"] not in ("", "1.0")
        else r["implementation"]
        for r in rows
    ]
    return names, [float(row["ms"]) for row in rows], title
