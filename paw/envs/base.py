"""The environment protocol: text in, text out, no torch.

An `Env` plays one episode at a time and owns everything about its text: the context shown to the model, parsing a
response into an action, which responses are invalid. An `EnvFactory` is a configured family of tasks: it lists them and
makes environments.
"""

import functools
import random
from typing import Protocol

from paw.types import Outcome, Task


class Env(Protocol):
    """One playable episode at a time."""

    def reset(self, task: Task) -> str:
        """Start `task`; returns the first observation."""
        ...

    def context(self) -> str:
        """What the model reads in the current turn, as one user message: task, history, observation, actions."""
        ...

    def anchor(self) -> str:
        """The current observation as GiGPO compares it."""
        ...

    def step(self, response: str) -> Outcome:
        """Play the action parsed from a model's `response` text."""
        ...

    def oracle(self) -> str:
        """A good response to the current context, well-formed: what a warm-up imitates."""
        ...

    def admissible_actions(self) -> list[str]:
        """Actions that do something now, bare, without tags; [] for open-ended environments."""
        ...

    def format_action(self, action: str) -> str:
        """A well-formed response that plays the bare `action`."""
        ...

    def close(self) -> None: ...


class Playable(Env, Protocol):
    """What agents with prompts of their own (ReAct, Reflexion, Search-R1) need besides; training does not."""

    task: str
    """The current task in words."""


def admissible_responses(env: Env) -> list[str]:
    """A well-formed response for each admissible action."""
    return [env.format_action(action) for action in env.admissible_actions()]


class EnvFactory(Protocol):
    """A configured environment: its tasks and how to play them."""

    name: str
    reward_max: float
    """R_max of lambda_g = 1 - mean return / R_max."""
    invalid_penalty: float
    may_block: bool
    """Whether its environments wait for something outside this process (a child, a network): they run in threads. Else
    one turn is played at a time; those of a user in another thread than the trainer's all the same, see `guard`."""

    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        """The tasks of update `step`: a pure function of its arguments, so that a resumed run sees the same ones."""
        ...

    def eval_tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """`count` seeded draws of a held-out `split`; count 0 is the whole split."""
        ...

    def warmup_tasks(self, start: int, count: int, seed: int) -> list[Task]:
        """Tasks `start`, `start + 1`, ... of the warm-up stream, which shares none with training or evaluation."""
        ...

    def make(self) -> Env: ...

    def fingerprint(self) -> str:
        """Version and content hash of the games: results of different ones do not compare."""
        ...


def shuffled(seed: int, i: int, n: int) -> int:
    """Place `i` of an endless sequence over n games that goes through all of them, in a new order, again and again."""
    epoch, place = divmod(i, n)
    return _order(seed, epoch, n)[place]


@functools.lru_cache(4)
def _order(seed: int, epoch: int, n: int) -> list[int]:
    order = list(range(n))
    random.Random(f"train/{seed}/{epoch}").shuffle(order)
    return order
