"""HTTP on loopback, both ways: servers that trickle, flood and lie to our clients, clients that starve our server."""

import asyncio
import gzip
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paw.config import EndpointConfig
from paw.envs import http
from paw.envs.search.retrieval import remote, server
from paw.envs.search.retrieval.base import Hit
from paw.envs.search.retrieval.remote import RemoteRetriever
from paw.envs.settings import SearchConfig
from paw.errors import UserError

httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from paw.agents import endpoint  # noqa: E402
from paw.agents.endpoint import Endpoint, EndpointError  # noqa: E402

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.0
Sender = Callable[[socket.socket], object]


@pytest.fixture
def listen() -> Iterator[Callable[..., str]]:
    """`listen(sender, ...)` starts a server and returns its URL: the n-th connection's request is answered by the n-th
    sender, the last for ever."""
    listeners: list[socket.socket] = []

    def start(*senders: Sender) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def treat(sender: Sender, connection: socket.socket) -> None:
            with connection:
                try:
                    read_request(connection)
                    sender(connection)
                except OSError:
                    pass  # the client has gone, as it should

        def accept() -> None:
            for n in range(1000):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                sender = senders[min(n, len(senders) - 1)]
                threading.Thread(target=treat, args=(sender, connection), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def read_request(connection: socket.socket) -> None:
    """To its end: what is closed with something unread is reset, and the answer may be lost."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(1 << 16)
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.I)
    while length and len(body) < int(length[1]):
        body += connection.recv(1 << 16)


def answers(body: bytes, *, status: str = "200 OK", headers: str = "") -> Sender:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return lambda connection: connection.sendall(head.encode() + body)


def trickle(first: bytes, drop: bytes) -> Sender:
    def send(connection: socket.socket) -> None:
        connection.sendall(first)
        for _ in range(600):
            connection.sendall(drop)
            time.sleep(0.05)

    return send


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    for _ in range(4096):
        connection.sendall(b" " * (1 << 20))


BOMB = gzip.compress(b" " * (1 << 28), 9)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
TOO_LARGE = "the answer has more than 16,777,216 bytes"
BAD: dict[str, tuple[Sender, str]] = {
    "a head without end": (trickle(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), "no (whole )?answer within"),
    "a body without end": (trickle(HEAD, b" "), "no (whole )?answer within"),
    "a flood": (flood, TOO_LARGE),
    "a bomb in an error": (answers(BOMB, status="500 No", headers="Content-Encoding: gzip\r\n"), TOO_LARGE),
    "a bomb in a bomb": (answers(gzip.compress(BOMB), headers="Content-Encoding: gzip, gzip\r\n"), "encoding is"),
}
HITS = b'{"result": [[{"document": {"id": 1, "contents": "x"}, "score": 0.5}]]}'


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("problem", ["a body without end", "a bomb in an error"])
def test_a_retriever_that_misbehaves_costs_little_time_and_memory(listen, monkeypatch, problem):
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    sender, reason = BAD[problem]
    url = listen(sender)
    started, before = time.monotonic(), memory()
    with pytest.raises(UserError, match=rf"^env.retriever = '{url}/retrieve': .*({reason})") as caught:
        RemoteRetriever(url, timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < 4 * TIMEOUT_S and memory() - before < 200 << 20
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("problem", BAD)
def test_an_endpoint_that_misbehaves_costs_little_time_and_memory(listen, problem):
    sender, reason = BAD[problem]
    config = EndpointConfig(url=listen(sender), model="m", retries=0, timeout_s=TIMEOUT_S)
    player = Endpoint(config)
    started, before = time.monotonic(), memory()
    with pytest.raises(EndpointError, match=reason) as caught:
        asyncio.run(player.complete("hello", temperature=0.0, max_tokens=4, seed=0))
    assert time.monotonic() - started < 4 * TIMEOUT_S and memory() - before < 200 << 20
    assert str(caught.value).isprintable()


def test_a_compressed_answer_is_read(listen):
    url = listen(answers(gzip.compress(HITS), headers="Content-Encoding: gzip\r\nConnection: close\r\n"))
    assert RemoteRetriever(url, timeout_s=5).search(["q"], 1) == [[Hit("1", "x", 0.5)]]


DEEP = b"[" * 1_000_000


@pytest.mark.parametrize(
    "body", [DEEP, HITS.replace(b"0.5", b"9" * 5000), HITS.replace(b"0.5", b"NaN"), b"\xff\xfe\x00"]
)
def test_what_a_retriever_makes_up_is_one_line(listen, body):
    url = listen(answers(body))
    with pytest.raises(UserError, match=f"^{url}/retrieve: it does not answer as a retriever") as caught:
        RemoteRetriever(url, timeout_s=10)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_a_retriever_that_restarts_costs_nothing(listen, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_S", 0.02)
    close = "Connection: close\r\n"
    busy = answers(b"starting", status="503 Service Unavailable", headers=close)
    good = answers(HITS, headers=close)
    client = RemoteRetriever(listen(good, *[lambda connection: None] * 4, *[busy] * 4, good), timeout_s=5)
    assert client.search(["q"], 1) == [[Hit("1", "x", 0.5)]]
    assert sum(0.5 * min(60, 2**n) for n in range(remote.PATIENT_TRIES - 1)) > 120  # as the pauses are


# --- what an endpoint says --------------------------------------------------------------------------------------------


def completion(**changes) -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "look"}}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps({**body, **changes}).encode()


@pytest.fixture
def ask(listen):
    def ask(*bodies: bytes, pauses=None, prompt="hello", **options):
        async def sleep(seconds):
            if pauses is not None:
                pauses.append(seconds)

        senders = [body if callable(body) else answers(body, headers="Connection: close\r\n") for body in bodies]
        config = EndpointConfig(url=listen(*senders), model="m", **{"retries": 0, "timeout_s": 5, **options})
        return asyncio.run(Endpoint(config, sleep=sleep).complete(prompt, temperature=0.0, max_tokens=4, seed=0))

    return ask


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 11, "completion_tokens": 5.0}, (11, 5)),
        ({"prompt_tokens": -11, "completion_tokens": 10**12}, (0, 0)),
        ({"prompt_tokens": int("9" * 400), "completion_tokens": float("nan")}, (0, 0)),
        (None, (0, 0)),
    ],
)
def test_usage_that_is_none_is_not_counted(ask, usage, counted):
    reply = ask(completion(usage=usage))
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("look", *counted)


@pytest.mark.parametrize("body", [DEEP, b'{"usage": ' + b"9" * 5000 + b"}", b'"\\ud800"'])
def test_what_an_endpoint_makes_up_is_one_line(ask, body):
    with pytest.raises(EndpointError, match="malformed answer: ") as caught:
        ask(body)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_a_wait_of_hours_is_cut_and_named(ask, capfd):
    for value in ("9" * 400, "Fri, 31 Dec 2199 23:59:59 GMT"):
        pauses = []
        refusal = answers(b"{}", status="429 Slow", headers=f"Retry-After: {value}\r\nConnection: close\r\n")
        assert ask(refusal, completion(), retries=1, pauses=pauses).text == "look"
        assert pauses == [endpoint.LONGEST_WAIT_S] == [120.0]
        said = capfd.readouterr().err
        assert f"asks to wait (Retry-After: {value[:40]}" in said and said.endswith(": waiting 120 s of it\n")


FORGERIES = [
    "<|im_start|>system", "<|im_end|>", "<｜User｜>", "<|start_header_id|>", "<|turn>", "[INST]", "[/INST]", "<s>",
    "</s>", "<start_of_turn>model", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<<SYS>>", "<</SYS>>",
    "[SYSTEM_PROMPT]", "[TOOL_CALLS]", "<｜begin▁of▁sentence｜>", "<<|im_end|>", "[gMASK]", "<unused3>",
]  # fmt: skip
BENIGN = "<think>a < b || c</think><action>go [to] <search>x</search></action> a[INSTANCE] <strong> <state>"


def test_endpoints_get_no_control_tokens(listen):
    got: list[dict] = []

    def keep(connection: socket.socket) -> None:
        answers(completion(), headers="Connection: close\r\n")(connection)

    class Listening(Endpoint):
        def _request(self, *given):
            got.append(super()._request(*given))
            return got[-1]

    player = Listening(EndpointConfig(url=listen(keep), model="m", retries=0))
    text = BENIGN + "".join(FORGERIES)
    asyncio.run(player.complete(text, start=text, temperature=0.0, max_tokens=4, seed=0))
    for message in got[0]["messages"]:
        assert message["content"].startswith(BENIGN)
        assert not any(forged in message["content"] for forged in FORGERIES)
        assert message["content"].replace(" ", "") == text.replace(" ", "")


# --- our server -------------------------------------------------------------------------------------------------------


class One:
    """A retriever of one document."""

    def search(self, queries, topk):
        return [[Hit("1", query, 1.0)] for query in queries]


@pytest.fixture
def serving(monkeypatch) -> Iterator[Callable[..., tuple[str, int]]]:
    """`serving(limit=...)` runs the server in a thread, with constants of its module changed: (host, port)."""
    servers = []

    def start(timeout_s: float = 5.0, **limits) -> tuple[str, int]:
        for name, value in limits.items():
            monkeypatch.setattr(server, name, value)
        config = SearchConfig(timeout_s=timeout_s)
        made = server.make_server(server.make_app(One(), config, documents=1), config)
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        servers.append((made, thread))
        return listener.getsockname()

    yield start
    for made, thread in servers:
        made.should_exit = True
        thread.join(10)


def search(address: tuple[str, int], timeout_s: float = 5.0) -> int:
    with httpx.Client(trust_env=False, timeout=timeout_s) as client:
        return client.post(f"http://{address[0]}:{address[1]}/retrieve", json={"query": "q"}).status_code


def test_half_open_connections_shut_nobody_out(serving):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))  # both ends are in this process
    address = serving(HEAD_S=3)
    held = [socket.create_connection(address) for _ in range(1100)]
    for n, connection in enumerate(held):
        if n % 2:
            connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\n")
    started = time.monotonic()
    assert search(address) == 200 and time.monotonic() - started < 2
    held[0].settimeout(10)
    assert held[0].recv(1) == b"" and time.monotonic() - started > 1  # closed, and not at once
    for connection in held:
        connection.close()


def test_of_too_many_connections_those_without_a_request_go(serving):
    address = serving(MAX_CONNECTIONS=20, HEAD_S=60)
    body = socket.create_connection(address)
    body.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n")
    held = []
    for _ in range(60):
        held.append(socket.create_connection(address))
        assert len(held) % 10 or search(address) == 200
    body.sendall(b'{"query": "q"}')
    body.settimeout(5)
    assert b" 200 OK" in body.recv(1 << 16)  # a request is not closed for a connection
    gone = 0
    for connection in held:
        connection.setblocking(False)
        try:
            gone += connection.recv(1) == b""
        except BlockingIOError:
            continue
        except ConnectionError:
            gone += 1
    assert 60 - 20 <= gone < 60
    for connection in [*held, body]:
        connection.close()


def closes_after(connection: socket.socket, drop: bytes, limit_s: float = 5.0) -> float:
    """Seconds until the server closes a connection on which `drop` is sent again and again."""
    connection.settimeout(0.05)
    started = time.monotonic()
    while time.monotonic() - started < limit_s:
        try:
            connection.sendall(drop)
            if connection.recv(1 << 16) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    connection.close()
    return time.monotonic() - started


def test_a_head_that_does_not_end_ends_the_connection(serving):
    connection = socket.create_connection(serving(HEAD_S=1))
    connection.sendall(b"GET /health HTTP/1.1\r\n")
    assert 0.5 < closes_after(connection, b"X") < 3


def test_the_second_head_of_a_connection_has_a_clock_too(serving):
    connection = socket.create_connection(serving(HEAD_S=1))
    connection.settimeout(5)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 OK" in connection.recv(1 << 16)
    time.sleep(1.5)  # kept open while nothing is asked
    connection.sendall(b"GET /health HTTP/1.1\r\n")
    assert 0.5 < closes_after(connection, b"") < 3


@pytest.mark.parametrize(
    "head", ["GET /health HTTP/1.1\r\nX: ", "POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"]
)
def test_a_huge_head_and_a_body_that_nobody_asked_for_keep_no_connection(serving, head):
    connection = socket.create_connection(serving(HEAD_S=1))
    connection.sendall(head.encode())
    assert closes_after(connection, b"y" * (1 << 16)) < 3


def test_the_clients_limit_is_the_servers_answer():
    """A whole answer of our server fits: the most documents that a search of an environment asks for."""
    assert http.MAX_BYTES > 100 * 100_000
