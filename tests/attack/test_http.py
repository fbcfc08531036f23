"""HTTP on loopback in both directions: servers that trickle, flood and lie to our clients, and
clients that starve our server."""

import asyncio
import gzip
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from processes import wait_until

from paw.config.sections import EndpointConfig
from paw.envs.search.retrieval import remote
from paw.envs.search.retrieval.base import Hit
from paw.envs.search.retrieval.remote import RemoteRetriever
from paw.envs.settings import SearchConfig
from paw.errors import UserError
from paw.io import serving as serving_module
from paw.io.http import BlockingHttpClient

httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from paw.agents.endpoint import Endpoint, EndpointError  # noqa: E402
from paw.envs.search.retrieval import app as retriever_app  # noqa: E402

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.0


def trickle(first: bytes, drop: bytes):
    def send(handler) -> None:
        handler.connection.sendall(first)
        for _ in range(600):
            handler.connection.sendall(drop)
            time.sleep(0.05)

    return send


def flood(handler) -> None:
    handler.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    for _ in range(4096):
        handler.connection.sendall(b" " * (1 << 20))


def close(handler) -> None:
    handler.close_connection = True
    handler.connection.close()


def packed_spaces(mebibytes: int) -> bytes:
    """A gzip stream of spaces. All mebibytes but the first compress alike, so only two are
    compressed."""
    packer = zlib.compressobj(wbits=31)
    spaces = b" " * (1 << 20)
    first_part = packer.compress(spaces) + packer.flush(zlib.Z_FULL_FLUSH)
    further = packer.compress(spaces) + packer.flush(zlib.Z_FULL_FLUSH)
    return first_part + (mebibytes - 1) * further


