"""Draws the plots in docs/profile.md and docs/rollout.md about tokens that need not be run, from bench/results.

python bench/trainer/tokens_plot.py        # docs/tokens_{conversations,known}.png; nothing is
measured
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
    """Tokens of an update for each layout of the same episodes, and those that PaW adds."""
    records = {}
    for record in read(RESULTS / "conversations.csv"):
        records[record["environment"], record["style"], record["rows"]] = record
    for panel, environment_name in zip(
        figure.subplots(2, 1, sharex=True), ("search", "tau2"), strict=True
    ):
        of_layouts = [records[environment_name, *layout] for layout in LAYOUTS]
        without = []
        added = []
        labels = []
        for record in of_layouts:
            thousands = int(record["scoring"]) / 1000
            added_percent = float(record["paw"])
            without.append(thousands)
            added.append(thousands * added_percent / 100)
            labels.append(f" {without[-1] + added[-1]:.0f}k (+{added_percent:.1f} %)")

        layout_names = list(LAYOUTS.values())
        panel.barh(layout_names, without, 0.62, color=BLUE, label="without the world model")
        panel.barh(layout_names, added, 0.62, without, color=VERMILLION, label="added by PaW")
        for position, label in enumerate(labels):
            panel.text(without[position] + added[position], position, label, va="center", color=INK)
        panel.set(title=f"{environment_name}, {of_layouts[0]['episodes']} episodes", xlim=(0, 140))
        panel.invert_yaxis()
        panel.grid(visible=False)
    panel.set_xlabel("Tokens of an update, thousands")
    panel.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.2, -0.35), handlelength=1)


def known(figure: Figure) -> None:
    """Shares of selected observations that are fully masked, and that the rule predicts from the
    previous update."""
    axes: Axes = figure.subplots()
    records = read(RESULTS / "masked_cpu.csv")
    updates = [int(record["update"]) for record in records]
    for column, label, colour in (
        ("masked", "masked as a whole", BLUE),
        ("ruled", "left out by the rule", GREEN),
        ("wrong", "of these wrongly", VERMILLION),
    ):
        shares = [100 * int(record[column]) / int(record["selected"]) for record in records]
        smooth = []
        for window_end in range(1, len(shares) + 1):
            smooth.append(mean(shares[max(0, window_end - WINDOW) : window_end]))
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
