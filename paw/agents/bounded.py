"""An HTTP client for the openai library that limits the size of answers.

The library uses httpx, which decompresses each part of an answer whole, to up to a thousand times
its size.
"""

from collections.abc import AsyncIterator
from typing import Any

from paw.io.http import MAX_BYTES, read_body


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
            body = await _body_of(answer)
            headers = [
                (key, value)
                for key, value in answer.headers.multi_items()
                if key != "content-encoding"
            ]
            return type(answer)(answer.status_code, headers=headers, content=body, request=request)

    return Bounded


async def _body_of(answer: Any) -> bytes:
    """Return the decompressed body of a streamed httpx response. Closes the response."""
    body_parts: AsyncIterator[bytes] = answer.aiter_raw()
    encoding = answer.headers.get("Content-Encoding", "")
    try:
        return await read_body(body_parts, encoding=encoding, max_bytes=MAX_BYTES)
    finally:
        await answer.aclose()
