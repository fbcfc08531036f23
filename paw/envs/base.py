"""The environment protocol (text in, text out, no torch), and the choice of the tasks to play with
`train_tasks` and its siblings.
"""

import functools
import inspect
import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from paw.config.sections import RunConfig
from paw.errors import OURS, OthersCodeError, UserError, clean, describe, short_repr, user_location
from paw.io.threads import Threads
from paw.types import Outcome, Task

FURTHER_OFFSET = 1 << 40
"""Index of the first of `further_tasks` among the training tasks. No run gets that far."""
ENDLESS_EVAL = 256
"""Number of tasks played from an endless split if the whole split is requested."""
ALL_KINDS = ("all", "avg.")
"""Names in metrics and tables for all kinds of tasks together. No task may have such a kind."""
KIND_CHARS = 200
"""Maximum number of characters of a kind in the name of its metric."""
UNREADABLE = "a task of env.name cannot be read"
"""How the error begins if reading a task fails."""


class Env(Protocol):
    """An environment that plays one episode at a time. Its methods may be coroutine functions.

    If `reset` or `step` is one, it is a coroutine environment: episodes await it on their event
    loop, thousands at a time. Others run in threads.

    Optional members of every environment:

    - `anchor() -> str`: the observation as GiGPO compares it (default: the last observation);
    - `close()`;
    - `task: str`: the current task in words, for agents with prompts of their own (default: the
      first observation);
    - `tools`: a list of OpenAI function schemas, read after reset and fixed for the whole episode.
      `step` then gets a `paw.types.Reply`, which includes the calls that the model made. The shared
      parts of such environments are in `paw.envs.conversation`.

    Optional members that only the quickstart's warm-up and `paw env check` use:

    - `oracle() -> str`: a good response to the current context. Raises NoOracleError if there is
      none;
    - `admissible_actions() -> list[str]`: the actions that currently have an effect, without tags
      ([] for open-ended environments);
    - `format_action(action) -> str`: a well-formed response that plays such an action (default: the
      action itself).
    """

    def reset(self, task: Task) -> str:
        """Start `task`. Returns the first observation."""
        ...

    def context(self) -> "str | list[dict[str, Any]]":
        """Return what the model reads in the current turn: task, history, observation and actions.

        It is either the text of one user message or a conversation. A conversation is a list of
        {"role", "content"} with the roles system, user, assistant and tool. An assistant's message
        may have OpenAI's `tool_calls`. A tool's message may have `name` and `tool_call_id`.
        """
        ...

    def step(self, response: str) -> Outcome:
        """Play the action parsed from a model's `response` text."""
        ...


class Tasks(Protocol):
    """The tasks of a split: `tasks[i]`, and `len(tasks)` unless endless. It may be a list."""

    def __getitem__(self, i: int, /) -> Task: ...


