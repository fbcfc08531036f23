"""`paw serve retriever`: a retriever behind HTTP, as clients of Search-R1, verl-agent and `RemoteRetriever` expect it.

    POST /retrieve  {"queries": [...] or "query": "...", "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}, a list for each query
                    without return_scores: {"result": [[{"id", "contents"}, ...], ...]}
    GET /health     -> {"status": "ok", "documents": 21015324, "retriever": "bm25"}

Whatever goes wrong is {"error": "..."}: 4xx for what the client did, 503 where the server has too much to do.
"""

import asyncio
import resource
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paw.envs.checked import problem
from paw.envs.search.retrieval import Documents, Hit, Retriever, make_retriever
from paw.envs.search.retrieval.corpus import Corpus
from paw.envs.search.world import World
from paw.envs.settings import SearchConfig
from paw.errors import UserError, to_stderr

MAX_BYTES, MAX_HEAD, MAX_QUERIES = 4 << 20, 16 << 10, 1024
"""Of a request: bytes of its body and of its head, and queries."""
MAX_CONNECTIONS, SPARE_FILES = 2048, 64
"""Open at once (of more, the one longest without a request is closed); file descriptors left for everything else."""
WORKERS, MAX_WAITING = 4, 512
"""Requests searched for at once; those searched for or waiting, of which more are turned away."""
HEAD_S, KEEP_ALIVE_S, SHUTDOWN_S = 10, 75, 5
"""Seconds for a request's head, from its first byte or the connection's start; for an unused connection, longer than
clients keep one, so that they are the ones to close it; for the requests in work when the server is to end."""


class Query(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)
    query: str | None = None
    queries: Annotated[list[str], Field(min_length=1, max_length=MAX_QUERIES)] | None = None
    topk: Annotated[int, Field(ge=1, le=100)] | None = None
    """None: the server's own env.topk."""
    return_scores: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> "Query":
        if (self.query is None) == (self.queries is None):
            raise ValueError('give either "queries", a list, or "query", one text')
        return self


def make_app(retriever: Retriever, config: SearchConfig, *, documents: int) -> Any:
    """The FastAPI application. A request is one batch in a thread; it may take `config.timeout_s`, as may its body."""
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException as AnyHTTPException
    from starlette.requests import ClientDisconnect

    app = FastAPI(openapi_url=None)
    pool = ThreadPoolExecutor(WORKERS, "search")
    waiting: set[asyncio.Future[Any]] = set()

    async def body(request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body is to be JSON: send the header Content-Type: application/json")
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > MAX_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BYTES:,} bytes")
        return bytes(parts)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        try:
            asked = Query.model_validate_json(await asyncio.wait_for(body(request), config.timeout_s))
        except TimeoutError:
            detail = f"the body did not come within {config.timeout_s:g} s"
            raise HTTPException(408, detail, {"Connection": "close"}) from None
        except ClientDisconnect:
            raise HTTPException(400, "the connection ended before the body did") from None
        except ValidationError as error:
            raise HTTPException(400, problem(error)) from None
        if len(waiting) >= MAX_WAITING:
            raise HTTPException(503, f"{MAX_WAITING} requests are waiting already; try again")
        queries, topk = asked.queries or [asked.query or ""], asked.topk or config.topk
        found = asyncio.get_running_loop().run_in_executor(pool, retriever.search, queries, topk)
        waiting.add(found)
        found.add_done_callback(waiting.discard)
        try:
            hits = await asyncio.wait_for(found, config.timeout_s)
        except TimeoutError:
            raise HTTPException(503, f"not done within {config.timeout_s:g} s; try again with fewer queries") from None

        def result(hit: Hit) -> dict[str, Any]:
            document = {"id": hit.id, "contents": hit.contents}
            return {"document": document, "score": hit.score} if asked.return_scores else document

        return JSONResponse({"result": [[*map(result, row)] for row in hits]})

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "documents": documents, "retriever": config.retriever})

    @app.exception_handler(AnyHTTPException)
    async def failed(request: Request, error: AnyHTTPException) -> JSONResponse:
        detail = error.detail
        if error.status_code in (404, 405):
            detail = f"no {request.method} {request.url.path} here: there are POST /retrieve and GET /health"
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"the search failed: {error}"}, 500)

    return app


def make_server(app: Any, config: SearchConfig) -> Any:
    """The uvicorn server; every connection has a clock and can be closed for a new one."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    most = _connections()
    request_s = 3 * config.timeout_s + HEAD_S  # body, search, answer
    idle: dict[H11Protocol, None] = {}  # without a whole head, the longest first

    class Protocol(H11Protocol):
        clock: asyncio.TimerHandle | None = None
        has_begun = False
        """Whether bytes of a head have come."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            idle[self] = None
            self.has_begun = True
            self.wind(HEAD_S)
            if len(self.connections) > most:
                next(iter(idle)).transport.abort()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                idle.pop(self, None)
                self.wind(request_s)
            elif self in idle and not self.has_begun:
                self.has_begun = True
                self.wind(HEAD_S)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # else the next request was there already
                idle[self] = None
                self.has_begun = False
            self.wind(KEEP_ALIVE_S + request_s)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            idle.pop(self, None)
            if self.clock:
                self.clock.cancel()

        def wind(self, seconds: float) -> None:
            if self.clock:
                self.clock.cancel()
            self.clock = self.loop.call_later(seconds, self.transport.abort)

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Protocol,
            h11_max_incomplete_event_size=MAX_HEAD,
            backlog=MAX_CONNECTIONS // 2,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
            log_level="error",
            lifespan="off",
            ws="none",
            server_header=False,
        )
    )


def _connections() -> int:
    """How many may be open at once: MAX_CONNECTIONS, where the limit of open files lets itself be raised so far."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < MAX_CONNECTIONS + SPARE_FILES:
        soft = min(hard, MAX_CONNECTIONS + SPARE_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return max(1, min(MAX_CONNECTIONS, soft - SPARE_FILES))


def serve(search: SearchConfig, *, host: str, port: int) -> int:
    """Serve `env.corpus`, or the generated world, until Ctrl-C or SIGTERM; returns 0."""
    try:
        if search.retriever not in ("bm25", "dense"):
            raise UserError(
                f"paw serve retriever: '{search.retriever}' is no index; there are --retriever bm25 and dense"
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
    said = f"{url}: {len(documents):,} documents of {search.corpus or 'the generated world'}, {search.retriever}"
    return run_server(make_server(app, search), listener, said)


def listen(host: str, port: int, command: str) -> tuple[socket.socket, str]:
    """A listening socket and its URL. UserError, beginning with `command`, where there can be none."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(f"{command}: --host {host} --port {port}: {error}") from None
    return listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def run_server(server: Any, listener: socket.socket, said: str) -> int:
    """Run a uvicorn server until Ctrl-C or SIGTERM, having `said` that it is there; returns 0."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn ends at one of them, and then raises it once more
        signal.signal(number, signal.SIG_IGN)
    to_stderr(said)
    server.run(sockets=[listener])
    return 0
