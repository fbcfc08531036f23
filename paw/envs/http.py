"""HTTP calls with a bound on all of it. A time limit of httpx is one of each read: a server that
trickles keeps within it for ever, and a few kilobytes of gzip become gigabytes.
"""

import asyncio
import math
import threading
import zlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

from paw.errors import needed

T = TypeVar("T")
MAX_BYTES = 16 << 20
"""Of an answer, decompressed."""
KEEP_S = 2.0
"""For a connection that nobody uses: servers close theirs after 5 s, perhaps just as it is used again."""
CLOSE_S = 5.0
"""For saying goodbye to all servers."""
PLAIN, PACKED = ("", "identity"), ("gzip", "deflate")
GZIP_OR_ZLIB = 47
"""The window that has zlib find out which."""


class BadAnswer(Exception):
    """An answer that is not read to its end. One line says why."""


def import_httpx(what: str) -> Any:
    """httpx. Raises UserError where it is not installed, beginning with `what` needs it."""
    return needed("httpx", f"{what}: asking a server", "search")


def bounded(client: type[Any]) -> type[Any]:
    """A subclass of httpx.AsyncClient or one of its kind: BadAnswer for answers above MAX_BYTES or of odd encoding."""

    class Bounded(client):
        async def send(self, request: Any, **options: Any) -> Any:
            request.headers["Accept-Encoding"] = "gzip, deflate"
            try:
                answer = await super().send(request, **options | {"stream": True})
            except ExceptionGroup as group:  # of anyio, for an address that is none
                raise group.exceptions[0] from None
            body = await _read_body(answer, MAX_BYTES)
            headers = [
                (key, value)
                for key, value in answer.headers.multi_items()
                if key != "content-encoding"
            ]
            return type(answer)(answer.status_code, headers=headers, content=body, request=request)

    return Bounded


async def _read_body(answer: Any, max_bytes: int) -> bytes:
    """The decompressed body of an httpx response that is a stream, which is closed."""
    encoding = answer.headers.get("Content-Encoding", "")
    body = bytearray()
    try:
        if encoding.lower() not in PLAIN + PACKED:
            raise BadAnswer(f"the answer's encoding is {encoding!r}")
        packed = zlib.decompressobj(GZIP_OR_ZLIB) if encoding.lower() in PACKED else None
        async for (
            part
        ) in answer.aiter_raw():  # httpx would unpack all of a part, a thousand times its size
            body += packed.decompress(part, max_bytes + 1 - len(body)) if packed else part
            if len(body) > max_bytes:
                raise BadAnswer(f"the answer has more than {max_bytes:,} bytes")
    except zlib.error as error:
        raise BadAnswer(f"the answer is no {encoding}: {error}") from None
    finally:
        await answer.aclose()
    return bytes(body)


async def _split_lines(
    parts: AsyncIterator[bytes], *, max_line: int, max_bytes: int
) -> AsyncIterator[str]:
    """The lines of a body that comes in `parts`.

    Raises BadAnswer for a line or a body that is too long.
    """
    line = bytearray()
    received = 0
    async for part in parts:
        received += len(part)
        if received > max_bytes:
            raise BadAnswer(f"a stream without end: it has more than {max_bytes:,} bytes")
        for piece in part.splitlines(keepends=True):
            line += piece
            if len(line) > max_line:
                raise BadAnswer(
                    f"a stream without end: a line of it has more than {max_line:,} bytes"
                )
            if piece.endswith(b"\n"):
                yield line.decode("utf-8", "replace").rstrip("\r\n")
                line.clear()
    if line:
        yield line.decode("utf-8", "replace")


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class HttpClient:
    """Asks servers. Each call has a deadline for all of it and a maximum size of the answer, whatever the server does.

    It has as many connections as calls. It uses no proxy: an address of the cluster is not to be
    asked of one. It keeps no cookies: those of one server would be sent to the others on the same
    machine. Use it on one event loop. `what` needs it, for the UserError if httpx is not installed.
    """

    def __init__(self, what: str, *, timeout_s: float) -> None:
        httpx = import_httpx(what)
        self.timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            timeout=None,
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_S
            ),
            trust_env=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )

    async def ask(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> HttpAnswer:
        """The answer, whatever its status; `body` is sent as JSON. Raises BadAnswer for one that is
        too large, TimeoutError after `timeout_s` (default: the client's), httpx's errors if there
        is no connection."""
        async with _deadline(timeout_s or self.timeout_s):
            answer = await self._send(method, url, body, encoding="gzip, deflate")
            content = await _read_body(answer, max_bytes)
        return HttpAnswer(answer.status_code, content)

    @asynccontextmanager
    async def lines(
        self, url: str, body: Any, *, max_line: int, max_bytes: int, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of the answer to a POST, as they come. Leaving the context closes the
        connection, so the server hears that nobody listens any more. Raises as `ask` does, and
        BadAnswer for a status other than 200."""
        async with _deadline(timeout_s or self.timeout_s):
            answer = await self._send("POST", url, body, encoding="identity")
            try:
                if answer.status_code != 200:
                    raise BadAnswer(f"status {answer.status_code}")
                encoding = answer.headers.get("Content-Encoding", "")
                if encoding.lower() not in PLAIN:
                    raise BadAnswer(f"the answer's encoding is {encoding!r}")
                yield _split_lines(answer.aiter_raw(), max_line=max_line, max_bytes=max_bytes)
            finally:
                await answer.aclose()

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, method: str, url: str, body: Any, *, encoding: str) -> Any:
        request = self._client.build_request(
            method, url, json=body, headers={"Accept-Encoding": encoding}
        )
        try:
            return await self._client.send(request, stream=True)
        except ExceptionGroup as group:  # of anyio, for an address that is none
            raise group.exceptions[0] from None


class BlockingHttpClient:
    """An HttpClient for callers in any thread, on an event loop of its own."""

    def __init__(self, what: str, *, timeout_s: float) -> None:
        self._client = HttpClient(what, timeout_s=timeout_s)
        self._loop = Loop()

    def ask(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> HttpAnswer:
        """As `HttpClient.ask`."""
        call = self._client.ask(method, url, body, timeout_s=timeout_s, max_bytes=max_bytes)
        return self._loop.run(call, math.inf)

    def close(self) -> None:
        with suppress(Exception):
            self._loop.run(self._client.close(), CLOSE_S)
        self._loop.close()


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError, which says so, if what is inside takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {seconds:g} s") from None


class Loop:
    """An event loop in a thread of its own, for callers in any thread.

    It ends with the process, if not closed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What `call` returns or raises; TimeoutError after `timeout_s`, from its first step on."""
        try:
            return asyncio.run_coroutine_threadsafe(
                asyncio.wait_for(call, timeout_s), self._loop
            ).result()
        except TimeoutError:
            if timeout_s == math.inf:
                raise  # of a time limit within the call, which says so
            raise TimeoutError(f"no whole answer within {timeout_s:g} s") from None

    def begin(self, call: Coroutine[Any, Any, Any]) -> None:
        """Have `call` run; what comes of it is its own affair."""
        asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
