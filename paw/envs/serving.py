"""The HTTP servers that we run: `paw serve retriever` and `paw serve env`. Every connection has a
clock and every body a limit, so clients that are slow, silent or greedy shut nobody out.
"""

import asyncio
import resource
import signal
import socket
import sys
from typing import Any

from paw import watcher
from paw.errors import UserError, needed, to_stderr

MAX_BYTES, MAX_HEAD = 4 << 20, 16 << 10
"""Of a request: bytes of its body, or of a WebSocket's message, and of its head."""
MAX_CONNECTIONS, SPARE_FILES = 2048, 64
"""Open at once (of more, the one longest without a request is closed); file descriptors left for everything else."""
HEAD_S, BODY_S, KEEP_ALIVE_S, SHUTDOWN_S = 10, 30, 75, 5
"""Seconds for a request's head, from its first byte or the connection's start; for its body; for an
unused connection, longer than clients keep one, so that they are the ones to close it; for the
requests in work when the server is to end."""


class LimitedBodies:
    """ASGI middleware. A request's body has at most MAX_BYTES and comes within BODY_S, or
    `timeout_s` if that is less: otherwise whoever reads it gets an HTTPException, which the
    application answers with."""

    def __init__(self, app: Any, timeout_s: float) -> None:
        self.app = app
        self.timeout_s = min(timeout_s, BODY_S)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        limited = self._limited(receive) if scope["type"] == "http" else receive
        await self.app(scope, limited, send)

    def _limited(self, receive: Any) -> Any:
        from starlette.exceptions import HTTPException

        deadline = asyncio.get_running_loop().time() + self.timeout_s
        received = 0
        complete = False

        async def limited() -> Any:
            nonlocal received, complete
            if complete:  # what is waited for is the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                detail = f"the body did not come within {self.timeout_s:g} s"
                raise HTTPException(408, detail, {"Connection": "close"}) from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            if received > MAX_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BYTES:,} bytes")
            return message

        return limited


def make_server(app: Any, *, timeout_s: float, websockets: bool = False) -> Any:
    """The uvicorn server of an application with LimitedBodies; every connection has a clock and can
    be closed for a new one. `timeout_s` is what the application takes for a request at most. A
    WebSocket has no clock: its session lasts as long as the client answers pings."""
    uvicorn = needed("uvicorn", "serving", "search")
    H11Protocol: Any = needed("uvicorn.protocols.http.h11_impl", "serving", "search").H11Protocol

    most = _connections()
    request_s = 3 * timeout_s + HEAD_S  # body, work, answer
    idle: dict[Any, None] = {}  # without a whole head, the longest first

    class Protocol(H11Protocol):
        clock: asyncio.TimerHandle | None = None
        has_begun = False
        """Whether bytes of a head have come."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            idle[self] = None
            self.has_begun = True
            self.wind(HEAD_S)
            if len(self.connections) > most:
                oldest = next(iter(idle))
                del idle[
                    oldest
                ]  # it is lost in a later round of the loop, and several may come before that
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                idle.pop(self, None)
                self.wind(request_s)
            elif self in idle and not self.has_begun:
                self.has_begun = True
                self.wind(HEAD_S)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # else the next request was there already
                idle[self] = None
                self.has_begun = False
            self.wind(KEEP_ALIVE_S + request_s)

        def handle_websocket_upgrade(self, event: Any) -> None:
            self.unwind()
            super().handle_websocket_upgrade(event)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.unwind()

        def wind(self, seconds: float) -> None:
            if self.clock:
                self.clock.cancel()
            self.clock = self.loop.call_later(seconds, self.transport.abort)

        def unwind(self) -> None:
            idle.pop(self, None)
            if self.clock:
                self.clock.cancel()

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Protocol,
            h11_max_incomplete_event_size=MAX_HEAD,
            backlog=MAX_CONNECTIONS // 2,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
            log_level="error",
            lifespan="off",
            ws="auto" if websockets else "none",
            ws_max_size=MAX_BYTES,
            server_header=False,
            loop="asyncio",  # uvloop would take the wake-up descriptor from the parent that watches
        )
    )


def _connections() -> int:
    """How many may be open at once: MAX_CONNECTIONS, where the limit of open files lets itself be raised so far."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < MAX_CONNECTIONS + SPARE_FILES:
        soft = min(hard, MAX_CONNECTIONS + SPARE_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return max(1, min(MAX_CONNECTIONS, soft - SPARE_FILES))


def listen(host: str, port: int, command: str) -> tuple[socket.socket, str]:
    """A listening socket and its URL.

    UserError, beginning with `command`, where there can be none.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(f"{command}: --host {host} --port {port}: {error}") from None
    return listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def run_server(server: Any, listener: socket.socket, said: str) -> int:
    """Run a uvicorn server until Ctrl-C or SIGTERM, having `said` that it is there; returns 0."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # uvicorn ends at one of them, and then raises it once more
        signal.signal(number, signal.SIG_IGN)
    handle_exit = server.handle_exit

    def hear(number: int, frame: Any) -> None:
        watcher.say_heard()
        handle_exit(number, frame)

    server.handle_exit = hear
    to_stderr(said)
    server.run(sockets=[listener])
    return 0
