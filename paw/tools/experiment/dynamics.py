"""`paw experiment dynamics`: Figures 10 and 11 of PaW, training curves of runs, or of an experiment over seeds."""

import argparse
from pathlib import Path

from paw.errors import UserError
from paw.tools.experiment.results import markdown, write
from paw.tools.rundir import Run, load_run

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
"""Metrics that make a panel where a run has them."""
WINDOW = 10
"""Updates of the moving mean."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run directories, or an experiment's folder (with runs/ in it)"
    )
    parser.add_argument("--out", type=Path, default=Path("dynamics"), help="folder to write (default: %(default)s)")
    parser.set_defaults(overrides=False)


def run(options: argparse.Namespace, _: dict[str, str]) -> int:
    """Write dynamics.{csv,png,md}: a line for each run and update; a panel for each metric; first and last means."""
    groups = read(options.runs)
    from paw.tools.experiment import figures

    found = dict.fromkeys(key for group in groups.values() for run in group for key in run.metrics)
    labels = {key: label for key, label in CURVES.items() if key in found}
    if not labels:
        raise UserError(f"{options.runs[0]}: none of its metrics is a training curve")
    panels = {}
    for key, label in labels.items():
        having = {name: [run for run in group if key in run.metrics] for name, group in groups.items()}
        window = 1 if key.startswith("eval/") else WINDOW
        panels[label] = {
            n: figures.average(group, key, window=window) if group else ([], []) for n, group in having.items()
        }
    rows = []
    for key, label in labels.items():
        factor = 100 if label.endswith("(%)") else 1
        count = 1 if key.startswith("eval/") else WINDOW
        row = [label]
        for group in groups.values():
            ends = [(run.first(key, count), run.last(key, count)) for run in group if key in run.metrics]
            means = [factor * sum(end[i] or 0.0 for end in ends) / len(ends) for i in (0, 1)] if ends else None
            row.append("{:.3g} -> {:.3g}".format(*means) if means else "-")
        rows.append(row)
    records = [
        {"group": name, "run": run.name, "update": step} | {key: run.at(key, step) for key in labels}
        for name, group in groups.items()
        for run in group
        for step in sorted({step for key in labels for step in run.metrics.get(key, {})})
    ]
    header = ["", *(f"{name} ({len(group)})" for name, group in groups.items())]
    text = "\n".join([
        "# Training curves\n",
        markdown(header, rows),
        f"\nMeans over runs of the first and the last {WINDOW} updates, of the first and the last evaluation. In the "
        f"plot moving means of {WINDOW} updates, bands: 95 % Student interval over runs. The counterpart of Figures 10 "
        "and 11 of arXiv 2606.02388.",
    ])  # fmt: skip
    write(options.out, "dynamics", text=text, records=records, figure=figures.curves(panels))
    return 0


def read(folders: list[Path]) -> dict[str, list[Run]]:
    """Runs by group: those of an experiment by variant, others each for itself. UserError where there is none."""
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        if not (folder / "runs").is_dir():
            run = load_run(folder)
            groups.setdefault(run.name, []).append(run)
            continue
        found = sorted(path.parent for path in (folder / "runs").glob("*/report.html"))
        if not found:
            raise UserError(f"{folder / 'runs'}: no finished run in it")
        for path in found:
            groups.setdefault(path.name.rpartition("-")[0] or path.name, []).append(load_run(path))
    return groups
