"""An environment of one's own: `env.name = "FILE.py:Class"`, a class of the `Suite` protocol (docs/environments.md)."""

import math
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from paw.config import EnvConfig
from paw.envs.base import Environment, Suite
from paw.envs.guard import make_threads
from paw.errors import UserError, quietly
from paw.plugins import import_file


def load_suite(config: EnvConfig) -> Suite:
    """Class(config) of the file that env.name names. What the file itself raises is not caught.

    Raises:
        UserError: there is no such file or class, or the suite or its environments lack a member of their protocol.
    """
    with chdir(Path.cwd()):  # relative paths are still to be read, whatever the file does
        suite = find_class(config.name)(config)
        if not hasattr(suite, "reward_max"):
            suite.reward_max = math.nan  # only the adaptive weight needs it: see check_reward_max
        _check(suite, Suite, config.name)
        threads = make_threads(suite, config)
        environment = threads.call(suite.make)
        _check(environment, Environment, config.name)
        with quietly():
            threads.call(environment.close)
        threads.close()
        return suite


def is_own(name: str) -> bool:
    """Whether an env.name is a file of the user's."""
    return ":" in name


def find_class(name: str) -> Callable[[EnvConfig], Suite]:
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


def check_reward_max(suite: Suite, name: str) -> None:
    """UserError where the adaptive lambda_g = 1 - mean return / R_max has no R_max; `name` is env.name."""
    value = suite.reward_max
    if isinstance(value, int | float) and 0 < value < math.inf:
        return
    found = "missing" if value != value else f"{value!r}, which is no positive number"
    member = f"{type(suite).__name__}.reward_max"
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
