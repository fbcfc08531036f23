"""Our HTTP servers: `paw serve retriever` and `paw serve env`.

Every connection has a time limit and every body a size limit, so that slow, silent or greedy
clients do not shut others out.
"""

import asyncio
import resource
import signal
import socket
import sys
from typing import Any

from paw.errors import UserError, needed, to_stderr
from paw.processes import watcher

MAX_BYTES = 4 << 20
"""Size limit of a request's body, or of a WebSocket's message."""
MAX_HEAD = 16 << 10
"""Size limit of a request's head."""
MAX_CONNECTIONS = 2048
"""Connections that are open at once. If there are more, the one that is longest without a request
is closed."""
SPARE_FILES = 64
"""File descriptors that are left for everything else."""
HEAD_S = 10
"""Time limit of a request's head, from its first byte or the start of the connection."""
BODY_S = 30
"""Time limit of a request's body."""
KEEP_ALIVE_S = 75
"""How long an unused connection is kept: longer than clients keep it, so that they close it."""
SHUTDOWN_S = 5
"""Time limit of the unfinished requests when the server ends."""


class LimitedBodies:
    """ASGI middleware that limits the bodies of requests.

    A body may have MAX_BYTES and take BODY_S, or `timeout_s` if that is less. Otherwise reading it
    raises an HTTPException, which is then the application's answer.
    """

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
            if complete:  # now the application waits for the end of the connection
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
    """The uvicorn server of an application with LimitedBodies.

    Every connection has a time limit and can be closed in favour of a new one. `timeout_s` is the
    longest that the application takes for a request. A WebSocket has no time limit: its session
    lasts as long as the client answers pings.
    """
    uvicorn = needed("uvicorn", "serving", "search")
    H11Protocol: Any = needed("uvicorn.protocols.http.h11_impl", "serving", "search").H11Protocol

    most = _connections()
    request_s = 3 * timeout_s + HEAD_S  # body, work, answer
    idle: dict[Any, None] = {}
    """Connections without a complete head, the longest idle one first."""

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
                # Removed now: it is only lost in a later round of the event loop, and more
                # connections may come before that.
                oldest = next(iter(idle))
                del idle[oldest]
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
    """How many connections may be open at once: MAX_CONNECTIONS, or fewer if the limit of open
    files cannot be raised so far."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = sys.maxsize if soft_limit == resource.RLIM_INFINITY else soft_limit
    hard = sys.maxsize if hard_limit == resource.RLIM_INFINITY else hard_limit
    if soft < MAX_CONNECTIONS + SPARE_FILES:
        soft = min(hard, MAX_CONNECTIONS + SPARE_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard_limit))
    return max(1, min(MAX_CONNECTIONS, soft - SPARE_FILES))


def listen(host: str, port: int, command: str) -> tuple[socket.socket, str]:
    """A listening socket and its URL.

    Raises UserError, which begins with `command`, if the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(f"{command}: --host {host} --port {port}: {error}") from None
    url_host = f"[{host}]" if ":" in host else host
    return listener, f"http://{url_host}:{listener.getsockname()[1]}"


def run_server(server: Any, listener: socket.socket, banner: str) -> int:
    """Print `banner`, then run a uvicorn server until Ctrl-C or SIGTERM; returns 0."""
    # uvicorn raises the signal once more after it has ended: that one is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    handle_exit = server.handle_exit

    def confirm_and_exit(number: int, frame: Any) -> None:
        watcher.say_heard()
        handle_exit(number, frame)

    server.handle_exit = confirm_and_exit
    to_stderr(banner)
    server.run(sockets=[listener])
    return 0