BOMB = packed_spaces(256)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
TOO_LARGE = "the answer has more than 16,777,216 bytes"
HITS = b'{"result": [[{"document": {"id": 1, "contents": "x"}, "score": 0.5}]]}'
BAD = {
    "a head without end": (
        trickle(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        "no (complete )?answer within",
    ),
    "a body without end": (trickle(HEAD, b" "), "no (complete )?answer within"),
    "a flood": (flood, TOO_LARGE),
    "a bomb in an error": ((500, BOMB, {"Content-Encoding": "gzip"}), TOO_LARGE),
    "no gzip": ((200, HITS, {"Content-Encoding": "gzip"}), "is not gzip"),
    "a bomb in a bomb": (
        (200, gzip.compress(BOMB), {"Content-Encoding": "gzip, gzip"}),
        "encoding is",
    ),
}


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("problem", BAD)
def test_who_misbehaves_costs_little_memory(server, monkeypatch, problem):
    """Checked with an endpoint, and with a retriever in the cases that it reads differently.
    Endless answers are given up."""
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    server.default, reason = BAD[problem]
    before = memory()
    if problem in ("a body without end", "a bomb in an error"):
        with pytest.raises(
            UserError, match=rf"^env.retriever = '{server.url}/retrieve': .*({reason})"
        ) as caught:
            RemoteRetriever(server.url, timeout_s=TIMEOUT_S)
        assert str(caught.value).isprintable()
    player = Endpoint(EndpointConfig(url=server.url, model="m", retries=0, timeout_s=TIMEOUT_S))
    with pytest.raises(EndpointError, match=reason) as caught:
        asyncio.run(player.complete("hello", temperature=0.0, max_tokens=4, seed=0))
    assert memory() - before < 128 << 20
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_a_compressed_answer_is_read(server, encoding, pack):
    server.default = (200, pack(HITS), {"Content-Encoding": encoding})
    assert RemoteRetriever(server.url, timeout_s=5).search(["q"], 1) == [[Hit("1", "x", 0.5)]]


DEEP = b"[" * 1_000_000


@pytest.mark.parametrize(
    "body", [DEEP, HITS.replace(b"0.5", b"9" * 5000), HITS.replace(b"0.5", b"NaN"), b"\xff\xfe\x00"]
)
def test_what_a_retriever_makes_up_is_one_line(server, body):
    server.default = (200, body, {})
    with pytest.raises(
        UserError, match=f"^{server.url}/retrieve: it does not answer like a retriever"
    ) as caught:
        RemoteRetriever(server.url, timeout_s=10)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_retriever_that_restarts_costs_nothing(server, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_S", 0.002)
    server.script = [(200, HITS, {}), *[close] * 4, *[(503, b"starting", {})] * 4, (200, HITS, {})]
    client = RemoteRetriever(server.url, timeout_s=5)
    assert client.search(["q"], 1) == [[Hit("1", "x", 0.5)]]
    # The pauses are longer outside of tests.
    assert sum(0.5 * min(60, 2**n) for n in range(remote.PATIENT_TRIES - 1)) > 120


# --- our server of documents


class One:
    """A retriever of one document."""

    def search(self, queries, topk):
        return [[Hit("1", query, 1.0)] for query in queries]


@pytest.fixture
def serving(monkeypatch) -> Iterator[Callable[..., tuple[str, int]]]:
    """`serving(limit=...)` runs the server in a thread, with changed constants of its module.
    Returns (host, port)."""
    servers = []

    def start(timeout_s: float = 5.0, **limits) -> tuple[str, int]:
        for name, value in limits.items():
            monkeypatch.setattr(serving_module, name, value)
        config = SearchConfig(timeout_s=timeout_s)
        app = retriever_app.make_app(One(), config, documents=1)
        server = serving_module.make_server(app, timeout_s=timeout_s)
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return listener.getsockname()

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


def search(address: tuple[str, int], timeout_s: float = 5.0) -> int:
    with httpx.Client(trust_env=False, timeout=timeout_s) as client:
        return client.post(
            f"http://{address[0]}:{address[1]}/retrieve", json={"query": "q"}
        ).status_code


def test_half_open_connections_shut_nobody_out(serving):
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # This process holds both ends.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, 8192), hard_limit))
    address = serving(HEAD_S=600)
    connections = [socket.create_connection(address) for _ in range(1100)]
    for connection in connections[::2]:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\n")
    assert search(address, timeout_s=60) == 200
    for connection in connections[:2]:  # still open
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
    for connection in connections:
        connection.close()


def test_half_open_connections_are_closed_in_the_end(serving):
    address = serving(HEAD_S=0.5)
    silent = socket.create_connection(address)
    half_asked = socket.create_connection(address)
    half_asked.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\n")
    for connection in (silent, half_asked):
        connection.settimeout(60)
        assert connection.recv(1) == b""
        connection.close()


def test_of_too_many_connections_those_without_a_request_go(serving):
    address = serving(MAX_CONNECTIONS=20, HEAD_S=60)
    asking = socket.create_connection(address)
    asking.sendall(
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n"
    )
    silent = []
    for _ in range(6):
        silent += [socket.create_connection(address) for _ in range(10)]
        assert search(address) == 200
    asking.sendall(b'{"query": "q"}')
    asking.settimeout(5)
    # A connection with a request is not closed for another one.
    assert b" 200 OK" in asking.recv(1 << 16)

    def closed() -> int:
        return sum(map(was_closed, silent))

    wait_until(lambda: closed() >= 60 - 20, seconds=10)  # the server closes them sooner or later
    assert closed() < 60
    for connection in [*silent, asking]:
        connection.close()


def was_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it sends nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def is_closed(connection: socket.socket, drop: bytes) -> bool:
    """Whether the server closes a connection on which `drop` is sent again and again. Waits at most
    a minute."""
    connection.settimeout(0.05)
    deadline = time.monotonic() + 60
    closed = False
    while not closed and time.monotonic() < deadline:
        try:
            connection.sendall(drop)
            closed = connection.recv(1 << 16) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            closed = True
    connection.close()
    return closed


def test_every_head_has_a_clock(serving):
    """Both the first head of a connection and a later one. A huge head, or a body for an unknown
    path, does not keep a connection open either."""
    address = serving(HEAD_S=0.5)
    for head, drop in (
        ("GET /health HTTP/1.1\r\n", b"X"),
        ("GET /health HTTP/1.1\r\nX: ", b"y" * (1 << 16)),
        ("POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b"y" * (1 << 16)),
    ):
        connection = socket.create_connection(address)
        connection.sendall(head.encode())
        assert is_closed(connection, drop)
    connection = socket.create_connection(address)
    connection.settimeout(60)
    for _ in range(2):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = connection.recv(1 << 16)
        while not answer.endswith(b"}"):  # head and body may arrive separately
            answer += connection.recv(1 << 16)
        assert b" 200 OK" in answer
        time.sleep(0.75)  # the connection stays open between requests
    connection.sendall(b"GET /health HTTP/1.1\r\n")
    assert is_closed(connection, b"")


# --- `paw serve env`, which uses the same server

PACKAGE = Path(sys.prefix) / "openenv"
GAME = Path(__file__).parents[2] / "examples" / "number_game.py"
IMPATIENT = """
import sys
from paw import cli
from paw.io import serving

serving.HEAD_S = serving.BODY_S = 0.5
serving.MAX_CONNECTIONS = 20
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def environment(paw_env) -> Iterator[tuple[str, int]]:
    """(host, port) of `paw serve env` with a guessing game, in an impatient process that can import
    openenv."""
    variables = paw_env | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), paw_env["PYTHONPATH"]])}
    command = [sys.executable, "-c", IMPATIENT, "serve", "env", f"{GAME}:Guess", "--port", "0"]
    child = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    url = next(line for line in child.stderr if line.startswith("http")).split(": ")[0]
    # A full pipe would stop the server.
    threading.Thread(target=child.stderr.read, daemon=True).start()
    yield "127.0.0.1", int(url.rpartition(":")[2])
    child.kill()
    child.wait()


needs_openenv = pytest.mark.skipif(not PACKAGE.is_dir(), reason=f"openenv is not at {PACKAGE}")


def answer_to(address: tuple[str, int], path: str, length: int, body: Iterable[bytes]) -> bytes:
    """The first line of the answer to a POST. The body may come in parts or be longer than the
    server reads."""
    with socket.create_connection(address) as connection:
        connection.settimeout(10)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        with suppress(ConnectionError):  # the server reads no more
            for body_part in body:
                connection.sendall(body_part)
        return connection.recv(1 << 16).partition(b"\r\n")[0]


@needs_openenv
def test_an_environment_served_has_a_clock_for_heads_and_bodies_and_a_limit_for_bodies(environment):
    for head, drop in (
        (b"", b""),
        (b"GET /health HTTP/1.1\r\n", b"X"),
        (b"GET /health HTTP/1.1\r\nX: ", b"y" * 4096),
    ):
        connection = socket.create_connection(environment)
        connection.sendall(head)
        assert is_closed(connection, drop)
    assert answer_to(environment, "/step", 1000, [b"{"]) == b"HTTP/1.1 408 Request Timeout"
    megabytes = iter([b" " * (1 << 20)] * 30)
    assert (
        answer_to(environment, "/step", 30 << 20, megabytes)
        == b"HTTP/1.1 413 Request Entity Too Large"
    )
    with httpx.Client(
        base_url=f"http://127.0.0.1:{environment[1]}", trust_env=False, timeout=10
    ) as client:
        assert client.get("/health").status_code == 200


@needs_openenv
def test_half_open_connections_shut_nobody_out_of_an_environment(environment):
    """The clocks do not end a session. A session has no clock, because its model may think for a
    long time."""
    websockets = pytest.importorskip("websockets.sync.client")
    with websockets.connect(f"ws://127.0.0.1:{environment[1]}/ws") as session:
        session.send(json.dumps({"type": "reset", "data": {"index": 4}}))
        assert "I think of a number" in session.recv(10)
        connections = [socket.create_connection(environment) for _ in range(60)]
        with httpx.Client(
            base_url=f"http://127.0.0.1:{environment[1]}", trust_env=False, timeout=10
        ) as client:
            assert client.get("/health").status_code == 200
        for connection in connections:
            connection.settimeout(10)
            with suppress(ConnectionError):
                assert connection.recv(1) == b""  # closed
            connection.close()
        session.send(json.dumps({"type": "step", "data": {"text": "5"}}))
        assert "That is it." in session.recv(10)
        session.send(json.dumps({"type": "step", "data": {"text": "5" * (5 << 20)}}))
        with pytest.raises(Exception, match=r"1009|too big"):
            session.recv(10)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/x", "no connection to 127.0.0.1:1: Connection refused"),
        ("http://no-such-host.invalid/", "no connection to no-such-host.invalid:80: "),
        ("http://[::1", "'http://[::1' is not an HTTP address"),
    ],
)
def test_no_connection_is_a_plain_line(url, message):
    client = BlockingHttpClient("env.retriever", timeout_s=20)
    with pytest.raises((ConnectionError, ValueError)) as failure:
        client.ask("GET", url)
    client.close()
    assert str(failure.value).startswith(message)
    assert "\n" not in str(failure.value)
