"""A retriever behind HTTP: `paw serve retriever`, Search-R1's server, or another of the same form."""

import time
from collections.abc import Sequence
from typing import Any

from paw.errors import UserError
from paw.experience.retrieval.base import Hit

TRIES = 3
PAUSE_S = 0.5
"""Before the second try; the third waits twice as long."""


class RemoteRetriever:
    """The server at `url`, with or without /retrieve at its end. Connections are kept open.

    UserError, naming the URL, if it cannot be reached, now or later, takes longer than `timeout_s` or answers anything
    but hits. A refused or lost connection and an answer 5xx are tried three times.
    """

    def __init__(self, url: str, *, timeout_s: float):
        try:
            import httpx
        except ImportError:
            raise UserError(
                f"search.retriever = '{url}': asking a server needs httpx: pip install 'paw-trainer[search]'"
            ) from None
        self._httpx = httpx
        self._url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        # As many connections as callers, and no proxy: an address of the cluster is not to be asked of one.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(timeout=timeout_s, limits=limits, trust_env=False)
        self.search(["retriever"], 1)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if not queries:
            return []
        answer = self._ask({"queries": list(queries), "topk": topk, "return_scores": True})
        try:
            result = answer.json()["result"]
            if len(result) != len(queries):
                raise ValueError(f"{len(result)} lists of hits for {len(queries)} queries")
            return [[_hit(item) for item in items][:topk] for items in result]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{self._url}: it does not answer as a retriever ({error!r}): {_start(answer)}") from None

    def _ask(self, request: dict[str, Any]) -> Any:
        """The answer 200, as httpx has it."""
        reason = ""
        for wait in range(TRIES):
            time.sleep(PAUSE_S * wait)
            try:
                answer = self._client.post(self._url, json=request)
            except self._httpx.TimeoutException:
                reason = f"no answer within search.timeout_s = {self._client.timeout.read:g}"
                break
            except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
                reason = str(error) or type(error).__name__
                continue
            if answer.status_code == 200:
                return answer
            reason = f"status {answer.status_code}: {_start(answer)}"
            if answer.status_code < 500:
                break
        raise UserError(f"search.retriever = '{self._url}': {reason}; `paw serve retriever` starts such a server")


def _hit(item: Any) -> Hit:
    """From {"document": {...}, "score"}, or from the bare document, which has no score."""
    document = item.get("document", item)
    if not isinstance(document["contents"], str):
        raise TypeError("contents are not text")
    return Hit(str(document.get("id", "")), document["contents"], float(item.get("score", 0.0)))


def _start(answer: Any) -> str:
    return " ".join(answer.text.split())[:200]
