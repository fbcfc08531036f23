"""`paw serve retriever` as a process on loopback answers many clients at once, names mistakes and
ends cleanly."""

import asyncio
import json
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonl import write_jsonl
from processes import wait_until
from scripted_server import serve as serve_script

from paw.envs.search.retrieval import make_retriever, remote
from paw.envs.search.retrieval.base import Hit
from paw.envs.search.retrieval.remote import RemoteRetriever
from paw.envs.settings import SearchConfig
from paw.errors import UserError
from paw.io import serving

pytest.importorskip("fastapi")

from paw.envs.search.retrieval import app as retriever_app

pytestmark = pytest.mark.slow
TIGHT_S = 0.5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "numbers.jsonl"
    documents = []
    for i in range(3000):
        contents = f'"Number {i}"\nmod{i % 7} mod{i % 11} unique{i}'
        documents.append({"id": i, "contents": contents})
    write_jsonl(path, documents)
    return path


@pytest.fixture
def serve(paw_start, corpus) -> Callable:
    """`serve(*words)` starts a server on a free port. Returns (process, URL, its first line)."""

    def start(*words):
        child = paw_start("serve", "retriever", "--corpus", corpus, "--port", 0, *words)
        greeting = child.stderr.readline()
        return child, re.match(r"(http://\S+): ", greeting)[1], greeting

    return start


JSON_TYPE = {"Content-Type": "application/json"}
TOO_MANY = json.dumps({"queries": ["a"] * (retriever_app.MAX_QUERIES + 1)})
MISTAKES = {
    "[" * 100_000: "Invalid JSON",
    "[]": "an object, not []",
    "{}": 'give either "queries", a list, or "query", one text',
    '{"query": "a", "queries": ["b"]}': "give either",
    '{"queries": []}': "queries: List should have at least 1",
    TOO_MANY: f"at most {retriever_app.MAX_QUERIES}",
    '{"queries": ["a", 3]}': "queries: 1: Input should be a valid string",
    '{"query": "a", "topk": 0}': "topk: Input should be greater",
    '{"query": "a", "topk": 101}': "topk: Input should be less",
    '{"query": "a", "top_k": 3}': "top_k: Extra inputs",
}


def test_a_server_answers_many_at_once_and_says_what_is_wrong(serve, corpus, paw, monkeypatch):
    server, url, greeting = serve("--env.topk", 2)
    assert greeting.endswith(f": 3,000 documents of {corpus}, bm25\n")
    local_retriever = make_retriever(SearchConfig(corpus=corpus))
    client = RemoteRetriever(url, timeout_s=30)

    def answers_are_right(number: int) -> bool:
        queries = [f"unique{number + 16 * i} mod{i % 7}" for i in range(8)]
        return all(
            client.search(queries, 5) == local_retriever.search(queries, 5) for _ in range(4)
        )

    with ThreadPoolExecutor(16) as executor:
        assert all(executor.map(answers_are_right, range(16)))
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        check_answers(http, local_retriever)
        check_refusals(http)

    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(HEAD)  # and the client is gone
    refused = paw("serve", "retriever", "--corpus", corpus, "--port", port, code=2)
    assert re.fullmatch(r"paw: .*--port \d+: .*Address already in use.*\n", refused.stderr)
    server.send_signal(signal.SIGTERM)
    assert server.wait(10) == 0
    assert server.stderr.read() == ""
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    with pytest.raises(
        UserError, match=f"'{url}/retrieve': .*; `paw serve retriever` starts such a server"
    ):
        client.search(["a"], 1)


def check_answers(client: httpx.Client, local_retriever: Any) -> None:
    """Documents with and without scores, and the state of the server."""
    document = {"id": "42", "contents": '"Number 42"\nmod0 mod9 unique42'}
    (hit,) = local_retriever.search(["unique42"], 1)[0]
    with_scores = {"query": "unique42", "topk": 3, "return_scores": True}
    scored = client.post("/retrieve", json=with_scores).json()
    assert scored == {"result": [[{"document": document, "score": hit.score}]]}
    several = {"queries": ["unique42", "mod1", ""], "topk": None}
    result = client.post("/retrieve", json=several).json()["result"]
    assert result[0] == [document]
    assert len(result[1]) == 2
    assert result[2] == []
    health = client.get("/health").json()
    assert health == {"status": "ok", "documents": 3000, "retriever": "bm25"}


def check_refusals(client: httpx.Client) -> None:
    for body, reason in MISTAKES.items():
        answer = client.post("/retrieve", content=body.encode("latin-1"), headers=JSON_TYPE)
        assert answer.status_code == 400, (body[:40], answer.text)
        assert reason in answer.json()["error"], (body[:40], answer.text)
    answers = {
        415: client.post("/retrieve", data={"query": "a"}),
        404: client.post("/search", json={"query": "a"}),
        405: client.get("/retrieve"),
        413: client.post("/retrieve", content=stream(serving.MAX_BYTES + 1), headers=JSON_TYPE),
    }
    for status, answer in answers.items():
        assert answer.status_code == status, answer.text
        assert answer.json()["error"], answer.text
    assert "POST /retrieve and GET /health" in answers[405].json()["error"]


