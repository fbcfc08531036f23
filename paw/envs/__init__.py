"""Environments: text in, text out. `make_factory` is the one way in."""

from paw.config import Config
from paw.envs.base import EnvFactory


def make_factory(config: Config) -> EnvFactory:
    """The factory that `env.name` names. UserError if its data, its back end or a package it needs is missing."""
    match config.env.name:
        case "alfworld":
            from paw.envs.alfworld.factory import AlfworldFactory

            return AlfworldFactory(config.env)
        case "webshop":
            from paw.envs.webshop.factory import WebshopFactory

            return WebshopFactory(config.env, config.webshop)
        case "search":
            from paw.envs.search.factory import SearchFactory

            return SearchFactory(config)
        case "tau2":
            from paw.envs.tau2 import Tau2Factory

            return Tau2Factory(config.env, config.tau2)
        case "next_state":
            from paw.envs.next_state import NextStateFactory

            return NextStateFactory(config.env, config.rwml)
    from paw.envs.load import load_factory

    return load_factory(config.env)
