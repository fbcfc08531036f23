"""A user's own environment: `env.name = "FILE.py:Class"`, an `EnvFactory` (docs/environments.md)."""

import math
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from paw.config import EnvConfig
from paw.envs.base import Env, EnvFactory
from paw.errors import UserError, quietly
from paw.plugins import import_file
from paw.rollout.guard import make_threads


def load_factory(config: EnvConfig) -> EnvFactory:
    """Class(config) of the file that env.name names. What the file itself raises is not caught.

    Raises:
        UserError: there is no such file or class, or the factory or its environments lack a member of their protocol.
    """
    with chdir(Path.cwd()):  # relative paths are still to be read, whatever the file does
        factory = find_class(config.name)(config)
        if not hasattr(factory, "reward_max"):
            factory.reward_max = math.nan  # only the adaptive weight needs it: see check_reward_max
        _check(factory, EnvFactory, config.name)
        threads = make_threads(factory, config)
        environment = threads.call(factory.make)
        _check(environment, Env, config.name)
        with quietly():
            threads.call(environment.close)
        threads.close()
        return factory


def is_own(name: str) -> bool:
    """Whether an env.name is a file of the user's."""
    return ":" in name


def find_class(name: str) -> Callable[[EnvConfig], EnvFactory]:
    """The class that `name`, "FILE.py:Class", names; UserError where there is none."""
    place, _, wanted = name.rpartition(":")
    made = getattr(import_file(place, f"env.name = '{name}'"), wanted, None)
    if not isinstance(made, type):
        raise UserError(f"env.name = '{name}': the file has no class '{wanted}'")
    return made


def missing(made: object, protocol: type) -> list[str]:
    """Members of the protocol that `made` lacks."""
    members = {*protocol.__annotations__, *(key for key in vars(protocol) if not key.startswith("_"))}
    return sorted(member for member in members if not hasattr(made, member))


def check_reward_max(factory: EnvFactory, name: str) -> None:
    """UserError where the adaptive lambda_g = 1 - mean return / R_max has no R_max; `name` is env.name."""
    value = factory.reward_max
    if isinstance(value, int | float) and 0 < value < math.inf:
        return
    found = "missing" if value != value else f"{value!r}, which is no positive number"
    member = f"{type(factory).__name__}.reward_max"
    raise UserError(
        f"env.name = '{name}': {member} is {found}: wm.weight = 'adaptive' divides by it; set it to the largest return "
        "of an episode, or take a constant: --wm.weight 1.0"
    )


def _check(made: object, protocol: type, name: str) -> None:
    if lacks := missing(made, protocol):
        raise UserError(
            f"env.name = '{name}': {type(made).__name__} lacks {', '.join(lacks)}; "
            f"see {protocol.__name__} in paw/envs/base.py"
        )
