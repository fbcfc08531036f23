"""HTTP calls with limits on total time and size.

A server that sends byte by byte must not take longer than the time limit of a whole answer. A
server that sends a few kilobytes of gzip must not fill the memory when they are decompressed.
"""

import asyncio
import math
import os
import threading
import zlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from paw.errors import clean, needed
from paw.io.files import raise_file_limit

T = TypeVar("T")
MAX_BYTES = 16 << 20
"""Size limit of an answer, decompressed."""
KEEP_S = 4.0
"""Seconds that an unused connection is kept. Servers close theirs after 5 s, which may be just when
it is used again."""
MAX_FILES = 65_536
"""Files that may be open at once. Each connection is one."""
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


async def read_body(parts: AsyncIterator[bytes], *, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed body of an answer that comes in `parts`.

    `encoding` is the answer's header. Raises BadAnswer if the encoding is unknown or wrong, or if
    there are more than `max_bytes` bytes.
    """
    if encoding.lower() not in PLAIN + PACKED:
        raise BadAnswer(f"the answer's encoding is {encoding!r}")
    decompressor = zlib.decompressobj(GZIP_OR_ZLIB) if encoding.lower() in PACKED else None
    body = bytearray()
    try:
        async for received in parts:
            if decompressor:
                # A limit for each part: it may decompress to a thousand times its size.
                received = decompressor.decompress(received, max_bytes + 1 - len(body))
            body += received
            if len(body) > max_bytes:
                raise BadAnswer(f"the answer has more than {max_bytes:,} bytes")
    except zlib.error as error:
        raise BadAnswer(f"the answer is not {encoding}: {error}") from None
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

    It opens as many connections as there are calls. With a thousand at a time, a call costs about a
    millisecond of processor time (bench/rollout/server_client.py). It uses no proxy, because
    servers are in the cluster, and it follows no redirects. It keeps no cookies, because one
    server's cookies would be sent to others on the same machine. Use it on one event loop only.
    `user` says who needs it. If aiohttp is not installed, the UserError begins with `user`.
    """

    def __init__(self, user: str, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._aiohttp = needed("aiohttp", f"{user}: asking a server", "servers")
        raise_file_limit(MAX_FILES)
        self._session: Any = None
        """Made by the first call, on the event loop of the calls."""

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
        ConnectionError if there is no connection or it breaks, and ValueError if `url` is not an
        address.
        """
        async with (
            self._errors(url),
            _deadline(timeout_s or self.timeout_s),
            self._request(method, url, body, encoding="gzip, deflate") as answer,
        ):
            content = await read_body(
                answer.content.iter_any(),
                encoding=answer.headers.get("Content-Encoding", ""),
                max_bytes=max_bytes,
            )
        return HttpAnswer(answer.status, content)

    @asynccontextmanager
    async def lines(
        self, url: str, body: Any, *, max_line: int, max_bytes: int, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Yield the lines of the answer to a POST as they arrive.

        Leaving the context closes the connection, so the server notices that nobody is reading.
        Raises what `ask` raises, and BadAnswer for a status other than 200.
        """
        async with (
            self._errors(url),
            _deadline(timeout_s or self.timeout_s),
            self._request("POST", url, body, encoding="identity") as answer,
        ):
            try:
                if answer.status != 200:
                    raise BadAnswer(f"status {answer.status}")
                encoding = answer.headers.get("Content-Encoding", "")
                if encoding.lower() not in PLAIN:
                    raise BadAnswer(f"the answer's encoding is {encoding!r}")
                chunks = answer.content.iter_any()
                yield _split_lines(chunks, max_line=max_line, max_bytes=max_bytes)
            finally:
                answer.close()

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    def _request(self, method: str, url: str, body: Any, *, encoding: str) -> Any:
        """Return the context of a request, in which its answer is read."""
        if self._session is None:
            self._session = self._open_session()
        return self._session.request(
            method, url, json=body, headers={"Accept-Encoding": encoding}, allow_redirects=False
        )

    @asynccontextmanager
    async def _errors(self, url: str) -> AsyncIterator[None]:
        """Raise Python's own errors in place of the library's."""
        try:
            yield
        except self._aiohttp.InvalidURL:
            raise ValueError(f"{url!r} is not an HTTP address") from None
        except self._aiohttp.ClientConnectorError as error:
            failure = error.os_error
            reason = str(failure)
            if failure.errno and failure.errno > 0:  # those of host names are negative
                reason = os.strerror(failure.errno)
            raise ConnectionError(f"no connection to {error.host}:{error.port}: {reason}") from None
        except self._aiohttp.ClientError as error:
            raise ConnectionError(clean(error) or type(error).__name__) from None

    def _open_session(self) -> Any:
        aiohttp = self._aiohttp
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
            timeout=aiohttp.ClientTimeout(total=None),  # `_deadline` limits a call
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )


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
        self._loop.set_exception_handler(_report_failure)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return or raise what `call` returns or raises. Raises TimeoutError after `timeout_s`."""
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


def _report_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error on a loop, unless it is that connections end with the process."""
    if "client_session" not in context and "connector" not in context:
        loop.default_exception_handler(context)
