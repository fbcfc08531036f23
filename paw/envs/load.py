"""A user's own environment, by name or as an object, with defaults for what it lacks (docs/environments.md)."""

import copy
import math
from contextlib import chdir
from pathlib import Path
from typing import Any

from paw import plugins
from paw.config import EnvConfig
from paw.envs.base import Env, EnvFactory, Tasks, every_tenth, size
from paw.envs.threads import Threads
from paw.errors import OURS, OthersCodeError, UserError, describe, place, shown
from paw.types import Task

FACTORY, ENV = ("make", "tasks"), ("reset", "context", "step")


class OwnFactory:
    """The EnvFactory of what a user handed over: an Env or an EnvFactory, as a class or as an object.

    Of an Env each episode gets a new one, or a deep copy of the object; of a list of tasks every
    tenth is held out.
    """

    runs_others_code = has_others_tasks = True

    def __init__(self, given: Any, config: EnvConfig, origin: str) -> None:
        self._given, self.config, self._origin = given, config, origin
        self._made = self._new()
        self._lists = hasattr(self._made, "make")
        self._require(self._made, FACTORY if self._lists else ("tasks", *ENV))
        self.name: str = getattr(self._made, "name", type(self._made).__name__.lower())
        self.reward_max: float = getattr(self._made, "reward_max", 1.0)
        self.invalid_penalty: float = getattr(self._made, "invalid_penalty", config.invalid_penalty)
        self.may_block: bool = getattr(self._made, "may_block", False)
        self.distinct_eval: bool = getattr(self._made, "distinct_eval", True)
        self.demonstrates = True
        """Whether its environments have an oracle, once one was made."""
        penalty: Any = self.invalid_penalty
        if not (isinstance(penalty, int | float) and 0 <= penalty < math.inf):
            raise UserError(
                f"{origin}: invalid_penalty is {shown(penalty)}, which is no number from 0 on"
            )

    def tasks(self, split: str, seed: int) -> Tasks:
        """UserError where there are none, or no Tasks."""
        listed: Any = self._made.tasks
        what = f"{self._origin}: {type(self._made).__name__}.tasks('{split}', {seed})"
        try:
            held_out = split == self.config.eval_split
            found: Any = listed(split, seed) if callable(listed) else every_tenth(listed, held_out)
            first = found[0] if size(found) != 0 else None
        except OURS:
            raise
        except BaseException as error:  # SystemExit as well
            raise OthersCodeError(f"{what}: {describe(error)}{place(error)}") from error
        if size(found) == 0:
            raise UserError(f"{what} is empty")
        if not (
            isinstance(first, Task) and isinstance(first.id, str) and isinstance(first.kind, str)
        ):
            raise UserError(
                f"{what}[0] is {shown(first)}; it must be a paw.Task, its id and kind texts"
            )
        if split == "warmup" and not self.demonstrates:
            raise UserError(
                f"{self._origin} has no oracle(), which the quickstart's model imitates; set model.path"
            )
        return found

    def make(self) -> Env:
        made = self._made.make() if self._lists else self._new()
        self._require(made, ENV)
        self.demonstrates = hasattr(made, "oracle")
        return made

    def fingerprint(self) -> str:
        """Raises UserError if it fails, or takes longer than env.step_timeout_s."""
        if not hasattr(self._made, "fingerprint"):
            return self.name
        threads = Threads(1, self.config.step_timeout_s)
        try:
            return threads.call(self._made.fingerprint)
        except OURS:
            raise
        except BaseException as error:
            what = f"{self._origin}: {type(self._made).__name__}.fingerprint()"
            raise OthersCodeError(f"{what}: {describe(error)}{place(error)}") from error
        finally:
            threads.close()

    def _new(self) -> Any:
        given = self._given
        if not isinstance(given, type):
            return given if hasattr(given, "make") else copy.deepcopy(given)
        return plugins.make(given, self.config)

    def _require(self, made: object, members: tuple[str, ...]) -> None:
        if lacking := [member for member in members if not hasattr(made, member)]:
            name = type(made).__name__
            raise UserError(
                f"{self._origin}: {name} lacks {', '.join(lacking)}; see docs/environments.md"
            )


def load_factory(given: Any, config: EnvConfig) -> EnvFactory:
    """The factory of `given`, or, where that is None, of what env.name names. UserError where it cannot be had.

    With env.processes no environment is made in this process.
    """
    origin = f"env = {shown(given)}" if given is not None else f"env.name = '{config.name}'"
    with chdir(Path.cwd()):  # relative paths are still to be read, whatever the file does
        if given is None:
            try:
                given = plugins.load("envs", config.name)
            except UserError as error:
                raise UserError(f"env.name = {error}") from None
        threads = Threads(1, config.step_timeout_s)
        try:
            factory: OwnFactory = threads.call(OwnFactory, given, config, origin)
            if not config.processes:
                threads.call(factory.make)
        except OURS:
            raise
        except BaseException as error:
            raise UserError(f"{origin}: it cannot be made: {describe(error)}") from error
        finally:
            threads.close()
        return factory


def check_reward_max(factory: EnvFactory, name: str) -> None:
    """UserError where the adaptive lambda_g = 1 - mean return / R_max has no R_max; `name` is env.name."""
    value = factory.reward_max
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise UserError(
            f"env.name = '{name}': reward_max is {value!r}, which is no positive number: wm.weight = 'adaptive' "
            "divides by it; set it to the largest return of an episode, or take a constant: --wm.weight 1.0"
        )
