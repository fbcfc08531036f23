"""An environment that runs a loop of its own and asks a model through an OpenAI-compatible endpoint.

So control is inverted: `reset` starts its rollout as a coroutine beside such an endpoint, a request
there is the next `context`, `step` answers it, and the reward of the finished rollout is that of
the last turn. Within `reset` and `step` alone the rollout goes on.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from paw.config import EnvConfig
from paw.envs.conversation import Message, unread
from paw.errors import EnvironmentFailure, shown
from paw.types import THINKING, Outcome, Reply, Task
from paw.values import Count, Positive

Play = Callable[[Any, str, str], Coroutine[Any, Any, float]]
"""(a task's payload, URL, model) -> the reward."""
WAIT = 0.9
"""Of env.step_timeout_s: for code that waits.

Beyond all of it, code that blocks is given up, and its thread.
"""
CLOSE_S = 5.0
MAX_BYTES = 1 << 28
"""Of a request: a whole conversation."""


class VerifiersConfig(EnvConfig):
    """An environment written with verifiers of Prime Intellect."""

    name: str = "verifiers"
    """Which environment."""
    id: str = ""
    """Its package, installed or in PYTHONPATH."""
    args: dict[str, Any] = {}
    """The `[env]` table of verifiers' own commands: {taskset = {...}, agent = {...}}."""
    tasks: Count = 10_000
    """Tasks taken of a taskset without end."""
    eval_split: str = "eval"
    """Of a taskset with the key `split` its value; else every tenth task is held out for it."""
    reward: Positive = 1.0
    """The largest reward of an episode, R_max."""
    won_at: Positive | None = None
    """Reward from which an episode counts as won; unset, env.reward."""


class InvertedEnv:
    """One rollout at a time."""

    tools: list[dict[str, Any]]
    """What the first request offers."""

    def __init__(self, play: Play, config: VerifiersConfig) -> None:
        self._play, self.config = play, config
        self._rollout: asyncio.Task[float] | None = None
        self._asked: asyncio.Queue[Request] = asyncio.Queue()

    async def reset(self, task: Task) -> str:
        """Start a rollout; returns the last message's text.

        EnvironmentFailure: it fails, hangs or asks nothing.
        """
        await self.close()
        self._asked = asyncio.Queue()
        self._rollout = asyncio.create_task(self._run(task.payload))
        request = await self._next()
        if not isinstance(request, Request):
            raise EnvironmentFailure(
                f"{self.config.id}: the rollout ended before it asked the model"
            )
        self._request, self._messages = request, [_plain(m) for m in request.body["messages"]]
        self.tools = request.body.get("tools") or []
        return self._messages[-1]["content"]

    def context(self) -> list[Message]:
        return list(self._messages)

    async def step(self, response: str) -> Outcome:
        """Answer the request; the observation is what the next one adds."""
        reply = response if isinstance(response, Reply) else Reply(response)
        before = self._request.body["messages"]
        self._request.answer.set_result(_wire(reply, len(before)))
        action = "; ".join(map(str, reply.calls)) or reply.content
        valid = bool(action.strip()) and not reply.problem
        found = await self._next()
        if not isinstance(found, Request):
            score, won_at = (
                min(1.0, max(0.0, found / self.config.reward)),
                self.config.won_at or self.config.reward,
            )
            return Outcome(
                "", found, True, won=found >= won_at, action=action, valid=valid, score=score
            )
        self._request, after = found, found.body["messages"]
        added = [_plain(m) for m in after[len(before) + 1 :]]
        if after[: len(before)] == before and added and after[len(before)]["role"] == "assistant":
            self._messages += [reply.message(), *added]
        else:  # another conversation, or the same one rewritten
            self._messages = [_plain(m) for m in after]
            added = self._messages[-1:]
        seen = [message["content"] for message in added]
        results = seen if len(seen) > 1 else []
        return Outcome(
            "\n".join(seen), 0.0, done=False, won=False, action=action, valid=valid, results=results
        )

    async def close(self) -> None:
        """End the rollout, and whatever else runs on the loop, which is this episode's own."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()
            await asyncio.wait({rollout}, timeout=CLOSE_S)  # it may have to tidy up
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=CLOSE_S)

    async def _run(self, task: Any) -> float:
        async with _endpoint(self._asked) as (url, model):
            return await self._play(task, url, model)

    async def _next(self) -> "Request | float":
        """What the rollout asks next; its reward where it has ended.

        EnvironmentFailure: it failed, or hangs.
        """
        assert self._rollout is not None, "step() before reset() or after the end"
        asked, limit = asyncio.ensure_future(self._asked.get()), self.config.step_timeout_s
        try:
            await asyncio.wait(
                {asked, self._rollout}, timeout=WAIT * limit, return_when=asyncio.FIRST_COMPLETED
            )
            if asked.done():
                return asked.result()
            if self._rollout.done():
                rollout, self._rollout = self._rollout, None
                return rollout.result()
        finally:
            asked.cancel()
        raise EnvironmentFailure(
            f"{self.config.id}: nothing asked and no end within env.step_timeout_s = {limit:g}"
        )


class Request:
    """What a rollout asks: the body of a chat completion, and where the message that answers it goes."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


@asynccontextmanager
async def _endpoint(asked: "asyncio.Queue[Request]") -> AsyncIterator[tuple[str, str]]:
    """(URL, model) of an OpenAI-compatible endpoint on this machine; the model's name is a secret."""
    from aiohttp import web

    model = f"paw-{secrets.token_hex(16)}"

    async def complete(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if body.get("model") != model:
            text = f"there is no model {shown(body.get('model'))} here: give who asks for it a client of its own"
            return web.json_response({"error": {"message": text}}, status=404)
        request = Request(body)
        asked.put_nowait(request)
        message = await request.answer
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        whole = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": 0, "model": model}
        choice = {"index": 0, "finish_reason": finish}
        if not body.get("stream"):
            usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
            whole |= {
                "object": "chat.completion",
                "choices": [choice | {"message": message}],
                "usage": usage,
            }
            return web.json_response(text=_json(whole))
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunk = _json(
            whole | {"object": "chat.completion.chunk", "choices": [choice | {"delta": delta}]}
        )
        return web.Response(
            text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        )

    app = web.Application(client_max_size=MAX_BYTES)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", model
    finally:
        await runner.cleanup()


def _json(value: Any) -> str:
    """Lone surrogates, which no reader of JSON takes, become question marks."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


def _wire(reply: Reply, place: int) -> Message:
    """A reply as an endpoint writes it, thoughts apart.

    A call that cannot be read has what is wrong as arguments.
    """
    calls = [(call.id, call.name, _json(call.arguments)) for call in reply.calls]
    if reply.problem and not calls:
        calls = [(unread(place).id, "invalid_call", reply.problem)]
    thought, closed, content = reply.content.rpartition(THINKING[1])
    message = {"role": "assistant", "content": content.lstrip() if closed else content}
    message |= {"reasoning_content": thought.replace(THINKING[0], "").strip()} if closed else {}
    functions = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls
    ]
    return message | ({"tool_calls": functions} if functions else {})


def _plain(message: Message) -> Message:
    """A message with its content as text. EnvironmentFailure: it has an image."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if others := {part.get("type") for part in content} - {"text"}:
            raise EnvironmentFailure(
                f"a message has content of type {', '.join(map(str, others))}; only text is read"
            )
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}
