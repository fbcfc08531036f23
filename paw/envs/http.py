"""HTTP calls with a bound on all of it. A time limit of httpx is one of each read: a server that trickles keeps within
it for ever, and a few kilobytes of gzip become gigabytes.
"""

import asyncio
import threading
import zlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from paw.errors import needed

T = TypeVar("T")
MAX_BYTES = 16 << 20
"""Of an answer, decompressed."""
KEEP_S = 2.0
"""For a connection that nobody uses: servers close theirs after 5 s, perhaps just as it is used again."""
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
            try:
                encoding, body = answer.headers.get("Content-Encoding", ""), bytearray()
                if encoding.lower() not in PLAIN + PACKED:
                    raise BadAnswer(f"the answer's encoding is {encoding!r}")
                packed = zlib.decompressobj(GZIP_OR_ZLIB) if encoding.lower() in PACKED else None
                async for part in answer.aiter_raw():  # httpx would unpack all of a part, a thousand times its size
                    body += packed.decompress(part, MAX_BYTES + 1 - len(body)) if packed else part
                    if len(body) > MAX_BYTES:
                        raise BadAnswer(f"the answer has more than {MAX_BYTES:,} bytes")
            except zlib.error as error:
                raise BadAnswer(f"the answer is no {encoding}: {error}") from None
            finally:
                await answer.aclose()
            headers = [(key, value) for key, value in answer.headers.multi_items() if key != "content-encoding"]
            return type(answer)(answer.status_code, headers=headers, content=bytes(body), request=request)

    return Bounded


class Loop:
    """An event loop in a thread of its own, for callers in any thread. It ends with the process, if not closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What `call` returns or raises; TimeoutError after `timeout_s`, from its first step on."""
        try:
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, timeout_s), self._loop).result()
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {timeout_s:g} s") from None

    def begin(self, call: Coroutine[Any, Any, Any]) -> None:
        """Have `call` run; what comes of it is its own affair."""
        asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
