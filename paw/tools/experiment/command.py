"""`paw experiment NAME ...`: the paper's experiments as commands, each writing numbers, a plot and a table."""

import argparse
from functools import partial
from typing import Any

from paw.tools.experiment import compare, dynamics, noise, sweep

EXPERIMENTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "compare": (compare, "arms x seeds with intervals: the world model, its ablations, estimators (Tables 1 to 4)", {}),
    "sparse": (compare, "the same from a start policy that almost never succeeds (Figure 4)", {"sparse": True}),
    "sweep": (sweep, "success over alpha and rho (Figure 6)", {}),
    "noise-gradient": (noise, "share of the world model's gradient on unpredictable tokens (Figure 2c)", {}),
    "dynamics": (dynamics, "training curves of finished runs (Figures 10 and 11)", {}),
}
"""Module, help, and what its `add_arguments` and `run` are called with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    experiments = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    for name, (module, help, keywords) in EXPERIMENTS.items():
        sub = experiments.add_parser(name, help=help, description=help)
        sub.set_defaults(experiment=partial(module.run, **keywords))
        module.add_arguments(sub, **keywords)


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    return options.experiment(options, overrides)
