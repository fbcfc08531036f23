"""The table and the plot of docs/rollout.md from a file of bench/rollout.py."""

from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.common import read

COLOURS = {"reference": "#999999", "lock-step": "#E69F00", "continuous": "#0072B2"}  # Okabe-Ito
Rows = list[dict[str, str]]


def cases(rows: Rows) -> dict[tuple[str, str, str], Rows]:
    """Rows by (model, environments, milliseconds a step of theirs)."""
    found: dict[tuple[str, str, str], Rows] = {}
    for row in sorted(rows, key=lambda row: (row["model"], int(row["envs"]), float(row["env_ms"]))):
        found.setdefault((row["model"], row["envs"], row["env_ms"]), []).append(row)
    return found


def markdown(table: Path) -> str:
    """One line a case: medians over plays, then how many times better continuous was on the same episodes, as
    "median (worst .. best)" over lock-step and the median over reference."""
    lines = [
        "| model, environments | plays | engine steps | environment steps/s | fewer steps | less time | less CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for (model, envs, ms), rows in cases(read(table)).items():
        plays = {mode: sorted((r for r in rows if r["mode"] == mode), key=repeat) for mode in COLOURS}
        steps, speeds = (
            " / ".join(f"{median(float(row[name]) for row in mine):,.0f}" for mine in plays.values())
            for name in ("engine_steps", "env_steps_s")
        )
        cells = []
        for name in ("engine_steps", "wall_s", "cpu_s"):
            over, over_reference = (
                [float(a[name]) / float(b[name]) for a, b in zip(plays[mode], plays["continuous"], strict=True)]
                for mode in ("lock-step", "reference")
            )
            spread = f" ({min(over):.2f} .. {max(over):.2f})" if len(over) > 1 else ""
            cells.append(f"{median(over):.2f}{spread}, {median(over_reference):.2f}")
        case = f"{model}, {envs}" + (f", {float(ms):g} ms a step" if float(ms) else "")
        lines.append(f"| {case} | {len(plays['continuous'])} | {steps} | {speeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def repeat(row: dict[str, str]) -> int:
    return int(row["repeat"])


def draw(table: Path, picture: Path) -> Path:
    """Left: requests in the engine's batch, step by step, of the same episodes. Right: environment steps a second."""
    rows = read(table)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), dpi=150, layout="constrained", width_ratios=(3, 2))
    about = rows[0]
    figure.suptitle(f"{about['device']}, {about['threads']} threads, vLLM {about['vllm']}", fontsize=10)
    found = cases(rows)
    (model, envs, _), shown = next(iter(found.items()))
    for row in shown:
        if row["repeat"] == "0":
            sizes, steps = [float(size) for size in row["batches"].split()], int(row["engine_steps"])
            edges = [steps * i / len(sizes) for i in range(len(sizes) + 1)]
            left.stairs(sizes, edges, color=COLOURS[row["mode"]], label=f"{row['mode']}, {steps:,} steps")
    left.set(xlabel="Engine steps", ylabel="Requests in the batch", xlim=(0, None), ylim=(0, 1.3 * int(envs)))
    left.legend(frameon=False, fontsize=8, loc="upper right")
    left.set_title(f"{model}, {envs} environments, the same episodes", loc="left", fontsize=9)
    width = 0.27
    for place, (mode, colour) in enumerate(COLOURS.items()):
        speeds = [[float(r["env_steps_s"]) for r in rows if r["mode"] == mode] for rows in found.values()]
        medians = [median(values) if values else 0.0 for values in speeds]
        bars = right.bar([x + (place - 1) * width for x in range(len(found))], medians, width * 0.92, color=colour)
        right.bar_label(bars, [f"{value:.0f}" for value in medians], fontsize=7, padding=2)
    names = [f"{model}, {envs}" + (f",\n{float(ms):g} ms a step" if float(ms) else "") for model, envs, ms in found]
    right.set_xticks(range(len(found)), names, fontsize=7)
    right.set_title("Environment steps a second (median)", loc="left", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    plt.close(figure)
    return picture
