"""The table and the plot of docs/rollout.md, from a file written by bench/rollout/continuous.py.

    python bench/rollout/plot.py        # draws docs/rollout_cpu.png again; nothing is measured

Also prints the table.
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
Records = list[dict[str, str]]


def cases(records: Records) -> dict[str, Records]:
    """Records by model, number of environments and milliseconds of an environment step."""

    def order(record: dict[str, str]) -> tuple[str, int, float, int]:
        return record["model"], int(record["envs"]), float(record["env_ms"]), int(record["repeat"])

    by_case: dict[str, Records] = {}
    for record in sorted(records, key=order):
        case_name = f"{record['model']}, {record['envs']}"
        if float(record["env_ms"]):
            case_name += f", {float(record['env_ms']):g} ms a step"
        by_case.setdefault(case_name, []).append(record)
    return by_case


def values_of(records: Records, mode: str, column: str) -> list[float]:
    """A measure in one mode, for each play."""
    return [float(record[column]) for record in records if record["mode"] == mode]


def ratios(records: Records, mode: str, column: str) -> list[float]:
    """A measure in one mode divided by that of continuous, for each play."""
    compared = values_of(records, mode, column)
    continuous = values_of(records, "continuous", column)
    return [value / base for value, base in zip(compared, continuous, strict=True)]


def markdown(table_path: Path) -> str:
    """A line for each case: medians over plays, then how many times better continuous was.

    The latter compares plays of the same episodes. It is given as "median (worst .. best)" relative
    to lock-step, and as the median relative to reference.
    """
    table_lines = [
        "| model, environments | plays | engine steps | environment steps/s | fewer steps | less time | less CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, records in cases(read(table_path)).items():
        play_count = len(values_of(records, "continuous", "repeat"))
        cells = [case, str(play_count)]
        for column in ("engine_steps", "env_steps_s"):
            cells.append(medians_cell(records, column))
        for column in ("engine_steps", "wall_s", "cpu_s"):
            cells.append(ratios_cell(records, column))
        table_lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(table_lines)


def medians_cell(records: Records, column: str) -> str:
    """The median of a measure in each mode."""
    medians = [median(values_of(records, mode, column)) for mode in COLOURS]
    return " / ".join(f"{value:,.0f}" for value in medians)


def ratios_cell(records: Records, column: str) -> str:
    """ "median (worst .. best)" relative to lock-step, then the median relative to reference."""
    over_lock_step = ratios(records, "lock-step", column)
    over_reference = ratios(records, "reference", column)

    cell = f"{median(over_lock_step):.2f}"
    if len(over_lock_step) > 1:
        cell += f" ({min(over_lock_step):.2f} .. {max(over_lock_step):.2f})"
    return f"{cell}, {median(over_reference):.2f}"


def draw(table_path: Path, picture: Path) -> Path:
    """Left: requests in the engine's batch at each step, for the same episodes.

    Right: environment steps per second.
    """
    records = read(table_path)
    by_case = cases(records)
    first_case = next(iter(by_case))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.6), dpi=150, layout="constrained", width_ratios=(3, 2)
    )
    figure.suptitle(title(records[0]), fontsize=10)
    draw_batches(left, first_case, by_case[first_case])
    draw_speeds(right, by_case)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)

    figure.savefig(picture)
    plt.close(figure)
    return picture


def title(record: dict[str, str]) -> str:
    """The device, its number of threads, and the engine's version."""
    threads = "1 thread" if record["threads"] == "1" else f"{record['threads']} threads"
    return f"{record['device']}, {threads}, vLLM {record['vllm']}"


def draw_batches(axes: Axes, case: str, records: Records) -> None:
    """The size of the batch over the engine's steps, for the first play in each mode."""
    for record in records:
        if record["repeat"] != "0":
            continue
        batch_sizes = [float(batch_size) for batch_size in record["batches"].split()]
        step_count = int(record["engine_steps"])
        bin_count = len(batch_sizes)
        edges = [step_count * edge / bin_count for edge in range(bin_count + 1)]
        label = f"{record['mode']}, {step_count:,} steps"
        axes.stairs(batch_sizes, edges, color=COLOURS[record["mode"]], label=label)
    axes.set(
        xlabel="Engine steps",
        ylabel="Requests in the batch",
        xlim=(0, None),
        ylim=(0, 1.3 * int(records[0]["envs"])),
    )
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.set_title(f"{case} environments, the same episodes", loc="left", fontsize=9)


def draw_speeds(axes: Axes, by_case: dict[str, Records]) -> None:
    """Environment steps per second of each case and mode."""
    for position, (mode, colour) in enumerate(COLOURS.items()):
        medians = []
        for records in by_case.values():
            speeds = values_of(records, mode, "env_steps_s")
            medians.append(median(speeds) if speeds else 0.0)
        positions = [index + 0.27 * (position - 1) for index in range(len(by_case))]
        bars = axes.bar(positions, medians, 0.25, color=colour)
        labels = [f"{speed:.0f}" for speed in medians]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    case_labels = [wrapped(case) for case in by_case]
    axes.set_xticks(range(len(by_case)), case_labels, fontsize=7)
    axes.set_title("Environment steps a second (median)", loc="left", fontsize=9)


def wrapped(case: str) -> str:
    """The label of a case, on two lines if it says how long an environment step takes.

    >>> wrapped("quickstart, 16, 20 ms a step")
    'quickstart, 16,\\n20 ms a step'
    """
    model, environments, *step_time = case.split(", ")
    return ",\n".join([f"{model}, {environments}", *step_time])


def main() -> None:
    table_path = RESULTS / "rollout_cpu.csv"
    print(markdown(table_path))
    print(draw(table_path, ROOT / "docs" / "rollout_cpu.png"))


if __name__ == "__main__":
    main()
