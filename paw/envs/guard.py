"""Between an environment and whoever plays it: what it returns is checked where it comes in, and an episode is bounded.

Whatever an environment raises, returns or fails to return costs its own episode; see `paw.errors.OURS` for what passes.
"""

import numbers
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from paw.config import EnvConfig
from paw.envs.base import EnvFactory
from paw.envs.worker import EnvironmentFailure
from paw.errors import shown
from paw.rollout.threads import Threads
from paw.types import Outcome, Task

MAX_REWARD = 1e6
"""Largest reward of a step in size: sums of squares of a whole update stay far from the end of float32."""


def make_threads(factory: EnvFactory, config: EnvConfig, count: int = 1) -> Threads:
    """Where the environments of a factory run: up to `count` at once where they may block, else one at a time.

    Ours keep time limits of their own, and those that never wait stay in the caller's thread. Any other gets a thread
    and env.step_timeout_s a call.
    """
    count = count if factory.may_block else 1
    if type(factory).__module__.startswith("paw."):
        return Threads(count if count > 1 else 0)
    return Threads(count, config.step_timeout_s)


class Guarded:
    """An Env of `factory` whose answers are sound.

    Everything raised is the environment's own exception, or EnvironmentFailure for what it should not have returned.
    Texts are cut to env.max_text, at the end that the tokeniser would cut, and lone surrogates become question marks; a
    turn that reaches env.max_turns is the last. Other members (`task`) are the environment's.

    Args:
        threads: what makes the environment. One that cannot be made says so at its first `reset`.
        bounded: whether every call goes through `threads`, rather than the caller's own thread.
    """

    def __init__(self, factory: EnvFactory, config: EnvConfig, threads: Threads, *, bounded: bool = False) -> None:
        self._made = threads.settled(threads.submit(factory.make))
        self._config, self._threads, self._bounded = config, threads, bounded
        self._environment: Any = None
        self._turns = 0
        self.texts_cut = 0

    def reset(self, task: Task) -> str:
        self._environment = self._made.result()
        self._turns = 0
        return self._text("reset()", self._call("reset", task))

    def context(self) -> str:
        return self._text("context()", self._call("context"), tail=True)

    def anchor(self) -> str:
        return self._text("anchor()", self._call("anchor"))

    def step(self, response: str) -> Outcome:
        outcome = self._call("step", response)
        if not isinstance(outcome, Outcome):
            self._refuse("step()", outcome, "an Outcome (paw/types.py)")
        self._turns += 1
        return replace(
            outcome,
            observation=self._text("Outcome.observation", outcome.observation),
            reward=self._number("reward", outcome.reward, -MAX_REWARD, MAX_REWARD),
            done=self._flag("done", outcome.done) or self._turns >= self._config.max_turns,
            won=self._flag("won", outcome.won),
            action=self._text("Outcome.action", outcome.action),
            valid=self._flag("valid", outcome.valid),
            score=None if outcome.score is None else self._number("score", outcome.score, 0, 1),
        )

    def oracle(self) -> str:
        return self._text("oracle()", self._call("oracle"))

    def admissible_actions(self) -> list[str]:
        return [self._text("admissible_actions()", action) for action in self._call("admissible_actions")]

    def format_action(self, action: str) -> str:
        return self._text("format_action()", self._call("format_action", action))

    def close(self) -> None:
        hangs = self._bounded and self._threads.given_up
        if self._environment is not None and not hangs:
            self._call("close")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def _call(self, name: str, *args: Any) -> Any:
        method: Callable[..., Any] = getattr(self._environment, name)
        return self._threads.call(method, *args) if self._bounded else method(*args)

    def _text(self, what: str, value: object, *, tail: bool = False) -> str:
        if not isinstance(value, str):
            self._refuse(what, value, "text")
        most = self._config.max_text
        if len(value) > most:
            self.texts_cut += 1
            value = value[-most:] if tail else value[:most]
        return value.encode("utf-8", "replace").decode()

    def _number(self, name: str, value: Any, least: float, most: float) -> float:
        if not isinstance(value, numbers.Real) or not least <= value <= most:  # pyright: ignore[reportOperatorIssue]
            self._refuse(f"Outcome.{name}", value, f"a number from {least:g} to {most:g}")
        return float(value)

    def _flag(self, name: str, value: object) -> bool:
        numpy_bool = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
        if not (isinstance(value, bool) or numpy_bool):
            self._refuse(f"Outcome.{name}", value, "True or False")
        return bool(value)

    def _refuse(self, what: str, value: object, wanted: str) -> NoReturn:
        raise EnvironmentFailure(f"{type(self._environment).__name__}: {what} is {shown(value)}; it must be {wanted}")
