"""`paw serve retriever`: a retriever behind HTTP, for clients of Search-R1 and verl-agent, and for
`RemoteRetriever`.

    POST /retrieve  {"queries": [...] or "query": "...", "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]},
                    a list for each query
                    without return_scores: {"result": [[{"id", "contents"}, ...], ...]}
    GET /health     -> {"status": "ok", "documents": 21015324, "retriever": "bm25"}

Errors are answered with {"error": "..."}. The status is 4xx for a mistake of the client, 503 if the
server is overloaded, and 500 if the search fails.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paw.envs.checked import problem
from paw.envs.search.retrieval import make_retriever
from paw.envs.search.retrieval.base import Documents, Hit, Retriever
from paw.envs.search.retrieval.corpus import Corpus
from paw.envs.search.world import World
from paw.envs.settings import SearchConfig
from paw.errors import UserError
from paw.io.serving import LimitedBodies, listen, make_server, run_server

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


def make_app(retriever: Retriever, config: SearchConfig, *, documents: int) -> Any:
    """Make the FastAPI application.

    Each request is one batch, searched in a thread. Reading its body and searching may each take
    `config.timeout_s`.
    """
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException as AnyHTTPException
    from starlette.requests import ClientDisconnect

    app = FastAPI(openapi_url=None)
    app.add_middleware(LimitedBodies, timeout_s=config.timeout_s)
    pool = ThreadPoolExecutor(WORKERS, "search")
    waiting: set[asyncio.Future[Any]] = set()

    async def read_query(request: Request) -> Query:
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

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        query = await read_query(request)
        if len(waiting) >= MAX_WAITING:
            raise HTTPException(503, f"{MAX_WAITING} requests are waiting already; try again")
        queries = query.queries or [query.query or ""]
        topk = query.topk or config.topk
        search = asyncio.get_running_loop().run_in_executor(pool, retriever.search, queries, topk)
        waiting.add(search)
        search.add_done_callback(waiting.discard)
        try:
            hits_of_queries = await asyncio.wait_for(search, config.timeout_s)
        except TimeoutError:
            raise HTTPException(
                503, f"not done within {config.timeout_s:g} s; try again with fewer queries"
            ) from None
        results = [[query.result(hit) for hit in hits] for hits in hits_of_queries]
        return JSONResponse({"result": results})

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "documents": documents, "retriever": config.retriever})

    @app.exception_handler(AnyHTTPException)
    async def failed(request: Request, error: AnyHTTPException) -> JSONResponse:
        detail = error.detail
        if error.status_code in (404, 405):
            detail = (
                f"no {request.method} {request.url.path} here: "
                "there are POST /retrieve and GET /health"
            )
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"the search failed: {error}"}, 500)

    return app


def serve(search: SearchConfig, *, host: str, port: int) -> int:
    """Serve `env.corpus`, or the generated world, until Ctrl-C or SIGTERM; returns 0."""
    try:
        if search.retriever not in ("bm25", "dense"):
            raise UserError(
                f"paw serve retriever: '{search.retriever}' is not an index; "
                "use --retriever bm25 or dense"
            )
        listener, url = listen(host, port, "paw serve retriever")
        if search.corpus:
            documents: Documents = Corpus(search.corpus)
        else:
            documents = World(search.entities, numbered=search.style == "compact").documents
        retriever = make_retriever(search.model_copy(update={"corpus": None}), documents)
        app = make_app(retriever, search, documents=len(documents))
    except ImportError as error:
        raise UserError(f"a server needs {error.name}: pip install 'paw-trainer[search]'") from None
    source = search.corpus or "the generated world"
    banner = f"{url}: {len(documents):,} documents of {source}, {search.retriever}"
    return run_server(make_server(app, timeout_s=search.timeout_s), listener, banner)
