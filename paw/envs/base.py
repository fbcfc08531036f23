"""The environment protocol: text in, text out, no torch.

Which task is played when is the trainer's: `train_tasks`.
"""

import functools
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from paw.envs.threads import Threads
from paw.errors import OURS, OthersCodeError, UserError, clean, describe, place, shown
from paw.types import Outcome, Task

FURTHER = 1 << 40
"""Place in the order of training tasks of the first of `further_tasks`: no run gets there."""
ENDLESS_EVAL = 256
"""Tasks of an endless split that are played where all of it is asked for."""
ALL_KINDS = ("all", "avg.")
"""What metrics and tables call all kinds of tasks together, so no task may have one of them as its kind."""
KIND_CHARS = 200
"""Characters of a kind in the name of its metric."""
UNREADABLE = "a task of env.name cannot be had"


class Env(Protocol):
    """One playable episode at a time. Its methods may be coroutines.

    It may also have `anchor() -> str`, the observation as GiGPO compares it (default: the last
    one), `close()`, and `task: str`, the current task in words, for agents with prompts of their
    own (default: the first observation).

    With `tools`, a list of OpenAI function schemas (read after reset, the same for the whole
    episode), `step` gets a `paw.types.Reply`, the calls that the model made included;
    `paw.envs.conversation` has what such environments share.

    The quickstart's warm-up imitates, and `paw env check` plays, what training needs nothing of:
    `oracle() -> str`, a good response to the current context (NoOracleError where there is none);
    `admissible_actions() -> list[str]`, those that do something now, bare, without tags ([] for
    open-ended environments); and `format_action(action) -> str`, a well-formed response that plays
    a bare action (default: the action itself).
    """

    def reset(self, task: Task) -> str:
        """Start `task`; returns the first observation."""
        ...

    def context(self) -> "str | list[dict[str, Any]]":
        """What the model reads in the current turn, as one user message: task, history, observation, actions.

        Or a conversation, a list of {"role", "content"} of system, user, assistant and tool; a
        message of the assistant may have OpenAI's `tool_calls`, one of a tool `name` and
        `tool_call_id`.
        """
        ...

    def step(self, response: str) -> Outcome:
        """Play the action parsed from a model's `response` text."""
        ...


class Tasks(Protocol):
    """The tasks of a split: `tasks[i]`, and `len(tasks)` where they end. A list is one."""

    def __getitem__(self, i: int, /) -> Task: ...


class EnvFactory(Protocol):
    """A configured environment: its tasks and how to play them.

    A user's own may lack all but `tasks` and `make`.
    """

    name: str
    reward_max: float
    """R_max of lambda_g = 1 - mean return / R_max: the largest return of an episode (default: 1)."""
    invalid_penalty: float
    """Subtracted from the score of a turn whose response is invalid (default: env.invalid_penalty)."""
    may_block: bool = False
    """Whether its environments wait for something outside this process, a child or a network: they
    then run in threads, many at once."""
    runs_others_code: bool = False
    """Whether its environments are not ours: each call then has a thread, for env.step_timeout_s at
    most (a user's own: always)."""
    has_others_tasks: bool = False
    """Whether `tasks` is not ours either: it, and each task it gives, is then read in a thread, with that limit."""
    distinct_eval: bool = True
    """Whether an evaluation plays different tasks, as many as there are; else each is an
    independent draw, as in the reference code."""

    def tasks(self, split: str, seed: int) -> Tasks:
        """The tasks of a split; `seed` is for those that are generated. The split "warmup" is for
        the quickstart's warm-up model and shares no task with training or evaluation. UserError
        where there is no such split.
        """
        ...

    def make(self) -> Env: ...

    def fingerprint(self) -> str:
        """Version and content hash of the tasks: results of different ones do not compare (default: the name)."""
        ...


class Endless:
    """Tasks made on demand, without end: `make(i)` is number i."""

    def __init__(self, make: Callable[[int], Task]) -> None:
        self._make = make

    def __getitem__(self, i: int) -> Task:
        return self._make(i)


class Made(Endless):
    """`count` tasks made on demand."""

    def __init__(self, make: Callable[[int], Task], count: int) -> None:
        super().__init__(make)
        self._count = count

    def __len__(self) -> int:
        return self._count


def seeds(split: str, seed: int) -> Endless:
    """Tasks that are seeds, each `payload["seed"]` below 2^31."""

    def task(i: int) -> Task:
        name = f"{split}/{seed}/{i}"
        return Task(name, payload={"seed": random.Random(name).getrandbits(31)})

    return Endless(task)


def train_tasks(
    factory: EnvFactory, step: int, count: int, seed: int, *, split: str = "train"
) -> list[Task]:
    """The `count` tasks of update `step`, a function of the arguments: of n tasks each once an epoch."""
    return _stream(factory, split, step * count, count, seed)


