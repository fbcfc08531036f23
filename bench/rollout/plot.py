"""The table and the plot of docs/rollout.md from a file of bench/rollout/continuous.py."""

from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.common import read

COLOURS = {"reference": "#999999", "lock-step": "#E69F00", "continuous": "#0072B2"}  # Okabe-Ito
Rows = list[dict[str, str]]


def cases(rows: Rows) -> dict[str, Rows]:
    """Rows by model, environments and milliseconds a step of theirs."""
    found: dict[str, Rows] = {}
    for row in sorted(
        rows,
        key=lambda row: (row["model"], int(row["envs"]), float(row["env_ms"]), int(row["repeat"])),
    ):
        wait = f", {float(row['env_ms']):g} ms a step" if float(row["env_ms"]) else ""
        found.setdefault(f"{row['model']}, {row['envs']}{wait}", []).append(row)
    return found


def numbers(rows: Rows, mode: str, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row["mode"] == mode]


def markdown(table: Path) -> str:
    """One line a case: medians over plays, then how many times better continuous was on the same
    episodes, as "median (worst .. best)" over lock-step and the median over reference."""
    lines = [
        "| model, environments | plays | engine steps | environment steps/s | fewer steps | less time | less CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in cases(read(table)).items():
        cells = [case, str(len(numbers(rows, "continuous", "repeat")))]
        for name in ("engine_steps", "env_steps_s"):
            cells.append(
                " / ".join(f"{median(numbers(rows, mode, name)):,.0f}" for mode in COLOURS)
            )
        for name in ("engine_steps", "wall_s", "cpu_s"):
            ours = numbers(rows, "continuous", name)
            over, over_reference = (
                [a / b for a, b in zip(numbers(rows, mode, name), ours, strict=True)]
                for mode in ("lock-step", "reference")
            )
            spread = f" ({min(over):.2f} .. {max(over):.2f})" if len(over) > 1 else ""
            cells.append(f"{median(over):.2f}{spread}, {median(over_reference):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(table: Path, picture: Path) -> Path:
    """Left: requests in the engine's batch, step by step, of the same episodes.

    Right: environment steps a second.
    """
    rows = read(table)
    found, about = cases(rows), rows[0]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.6), dpi=150, layout="constrained", width_ratios=(3, 2)
    )
    figure.suptitle(
        f"{about['device']}, {about['threads']} threads, vLLM {about['vllm']}", fontsize=10
    )
    case, shown = next(iter(found.items()))
    for row in shown:
        if row["repeat"] == "0":
            sizes, steps = (
                [float(size) for size in row["batches"].split()],
                int(row["engine_steps"]),
            )
            edges = [steps * i / len(sizes) for i in range(len(sizes) + 1)]
            left.stairs(
                sizes, edges, color=COLOURS[row["mode"]], label=f"{row['mode']}, {steps:,} steps"
            )
    limits = {"xlim": (0, None), "ylim": (0, 1.3 * int(shown[0]["envs"]))}
    left.set(xlabel="Engine steps", ylabel="Requests in the batch", **limits)
    left.legend(frameon=False, fontsize=8, loc="upper right")
    left.set_title(f"{case} environments, the same episodes", loc="left", fontsize=9)
    for place, (mode, colour) in enumerate(COLOURS.items()):
        medians = [median(numbers(rows, mode, "env_steps_s") or [0.0]) for rows in found.values()]
        bars = right.bar(
            [x + 0.27 * (place - 1) for x in range(len(found))], medians, 0.25, color=colour
        )
        right.bar_label(bars, [f"{value:.0f}" for value in medians], fontsize=7, padding=2)
    right.set_xticks(range(len(found)), [case.replace(", ", ",\n") for case in found], fontsize=7)
    right.set_title("Environment steps a second (median)", loc="left", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    plt.close(figure)
    return picture
