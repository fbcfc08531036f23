"""Several environments in one run ([[envs]]): their factories, and whose task is played next.

A task carries the label of its environment (`Task.env`). Everything else finds the environment by
that label, with `parts`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from paw.config.sections import EnvConfig
from paw.envs.base import Env, EnvFactory, TaskChooser, Tasks, eval_tasks, stream
from paw.envs.curriculum import Curriculum
from paw.envs.shares import TaskShares, drawn, interleaved
from paw.errors import OthersCodeError, UserError
from paw.types import Task


class Part(NamedTuple):
    """One environment of a run."""

    factory: EnvFactory
    config: EnvConfig


class SeveralEnvs(TaskChooser):
    """The environments of a run with [[envs]], by label."""

    may_block = False
    runs_others_code = False
    has_others_tasks = False
    distinct_eval = True

    def __init__(
        self, parts: Mapping[str, Part], shares: TaskShares, curriculum: Curriculum | None = None
    ) -> None:
        self.parts = dict(parts)
        self.shares = shares
        self.curriculum = curriculum
        self.lacks_shares = False
        """Whether the curriculum failed to choose the shares of the next update."""
        factories = [part.factory for part in self.parts.values()]
        self.name = " + ".join(self.parts)
        self.reward_max = max(factory.reward_max for factory in factories)
        self.invalid_penalty = max(factory.invalid_penalty for factory in factories)

    @property
    def processes_lost(self) -> int:
        return sum(getattr(part.factory, "processes_lost", 0) for part in self.parts.values())

    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        places = self.shares.tasks(step, count)
        tasks: dict[str, list[Task]] = {}
        for label, numbers in places.items():
            part = self.parts[label]
            own_tasks = stream(
                part.factory, part.config.train_split, numbers.start, len(numbers), seed
            )
            tasks[label] = [task.in_env(label) for task in own_tasks]
        return _in_turn(tasks)

    def drawn_tasks(
        self, start: int, count: int, seed: int, *, step: int, split: str = ""
    ) -> list[Task]:
        numbers = range(start, start + count)
        labels = drawn(self.shares.of(step), numbers, seed)
        tasks: list[Task] = []
        for number, label in zip(numbers, labels, strict=True):
            part = self.parts[label]
            own_split = split or part.config.train_split
            (task,) = stream(part.factory, own_split, number, 1, seed)
            tasks.append(task.in_env(label))
        return tasks

    def eval_tasks(self, count: int, seed: int) -> list[Task]:
        tasks: dict[str, list[Task]] = {}
        for label, part in self.parts.items():
            own_tasks = eval_tasks(part.factory, part.config.eval_split, count, seed)
            tasks[label] = [task.in_env(label) for task in own_tasks]
        return _in_turn(tasks)

    def state(self, step: int, count: int) -> dict[str, Any] | None:
        """Return the state to continue from update `step`, which has `count` tasks, as JSON.

        Returns None without a curriculum, because the configuration then determines the tasks.
        """
        if self.curriculum is None:
            return None
        return self.shares.state(step, count) | {
            "success": self.curriculum.state(),
            "chosen": step == 0 or self.shares.is_chosen(step),
        }

    def load_state(self, state: Mapping[str, Any], step: int, count: int) -> None:
        """Load a saved state.

        Raises KeyError, TypeError, ValueError or AttributeError if it is malformed. Ignores it
        without a curriculum.
        """
        if self.curriculum is not None:
            self.curriculum.load_state(state["success"])
            self.shares.load_state(state, step, count)
            self.lacks_shares = not state.get("chosen", True)

    def tasks(self, split: str, seed: int) -> Tasks:
        raise self._refusal()

    def make(self) -> Env:
        raise self._refusal()

    def fingerprint(self) -> str:
        texts = [f"{label}: {part.factory.fingerprint()}" for label, part in self.parts.items()]
        return "; ".join(texts)

    def _refusal(self) -> UserError:
        return UserError(
            f"the recipe has several environments ([[envs]]: {', '.join(self.parts)}), and this "
            "needs one: name a recipe with that one as [env]"
        )


def _in_turn(tasks: Mapping[str, list[Task]]) -> list[Task]:
    """Return the tasks of all environments, spread evenly and each in their own order."""
    iterators = {label: iter(own_tasks) for label, own_tasks in tasks.items()}
    order = interleaved({label: len(own_tasks) for label, own_tasks in tasks.items()})
    return [next(iterators[label]) for label in order]


@contextmanager
def named_entry(label: str) -> Iterator[None]:
    """Name one of several environments in the message of a UserError that leaves this block."""
    if not label:
        yield
        return
    try:
        yield
    except OthersCodeError as error:
        raise OthersCodeError(f"[[envs]] {label}: {error}") from error
    except UserError as error:
        raise UserError(f"[[envs]] {label}: {error}") from None


def parts_of(factory: EnvFactory, config: EnvConfig) -> dict[str, Part]:
    """Return the environments of a run by their label in tasks; that of a single one is ""."""
    if isinstance(factory, SeveralEnvs):
        return factory.parts
    return {"": Part(factory, config)}
