"""A retriever behind HTTP: `paw serve retriever`, Search-R1's server, or another of the same form."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, FiniteFloat, ValidationError, model_validator

from paw.envs.checked import FIRST_ERROR, problem
from paw.envs.http import BadAnswer, BlockingHttpClient
from paw.envs.search.retrieval import Hit
from paw.errors import UserError, clean

TRIES, PATIENT_TRIES = 3, 10
"""Of a request: the first one, and later ones while the server is away.

The latter outlast a restart of two minutes.
"""
PAUSE_S = 0.5
"""Before the second try; then twice as long each time, 60 times that at most."""
AWAY = (502, 503, 504)


class Item(BaseModel):
    """{"document": {...}, "score"}, or the bare document, which has no score."""

    id: Any = ""
    contents: str
    score: FiniteFloat = 0.0

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, item: Any) -> Any:
        inner = item.get("document") if isinstance(item, dict) else None
        return {**inner, "score": item.get("score", 0.0)} if isinstance(inner, dict) else item


Items = Annotated[list[Item], FIRST_ERROR]


class Answer(BaseModel):
    result: Annotated[list[Items], FIRST_ERROR]


class RemoteRetriever:
    """The server at `url`, with or without /retrieve at its end. Connections are kept open.

    UserError, naming the URL, where it answers anything but hits, or not within `timeout_s`. Lost
    connections, 5xx are tried again; once the server has answered, for two minutes (500: three
    times).
    """

    def __init__(self, url: str, *, timeout_s: float):
        self._url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._timeout_s, self._tries = timeout_s, TRIES
        self._client = BlockingHttpClient(f"env.retriever = '{url}'", timeout_s=timeout_s)
        self.search(["retriever"], 1)
        self._tries = PATIENT_TRIES

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if not queries:
            return []
        text = self._ask({"queries": list(queries), "topk": topk, "return_scores": True})
        try:
            found = Answer.model_validate_json(text).result
            if len(found) != len(queries):
                raise ValueError(f"{len(found)} lists of hits for {len(queries)} queries")
        except ValueError as error:
            reason = problem(error) if isinstance(error, ValidationError) else error
            answer = clean(text, 200)
            raise UserError(
                f"{self._url}: it does not answer as a retriever ({clean(reason)}): {answer}"
            ) from None
        return [
            [Hit(str(item.id), item.contents, item.score) for item in items[:topk]]
            for items in found
        ]

    def _ask(self, request: dict[str, Any]) -> str:
        """The body of the answer 200."""
        reason = ""
        for tried in range(self._tries):
            time.sleep(PAUSE_S * min(60, 2 ** (tried - 1)) if tried else 0)
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
            if answer.status < 500 or (answer.status not in AWAY and tried + 1 >= TRIES):
                break
        raise UserError(
            f"env.retriever = '{self._url}': {reason}; `paw serve retriever` starts such a server"
        )
