"""Checks what an environment returns before it is used, and bounds the length of an episode.

If an environment raises an error, returns something wrong or does not return, only its own episode
fails. The exceptions are the errors in `paw.errors.OURS`.
"""

import asyncio
import inspect
import json
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

from paw.config.sections import EnvConfig
from paw.envs.base import EnvFactory, is_coroutine_env
from paw.envs.tools import checked_reply, checked_tools
from paw.errors import EnvironmentFailure, NoOracleError, clean, short_repr
from paw.io.threads import Threads
from paw.types import Outcome, Reply, Task

ROLES = ("system", "user", "assistant", "tool")
MAX_REWARD = 1e6
"""Largest absolute reward of a step.

Sums of squares over an update then stay far below float32's largest number.
"""


def make_threads(factory: EnvFactory, config: EnvConfig, count: int = 1) -> Threads:
    """Make the threads in which a factory's environments run.

    There are at most `count` if the environments may block, otherwise one. Environments of this
    project have their own time limits, and those that never wait stay in the caller's thread.
    """
    if not factory.may_block:
        count = 1
    if factory.runs_others_code:
        return Threads(count, config.step_timeout_s)
    return Threads(count if count > 1 else 0)


class CheckedEnv:
    """An Env whose results are checked. Its methods may be sync or async.

    The methods here are synchronous. They return when the environment's own methods have returned,
    and run its coroutines on their own loop. Episodes instead await a coroutine environment on
    their event loop (`paw.rollouts.coroutine_env`), with the same checks (methods `checked_...`).

    Optional methods have a default. A result that is not allowed raises EnvironmentFailure. Texts
    are cut to env.max_text, at the end that the tokenizer would cut, and lone surrogates become
    question marks. An episode ends after turn env.max_turns. All other attributes are those of the
    environment itself.
    """

    def __init__(self, environment: Any, config: EnvConfig) -> None:
        self._environment = environment
        self._config = config
        self._name = type(environment).__name__
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = 0
        """Steps of this episode so far."""
        self._last = ""
        """The last observation."""
        self.texts_cut = 0
        self.tools: list[dict[str, Any]] = []
        """The environment's tools in this episode, as OpenAI function schemas."""
        self.is_coroutine_env = is_coroutine_env(environment)
        self.is_closed = False
        """Whether it has been closed, or is being closed."""
        self.is_busy = False
        """Whether a thread is in one of its methods."""
        self.last_call: asyncio.Task[Any] | None = None
        """The last call of a coroutine environment."""

    @property
    def environment(self) -> Any:
        """The environment itself, without checks."""
        return self._environment

    def reset(self, task: Task) -> str:
        return self.checked_start(self._call("reset", task))

    def checked_start(self, observation: object) -> str:
        """Check what reset() returned, and the tools. A new episode begins."""
        self._turns = 0
        self._last = self._text("reset()", observation)
        self.tools = getattr(self._environment, "tools", None) or []
        if self.tools:
            try:
                self.tools = checked_tools(self.tools)
            except ValueError as error:
                raise EnvironmentFailure(f"{self._name}: {clean(error)}") from None
        return self._last

    def context(self) -> str | list[dict[str, Any]]:
        return self.checked_context(self._call("context"))

    def checked_context(self, context: Any) -> str | list[dict[str, Any]]:
        if not isinstance(context, list):
            return self._text("context()", context, tail=True)
        if not context or not all(isinstance(message, Mapping) for message in context):
            self._refuse("context()", context, 'text, or a list of {"role": ..., "content": ...}')
        messages = [
            self._message(message_index, message) for message_index, message in enumerate(context)
        ]
        if messages[-1]["role"] == "assistant":
            self._refuse(
                "context()", context[-1:], "a conversation that ends before the model's answer"
            )
        return messages

    def anchor(self) -> str:
        """Return the observation that GiGPO compares, by default the last one."""
        return self.checked_anchor(self._call("anchor", default=self._last))

    def checked_anchor(self, anchor: object) -> str:
        return self._text("anchor()", anchor)

    @property
    def last_observation(self) -> str:
        return self._last

    def step(self, response: str) -> Outcome:
        """Step the environment. If it has tools, it gets a Reply with checked calls."""
        return self.checked_outcome(self._call("step", self.checked_response(response)))

    def checked_response(self, response: str) -> str:
        """Return the response as step() gets it: a Reply with checked calls if there are tools."""
        return checked_reply(response, self.tools) if self.tools else response

    def checked_outcome(self, outcome: Any) -> Outcome:
        """Check what step() returned. One more turn of the episode has been played."""
        if not isinstance(outcome, Outcome):
            self._refuse("step()", outcome, "an Outcome (paw/types.py)")

        self._turns += 1
        self._last = self._text("Outcome.observation", outcome.observation)
        name = f"{self._name}: Outcome"
        reward = number(f"{name}.reward", outcome.reward, -MAX_REWARD, MAX_REWARD)
        done = self._flag("done", outcome.done) or self._turns >= self._config.max_turns
        won = self._flag("won", outcome.won)
        action = self._text("Outcome.action", outcome.action)
        valid = self._flag("valid", outcome.valid)
        score = None if outcome.score is None else number(f"{name}.score", outcome.score, 0, 1)
        results = [self._text(f"{name}.results", text) for text in outcome.results]
        return replace(
            outcome,
            observation=self._last,
            reward=reward,
            done=done,
            won=won,
            action=action,
            valid=valid,
            score=score,
            results=results,
        )

    def oracle(self) -> str:
        """Return a response that plays well. Raises NoOracleError if there is no oracle."""
        if not hasattr(self._environment, "oracle"):
            raise NoOracleError(f"{self._name} has no oracle()")
        return self._answer("oracle()", self._call("oracle"))

    def admissible_actions(self) -> list[str]:
        return self.checked_actions(self._call("admissible_actions", default=[]))

    def checked_actions(self, actions: Any) -> list[str]:
        return [self._text("admissible_actions()", action) for action in actions]

    def format_action(self, action: str) -> str:
        """Return a well-formed response that plays `action`, by default the action itself."""
        return self.checked_action(self._call("format_action", action, default=action))

    def checked_action(self, response: object) -> str:
        return self._answer("format_action()", response)

    def admissible_responses(self) -> list[str]:
        """Return a well-formed response per admissible action."""
        return self._run(self._admissible_responses)

    def close(self) -> None:
        """Close the environment, unless it is closed already."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._call("close")
        finally:
            if self._loop:
                self._loop.close()
                self._loop = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def _run(self, function: Callable[[], Any]) -> Any:
        """Call `function`, which uses the environment, and return its result."""
        return function()

    def _call(self, name: str, *args: Any, default: Any = None) -> Any:
        return self._run(partial(self._result_of, name, *args, default=default))

    def _admissible_responses(self) -> list[str]:
        responses = []
        for action in self.checked_actions(self._result_of("admissible_actions", default=[])):
            response = self._result_of("format_action", action, default=action)
            responses.append(self.checked_action(response))
        return responses

    def _result_of(self, name: str, *args: Any, default: Any = None) -> Any:
        """Return the method's result, awaited if async, or `default` if there is no such method."""
        method = getattr(self._environment, name, None)
        result = method(*args) if method else default
        if inspect.isawaitable(result):
            # This uses its own loop, so a method that blocks delays only its own episode.
            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(result)
        return result

    def _text(self, source: str, value: object, *, tail: bool = False) -> str:
        """Return `value` if it is a text, made encodable and cut to env.max_text.

        With `tail` the end is kept, otherwise the beginning.
        """
        if not isinstance(value, str):
            self._refuse(source, value, "text")
        limit = self._config.max_text
        if len(value) > limit:
            self.texts_cut += 1
            value = value[-limit:] if tail else value[:limit]
        return value.encode("utf-8", "replace").decode()

    def _answer(self, source: str, value: object) -> str:
        return value if isinstance(value, Reply) else self._text(source, value)

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Check message number `index` of a context. It keeps the keys that a template knows."""
        source = f"context()[{index}]"
        role = message.get("role")
        if role not in ROLES:
            self._refuse(f"the role of {source}", role, f"one of {', '.join(ROLES)}")

        tool_calls = message.get("tool_calls") or []
        content = ""
        if message.get("content") is not None or not tool_calls:  # a message with calls needs none
            content = self._text(f"the content of {source}", message.get("content"), tail=True)

        checked: dict[str, Any] = {"role": role, "content": content}
        for key in ("name", "tool_call_id"):
            if message.get(key):
                checked[key] = self._text(f"{source}: {key}", message[key])
        if tool_calls:
            checked["tool_calls"] = [
                self._tool_call(source, role, tool_call) for tool_call in tool_calls
            ]
        return checked

    def _tool_call(self, source: str, role: Any, call: Any) -> dict[str, Any]:
        """Check a call in the message `source`. Arguments in a JSON text become an object."""
        function = call.get("function") if isinstance(call, Mapping) else None
        name = None
        arguments = None
        if isinstance(function, Mapping):
            name = function.get("name")
            arguments = _json_value(function.get("arguments"))
        if role != "assistant" or not isinstance(name, str) or not isinstance(arguments, dict):
            wanted = (
                "those of an assistant, each "
                '{"id", "function": {"name", "arguments": a JSON object}}'
            )
            self._refuse(f"tool_calls of {source}", call, wanted)
        return {
            "id": self._text(f"{source}: a call's id", call.get("id") or ""),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _flag(self, name: str, value: object) -> bool:
        if type(value).__name__ not in ("bool", "bool_"):  # "bool_" is numpy's
            self._refuse(f"Outcome.{name}", value, "True or False")
        return bool(value)

    def _refuse(self, source: str, value: object, wanted: str) -> NoReturn:
        raise EnvironmentFailure(
            f"{self._name}: {source} is {short_repr(value)}; it must be {wanted}"
        )


class TimedEnv(CheckedEnv):
    """A new environment of a factory, with a time limit of env.step_timeout_s for its calls.

    Calls run in a thread, unless the environment is one of this project's. Changing threads takes
    longer than most calls, so `admissible_responses` counts as one call.
    """

    def __init__(self, factory: EnvFactory, config: EnvConfig) -> None:
        self._threads = make_threads(factory, config)
        super().__init__(self._threads.call(factory.make), config)

    def close(self) -> None:
        """Close the environment, unless one of its calls hangs and closing would wait for it."""
        try:
            if not self._threads.given_up:
                super().close()
        finally:
            self._threads.close()

    def _run(self, function: Callable[[], Any]) -> Any:
        return self._threads.call(function)


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return `value` as a float. Raises EnvironmentFailure if it is not in [`low`, `high`]."""
    if not isinstance(value, numbers.Real) or not low <= cast(float, value) <= high:
        raise EnvironmentFailure(
            f"{name} is {short_repr(value)}; it must be a number from {low:g} to {high:g}"
        )
    return float(value)


def _json_value(value: Any) -> Any:
    """Return `value` as JSON data, parsed if it is a text; None if it is not JSON."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
