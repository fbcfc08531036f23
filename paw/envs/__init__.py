"""Environments: text in, text out. `make_factory` makes the one that a configuration names."""

from typing import Any

from paw.config import plugins
from paw.config.recipe import check_passwords
from paw.config.sections import Config, EnvConfig, RunConfig
from paw.envs.base import EnvFactory, ScheduledFactory
from paw.envs.curriculum import Curriculum
from paw.envs.load import load_factory
from paw.envs.several import Part, SeveralEnvs, named_entry
from paw.envs.shares import WHOLE, TaskShares
from paw.envs.workers.processes import ProcessFactory
from paw.errors import UserError


def make_factory(config: Config, env: Any = None) -> EnvFactory:
    """Return the factory that `env.name` names, one of all [[envs]], or a factory for `env`.

    `env` is a user's own environment or factory (a class or an object). Raises UserError if data, a
    back end or a package is missing, if the password in a URL was masked, or if `env` lacks a
    member of the protocol.
    """
    check_passwords(config)
    if env is not None or not config.envs:
        return _make_one(config.env, config.run, tasks_per_update=config.rollout.tasks, env=env)

    shares = TaskShares({entry.label: entry.share for entry in config.envs})
    for entry in config.envs:
        if shares.initial[entry.label] == 0:
            raise UserError(
                f"envs.{entry.label}.share = {entry.share:g} is less than a millionth of all "
                "shares; raise it, or leave the entry out"
            )
    parts: dict[str, Part] = {}
    for entry in config.envs:
        own_tasks = config.rollout.tasks * shares.initial[entry.label] / WHOLE
        with named_entry(entry.label):
            factory = _make_one(
                entry.section, config.run, tasks_per_update=max(1, round(own_tasks)), env=None
            )
        parts[entry.label] = Part(factory, entry.section)
    curriculum = None
    if config.rollout.curriculum:
        curriculum = Curriculum(config.rollout.curriculum, list(parts))
    return SeveralEnvs(parts, shares, curriculum)


def _make_one(section: EnvConfig, run: RunConfig, *, tasks_per_update: int, env: Any) -> EnvFactory:
    """Return the factory of one environment, that of `section` or a user's own `env`."""
    if env is not None or section.name not in plugins.ENVS:
        factory: EnvFactory = load_factory(env, section)
    else:
        factory_class = plugins.load("envs", section.name)
        if issubclass(factory_class, ScheduledFactory):
            factory = factory_class(section, run, tasks_per_update)
        else:
            factory = factory_class(section)
    if section.processes:
        return _in_processes(factory, section, env)
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
