"""Helpers for our HTTP servers, `paw serve retriever` and `paw serve env`.

Every connection has a time limit and every body has a size limit, so that slow, silent or greedy
clients cannot shut others out.
"""

import asyncio
import signal
import socket
from typing import Any, cast

from paw.errors import UserError, needed, to_stderr
from paw.io.files import raise_file_limit
from paw.processes import watcher

MAX_BYTES = 4 << 20
"""Size limit of a request's body, or of a WebSocket's message."""
MAX_HEAD = 16 << 10
"""Size limit of a request's head."""
MAX_CONNECTIONS = 2048
"""Maximum number of open connections. Beyond it, the one that has been idle longest is closed."""
SPARE_FILES = 64
"""Number of file descriptors reserved for everything else."""
HEAD_S = 10
"""Time limit for a request's head, from its first byte or the start of the connection."""
BODY_S = 30
"""Time limit for a request's body."""
KEEP_ALIVE_S = 75
"""Seconds that an unused connection is kept. Clients keep it for less, so they close it first."""
SHUTDOWN_S = 5
"""Time limit for unfinished requests when the server shuts down."""


class LimitedBodies:
    """ASGI middleware that limits the bodies of requests.

    A body may have at most MAX_BYTES and take at most BODY_S, or `timeout_s` if that is less.
    Otherwise reading it raises an HTTPException, which becomes the application's answer.
    """

    def __init__(self, app: Any, timeout_s: float) -> None:
        self.app = app
        self.timeout_s = min(timeout_s, BODY_S)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            receive = self._limited(receive)
        await self.app(scope, receive, send)

    def _limited(self, receive: Any) -> Any:
        from starlette.exceptions import HTTPException

        deadline = asyncio.get_running_loop().time() + self.timeout_s
        received = 0
        complete = False

        async def limited() -> Any:
            nonlocal received, complete
            if complete:  # the application is waiting for the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                detail = f"the body did not arrive within {self.timeout_s:g} s"
                raise HTTPException(408, detail, {"Connection": "close"}) from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            if received > MAX_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BYTES:,} bytes")
            return message

        return limited


_Protocol = cast(Any, object)  # stands for uvicorn's class, as uvicorn is an extra


class _TimedConnection(_Protocol):
    """A mixin for uvicorn's HTTP protocol that limits the time and the number of connections."""

    max_connections: int
    request_s: float
    """Time limit for a request, including its body, the application's work and the answer."""
    idle: dict[Any, None]
    """Connections without a complete head, longest idle first."""
    timer: asyncio.TimerHandle | None = None
    has_begun = False
    """Whether bytes of a head have arrived."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.idle[self] = None
        self.has_begun = True
        self.close_after(HEAD_S)
        if len(self.connections) > self.max_connections:
            # Remove it now. The event loop reports it as lost only in a later round, and more
            # connections may arrive before that.
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        earlier_cycle = self.cycle
        super().data_received(data)
        if self.cycle is not earlier_cycle:
            self.idle.pop(self, None)
            self.close_after(self.request_s)
        elif self in self.idle and not self.has_begun:
            self.has_begun = True
            self.close_after(HEAD_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request has already arrived
            self.idle[self] = None
            self.has_begun = False
        self.close_after(KEEP_ALIVE_S + self.request_s)

    def handle_websocket_upgrade(self, event: Any) -> None:
        self.remove_limit()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.remove_limit()

    def close_after(self, seconds: float) -> None:
        if self.timer:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, self.transport.abort)

    def remove_limit(self) -> None:
        self.idle.pop(self, None)
        if self.timer:
            self.timer.cancel()


def make_server(app: Any, *, timeout_s: float, websockets: bool = False) -> Any:
    """Make a uvicorn server for an application with LimitedBodies.

    Every connection has a time limit and may be closed to make room for a new one. `timeout_s` is
    the longest time that the application takes for a request. A WebSocket has no time limit, and
    its session lasts as long as the client answers pings.
    """
    uvicorn = needed("uvicorn", "serving", "search")
    H11Protocol: Any = needed("uvicorn.protocols.http.h11_impl", "serving", "search").H11Protocol

    class Protocol(_TimedConnection, H11Protocol):
        max_connections = _max_connections()
        request_s = 3 * timeout_s + HEAD_S
        idle = {}

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
            loop="asyncio",  # uvloop would take the wake-up descriptor from the watching parent
        )
    )


def _max_connections() -> int:
    """Return MAX_CONNECTIONS, or fewer if the limit of open files cannot be raised that far."""
    max_files = raise_file_limit(MAX_CONNECTIONS + SPARE_FILES)
    return max(1, min(MAX_CONNECTIONS, max_files - SPARE_FILES))


def listen(host: str, port: int, command: str) -> tuple[socket.socket, str]:
    """Return a listening socket and its URL.

    Raises UserError, starting with `command`, if the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(f"{command}: --host {host} --port {port}: {error}") from None
    if ":" in host:
        host = f"[{host}]"
    return listener, f"http://{host}:{listener.getsockname()[1]}"


def run_server(server: Any, listener: socket.socket, banner: str) -> int:
    """Print `banner` and run a uvicorn server until Ctrl-C or SIGTERM. Returns 0."""
    # uvicorn raises the signal again after it has ended. That second signal is ignored.
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
