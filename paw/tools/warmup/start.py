"""`paw warmup`: finds mistakes in the configuration before loading torch, and then warms up."""

import argparse

from paw.config.recipe import load
from paw.envs import make_factory
from paw.io.imports import no_collections


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Print the folder of the warm-up model. Returns 0."""
    config = load(options.recipe, overrides)
    make_factory(config)
    with no_collections():
        from paw.tools.warmup.warmup import warmup  # loads torch

    print(warmup(config))
    return 0