HEAD = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"


def stream(count: int) -> Iterator[bytes]:
    """A body without Content-Length."""
    yield b'{"query": "'
    for _ in range(0, count, 1 << 16):
        yield b"a" * (1 << 16)


class Slow:
    """A retriever that only answers while `may_answer` is set."""

    def __init__(self):
        self.may_answer = threading.Event()

    def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        self.may_answer.wait(30)
        if queries == ["break"]:
            raise RuntimeError("index gone")
        return [[Hit("1", query, 1.0)] for query in queries]


def test_a_busy_server_turns_requests_away_and_what_takes_too_long_ends(monkeypatch):
    monkeypatch.setattr(retriever_app, "MAX_WAITING", 2)
    slow_retriever = Slow()
    app = retriever_app.make_app(slow_retriever, SearchConfig(timeout_s=TIGHT_S), documents=1)

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            first_request = asyncio.create_task(client.post("/retrieve", json={"query": "a"}))
            second = asyncio.create_task(client.post("/retrieve", json={"query": "break"}))
            await asyncio.sleep(0.2)
            turned_away = await client.post("/retrieve", json={"query": "c"})
            slow_retriever.may_answer.set()
            answers = [turned_away, await first_request, await second]
            answers.append(await client.post("/retrieve", content=body(), headers=JSON_TYPE))
            slow_retriever.may_answer.clear()
            answers.append(await client.post("/retrieve", json={"query": "c"}))
            slow_retriever.may_answer.set()
            return answers

    answers = asyncio.run(ask())
    assert [(answer.status_code, answer.json().get("error")) for answer in answers] == [
        (503, "2 requests are waiting already; try again"),
        (200, None),
        (500, "the search failed: index gone"),
        (408, "the body did not arrive within 0.5 s"),
        (503, "not done within 0.5 s; try again with fewer queries"),
    ]


def test_a_server_that_cannot_start_says_why(paw_here, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"id": 0, "contents": "x"}\n{"id": 1}\n')
    for arguments, reason in (
        (["--corpus", "bad.jsonl"], "bad.jsonl, line 2: contents: Field required"),
        (
            ["--corpus", "missing.jsonl"],
            "env.corpus = 'missing.jsonl': cannot be read: No such file or directory",
        ),
        (["--retriever", "zerosearch"], "'zerosearch' is not an index"),
        (["--port", "70000"], "--port 70000"),
    ):
        errors = paw_here(
            "serve", "retriever", "--port", 0, *arguments, code=2, cwd=tmp_path
        ).stderr
        assert reason in errors
        assert errors.count("\n") == 1, errors


def test_the_client_takes_both_forms_tries_again_and_names_who_misbehaves(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    with serve_script() as state:
        with_score = [{"document": {"id": 1, "contents": "x"}, "score": 0.5}]
        without_score = [{"contents": "y"}, {"contents": "z"}]
        state.script = [
            (503, b"busy", {}),
            (500, b"oh", {}),
            (200, {"result": [with_score]}, {}),
            (200, {"result": [without_score]}, {}),
        ]
        client = make_retriever(SearchConfig(retriever=f"{state.url}/retrieve"))
        assert len(state.requests) == 3
        assert client.search(["q"], 1) == [[("", "y", 0.0)]]
        assert state.requests[3] == {"queries": ["q"], "topk": 1, "return_scores": True}
        assert client.search([], 3) == []
        assert len(state.requests) == 4
        for status, body, reason, attempts in (
            (500, b"internal\nerror", "status 500: internal error; `paw serve", 3),
            (404, b"not here", "status 404: not here", 1),
            (200, b"<html>", "does not answer like a retriever .*<html>", 1),
            (200, {"result": []}, "0 lists of hits for 1 queries", 1),
            (
                200,
                {"result": [[{"document": {"id": 1}}]]},
                "result: 0: 0: contents: Field required",
                1,
            ),
        ):
            state.default = (status, body, {})
            state.requests = []
            with pytest.raises(UserError, match=f"{state.url}/retrieve.*{reason}") as error:
                RemoteRetriever(state.url, timeout_s=5)
            assert len(state.requests) == attempts
            assert "\n" not in str(error.value)
        state.default = lambda handler: time.sleep(TIGHT_S)
        state.requests = []
        with pytest.raises(UserError, match=f"no answer within env.timeout_s = {TIGHT_S / 2:g}"):
            RemoteRetriever(state.url, timeout_s=TIGHT_S / 2)
        wait_until(lambda: state.requests)  # a busy machine may read it after the client has gone
        assert len(state.requests) == 1
    with pytest.raises(UserError, match=r"99999/retrieve': .*; `paw serve retriever`"):
        make_retriever(SearchConfig(retriever="http://127.0.0.1:99999"))
