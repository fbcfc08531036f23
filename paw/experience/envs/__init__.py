"""Environments: text in, text out. `make_suite` is the one way in."""

from paw.config import EnvConfig
from paw.experience.envs.base import Suite


def make_suite(config: EnvConfig) -> Suite:
    """The suite that `env.name` names. UserError if its data or its back end is missing."""
    from paw.experience.envs.alfworld.suite import AlfworldSuite

    return AlfworldSuite(config)
