"""Environments: text in, text out. `make_factory` makes the one that a configuration names."""

from typing import Any

from paw.config import plugins
from paw.config.recipe import check_passwords
from paw.config.sections import Config, EnvConfig
from paw.envs.base import EnvFactory
from paw.envs.load import load_factory
from paw.envs.workers.processes import ProcessFactory
from paw.errors import UserError


def make_factory(config: Config, env: Any = None) -> EnvFactory:
    """Return the factory that `env.name` names, or a factory for `env`.

    `env` is a user's own environment or factory (a class or an object). Raises UserError if data, a
    back end or a package is missing, if the password in a URL was masked, or if `env` lacks a
    member of the protocol.
    """
    check_passwords(config)
    name = config.env.name
    if env is not None or name not in plugins.ENVS:
        factory: EnvFactory = load_factory(env, config.env)
    elif name == "search":  # ZeroSearch's noise grows with the updates
        factory = plugins.load("envs", name)(config.env, config.run, config.rollout.tasks)
    else:
        factory = plugins.load("envs", name)(config.env)
    if config.env.processes:
        return _in_processes(factory, config.env, env)
    return factory


def _in_processes(factory: EnvFactory, config: EnvConfig, env: Any) -> EnvFactory:
    """Put the factory's environments in env.processes processes.

    Raises UserError if they are PaW's own environments, or if `env` cannot be imported there.
    """
    setting = f"env.processes = {config.processes}"
    if not factory.runs_others_code:
        raise UserError(
            f"{setting}: env.name = '{config.name}' does not run in processes "
            "(docs/environments.md says which do); leave env.processes out"
        )
    try:
        target = plugins.importable(config.name if env is None else env)
    except UserError as error:
        raise UserError(f"{setting}: {error}; or set env.processes = 0") from None
    return ProcessFactory(factory, config, target)
