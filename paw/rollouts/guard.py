"""Between an environment and whoever plays it: what it returns is checked where it comes in, and an episode is bounded.

Whatever it raises, returns or fails to return costs its own episode; see `paw.errors.OURS` for what passes.
"""

import asyncio
import inspect
import json
import numbers
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from paw.config import EnvConfig
from paw.envs.base import EnvFactory
from paw.envs.threads import Threads
from paw.errors import EnvironmentFailure, NoOracleError, clean, shown
from paw.types import Outcome, Reply, Task

ROLES = ("system", "user", "assistant", "tool")
MAX_REWARD = 1e6
"""Largest reward of a step in size: sums of squares of a whole update stay far from the end of float32."""


def make_threads(factory: EnvFactory, config: EnvConfig, count: int = 1) -> Threads:
    """Where environments of a factory run: up to `count` at once where they may block, else one at a time. Ours have
    time limits of their own, and those that never wait stay in the caller's thread."""
    count = count if factory.may_block else 1
    if factory.runs_others_code:
        return Threads(count, config.step_timeout_s)
    return Threads(count if count > 1 else 0)


class Guarded:
    """An Env whose answers are sound, its methods sync or async; what it may lack has its default.

    Raises EnvironmentFailure for what it should not have returned. Texts are cut to env.max_text, at the end that the
    tokeniser would cut, and lone surrogates become question marks; turn env.max_turns is the last. Other members are
    the environment's.
    """

    def __init__(self, environment: Any, config: EnvConfig) -> None:
        self._environment, self._config, self._name = environment, config, type(environment).__name__
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns, self._last = 0, ""
        self.texts_cut = 0
        self.tools: list[dict[str, Any]] = []
        """What the environment offers in this episode."""

    def reset(self, task: Task) -> str:
        self._turns = 0
        self._last = self._text("reset()", self._call("reset", task))
        self.tools = getattr(self._environment, "tools", None) or []
        if self.tools:
            from paw.envs.tools import checked_tools

            try:
                self.tools = checked_tools(self.tools)
            except ValueError as error:
                raise EnvironmentFailure(f"{self._name}: {clean(error)}") from None
        return self._last

    def context(self) -> str | list[dict[str, Any]]:
        found = self._call("context")
        if not isinstance(found, list):
            return self._text("context()", found, tail=True)
        if not found or not all(isinstance(m, Mapping) for m in found):
            self._refuse("context()", found, 'text, or a list of {"role": ..., "content": ...}')
        messages = [self._message(place, message) for place, message in enumerate(found)]
        if messages[-1]["role"] == "assistant":
            self._refuse("context()", found[-1:], "a conversation that ends before the model's answer")
        return messages

    def anchor(self) -> str:
        """The observation as GiGPO compares it: the last one, unless the Env says otherwise."""
        return self._text("anchor()", self._call("anchor", default=self._last))

    def step(self, response: str) -> Outcome:
        """An environment with tools gets a Reply, whose calls are checked against them."""
        if self.tools:
            from paw.envs.tools import checked_reply

            response = checked_reply(response, self.tools)
        outcome = self._call("step", response)
        if not isinstance(outcome, Outcome):
            self._refuse("step()", outcome, "an Outcome (paw/types.py)")
        self._turns += 1
        self._last = self._text("Outcome.observation", outcome.observation)
        score, name = outcome.score, f"{self._name}: Outcome"
        return replace(
            outcome,
            observation=self._last,
            reward=number(f"{name}.reward", outcome.reward, -MAX_REWARD, MAX_REWARD),
            done=self._flag("done", outcome.done) or self._turns >= self._config.max_turns,
            won=self._flag("won", outcome.won),
            action=self._text("Outcome.action", outcome.action),
            valid=self._flag("valid", outcome.valid),
            score=None if score is None else number(f"{name}.score", score, 0, 1),
            results=[self._text(f"{name}.results", text) for text in outcome.results],
        )

    def oracle(self) -> str:
        """Raises NoOracleError where there is none."""
        if not hasattr(self._environment, "oracle"):
            raise NoOracleError(f"{self._name} has no oracle()")
        return self._answer("oracle()", self._call("oracle"))

    def admissible_actions(self) -> list[str]:
        return [self._text("admissible_actions()", x) for x in self._call("admissible_actions", default=[])]

    def format_action(self, action: str) -> str:
        """A well-formed response that plays `action`: the action itself, unless the Env says otherwise."""
        return self._answer("format_action()", self._call("format_action", action, default=action))

    def close(self) -> None:
        self._call("close")
        if self._loop:
            self._loop.close()
            self._loop = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def _call(self, name: str, *args: Any, default: Any = None) -> Any:
        method = getattr(self._environment, name, None)
        value = method(*args) if method else default
        if inspect.isawaitable(value):  # on a loop of its own, so that one that blocks costs its own episode
            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(value)
        return value

    def _text(self, what: str, value: object, *, tail: bool = False) -> str:
        if not isinstance(value, str):
            self._refuse(what, value, "text")
        most = self._config.max_text
        if len(value) > most:
            self.texts_cut += 1
            value = value[-most:] if tail else value[:most]
        return value.encode("utf-8", "replace").decode()

    def _answer(self, what: str, value: object) -> str:
        return value if isinstance(value, Reply) else self._text(what, value)

    def _message(self, place: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Of its keys those that a chat template knows."""
        what, role, calls = f"context()[{place}]", message.get("role"), message.get("tool_calls") or []
        if role not in ROLES:
            self._refuse(f"the role of {what}", role, f"one of {', '.join(ROLES)}")
        content = message.get("content")
        content = "" if content is None and calls else self._text(f"the content of {what}", content, tail=True)
        kept: dict[str, Any] = {
            key: self._text(f"{what}: {key}", message[key]) for key in ("name", "tool_call_id") if message.get(key)
        }
        if calls:
            kept["tool_calls"] = [self._tool_call(what, role, call) for call in calls]
        return {"role": role, "content": content, **kept}

    def _tool_call(self, what: str, role: Any, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        name, given = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (0, 0)
        try:
            arguments = json.loads(given) if isinstance(given, str) else json.loads(json.dumps(given, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            arguments = None
        if role != "assistant" or not isinstance(name, str) or not isinstance(arguments, dict):
            wanted = 'those of an assistant, each {"id", "function": {"name", "arguments": a JSON object}}'
            self._refuse(f"tool_calls of {what}", call, wanted)
        function = {"name": name, "arguments": arguments}
        return {
            "id": self._text(f"{what}: a call's id", call.get("id") or ""),
            "type": "function",
            "function": function,
        }

    def _flag(self, name: str, value: object) -> bool:
        if type(value).__name__ not in ("bool", "bool_"):  # numpy's own as well
            self._refuse(f"Outcome.{name}", value, "True or False")
        return bool(value)

    def _refuse(self, what: str, value: object, wanted: str) -> NoReturn:
        raise EnvironmentFailure(f"{self._name}: {what} is {shown(value)}; it must be {wanted}")


class TimedGuard(Guarded):
    """An environment of a factory, whose calls have a thread, and env.step_timeout_s each, if it is not ours."""

    def __init__(self, factory: EnvFactory, config: EnvConfig) -> None:
        self._threads = make_threads(factory, config)
        super().__init__(self._threads.call(factory.make), config)

    def close(self) -> None:
        """One that hangs is not waited for again."""
        try:
            if not self._threads.given_up:
                super().close()
        finally:
            self._threads.close()

    def _call(self, name: str, *args: Any, default: Any = None) -> Any:
        return self._threads.call(partial(super()._call, name, *args, default=default))


def number(what: str, value: Any, least: float, most: float) -> float:
    """`value` as a float. Raises EnvironmentFailure where it is no number of that range."""
    if not isinstance(value, numbers.Real) or not least <= value <= most:  # pyright: ignore[reportOperatorIssue]
        raise EnvironmentFailure(f"{what} is {shown(value)}; it must be a number from {least:g} to {most:g}")
    return float(value)
