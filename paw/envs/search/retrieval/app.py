"""The application of `paw serve retriever`. Importing this module needs fastapi.

    POST /retrieve  {"queries": [...] or "query": "...", "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]},
                    a list for each query
                    without return_scores: {"result": [[{"id", "contents"}, ...], ...]}
    GET /health     -> {"status": "ok", "documents": 21015324, "retriever": "bm25"}

Errors are answered with {"error": "..."}. The status is 4xx for a mistake of the client, 503 if the
server is overloaded, and 500 if the search fails.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from paw.envs.checked import problem
from paw.envs.search.retrieval.base import Hit, Retriever
from paw.envs.settings import SearchConfig
from paw.io.serving import LimitedBodies

MAX_QUERIES = 1024
"""Maximum number of queries per request."""
WORKERS = 4
"""Number of requests searched at once."""
MAX_WAITING = 512
"""Maximum number of requests being searched or waiting. Further ones are refused."""


class Query(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)
    query: str | None = None
    queries: Annotated[list[str], Field(min_length=1, max_length=MAX_QUERIES)] | None = None
    topk: Annotated[int, Field(ge=1, le=100)] | None = None
    """None for the server's own env.topk."""
    return_scores: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> "Query":
        if (self.query is None) == (self.queries is None):
            raise ValueError('give either "queries", a list, or "query", one text')
        return self

    def result(self, hit: Hit) -> dict[str, Any]:
        """Return a hit in the form that the client asked for."""
        document = {"id": hit.id, "contents": hit.contents}
        if self.return_scores:
            return {"document": document, "score": hit.score}
        return document


class Searches:
    """Searches in threads, each for a batch of queries."""

    def __init__(self, retriever: Retriever, timeout_s: float) -> None:
        self._retriever = retriever
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(WORKERS, "search")
        self._waiting: set[asyncio.Future[Any]] = set()

    async def run(self, queries: list[str], topk: int) -> Sequence[Sequence[Hit]]:
        """Return the hits of each query.

        Raises HTTPException if too many requests are waiting, or if the search takes too long.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise HTTPException(503, f"{MAX_WAITING} requests are waiting already; try again")
        loop = asyncio.get_running_loop()
        search = loop.run_in_executor(self._pool, self._retriever.search, queries, topk)
        self._waiting.add(search)
        search.add_done_callback(self._waiting.discard)
        try:
            return await asyncio.wait_for(search, self._timeout_s)
        except TimeoutError:
            raise HTTPException(
                503, f"not done within {self._timeout_s:g} s; try again with fewer queries"
            ) from None


def make_app(retriever: Retriever, config: SearchConfig, *, documents: int) -> FastAPI:
    """Make the application.

    Each request is one batch, searched in a thread. Reading its body and searching may each take
    `config.timeout_s`.
    """
    app = FastAPI(openapi_url=None)
    app.add_middleware(LimitedBodies, timeout_s=config.timeout_s)
    searches = Searches(retriever, config.timeout_s)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        query = await _read_query(request)
        queries = query.queries or [query.query or ""]
        hits_of_queries = await searches.run(queries, query.topk or config.topk)
        results = [[query.result(hit) for hit in hits] for hits in hits_of_queries]
        return JSONResponse({"result": results})

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "documents": documents, "retriever": config.retriever})

    app.exception_handler(AnyHTTPException)(_refused)
    app.exception_handler(Exception)(_broken)
    return app


async def _read_query(request: Request) -> Query:
    """Read the body of a request. Raises HTTPException if it is not a query."""
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type.strip().lower() != "application/json":
        raise HTTPException(
            415, "the body must be JSON: send the header Content-Type: application/json"
        )
    try:
        return Query.model_validate_json(await request.body())
    except ClientDisconnect:
        raise HTTPException(400, "the connection ended before the body did") from None
    except ValidationError as error:
        raise HTTPException(400, problem(error)) from None


async def _refused(request: Request, error: AnyHTTPException) -> JSONResponse:
    detail = error.detail
    if error.status_code in (404, 405):
        detail = (
            f"no {request.method} {request.url.path} here: there are POST /retrieve and GET /health"
        )
    return JSONResponse({"error": detail}, error.status_code, error.headers)


async def _broken(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": f"the search failed: {error}"}, 500)
