"""The table and the plot of docs/rollout.md from a file of bench/rollout/continuous.py."""

from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.common import read

COLOURS = {"reference": "#999999", "lock-step": "#E69F00", "continuous": "#0072B2"}  # Okabe-Ito
Rows = list[dict[str, str]]


def cases(rows: Rows) -> dict[str, Rows]:
    """Rows by model, number of environments and milliseconds of their step."""

    def order(row: dict[str, str]) -> tuple[str, int, float, int]:
        return row["model"], int(row["envs"]), float(row["env_ms"]), int(row["repeat"])

    by_case: dict[str, Rows] = {}
    for row in sorted(rows, key=order):
        case = f"{row['model']}, {row['envs']}"
        if float(row["env_ms"]):
            case += f", {float(row['env_ms']):g} ms a step"
        by_case.setdefault(case, []).append(row)
    return by_case


def numbers(rows: Rows, mode: str, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row["mode"] == mode]


def markdown(table: Path) -> str:
    """A line for each case: medians over plays, then how many times better continuous was.

    The latter on the same episodes, as "median (worst .. best)" over lock-step and the median over
    reference.
    """
    lines = [
        "| model, environments | plays | engine steps | environment steps/s | fewer steps | less time | less CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in cases(read(table)).items():
        cells = [case, str(len(numbers(rows, "continuous", "repeat")))]
        for name in ("engine_steps", "env_steps_s"):
            medians = [median(numbers(rows, mode, name)) for mode in COLOURS]
            cells.append(" / ".join(f"{value:,.0f}" for value in medians))
        for name in ("engine_steps", "wall_s", "cpu_s"):
            over_lock_step = ratios(rows, "lock-step", name)
            spread = ""
            if len(over_lock_step) > 1:
                spread = f" ({min(over_lock_step):.2f} .. {max(over_lock_step):.2f})"
            over_reference = median(ratios(rows, "reference", name))
            cells.append(f"{median(over_lock_step):.2f}{spread}, {over_reference:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(rows: Rows, mode: str, name: str) -> list[float]:
    """A measure in that mode over that of continuous, play by play."""
    continuous = numbers(rows, "continuous", name)
    return [a / b for a, b in zip(numbers(rows, mode, name), continuous, strict=True)]


def draw(table: Path, picture: Path) -> Path:
    """Left: requests in the engine's batch, step by step, of the same episodes.

    Right: environment steps a second.
    """
    rows = read(table)
    by_case = cases(rows)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.6), dpi=150, layout="constrained", width_ratios=(3, 2)
    )
    first = rows[0]
    figure.suptitle(
        f"{first['device']}, {first['threads']} threads, vLLM {first['vllm']}", fontsize=10
    )
    draw_batches(left, *next(iter(by_case.items())))
    draw_speeds(right, by_case)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    plt.close(figure)
    return picture


def draw_batches(axes: Axes, case: str, rows: Rows) -> None:
    """The size of the batch over the engine's steps, of the first play in each mode."""
    for row in rows:
        if row["repeat"] != "0":
            continue
        sizes = [float(size) for size in row["batches"].split()]
        steps = int(row["engine_steps"])
        edges = [steps * i / len(sizes) for i in range(len(sizes) + 1)]
        label = f"{row['mode']}, {steps:,} steps"
        axes.stairs(sizes, edges, color=COLOURS[row["mode"]], label=label)
    axes.set(
        xlabel="Engine steps",
        ylabel="Requests in the batch",
        xlim=(0, None),
        ylim=(0, 1.3 * int(rows[0]["envs"])),
    )
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.set_title(f"{case} environments, the same episodes", loc="left", fontsize=9)


def draw_speeds(axes: Axes, by_case: dict[str, Rows]) -> None:
    """Environment steps a second of each case and mode."""
    for place, (mode, colour) in enumerate(COLOURS.items()):
        medians = [median(numbers(rows, mode, "env_steps_s") or [0.0]) for rows in by_case.values()]
        positions = [x + 0.27 * (place - 1) for x in range(len(by_case))]
        bars = axes.bar(positions, medians, 0.25, color=colour)
        axes.bar_label(bars, [f"{value:.0f}" for value in medians], fontsize=7, padding=2)
    names = [case.replace(", ", ",\n") for case in by_case]
    axes.set_xticks(range(len(by_case)), names, fontsize=7)
    axes.set_title("Environment steps a second (median)", loc="left", fontsize=9)
