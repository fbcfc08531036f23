"""Loads a user's own environment, by name or as an object. Adds defaults for missing members
(docs/environments.md).
"""

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable
from contextlib import chdir
from pathlib import Path
from typing import Any

from paw.config import plugins
from paw.config.sections import EnvConfig
from paw.envs.base import Env, EnvFactory, Tasks, every_tenth, is_coroutine_env, size
from paw.errors import (
    OURS,
    OthersCodeError,
    UserError,
    describe,
    quietly,
    short_repr,
    user_location,
)
from paw.io.threads import Threads
from paw.types import Task

FACTORY_MEMBERS = ("make", "tasks")
"""Members that a factory must have."""
ENV_MEMBERS = ("reset", "context", "step")
"""Members that an environment must have."""


class UserFactory:
    """An EnvFactory made from a user's Env or EnvFactory, a class or an object.

    With an Env, each episode gets a new object of the class, or a deep copy of the object. If
    `tasks` is a list, every tenth task is held out.
    """

    runs_others_code = True
    has_others_tasks = True

    def __init__(self, plugin: Any, config: EnvConfig, origin: str) -> None:
        self.config = config
        self._plugin = plugin
        self._origin = origin
        self._object = self._new_object()
        """The user's factory, or a user's Env, of which only attributes are read."""
        self._is_factory = hasattr(self._object, "make")
        if self._is_factory:
            self._require(self._object, FACTORY_MEMBERS)
            if inspect.iscoroutinefunction(self._object.make):
                raise UserError(
                    f"{origin}: make() is a coroutine function; make it a plain one, and await in "
                    "`async def reset`"
                )
        else:
            self._require(self._object, ("tasks", *ENV_MEMBERS))
        self._class_name = type(self._object).__name__
        self.name: str = getattr(self._object, "name", self._class_name.lower())
        self.reward_max: float = getattr(self._object, "reward_max", 1.0)
        self.invalid_penalty: float = getattr(
            self._object, "invalid_penalty", config.invalid_penalty
        )
        self.may_block: bool = getattr(self._object, "may_block", False)
        self.distinct_eval: bool = getattr(self._object, "distinct_eval", True)
        self.demonstrates = True
        """Whether its environments have an oracle; set when one is made."""
        penalty: Any = self.invalid_penalty
        if not (isinstance(penalty, int | float) and 0 <= penalty < math.inf):
            raise UserError(
                f"{origin}: invalid_penalty is {short_repr(penalty)}, "
                "which is not a number of at least 0"
            )

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return a split's tasks. Raises UserError if there are none or the first is not a Task."""
        call = f"{self._origin}: {self._class_name}.tasks('{split}', {seed})"
        source: Any = self._object.tasks
        try:
            if callable(source):
                tasks: Any = source(split, seed)
            else:
                tasks = every_tenth(source, held_out=split == self.config.eval_split)
            is_empty = size(tasks) == 0
            first = None if is_empty else tasks[0]
        except OURS:
            raise
        except BaseException as error:  # including SystemExit
            raise OthersCodeError(f"{call}: {describe(error)}{user_location(error)}") from error

        if is_empty:
            raise UserError(f"{call} is empty")
        is_task = isinstance(first, Task)
        if not (is_task and isinstance(first.id, str) and isinstance(first.kind, str)):
            raise UserError(
                f"{call}[0] is {short_repr(first)}; "
                "it must be a paw.Task whose id and kind are strings"
            )
        if split == "warmup" and not self.demonstrates:
            raise UserError(
                f"{self._origin} has no oracle(), which the quickstart's model imitates; "
                "set model.path"
            )
        return tasks

    def make(self) -> Env:
        environment = self._object.make() if self._is_factory else self._new_object()
        self._require(environment, ENV_MEMBERS)
        self.demonstrates = hasattr(environment, "oracle")
        if is_coroutine_env(environment):
            self.may_block = True
        return environment

    def fingerprint(self) -> str:
        """Return the user's fingerprint, or else the name.

        Raises OthersCodeError if it fails, or takes longer than env.step_timeout_s.
        """
        if not hasattr(self._object, "fingerprint"):
            return self.name
        threads = Threads(1, self.config.step_timeout_s)
        try:
            return threads.call(self._object.fingerprint)
        except OURS:
            raise
        except BaseException as error:
            call = f"{self._origin}: {self._class_name}.fingerprint()"
            raise OthersCodeError(f"{call}: {describe(error)}{user_location(error)}") from error
        finally:
            threads.close()

    def _new_object(self) -> Any:
        """Return a new object of the user's class, the user's factory, or a copy of their Env."""
        if isinstance(self._plugin, type):
            return plugins.make(self._plugin, self.config)
        if hasattr(self._plugin, "make"):
            return self._plugin
        return copy.deepcopy(self._plugin)

    def _require(self, object_: object, members: tuple[str, ...]) -> None:
        """Raise UserError if the object lacks one of the members."""
        lacking = [member for member in members if not hasattr(object_, member)]
        if lacking:
            raise UserError(
                f"{self._origin}: {type(object_).__name__} lacks {', '.join(lacking)}; "
                "see docs/environments.md"
            )


def load_factory(plugin: Any, config: EnvConfig) -> EnvFactory:
    """Return the factory of `plugin`, or of the plug-in that env.name names if `plugin` is None.

    One environment is made as a check and closed again. With env.processes, none is made in this
    process. Raises UserError if the factory cannot be loaded or made.
    """
    origin = f"env.name = '{config.name}'"
    if plugin is not None:
        origin = f"env = {short_repr(plugin)}"
    with chdir(Path.cwd()):  # user code may change the folder, but our relative paths must hold
        if plugin is None:
            try:
                plugin = plugins.load("envs", config.name)
            except UserError as error:
                raise UserError(f"env.name = {error}") from None
        threads = Threads(1, config.step_timeout_s)
        try:
            factory: UserFactory = threads.call(UserFactory, plugin, config, origin)
            if not config.processes:
                environment = threads.call(factory.make)
                with quietly():  # a close that fails does not matter here
                    threads.call(_close, environment)
        except OURS:
            raise
        except BaseException as error:
            raise UserError(f"{origin}: it cannot be made: {describe(error)}") from error
        finally:
            threads.close()
        return factory


def _close(environment: Any) -> None:
    """Close an environment if it has a `close`, which may be a coroutine."""
    if not hasattr(environment, "close"):
        return
    result = environment.close()
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


async def _awaited(result: Awaitable[Any]) -> None:
    await result


def check_reward_max(factory: EnvFactory, name: str) -> None:
    """Raise UserError if a factory has no R_max. The adaptive lambda_g divides by it.

    lambda_g = 1 - mean return / R_max. `name` is env.name.
    """
    value = factory.reward_max
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise UserError(
            f"env.name = '{name}': reward_max is {value!r}, which is not a positive number: "
            "wm.weight = 'adaptive' divides by it; set it to the largest return of an episode, "
            "or use a constant: --wm.weight 1.0"
        )
