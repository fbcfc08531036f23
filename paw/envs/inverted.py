"""An environment that runs its own loop and asks a model through an OpenAI-compatible endpoint.

Control is inverted here. `reset` starts the rollout as a coroutine and opens such an endpoint for
it. Each request to the endpoint is the next `context`, and `step` answers it. The reward of the
finished rollout is the reward of the last turn. The rollout advances only within `reset` and
`step`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from paw.config.sections import EnvConfig
from paw.config.values import Count, Positive
from paw.envs.conversation import Message, unread
from paw.errors import EnvironmentFailure, short_repr
from paw.gateway.messages import (
    ChatAnswer,
    RequestError,
    answer_message,
    call_message,
    text_of,
)
from paw.gateway.server import Gateway, Incoming
from paw.types import Outcome, Reply, Task

Play = Callable[[Any, str, str], Coroutine[Any, Any, float]]
"""(a task's payload, URL of the endpoint, model) -> the reward."""
WAIT = 0.9
"""Share of env.step_timeout_s that a rollout may take before its next request.

After the full time, code that blocks is abandoned together with its thread.
"""
CLOSE_S = 5.0
"""Time limit for ending a rollout."""


class VerifiersConfig(EnvConfig):
    """An environment written with Prime Intellect's verifiers."""

    name: str = "verifiers"
    """Which environment."""
    id: str = ""
    """Its package, installed or on PYTHONPATH."""
    args: dict[str, Any] = {}
    """The `[env]` table of verifiers' own commands: {taskset = {...}, agent = {...}}."""
    tasks: Count = 10_000
    """Number of tasks taken from an endless taskset."""
    eval_split: str = "eval"
    """Split to evaluate on, if the taskset has the key `split`. Otherwise every tenth task is held
    out."""
    reward: Positive = 1.0
    """The largest reward of an episode, R_max."""
    won_at: Positive | None = None
    """Reward from which an episode counts as won. If unset, env.reward."""


class InvertedEnv:
    """One rollout at a time, on its own event loop.

    The methods are plain functions, which run in a thread. So a rollout that blocks its loop fails
    only its own episode, and when a rollout ends, so do all tasks of its loop.
    """

    tools: list[dict[str, Any]]
    """The tools that the first request offers."""

    def __init__(self, play: Play, config: VerifiersConfig) -> None:
        self._play = play
        self.config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rollout: asyncio.Task[float] | None = None
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        # Set by `reset` and `step`.
        self._request: Request
        """The request that waits for an answer."""
        self._messages: list[Message] = []

    def reset(self, task: Task) -> str:
        """Start a rollout. Returns the last message's text.

        Raises EnvironmentFailure if it fails, hangs, or ends without asking the model.
        """
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(self._start(task))

    def context(self) -> list[Message]:
        return list(self._messages)

    def step(self, response: str) -> Outcome:
        """Answer the request. The observation is what the next request adds to the conversation."""
        assert self._loop is not None, "step() before reset()"
        return self._loop.run_until_complete(self._answer(response))

    def close(self) -> None:
        """End the rollout and its loop."""
        if self._loop is None:
            return
        try:
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()
            self._loop = None

    async def _start(self, task: Task) -> str:
        await self._end()
        self._requests = asyncio.Queue()
        self._rollout = asyncio.create_task(self._run(task.payload))
        request = await self._next()
        if not isinstance(request, Request):
            raise EnvironmentFailure(
                f"{self.config.id}: the rollout ended before it asked the model"
            )
        self._request = request
        self._messages = [_plain(message) for message in request.body["messages"]]
        self.tools = request.body.get("tools") or []
        return self._messages[-1]["content"]

    async def _answer(self, response: str) -> Outcome:
        reply = response if isinstance(response, Reply) else Reply(response)
        action = "; ".join(map(str, reply.calls)) or reply.content
        valid = bool(action.strip()) and not reply.problem

        old_messages = self._request.body["messages"]
        self._request.answer.set_result(_to_openai(reply, position=len(old_messages)))
        answer = await self._next()
        if not isinstance(answer, Request):
            reward = answer
            won_at = self.config.won_at or self.config.reward
            return Outcome(
                observation="",
                reward=reward,
                done=True,
                won=reward >= won_at,
                action=action,
                valid=valid,
                score=min(1.0, max(0.0, reward / self.config.reward)),
            )

        self._request = answer
        added_messages = self._add_messages(reply, old_messages, answer.body["messages"])
        texts = [message["content"] for message in added_messages]
        return Outcome(
            observation="\n".join(texts),
            reward=0.0,
            done=False,
            won=False,
            action=action,
            valid=valid,
            results=texts if len(texts) > 1 else [],
        )

    def _add_messages(
        self, reply: Reply, old_messages: list[Message], new_messages: list[Message]
    ) -> list[Message]:
        """Update the conversation with a request's messages. Returns the messages that it adds."""
        length = len(old_messages)
        added_messages = [_plain(message) for message in new_messages[length + 1 :]]
        is_continued = new_messages[:length] == old_messages and bool(added_messages)
        if is_continued and new_messages[length]["role"] == "assistant":
            self._messages += [reply.message(), *added_messages]
            return added_messages

        # This is a new conversation, or the same one rewritten.
        self._messages = [_plain(message) for message in new_messages]
        return self._messages[-1:]

    async def _end(self) -> None:
        """End the rollout and everything else on the loop."""
        rollout = self._rollout
        self._rollout = None
        if rollout is not None:
            rollout.cancel()
            await asyncio.wait({rollout}, timeout=CLOSE_S)  # it may have to clean up
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=CLOSE_S)

    async def _run(self, task: Any) -> float:
        async with _endpoint(self._requests) as (url, model):
            return await self._play(task, url, model)

    async def _next(self) -> "Request | float":
        """Return the rollout's next request, or its reward if it has ended.

        Raises EnvironmentFailure if it failed or hangs.
        """
        assert self._rollout is not None, "step() before reset() or after the end"
        limit_s = self.config.step_timeout_s
        next_request = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait(
                {next_request, self._rollout},
                timeout=WAIT * limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if next_request.done():
                return next_request.result()
            if self._rollout.done():
                rollout = self._rollout
                self._rollout = None
                return rollout.result()
        finally:
            next_request.cancel()
        raise EnvironmentFailure(
            f"{self.config.id}: neither a request nor an end within "
            f"env.step_timeout_s = {limit_s:g}"
        )


class Request:
    """A rollout's request: the body of a chat completion, and the message that answers it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


@asynccontextmanager
async def _endpoint(requests: "asyncio.Queue[Request]") -> AsyncIterator[tuple[str, str]]:
    """Open an OpenAI-compatible endpoint on this machine, which fills `requests`.

    Yields (URL, model). The model's name is a secret, so only this rollout can ask for it.
    """
    model = f"paw-{secrets.token_hex(16)}"

    async def complete(incoming: Incoming) -> ChatAnswer:
        if incoming.body.get("model") != model:
            raise RequestError(
                f"there is no model {short_repr(incoming.body.get('model'))} here: "
                "give the agent that asks for it its own client",
                status=404,
            )
        request = Request(incoming.body)
        requests.put_nowait(request)
        message = await request.answer
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
        return ChatAnswer(message, finish_reason)

    async with Gateway(model).session(complete) as (url, _):
        yield url, model


def _to_openai(reply: Reply, *, position: int) -> Message:
    """Return a reply as an endpoint sends it, with the thought in its own field.

    `position` is the message's number. A call that could not be read gets the problem as its
    arguments.
    """
    message = answer_message(reply.content, reply.calls)
    if reply.problem and not reply.calls:
        call = call_message(unread(position).id, "invalid_call", reply.problem)
        message["tool_calls"] = [call]
    return message


def _plain(message: Message) -> Message:
    """Return a message with its content as text. Raises EnvironmentFailure if it has an image."""
    try:
        return {**message, "content": text_of(message.get("content"))}
    except ValueError as error:
        raise EnvironmentFailure(f"a message has {error}") from None
