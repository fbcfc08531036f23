"""The table and the plot of docs/rollout.md from a file of bench/rollout/continuous.py.

    python bench/rollout/plot.py        # docs/rollout_cpu.png again; nothing is measured

Prints the table, too.
"""

import sys
from pathlib import Path
from statistics import median

import matplotlib

sys.path.insert(0, str(Path(__file__).parents[2]))
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.common import RESULTS, ROOT, read

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


def values_of(rows: Rows, mode: str, column: str) -> list[float]:
    """A measure in one mode, play by play."""
    return [float(row[column]) for row in rows if row["mode"] == mode]


def ratios(rows: Rows, mode: str, column: str) -> list[float]:
    """A measure in that mode over that of continuous, play by play."""
    compared = values_of(rows, mode, column)
    continuous = values_of(rows, "continuous", column)
    return [value / base for value, base in zip(compared, continuous, strict=True)]


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
        plays = len(values_of(rows, "continuous", "repeat"))
        cells = [case, str(plays)]
        for column in ("engine_steps", "env_steps_s"):
            cells.append(medians_cell(rows, column))
        for column in ("engine_steps", "wall_s", "cpu_s"):
            cells.append(ratios_cell(rows, column))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def medians_cell(rows: Rows, column: str) -> str:
    """The median of a measure in each mode."""
    medians = [median(values_of(rows, mode, column)) for mode in COLOURS]
    return " / ".join(f"{value:,.0f}" for value in medians)


def ratios_cell(rows: Rows, column: str) -> str:
    """ "median (worst .. best)" over lock-step, then the median over reference."""
    over_lock_step = ratios(rows, "lock-step", column)
    over_reference = ratios(rows, "reference", column)

    cell = f"{median(over_lock_step):.2f}"
    if len(over_lock_step) > 1:
        cell += f" ({min(over_lock_step):.2f} .. {max(over_lock_step):.2f})"
    return f"{cell}, {median(over_reference):.2f}"


def draw(table: Path, picture: Path) -> Path:
    """Left: requests in the engine's batch, step by step, of the same episodes.

    Right: environment steps a second.
    """
    rows = read(table)
    by_case = cases(rows)
    first_case = next(iter(by_case))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.6), dpi=150, layout="constrained", width_ratios=(3, 2)
    )
    figure.suptitle(title(rows[0]), fontsize=10)
    draw_batches(left, first_case, by_case[first_case])
    draw_speeds(right, by_case)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)

    figure.savefig(picture)
    plt.close(figure)
    return picture


def title(row: dict[str, str]) -> str:
    """The device, how many threads ran on it, and the engine's version."""
    threads = "1 thread" if row["threads"] == "1" else f"{row['threads']} threads"
    return f"{row['device']}, {threads}, vLLM {row['vllm']}"


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
    for position, (mode, colour) in enumerate(COLOURS.items()):
        medians = []
        for rows in by_case.values():
            speeds = values_of(rows, mode, "env_steps_s")
            medians.append(median(speeds) if speeds else 0.0)
        positions = [x + 0.27 * (position - 1) for x in range(len(by_case))]
        bars = axes.bar(positions, medians, 0.25, color=colour)
        axes.bar_label(bars, [f"{value:.0f}" for value in medians], fontsize=7, padding=2)
    labels = [wrapped(case) for case in by_case]
    axes.set_xticks(range(len(by_case)), labels, fontsize=7)
    axes.set_title("Environment steps a second (median)", loc="left", fontsize=9)


def wrapped(case: str) -> str:
    """A case on two lines if it says how long a step of the environment takes.

    >>> wrapped("quickstart, 16, 20 ms a step")
    'quickstart, 16,\\n20 ms a step'
    """
    model, environments, *rest = case.split(", ")
    return ",\n".join([f"{model}, {environments}", *rest])


def main() -> None:
    table = RESULTS / "rollout_cpu.csv"
    print(markdown(table))
    print(draw(table, ROOT / "docs" / "rollout_cpu.png"))


if __name__ == "__main__":
    main()
