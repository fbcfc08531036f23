"""A retriever behind HTTP: `paw serve retriever`, Search-R1's server, or another with the same
protocol.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, FiniteFloat, ValidationError, model_validator

from paw.envs.checked import FIRST_ERROR, problem
from paw.envs.search.retrieval.base import Hit
from paw.errors import UserError, clean
from paw.io.http import BadAnswer, BlockingHttpClient

TRIES = 3
"""Number of tries for the first request, and for any request that is answered with status 500."""
PATIENT_TRIES = 10
"""Number of tries for later requests while the server is unavailable. It outlasts a restart of two
minutes."""
PAUSE_S = 0.5
"""Pause before the second try. It doubles with each try, up to 60 times as long."""
AWAY = (502, 503, 504)
"""Status codes of a server that is unavailable or busy."""


class Item(BaseModel):
    """{"document": {...}, "score"}, or the bare document, which has no score."""

    id: Any = ""
    contents: str
    score: FiniteFloat = 0.0

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, item: Any) -> Any:
        document = item.get("document") if isinstance(item, dict) else None
        if not isinstance(document, dict):
            return item
        return {**document, "score": item.get("score", 0.0)}


Items = Annotated[list[Item], FIRST_ERROR]


class SearchAnswer(BaseModel):
    """The body of an answer: a list of hits for each query."""

    result: Annotated[list[Items], FIRST_ERROR]


class RemoteRetriever:
    """The server at `url`, with or without /retrieve at its end. Connections are kept open.

    Raises UserError, which names the URL, if the server answers with anything but hits, or not
    within `timeout_s`. A request is tried again after a lost connection or a status 5xx. Once the
    server has answered, this goes on for two minutes. For the first request and for status 500,
    there are only TRIES tries.
    """

    def __init__(self, url: str, *, timeout_s: float):
        self._url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._timeout_s = timeout_s
        self._tries = TRIES
        self._client = BlockingHttpClient(f"env.retriever = '{url}'", timeout_s=timeout_s)
        self.search(["retriever"], 1)  # so that a mistake in the URL is reported now
        self._tries = PATIENT_TRIES

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if not queries:
            return []
        text = self._ask({"queries": list(queries), "topk": topk, "return_scores": True})
        try:
            result = SearchAnswer.model_validate_json(text).result
            if len(result) != len(queries):
                raise ValueError(f"{len(result)} lists of hits for {len(queries)} queries")
        except ValueError as error:
            reason = problem(error) if isinstance(error, ValidationError) else error
            answer = clean(text, 200)
            raise UserError(
                f"{self._url}: it does not answer like a retriever ({clean(reason)}): {answer}"
            ) from None

        hits_of_queries = []
        for items in result:
            hits = [Hit(str(item.id), item.contents, item.score) for item in items[:topk]]
            hits_of_queries.append(hits)
        return hits_of_queries

    def _ask(self, request: dict[str, Any]) -> str:
        """Return the body of the server's answer. Raises UserError unless its status is 200."""
        reason = ""
        for failures in range(self._tries):
            if failures:
                time.sleep(PAUSE_S * min(60, 2 ** (failures - 1)))
            try:
                answer = self._client.ask("POST", self._url, request)
            except TimeoutError:
                reason = f"no answer within env.timeout_s = {self._timeout_s:g}"
                break
            except BadAnswer as error:
                reason = str(error)
                break
            except Exception as error:  # no connection, a broken one, no address at all
                reason = clean(error) or type(error).__name__
                continue
            if answer.status == 200:
                return answer.text
            reason = f"status {answer.status}: {clean(answer.text, 200)}"
            is_away = answer.status in AWAY
            if answer.status < 500 or (not is_away and failures + 1 >= TRIES):
                break
        raise UserError(
            f"env.retriever = '{self._url}': {reason}; `paw serve retriever` starts such a server"
        )
