"""Training curves of runs or of an experiment: the counterpart of Figures 10 and 11 of arXiv 2606.02388.

    python bench/studies/dynamics.py study

Writes dynamics.csv with a line for each run and update, dynamics.md with a table of first and last
means, and dynamics.png with a panel for each metric.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from paw.errors import UserError
from paw.tools.evaluate.results import markdown
from paw.tools.experiment.figures import Curve, draw
from paw.tools.experiment.results import interval, write
from paw.tools.report.plots import INK, moving_mean, styled
from paw.tools.report.rundir import Run, load_run

CURVES = {
    "success/all": "Success in training (%)",
    "eval/success": "Success on unseen games (%)",
    "policy/entropy": "Policy entropy (nats)",
    "health/valid_actions": "Valid actions (%)",
    "policy/response_tokens": "Response length (tokens)",
    "policy/kl": "KL to the start model (nats)",
    "wm/loss": "World-model loss",
    "wm/lambda": "lambda",
    "optim/gradient_frac": "Tokens with a gradient (%)",
    "wm/masked_frac": "Observation tokens masked (%)",
    "optim/grad_norm": "Gradient norm",
}
"""Metric -> title of its panel. Metrics that no run has are left out."""
WINDOW = 10
"""Number of updates in the moving mean."""


def average(runs: Sequence[Run], key: str, window: int = 1) -> Curve:
    """The mean curve over seeds, at the updates that all seeds have.

    Each seed is first smoothed by a moving mean over `window` updates.
    """
    smoothed: list[dict[int, float]] = []
    for run in runs:
        updates, values = run.series(key)
        by_step: dict[int, float] = {}
        if updates:
            by_step = dict(zip(updates, map(float, moving_mean(values, window)), strict=True))
        smoothed.append(by_step)

    curve: Curve = {}
    for update in smoothed[0]:
        if all(update in by_step for by_step in smoothed):
            curve[update] = interval([by_step[update] for by_step in smoothed])
    return curve


def dynamics(folders: list[Path], out: Path) -> None:
    """Write dynamics.csv, dynamics.png and dynamics.md to the folder `out`."""
    groups = read(folders)
    logged: set[str] = set()
    for group in groups.values():
        for run in group:
            logged |= run.metrics.keys()
    logged_curves = {key: label for key, label in CURVES.items() if key in logged}
    if not logged_curves:
        raise UserError(f"{folders[0]}: none of its metrics is a training curve")
    panels: dict[str, dict[str, Curve]] = {}
    table_rows = []
    for key, label in logged_curves.items():
        window = 1 if key.startswith("eval/") else WINDOW
        table_row = [label]
        panels[label] = {}
        for name, group in groups.items():
            having = [run for run in group if key in run.metrics]
            panels[label][name] = average(having, key, window) if having else {}
            table_row.append(first_to_last(having, key, window, factor_of(label)))
        table_rows.append(table_row)

    records = []
    for name, group in groups.items():
        for run in group:
            updates: set[int] = set()
            for key in logged_curves:
                updates |= run.metrics.get(key, {}).keys()
            for update in sorted(updates):
                record = {"group": name, "run": run.name, "update": update}
                for key in logged_curves:
                    record[key] = run.at(key, update)
                records.append(record)

    header = ["", *(f"{name} ({len(group)})" for name, group in groups.items())]
    page = f"""# Training curves

{markdown(header, table_rows)}

Means over runs of the first and the last {WINDOW} updates, of the first and the last evaluation. In the plot moving
means of {WINDOW} updates, bands: 95 % Student interval over runs. The counterpart of Figures 10 and 11 of
arXiv 2606.02388."""
    write(out, "dynamics", text=page, records=records, figure=curves(panels))


def factor_of(label: str) -> int:
    """100 if the label is in per cent, otherwise 1."""
    return 100 if label.endswith("(%)") else 1


def first_to_last(runs: Sequence[Run], key: str, window: int, factor: int) -> str:
    """ "first -> last": the means over runs of the first and of the last `window` values.

    "-" if there is no run.
    """
    if not runs:
        return "-"
    first_mean = fmean([run.first(key, window) or 0.0 for run in runs])
    last_mean = fmean([run.last(key, window) or 0.0 for run in runs])
    return f"{factor * first_mean:.3g} -> {factor * last_mean:.3g}"


def read(folders: list[Path]) -> dict[str, list[Run]]:
    """Runs by group: an experiment's runs by variant; any other run is a group of its own.

    Raises UserError if a folder is not a run, or an experiment without a finished one.
    """
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        if not (folder / "runs").is_dir():
            run = load_run(folder)
            groups.setdefault(run.name, []).append(run)
            continue
        runs = [load_run(path.parent) for path in sorted((folder / "runs").glob("*/metrics.jsonl"))]
        finished = [run for run in runs if run.finished]
        if not finished:
            raise UserError(f"{folder / 'runs'}: no finished run in it")
        for run in finished:
            variant, _, _ = run.name.rpartition("-")
            groups.setdefault(variant or run.name, []).append(run)
    return groups


@styled
def curves(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """A panel for each metric, with a curve for each group of runs."""
    row_count = math.ceil(len(panels) / 3)
    figure = Figure((9.6, 2.5 * row_count + 0.4))
    panel_axes = list(figure.subplots(row_count, 3, squeeze=False).flat)
    for axes, (label, groups) in zip(panel_axes, panels.items(), strict=False):
        for colour_index, (group_name, curve) in enumerate(groups.items()):
            draw(axes, curve, colour_index, group_name, factor_of(label))
        axes.set_title(label, fontsize=9, loc="left", color=INK)
    for axes in panel_axes[len(panels) :]:
        axes.remove()
    for axes in panel_axes[max(0, len(panels) - 3) : len(panels)]:
        axes.set_xlabel("Update")
    figure.legend(*panel_axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=6)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        help="run directories, or an experiment's folder (with runs/ in it)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("dynamics"), help="folder to write (default: %(default)s)"
    )
    options = parser.parse_args(words)
    try:
        dynamics(options.runs, options.out)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
