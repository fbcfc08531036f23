"""`paw experiment NAME ...`: the paper's experiments as commands, each writing numbers, a plot and a table."""

import argparse
from functools import partial
from typing import Any

from paw.tools.experiment import compare, dynamics, noise

COMPARE = "variants x seeds with intervals: the world model, its ablations, estimators (Tables 1 to 4)"
SPARSE = "the same from a start policy that almost never succeeds (Figure 4)"
NOISE = "share of the world model's gradient on unpredictable tokens (Figure 2c)"
EXPERIMENTS: dict[str, tuple[Any, Any, str]] = {
    "compare": (compare.add_arguments, compare.run, COMPARE),
    "sparse": (partial(compare.add_arguments, sparse=True), partial(compare.run, sparse=True), SPARSE),
    "sweep": (compare.add_sweep_arguments, compare.sweep, "success over alpha and rho (Figure 6)"),
    "noise-gradient": (noise.add_arguments, noise.run, NOISE),
    "dynamics": (dynamics.add_arguments, dynamics.run, "training curves of finished runs (Figures 10 and 11)"),
}
"""What adds the arguments, what runs, and the help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    experiments = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    for name, (add, command, help) in EXPERIMENTS.items():
        sub = experiments.add_parser(name, help=help, description=help)
        sub.set_defaults(experiment=command)
        add(sub)


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    return options.experiment(options, overrides)