class EnvFactory(Protocol):
    """A configured environment: its tasks and how to play them.

    A user's own factory needs only `tasks` and `make`: `paw.envs.load` adds the defaults named
    here. One that comes with PaW sets `name`, `reward_max`, `invalid_penalty` and `fingerprint`.
    """

    name: str
    reward_max: float
    """R_max of lambda_g = 1 - mean return / R_max, the largest return of an episode (default:
    1)."""
    invalid_penalty: float
    """Penalty for a turn whose response is invalid, subtracted from its score (default:
    env.invalid_penalty)."""
    may_block: bool = False
    """Whether its environments wait for something outside this process, such as a child or a
    network. They are then made and played in up to env.threads threads at once."""
    runs_others_code: bool = False
    """Whether its environments run code that is not ours, as a user's own always do. If so, each
    call is made in a thread and may take up to env.step_timeout_s."""
    has_others_tasks: bool = False
    """Whether `tasks` is not our code either. If so, it is called, and each of its tasks is read,
    in a thread with the same time limit."""
    distinct_eval: bool = True
    """Whether an evaluation plays each task at most once. Otherwise each of its tasks is drawn
    independently, as in the reference code."""

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the tasks of a split. Generated ones depend on `seed`.

        The split "warmup" is for the quickstart's warm-up model and shares no task with training or
        evaluation. Raises UserError if there is no such split.
        """
        ...

    def make(self) -> Env: ...

    def fingerprint(self) -> str:
        """Return a version and content hash of the tasks (default: the name).

        Results with different fingerprints cannot be compared.
        """
        ...


class ScheduledFactory(EnvFactory):
    """A factory that comes with PaW and whose tasks change from update to update.

    `make_factory` gives it the run and the number of its tasks in an update. Others get only their
    section of the configuration.
    """

    @abstractmethod
    def __init__(self, config: Any, run: RunConfig, tasks_per_update: int) -> None: ...


class TaskChooser(ABC):
    """A factory of several environments, which chooses the tasks itself (`paw.envs.several`)."""

    @abstractmethod
    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        """Return the `count` tasks of update `step`."""

    @abstractmethod
    def drawn_tasks(
        self, start: int, count: int, seed: int, *, step: int, split: str = ""
    ) -> list[Task]:
        """Return tasks `start`, ..., `start + count - 1` of a sequence outside `train_tasks`.

        They are of `split`, by default of the environments' own training splits, with the shares of
        update `step`.
        """

    @abstractmethod
    def eval_tasks(self, count: int, seed: int) -> list[Task]:
        """Return the evaluation tasks of every environment, `count` of each (0: all)."""


class Endless:
    """Endless tasks, made on demand. `make(i)` makes task number i."""

    def __init__(self, make: Callable[[int], Task]) -> None:
        self._make = make

    def __getitem__(self, i: int) -> Task:
        return self._make(i)


class Sized(Endless):
    """`count` tasks, made on demand."""

    def __init__(self, make: Callable[[int], Task], count: int) -> None:
        super().__init__(make)
        self._count = count

    def __len__(self) -> int:
        return self._count


def seeds(split: str, seed: int) -> Endless:
    """Return endless tasks that consist of a seed, `payload["seed"]`, below 2^31."""

    def task(i: int) -> Task:
        name = f"{split}/{seed}/{i}"
        return Task(name, payload={"seed": random.Random(name).getrandbits(31)})

    return Endless(task)


def is_coroutine_env(environment: Any) -> bool:
    """Whether an environment plays on the event loop: `reset` or `step` is a coroutine function."""
    methods = (getattr(environment, name, None) for name in ("reset", "step"))
    return any(inspect.iscoroutinefunction(method) for method in methods)


def train_tasks(
    factory: EnvFactory, step: int, count: int, seed: int, *, split: str = "train"
) -> list[Task]:
    """Return the `count` tasks of update `step`. They depend only on the arguments.

    A finite split is played in epochs, with each task once and in a new order each time.
    """
    if isinstance(factory, TaskChooser):
        if split != "warmup":
            return factory.train_tasks(step, count, seed)
        return factory.drawn_tasks(step * count, count, seed, step=0, split=split)
    return stream(factory, split, step * count, count, seed)


def further_tasks(
    factory: EnvFactory, start: int, count: int, seed: int, *, step: int = 0, split: str = "train"
) -> list[Task]:
    """Return tasks `start`, ..., `start + count - 1` of a sequence other than `train_tasks`.

    `step` is the update that they are for.
    """
    if isinstance(factory, TaskChooser):
        return factory.drawn_tasks(FURTHER_OFFSET + start, count, seed, step=step)
    return stream(factory, split, FURTHER_OFFSET + start, count, seed)


def warmup_tasks(factory: EnvFactory, start: int, count: int, seed: int) -> list[Task]:
    """Return tasks `start`, ..., `start + count - 1` of the warm-up."""
    if isinstance(factory, TaskChooser):
        return factory.drawn_tasks(start, count, seed, step=0, split="warmup")
    return stream(factory, "warmup", start, count, seed)


def eval_tasks(factory: EnvFactory, split: str, count: int, seed: int) -> list[Task]:
    """Return `count` tasks of a held-out `split`, drawn with `seed`.

    `count` 0 means the whole split, or the first ENDLESS_EVAL tasks of an endless one. With several
    environments, it is `count` tasks of each, of their own splits.
    """
    if isinstance(factory, TaskChooser):
        return factory.eval_tasks(count, seed)
    with read_tasks(factory, split, seed) as tasks:
        task_count = size(tasks)
        if task_count is None:
            return _read_all(tasks, range(count or ENDLESS_EVAL))
        rng = random.Random(seed)
        indices: Sequence[int] = range(task_count)
        if factory.distinct_eval and 0 < count < task_count:
            indices = rng.sample(indices, count)
        elif not factory.distinct_eval and count:
            indices = rng.choices(indices, k=count)
        return _read_all(tasks, indices)


@contextmanager
def read_tasks(factory: EnvFactory, split: str, seed: int) -> Iterator[Tasks]:
    """Open a context in which the tasks of a split can be read.

    Tasks of a user's own environment are read in a thread, and each call of the user's code may
    take up to env.step_timeout_s. Raises OthersCodeError if that code raises anything, including
    SystemExit, or takes longer.
    """
    if not getattr(factory, "has_others_tasks", False):
        yield factory.tasks(split, seed)
        return

    config: Any = getattr(factory, "config", None)
    threads = Threads(1, config.step_timeout_s)

    def call(problem: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return threads.call(function, *arguments)
        except OURS:
            raise
        except BaseException as error:  # SystemExit as well
            fix = ""
            if threads.given_up:
                fix = "; give it its own time limit, or raise env.step_timeout_s"
            raise OthersCodeError(
                f"{problem}: {describe(error)}{user_location(error)}{fix}"
            ) from error

    try:
        tasks = call("the tasks of env.name cannot be read", factory.tasks, split, seed)
        if type(tasks) in (list, tuple):  # reading these calls no code of the user
            yield tasks
            return
        task_count = call("the number of tasks of env.name cannot be read", size, tasks)
        read_task = functools.partial(call, UNREADABLE, operator.getitem, tasks)
        yield Endless(read_task) if task_count is None else Sized(read_task, task_count)
    finally:
        threads.close()


def size(tasks: Tasks) -> int | None:
    """Return the number of tasks; None for an endless split."""
    return len(cast(Any, tasks)) if hasattr(tasks, "__len__") else None


def every_tenth(tasks: Any, held_out: bool) -> Any:
    """Return the held-out or the training part of a sequence: every tenth element, or all others.

    If there are fewer than ten elements, the last one is held out.
    """
    if held_out:
        return tasks[9::10] or tasks[-1:]
    if len(tasks) < 10:
        return tasks[:-1] or tasks
    return [task for i, task in enumerate(tasks) if i % 10 != 9]


def stream(factory: EnvFactory, split: str, start: int, count: int, seed: int) -> list[Task]:
    """Return tasks `start`, ..., `start + count - 1` of a split.

    An endless split keeps its own order, a finite one is `shuffled`.
    """
    with read_tasks(factory, split, seed) as tasks:
        task_count = size(tasks)
        indices: Iterable[int] = range(start, start + count)
        if task_count is not None:
            indices = [shuffled(seed, i, task_count) for i in indices]
        return _read_all(tasks, indices)


def _read_all(tasks: Tasks, indices: Iterable[int]) -> list[Task]:
    """Read the tasks at these indices. Raises OthersCodeError if one cannot be read."""
    try:
        return [tasks[i] for i in indices]
    except OURS:
        raise
    except BaseException as error:  # they may come from a file or a network
        raise OthersCodeError(f"{UNREADABLE}: {describe(error)}{user_location(error)}") from error


def shuffled(seed: int, i: int, n: int) -> int:
    """Return element i of an endless sequence that repeats range(n), each time in a new order."""
    epoch, position = divmod(i, n)
    return _order(seed, epoch, n)[position]


@functools.lru_cache(4)
def _order(seed: int, epoch: int, n: int) -> list[int]:
    order = list(range(n))
    random.Random(f"train/{seed}/{epoch}").shuffle(order)
    return order


def admissible_responses(env: Any) -> list[str]:
    """Return a well-formed response per admissible action. `env` must have all optional members."""
    return [env.format_action(action) for action in env.admissible_actions()]


def kind_name(kind: str) -> str:
    """Return a kind as metrics and tables show it.

    It is printable, so kinds that look the same count as one.
    """
    return clean(kind, KIND_CHARS)


def means_all_kinds(kind: str) -> bool:
    """Whether a kind, in any letter case, is one of ALL_KINDS. Its metric would replace theirs."""
    return kind_name(kind).lower() in ALL_KINDS


def check_kind(task: Task, factory: EnvFactory) -> None:
    """Raise UserError if the kind of a task of `factory` is one of ALL_KINDS."""
    if means_all_kinds(task.kind):
        raise UserError(
            f"{clean(factory.name)}: the task {short_repr(task.id)} "
            f"is of the kind {short_repr(task.kind)}, "
            "a name that reports use for all kinds; give it another kind"
        )
