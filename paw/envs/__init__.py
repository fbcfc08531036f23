"""Environments: text in, text out. `make_factory` is the one way in."""

from typing import Any

from paw import plugins
from paw.config import Config
from paw.envs.base import EnvFactory
from paw.recipe import check_passwords


def make_factory(config: Config, env: Any = None) -> EnvFactory:
    """The factory that `env.name` names, or that of `env`, an environment or factory of one's own (class or object).

    Raises UserError: its data, its back end or a package is missing, a URL has lost its password, or `env` lacks a
    member of the protocol.
    """
    check_passwords(config)
    name = config.env.name
    if env is not None or name not in plugins.ENVS:
        from paw.envs.load import load_factory

        return load_factory(env, config.env)
    made = plugins.load("envs", name)
    if name == "search":  # ZeroSearch's noise grows with updates
        return made(config.env, config.run, config.rollout.tasks)
    return made(config.env)
