"""HTTP calls with limits on total time and size.

httpx limits only the time of each read, and a server that sends byte by byte never exceeds that
limit. It also decompresses a few kilobytes of gzip into gigabytes.
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
"""Size limit of an answer, decompressed."""
KEEP_S = 2.0
"""Seconds that an unused connection is kept. Servers close theirs after 5 s, perhaps just when it
is about to be used again."""
CLOSE_S = 5.0
"""Time limit for closing the connections to all servers."""
PLAIN = ("", "identity")
"""Encodings of an answer that is not compressed."""
PACKED = ("gzip", "deflate")
"""Encodings of an answer that is compressed."""
GZIP_OR_ZLIB = 47
"""Window bits that make zlib detect the format."""


class BadAnswer(Exception):
    """An answer that was not read to the end. The message is one line."""


def import_httpx(user: str) -> Any:
    """Import httpx. Raises UserError, starting with `user`, if it is not installed."""
    return needed("httpx", f"{user}: asking a server", "search")


def bounded(client: type[Any]) -> type[Any]:
    """Return a subclass of `client`, a class like httpx.AsyncClient, that limits answers.

    It raises BadAnswer for answers above MAX_BYTES or with an unknown encoding.
    """

    class Bounded(client):
        async def send(self, request: Any, **options: Any) -> Any:
            request.headers["Accept-Encoding"] = "gzip, deflate"
            try:
                answer = await super().send(request, **options | {"stream": True})
            except ExceptionGroup as group:  # raised by anyio for an invalid address
                raise group.exceptions[0] from None
            body = await _read_body(answer, MAX_BYTES)
            headers = []
            for name, value in answer.headers.multi_items():
                if name != "content-encoding":
                    headers.append((name, value))
            return type(answer)(answer.status_code, headers=headers, content=body, request=request)

    return Bounded


async def _read_body(answer: Any, max_bytes: int) -> bytes:
    """Return the decompressed body of a streamed httpx response. Closes the response."""
    encoding = answer.headers.get("Content-Encoding", "")
    body = bytearray()
    try:
        if encoding.lower() not in PLAIN + PACKED:
            raise BadAnswer(f"the answer's encoding is {encoding!r}")
        decompressor = None
        if encoding.lower() in PACKED:
            decompressor = zlib.decompressobj(GZIP_OR_ZLIB)
        # Read raw parts, because httpx would decompress a whole part, to a thousand times its size.
        async for part in answer.aiter_raw():
            if decompressor:
                part = decompressor.decompress(part, max_bytes + 1 - len(body))
            body += part
            if len(body) > max_bytes:
                raise BadAnswer(f"the answer has more than {max_bytes:,} bytes")
    except zlib.error as error:
        raise BadAnswer(f"the answer is not {encoding}: {error}") from None
    finally:
        await answer.aclose()
    return bytes(body)


async def _split_lines(
    parts: AsyncIterator[bytes], *, max_line: int, max_bytes: int
) -> AsyncIterator[str]:
    """Yield the lines of a body that arrives in `parts`.

    Raises BadAnswer for a line or a body that is too long.
    """
    line = bytearray()
    received = 0
    async for part in parts:
        received += len(part)
        if received > max_bytes:
            raise BadAnswer(f"endless stream: it has more than {max_bytes:,} bytes")
        for piece in part.splitlines(keepends=True):
            line += piece
            if len(line) > max_line:
                raise BadAnswer(f"endless stream: one line has more than {max_line:,} bytes")
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
    """Sends requests to servers. Whatever a server does, the whole call has a time limit and its
    answer has a size limit.

    It opens as many connections as there are calls. It uses no proxy, because servers are in the
    cluster. It keeps no cookies, because one server's cookies would be sent to others on the same
    machine. Use it on one event loop only. `user` says who needs it. If httpx is not installed, the
    UserError begins with `user`.
    """

    def __init__(self, user: str, *, timeout_s: float) -> None:
        httpx = import_httpx(user)
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
        """Return the answer, whatever its status. `body` is sent as JSON.

        Raises BadAnswer if it is too large, TimeoutError after `timeout_s` (default: the client's),
        and httpx's errors if there is no connection.
        """
        async with _deadline(timeout_s or self.timeout_s):
            answer = await self._send(method, url, body, encoding="gzip, deflate")
            content = await _read_body(answer, max_bytes)
        return HttpAnswer(answer.status_code, content)

    @asynccontextmanager
    async def lines(
        self, url: str, body: Any, *, max_line: int, max_bytes: int, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Yield the lines of the answer to a POST as they arrive.

        Leaving the context closes the connection, so the server notices that nobody is reading.
        Raises what `ask` raises, and BadAnswer for a status other than 200.
        """
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
        except ExceptionGroup as group:  # raised by anyio for an invalid address
            raise group.exceptions[0] from None


class BlockingHttpClient:
    """An HttpClient for callers in any thread, with its own event loop."""

    def __init__(self, user: str, *, timeout_s: float) -> None:
        self._client = HttpClient(user, timeout_s=timeout_s)
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
        """Like `HttpClient.ask`."""
        call = self._client.ask(method, url, body, timeout_s=timeout_s, max_bytes=max_bytes)
        return self._loop.run(call, math.inf)

    def close(self) -> None:
        with suppress(Exception):
            self._loop.run(self._client.close(), CLOSE_S)
        self._loop.close()


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError, naming the limit, if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(f"no complete answer within {seconds:g} s") from None


class Loop:
    """An event loop in its own thread, for callers in any thread.

    It ends with the process, unless it is closed earlier.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return or raise what `call` does. Raises TimeoutError after `timeout_s` seconds."""
        limited = asyncio.wait_for(call, timeout_s)
        try:
            return asyncio.run_coroutine_threadsafe(limited, self._loop).result()
        except TimeoutError:
            if timeout_s == math.inf:
                raise  # from a time limit inside the call, which has its own message
            raise TimeoutError(f"no complete answer within {timeout_s:g} s") from None

    def start(self, call: Coroutine[Any, Any, Any]) -> None:
        """Start `call` without waiting for it. Its result and errors are ignored."""
        asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
