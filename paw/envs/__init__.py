"""Environments: text in, text out. `make_suite` is the one way in."""

from paw.config import Config
from paw.envs.base import Suite


def make_suite(config: Config) -> Suite:
    """The suite that `env.name` names. UserError if its data, its back end or a package it needs is missing."""
    match config.env.name:
        case "alfworld":
            from paw.envs.alfworld.suite import AlfworldSuite

            return AlfworldSuite(config.env)
        case "webshop":
            from paw.envs.webshop.suite import WebshopSuite

            return WebshopSuite(config.env, config.webshop)
        case "search":
            from paw.envs.search.suite import SearchSuite

            return SearchSuite(config)
        case "tau2":
            from paw.envs.tau2 import Tau2Suite

            return Tau2Suite(config.env, config.tau2)
        case "next_state":
            from paw.envs.next_state import NextStateSuite

            return NextStateSuite(config.env, config.rwml)
    from paw.envs.load import load_suite

    return load_suite(config.env)
