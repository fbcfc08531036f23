"""Environments: text in, text out. `make_factory` is the one way in."""

from paw import plugins
from paw.config import Config
from paw.envs.base import EnvFactory


def make_factory(config: Config) -> EnvFactory:
    """The factory that `env.name` names. UserError if its data, its back end or a package it needs is missing."""
    name = config.env.name
    if name not in plugins.ENVS:
        from paw.envs.load import load_factory

        return load_factory(config.env)
    made = plugins.load("envs", name)
    return made(config.env, config.run) if name == "search" else made(config.env)  # ZeroSearch's noise grows with runs
