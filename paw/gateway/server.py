"""An OpenAI-compatible endpoint with a base URL for each session: http://HOST:PORT/SESSION/v1.

A session is whatever asks the model on behalf of one episode. The URL says which session a request
belongs to. A client that cannot be given its own URL uses http://HOST:PORT/v1, and its API key
names the session.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from paw.errors import clean, needed, short_repr
from paw.gateway.messages import (
    NO_RESPONSES,
    ChatAnswer,
    RequestError,
    completion,
    events,
    problem_of,
    to_json,
)

MAX_BYTES = 1 << 25
"""Size limit of a request, which contains a whole conversation. Many may arrive at once."""
SHUTDOWN_S = 0.1
"""Time limit for requests in progress when the server stops."""
NO_RETRY = {"x-should-retry": "false"}
"""Tells openai's clients that the same request would be refused again."""


@dataclass(frozen=True)
class Incoming:
    """A request for a chat completion."""

    body: Any
    """Its parsed JSON."""
    is_open: Callable[[], bool]
    """Whether its client still waits for the answer."""


Complete = Callable[[Incoming], Awaitable[ChatAnswer]]
"""Answers a request of a session. Raises RequestError to refuse it."""
Control = Callable[[str, str, Any], dict[str, Any]]


class Gateway:
    """The server of all sessions on one event loop.

    It listens while there is a session, or from `start` to `stop`. `model` is the name that it
    lists. `open_unknown` returns a function that answers the requests of a session that nobody has
    opened. `control` answers requests outside OpenAI's interface: it takes (method, path, body as
    JSON or None) and returns a JSON object. Both may raise RequestError.
    """

    def __init__(
        self,
        model: str = "paw",
        *,
        user: str = "the gateway",
        open_unknown: Callable[[str], Complete] | None = None,
        control: Control | None = None,
    ) -> None:
        self._web: Any = needed("aiohttp.web", user, "servers")
        self._model = model
        self._open_unknown = open_unknown
        self._control = control
        self._sessions: dict[str, Complete] = {}
        self._runner: Any = None
        """Set while the server listens."""
        self._url = ""
        self._users = 0
        """Number of open sessions of `session`."""
        self._changing = asyncio.Lock()
        """Held while the server starts or stops."""

    @asynccontextmanager
    async def session(self, complete: Complete) -> AsyncIterator[tuple[str, str]]:
        """Open a session. Yields (its base URL, its API key, which is also its name)."""
        name = f"paw-{secrets.token_hex(16)}"
        self._sessions[name] = complete
        self._users += 1
        try:
            await self._in_own_context(self._start_if_needed)
            yield f"{self._url}/{name}/v1", name
        finally:
            del self._sessions[name]
            self._users -= 1
            await self._in_own_context(self._stop_if_unused)

    async def start(self, listener: socket.socket | None = None) -> None:
        """Listen at a socket, or at a free port of this machine. Ends with `stop`."""
        app = self._web.Application(client_max_size=MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = self._web.AppRunner(app, shutdown_timeout=SHUTDOWN_S, access_log=None)
        await runner.setup()
        if listener is None:
            await self._web.TCPSite(runner, "127.0.0.1", 0).start()
        else:
            await self._web.SockSite(runner, listener).start()
        self._runner = runner
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening. Requests in progress are given SHUTDOWN_S to end."""
        runner = self._runner
        self._runner = None
        await runner.cleanup()

    async def _start_if_needed(self) -> None:
        async with self._changing:
            if self._runner is None:
                await self.start()

    async def _stop_if_unused(self) -> None:
        async with self._changing:
            if self._users == 0 and self._runner is not None:
                await self.stop()

    @staticmethod
    async def _in_own_context(function: Callable[[], Any]) -> None:
        """Await a coroutine function. What it starts belongs to all episodes, not to one."""
        await Context().run(asyncio.ensure_future, function())

    async def _answer(self, http: Any) -> Any:
        """Answer any request. Any error becomes an answer in OpenAI's format."""
        try:
            return await self._route(http)
        except RequestError as error:
            return self._web.json_response(
                text=to_json(error.body()), status=error.status, headers=NO_RETRY
            )
        except self._web.RequestPayloadError as error:
            refusal = RequestError(f"the body cannot be read: {clean(error)}")
        except self._web.HTTPException as error:
            refusal = RequestError(error.reason, status=error.status)
        except Exception as error:
            refusal = RequestError(problem_of(error), status=500)
        return self._web.json_response(
            text=to_json(refusal.body()), status=refusal.status, headers=NO_RETRY
        )

    async def _route(self, http: Any) -> Any:
        session, found, path = http.match_info["path"].rpartition("v1/")
        if not found and self._control:
            body = await _json_of(http) if http.can_read_body else None
            return self._web.json_response(self._control(http.method, path, body))
        if not found:
            raise RequestError(f"there is no {http.path}; the base URL ends in /v1", status=404)
        session = session.strip("/") or _api_key(http)
        if session not in self._sessions and not self._open_unknown:
            raise RequestError(f"there is no session {short_repr(session)}", status=404)

        route = (http.method, path.rstrip("/"))
        if route == ("POST", "chat/completions"):
            return await self._complete(http, session)
        if route == ("GET", "models"):
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "paw"}
            return self._web.json_response({"object": "list", "data": [model]})
        problem = f"there is no {http.method} {short_repr(path)}"
        if path.startswith("responses"):
            problem = NO_RESPONSES
        raise RequestError(problem, status=404)

    async def _complete(self, http: Any, session: str) -> Any:
        body = await _json_of(http)
        complete = self._sessions.get(session)
        if complete is None and self._open_unknown:
            complete = self._open_unknown(session)
        if complete is None:
            raise RequestError(f"the session {short_repr(session)} has ended", status=404)

        def is_open() -> bool:
            return http.transport is not None and not http.transport.is_closing()

        answer = await complete(Incoming(body, is_open))
        model = str(body.get("model") or self._model)
        if not body.get("stream"):
            return self._web.json_response(text=to_json(completion(answer, model)))
        options = body.get("stream_options")
        with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        text = events(answer, model, with_usage=with_usage)
        return self._web.Response(text=text, content_type="text/event-stream")


async def _json_of(http: Any) -> Any:
    try:
        return await http.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    except LookupError as error:  # the charset in its header
        raise RequestError(f"the body cannot be read: {error}") from None


def _api_key(http: Any) -> str:
    return http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