def further_tasks(
    factory: EnvFactory, start: int, count: int, seed: int, *, split: str = "train"
) -> list[Task]:
    """`count` tasks from the `start`-th on of a sequence of its own: `train_tasks` stays what it is."""
    return _stream(factory, split, FURTHER + start, count, seed)


def warmup_tasks(factory: EnvFactory, start: int, count: int, seed: int) -> list[Task]:
    """Tasks `start`, `start + 1`, ... of the warm-up."""
    return _stream(factory, "warmup", start, count, seed)


def eval_tasks(factory: EnvFactory, split: str, count: int, seed: int) -> list[Task]:
    """`count` seeded tasks of a held-out `split`; 0 is all of it, of an endless one the first ENDLESS_EVAL."""
    with read_tasks(factory, split, seed) as tasks:
        n = size(tasks)
        if n is None:
            return _listed(tasks, range(count or ENDLESS_EVAL))
        rng, order = random.Random(seed), range(n)
        if factory.distinct_eval:
            order = rng.sample(order, count) if 0 < count < n else order
        elif count:
            order = rng.choices(order, k=count)
        return _listed(tasks, order)


@contextmanager
def read_tasks(factory: EnvFactory, split: str, seed: int) -> Iterator[Tasks]:
    """The tasks of a split, to be read inside. Those of a user's own are read in one thread: each
    call of its code has env.step_timeout_s. Raises OthersCodeError for whatever it raises,
    SystemExit included, and for a late answer.
    """
    if not getattr(factory, "has_others_tasks", False):
        yield factory.tasks(split, seed)
        return

    config: Any = getattr(factory, "config", None)
    threads = Threads(1, config.step_timeout_s)

    def call(what: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return threads.call(function, *args)
        except OURS:
            raise
        except BaseException as error:  # SystemExit as well
            fix = (
                "; give it a time limit of its own, or raise env.step_timeout_s"
                if threads.given_up
                else ""
            )
            raise OthersCodeError(f"{what}: {describe(error)}{place(error)}{fix}") from error

    try:
        tasks = call("the tasks of env.name cannot be had", factory.tasks, split, seed)
        if type(tasks) in (list, tuple):  # reading these calls none of its code
            yield tasks
            return
        count = call("the number of tasks of env.name cannot be had", size, tasks)
        read = functools.partial(call, UNREADABLE, operator.getitem, tasks)
        yield Endless(read) if count is None else Made(read, count)
    finally:
        threads.close()


def size(tasks: Tasks) -> int | None:
    """Number of tasks; None for an endless split."""
    return len(tasks) if hasattr(tasks, "__len__") else None  # pyright: ignore[reportArgumentType]


def every_tenth(tasks: Any, held_out: bool) -> Any:
    """Every tenth of a sequence without splits, which is `held_out`, or the others; of fewer than ten, the last one."""
    if held_out:
        return tasks[9::10] or tasks[-1:]
    return (
        [task for i, task in enumerate(tasks) if i % 10 != 9]
        if len(tasks) > 9
        else tasks[:-1] or tasks
    )


def _stream(factory: EnvFactory, split: str, start: int, count: int, seed: int) -> list[Task]:
    with read_tasks(factory, split, seed) as tasks:
        n = size(tasks)
        return _listed(
            tasks, (i if n is None else shuffled(seed, i, n) for i in range(start, start + count))
        )


def _listed(tasks: Tasks, order: Iterable[int]) -> list[Task]:
    try:
        return [tasks[i] for i in order]
    except OURS:
        raise
    except BaseException as error:  # they may come from a file or a network
        raise OthersCodeError(f"{UNREADABLE}: {describe(error)}{place(error)}") from error


def shuffled(seed: int, i: int, n: int) -> int:
    """Element i of an endless sequence over range(n) that goes through all of it, in a new order, again and again."""
    return _order(seed, i // n, n)[i % n]


@functools.lru_cache(4)
def _order(seed: int, epoch: int, n: int) -> list[int]:
    order = list(range(n))
    random.Random(f"train/{seed}/{epoch}").shuffle(order)
    return order


def admissible_responses(env: Any) -> list[str]:
    """A well-formed response for each admissible action; `env` has all members of an Env, or is guarded."""
    return [env.format_action(action) for action in env.admissible_actions()]


def kind_name(kind: str) -> str:
    """A kind as metrics and tables show it: printable, so that kinds which read the same are counted together."""
    return clean(kind, KIND_CHARS)


def means_all_kinds(kind: str) -> bool:
    """Whether a kind has the name of all kinds together, in any case: its metric would replace theirs."""
    return kind_name(kind).lower() in ALL_KINDS


def check_kind(task: Task, factory: EnvFactory) -> None:
    """Raises UserError if a task of `factory` has the name of all kinds as its kind."""
    if means_all_kinds(task.kind):
        raise UserError(
            f"{clean(factory.name)}: the task {shown(task.id)} is of the kind {shown(task.kind)}, which reports call "
            "all kinds together; give it another kind"
        )
