"""Draws the plots of docs/profile.md and docs/rollout.md on tokens that need not be run, from bench/results.

python bench/trainer/tokens_plot.py        # docs/tokens_{conversations,known}.png; nothing is measured
"""

import sys
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, read
from paw.tools.report.plots import BLUE, GREEN, INK, VERMILLION, styled

LAYOUTS = {
    ("paper", "turns"): "the paper's prompts,\na row a turn",
    ("chat", "turns"): "conversation,\na row a turn",
    ("chat", "episodes"): "conversation,\na row an episode",
}
WINDOW = 5


def conversations(figure: Figure) -> None:
    """Tokens of an update with each layout of the same episodes, and what PaW adds to them."""
    rows = {}
    for row in read(RESULTS / "conversations.csv"):
        rows[row["environment"], row["style"], row["rows"]] = row
    for axes, name in zip(figure.subplots(2, 1, sharex=True), ("search", "tau2"), strict=True):
        of_layouts = [rows[name, *layout] for layout in LAYOUTS]
        without = []
        added = []
        labels = []
        for row in of_layouts:
            thousands = int(row["scoring"]) / 1000
            added_percent = float(row["paw"])
            without.append(thousands)
            added.append(thousands * added_percent / 100)
            labels.append(f" {without[-1] + added[-1]:.0f}k (+{added_percent:.1f} %)")

        names = list(LAYOUTS.values())
        axes.barh(names, without, 0.62, color=BLUE, label="without the world model")
        axes.barh(names, added, 0.62, without, color=VERMILLION, label="added by PaW")
        for position, label in enumerate(labels):
            axes.text(without[position] + added[position], position, label, va="center", color=INK)
        axes.set(title=f"{name}, {of_layouts[0]['episodes']} episodes", xlim=(0, 140))
        axes.invert_yaxis()
        axes.grid(visible=False)
    axes.set_xlabel("Tokens of an update, thousands")
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.2, -0.35), handlelength=1)


def known(figure: Figure) -> None:
    """Selected observations that are masked as a whole, and those that the rule predicts from the
    update before."""
    axes: Axes = figure.subplots()
    rows = read(RESULTS / "masked_cpu.csv")
    updates = [int(row["update"]) for row in rows]
    for key, label, colour in (
        ("masked", "masked as a whole", BLUE),
        ("ruled", "left out by the rule", GREEN),
        ("wrong", "of these wrongly", VERMILLION),
    ):
        shares = [100 * int(row[key]) / int(row["selected"]) for row in rows]
        smooth = []
        for end in range(1, len(shares) + 1):
            smooth.append(mean(shares[max(0, end - WINDOW) : end]))
        axes.plot(updates, smooth, color=colour, label=label)
    axes.set(
        xlabel=f"Update of the quickstart (mean of {WINDOW})",
        ylabel="% of the selected observations",
    )
    axes.set_ylim(0, None)
    axes.legend(
        ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1), handlelength=1, columnspacing=1
    )


@styled
def main() -> None:
    for draw, size in ((conversations, (4.8, 4.4)), (known, (4.4, 3.2))):
        figure = Figure(size)
        draw(figure)
        path = ROOT / "docs" / f"tokens_{draw.__name__}.png"
        figure.savefig(path, dpi=200)
        print(path)


if __name__ == "__main__":
    main()
