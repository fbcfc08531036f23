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
NOTE = f"""
Means over runs of the first and the last {WINDOW} updates, of the first and the last evaluation. In the \
plot moving means of {WINDOW} updates, bands: 95 % Student interval over runs. The counterpart of Figures 10 \
and 11 of arXiv 2606.02388."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = "run directories, or an experiment's folder (with runs/ in it)"
    parser.add_argument("runs", nargs="+", type=Path, help=source)
    parser.add_argument("--out", type=Path, default=Path("dynamics"), help="folder to write (default: %(default)s)")
    parser.set_defaults(overrides=False)


def run(options: argparse.Namespace, _: dict[str, str]) -> int:
    """Write dynamics.{csv,png,md}: a line for each run and update; a panel for each metric; first and last means."""
    groups = read(options.runs)
    from paw.tools.experiment import figures

    logged = {key for group in groups.values() for run in group for key in run.metrics}
    panels, rows = {}, []
    for key, label in CURVES.items():
        if key not in logged:
            continue
        window, factor = 1 if key.startswith("eval/") else WINDOW, 100 if label.endswith("(%)") else 1
        row, panel = [label], {}
        for name, group in groups.items():
            having = [run for run in group if key in run.metrics]
            panel[name] = figures.average(having, key, window) if having else {}
            sums = [sum(mean(key, window) or 0.0 for mean in means)
                    for means in ([run.first for run in having], [run.last for run in having])]  # fmt: skip
            row.append("{:.3g} -> {:.3g}".format(*(factor * total / len(having) for total in sums)) if having else "-")
        panels[label] = panel
        rows.append(row)
    if not panels:
        raise UserError(f"{options.runs[0]}: none of its metrics is a training curve")
    shown = [key for key in CURVES if key in logged]
    records = [
        {"group": name, "run": run.name, "update": step} | {key: run.at(key, step) for key in shown}
        for name, group in groups.items()
        for run in group
        for step in sorted({step for key in shown for step in run.metrics.get(key, {})})
    ]
    header = ["", *(f"{name} ({len(group)})" for name, group in groups.items())]
    text = "\n".join(["# Training curves\n", markdown(header, rows), NOTE])
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
