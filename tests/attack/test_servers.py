"""A rollout server that misbehaves costs its own requests only: another server answers them with
the same tokens."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace

import httpx
import pytest
import torch
from forked import Supervisor
from processes import wait_until
from safetensors.torch import load_file
from torch import nn
from toyworld import ENV, make_factory

from paw.config import plugins
from paw.config.sections import (
    AgentConfig,
    Config,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.model.loading import load_tokenizer
from paw.rollouts.background import ahead
from paw.rollouts.background.ahead import AsyncRollouts
from paw.rollouts.engines.base import Request
from paw.rollouts.engines.pool import SendingPool
from paw.rollouts.engines.server import ServerEngine
from paw.rollouts.engines.servers import Servers
from paw.rollouts.engines.settings import ServerConfig
from paw.rollouts.engines.transfer import AdapterTransfer, FileTransfer, NcclTransfer
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.rollouts.text.chat import Chat

TIMEOUT_S = 2.0
VOCABULARY = 50
DIGITS = "9" * 401


def answer_with(content, status=200, **headers):
    """A habit: exactly these bytes."""

    def send(handler):
        handler.send_response(status)
        for header, value in {"Content-Length": len(content), **headers}.items():
            handler.send_header(header, str(value))
        handler.end_headers()
        handler.wfile.write(content)

    return send


def trickle(handler):
    """A byte at a time, for longer than any test waits."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.1)


FLOOD_LIMIT = 1 << 30
"""Bytes after which a flood gives up, as nobody has stopped it."""
flooded = []
"""Bytes that each flood was able to send."""


def flood(handler, data=b" " * (1 << 16)):
    """The same bytes again and again, until the connection is closed."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    flooded.append(0)
    try:
        while flooded[-1] < FLOOD_LIMIT:
            handler.wfile.write(data)
            flooded[-1] += len(data)
    except OSError:
        handler.close_connection = True


CACHED_TOKENS = {
    "counts more cached tokens than there are": "4",
    "counts cached tokens below zero": "-1",
    "counts cached tokens with 401 digits": DIGITS,
    "counts cached tokens with 5000 digits": "9" * 5000,
    "counts cached tokens in deep brackets": "[" * 20_000,
}
"""What each habit gives as the cached tokens of a prompt of three."""


def tokens_of(request):
    params = request["sampling_params"]
    return expected_tokens(params["seed"])[: params["max_tokens"]]


def expected_tokens(seed):
    """The four tokens that a server samples from a seed."""
    return [(seed + place) % VOCABULARY for place in range(4)]


class Peer:
    """A server in a thread that speaks vLLM's protocol as far as the engine uses it, and has one
    bad `habit`."""

    def __init__(self, habit=""):
        self.habit = habit
        self.version = "default"
        self.loaded = {}
        self.asked = 0
        self.dropped = 0
        self.habits = {}
        """For single calls, by path or method: a function of the handler, which answers."""
        self.entropy = None
        """The entropy of each token. None: it does not know any."""
        self.cookies = []
        """Cookies that clients have sent."""
        self.asked_for_tokens = threading.Event()
        self.has_new_weights = threading.Event()
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # The body follows the head at once, not 40 ms later when the head has been
            # acknowledged.
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def do_GET(self):
                peer.answer(self, self.path, {})

            def do_POST(self):
                peer.cookies += self.headers.get_all("Cookie", [])
                length = int(self.headers.get("Content-Length") or 0)
                peer.answer(self, self.path, json.loads(self.rfile.read(length) or "{}"))

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler, path, body):
        """Answer one call: by its own habit, by vLLM's protocol, or with sampled tokens."""
        route = path.partition("?")[0]
        habit = self.habits.get(route) or self.habits.get(body.get("method"))
        if habit:
            return habit(handler)
        if handler.command == "GET":
            return send(handler, {"error": "no such page"}, 404)
        if route == "/collective_rpc" and body["method"] == "paw_entropy":
            return self.give_entropies(handler, body["args"][0])
        if route == "/collective_rpc":
            return self.load_weights(handler, Path(body["kwargs"]["weights_path"]))
        if route in ("/pause", "/reset_prefix_cache", "/resume"):
            return send(handler, {"success": True})
        if route == "/update_weight_version":
            self.version = body["new_version"]
            return send(handler, {"success": True})
        return self.sample(handler, body)

    def give_entropies(self, handler, responses):
        if self.entropy is None:
            return send(handler, {"error": "no such method"}, 500)
        return send(handler, {"results": [[[self.entropy] * count for _, count in responses]]})

    def load_weights(self, handler, folder):
        if self.habit == "takes no weights":
            return send(handler, {"error": "CUDA error: an illegal memory access"}, 500)
        self.loaded = {}
        for file in sorted(folder.iterdir()):
            self.loaded |= load_file(file)
        return send(handler, {"results": [None]})

    def sample(self, handler, body):
        """Answer a request for tokens, as the habit wants it."""
        self.asked += 1
        ids = tokens_of(body)
        spots = [{"token_id": token, "logprob": -0.5} for token in ids]
        choice = {"token_ids": ids, "logprobs": {"content": spots}, "finish_reason": "stop"}
        choice["weight_versions"] = [{"version": self.version, "start": 0, "end": len(ids)}]
        match self.habit:
            case "dies":
                handler.connection.shutdown(socket.SHUT_RDWR)
                return None
            case "hangs":
                time.sleep(60)
            case "is late":
                time.sleep(TIMEOUT_S + 0.5)
            case "trickles":
                return trickle(handler)
            case "fails":
                return send(handler, {"error": "EngineCore died\x1b[2J"}, 500)
            case "is another service":
                return send(handler, {"message": "welcome"})
            case "speaks no JSON":
                return send(handler, b"<html>busy</html>")
            case "takes new weights meanwhile":
                self.asked_for_tokens.set()
                self.has_new_weights.wait()
                choice["weight_versions"] = [
                    {"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 4}
                ]  # fmt: skip
            case "has other weights":
                choice["weight_versions"][0]["version"] = "7"
            case "answers too long":
                choice["token_ids"] = ids * 100
            case "has positive log-probs":
                spots[0]["logprob"] = 0.4
            case "has NaN":
                text = json.dumps({"choices": [choice]}).replace("-0.5", "NaN")
                return send(handler, text.encode())
            case "answers without end":
                return send(handler, b"[" + b"1," * (9 << 20))
            case "names versions of more tokens":
                choice["weight_versions"][0]["end"] = 10**11
            case "names versions twice":
                choice["weight_versions"] *= 2
            case "names versions of fewer tokens":
                choice["weight_versions"][0]["end"] = 3
            case "names versions before the first":
                choice["weight_versions"][0]["start"] = -(10**11)
            case "has a version without end":
                choice["weight_versions"][0]["version"] = "1" * 5000
            case "has a token of another vocabulary":
                ids[0] = spots[0]["token_id"] = VOCABULARY
            case "has a token below zero":
                ids[0] = spots[0]["token_id"] = -1
            case "has a token of 401 digits":
                ids[0] = spots[0]["token_id"] = int(DIGITS)
            case "has texts for tokens":
                choice["token_ids"] = ["x"] * 10_000
            case "has log-probs of no weights":
                spots[0]["logprob"] = -1e300
            case "has log-probs that are unknown":
                spots[0]["logprob"] = -9999.0
            case "has log-probs of 401 digits":
                text = json.dumps({"choices": [choice]}).replace("-0.5", f"-{DIGITS}")
                return send(handler, text.encode())
            case habit if habit in CACHED_TOKENS:
                usage = {"prompt_tokens_details": {"cached_tokens": "COUNT"}}
                text = json.dumps({"choices": [choice], "usage": usage})
                return send(handler, text.replace('"COUNT"', CACHED_TOKENS[habit]).encode())
        if body.get("stream"):
            return self.stream(handler, choice)
        return send(handler, {"choices": [choice]})

    def stream(self, handler, choice):
        if self.habit == "streams a line without end":
            return flood(handler, b"data: {" + b" " * (1 << 16))
        if self.habit == "streams empty lines without end":
            return flood(handler, b": still there\n" * (1 << 12))
        if self.habit == "streams tokens of another vocabulary":
            choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = VOCABULARY
            return answer_with(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())(handler)
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        try:
            for token in range(10**6 if self.habit == "streams without end" else 40):
                choice = {
                    "token_ids": [token],
                    "logprobs": {"content": [{"token_id": token, "logprob": -0.5}]},
                    "finish_reason": None,
                }
                handler.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                handler.wfile.flush()
                time.sleep(0.005)
        except OSError:
            self.dropped += 1


def send(handler, content, status=200):
    """Answer with bytes, or with anything else as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def connected():
    """`connected(peer, peer)`: an engine that samples on these servers. All are closed at the
    end."""
    engines = []

    def connect(*peers, transfer=None, entropy=False, timeout_s=TIMEOUT_S):
        pool = SendingPool(
            [peer.url for peer in peers],
            transfer or FileTransfer(torch.float32, TIMEOUT_S),
            end_ids={3},
            vocabulary=VOCABULARY,
            timeout_s=timeout_s,
            ranks=Ranks(),
            entropy=entropy,
        )
        engines.append(ServerEngine(pool, 64))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


def ask(engine, count=6, **changes):
    """The completions of requests with the keys and seeds from 0 to `count`, in that order."""
    for key in range(count):
        engine.submit(Request(key, [1, 2, 3], seed=key, temperature=1.0, max_tokens=8, **changes))
    completions = finish(engine)
    return sorted(completions, key=lambda completion: completion.key)


def finish(engine):
    completions = []
    while engine.pending:
        completions += engine.step()
    return completions


def asked_in_all(peer):
    """How many requests a server has had, once it has read those that were under way."""
    before = -1
    while peer.asked != before:
        before = peer.asked
        time.sleep(0.2)
    return before


def servers_of(completions):
    return {completion.server for completion in completions}


HABITS = {
    "dies": "Server disconnected",
    "hangs": "no complete answer within engine.timeout_s = 2",
    "is late": "no complete answer within engine.timeout_s = 2",
    "trickles": "no complete answer within engine.timeout_s = 2",
    "fails": 'status 500: {"error": "EngineCore died\\u001b[2J"}',
    "is another service": "not vLLM's answer: choices",
    "speaks no JSON": "not vLLM's answer",
    "has other weights": "weights 7 instead of 1",
    "answers too long": "400 token ids with 4 log-probs for at most 8",
    "has positive log-probs": "a log-probability above 0",
    "has NaN": "logprob: Input should be a finite number, not nan",
    "answers without end": "the answer has more than 73,728 bytes",
    "names versions of more tokens": "for each of 4 tokens: 1 of tokens 0 to 100000000000",
    "names versions twice": "for each of 4 tokens: 1 of tokens 0 to 4, 1 of tokens 0 to 4",
    "names versions of fewer tokens": "for each of 4 tokens: 1 of tokens 0 to 3",
    "names versions before the first": "for each of 4 tokens: 1 of tokens -100000000000 to 4",
    "has a version without end": "for each of 4 tokens: 11111111111111111111... of tokens 0 to 4",
    "has a token of another vocabulary": "token 50 of a vocabulary of 50",
    "has a token below zero": "token -1 of a vocabulary of 50",
    "has a token of 401 digits": f"token {'9' * 18}...{'9' * 19} of a vocabulary of 50",
    "has texts for tokens": "token_ids: 0: Input should be a valid integer, not 'x'",
    "has log-probs of no weights": "a log-probability of -1e+300, too low for any token to be drawn",
    "has log-probs that are unknown": "a log-probability of -9999, too low for any token to be drawn",
    "has log-probs of 401 digits": "logprob: Input should be a finite number",
    "counts more cached tokens than there are": "4 cached tokens of 3 in the prompt",
    "counts cached tokens below zero": "-1 cached tokens of 3 in the prompt",
    "counts cached tokens with 401 digits": "cached tokens of 3 in the prompt",
    "counts cached tokens with 5000 digits": "not vLLM's answer",
    "counts cached tokens in deep brackets": "not vLLM's answer",
}


@pytest.mark.parametrize("habit", HABITS)
def test_what_one_server_fails_at_another_one_does(habit, connected, capsys):
    bad = Peer()
    good = Peer()
    waits = "timeout_s" in HABITS[habit]
    engine = connected(bad, good, timeout_s=TIMEOUT_S if waits else 60)
    push_weights(nn.Linear(2, 3), engine, version=1)
    bad.habit = habit
    completions = ask(engine)
    assert [c.token_ids for c in completions] == [expected_tokens(seed) for seed in range(6)]
    assert not any(completion.failure for completion in completions)
    assert servers_of(completions) == {good.url}
    assert bad.asked
    assert list(engine.faults) == [bad.url]
    assert HABITS[habit] in engine.faults[bad.url]
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1  # once, whatever it held
    assert bad.url in errors

    asked_so_far = asked_in_all(bad)
    bad.habit = ""
    ask(engine)
    assert asked_in_all(bad) == asked_so_far  # it gets no request until it has taken weights
    push_weights(nn.Linear(2, 3), engine, version=2)
    assert not engine.faults
    assert not any(completion.failure for completion in ask(engine))
    assert bad.asked > asked_so_far


def test_a_server_that_is_left_out_gets_no_more_weights_or_requests(connected):
    bad = Peer()
    good = Peer()
    engine = connected(bad, good)
    push_weights(nn.Linear(2, 3), engine, version=1)
    assert engine.exclude([bad.url])
    assert not engine.exclude([good.url])
    push_weights(nn.Linear(2, 3), engine, version=2)
    assert servers_of(ask(engine)) == {good.url}
    assert bad.version == "1"


def test_a_server_without_the_package_gives_no_entropy_and_says_what_it_needs(connected):
    engine = connected(Peer(), entropy=True)
    push_weights(nn.Linear(2, 3), engine, version=1)
    assert "it returns no entropy; it needs two more options" in ask(engine, count=1)[0].failure


def test_if_no_server_is_left_requests_fail_and_say_why(connected):
    bad = Peer("fails")
    worse = Peer("dies")
    engine = connected(bad, worse)
    push_weights(nn.Linear(2, 3), engine, version=1)
    for completion in ask(engine):
        assert completion.token_ids == []
        assert "no server is left" in completion.failure
        assert bad.url in completion.failure
        assert worse.url in completion.failure


def test_weights_reach_every_server_that_takes_them(connected, capsys):
    good = Peer()
    bad = Peer("takes no weights")
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    reason = "CUDA error: an illegal memory access"
    # The first weights must reach every server.
    with pytest.raises(UserError, match=f"engine.urls: {bad.url}: .*{reason}"):
        push_weights(model, connected(good, bad), version=0)

    bad.habit = ""
    engine = connected(good, bad)
    push_weights(model, engine, version=1)
    bad.habit = "takes no weights"
    push_weights(model, engine, version=5)
    assert good.version == "5"
    assert bad.version == "1"
    assert {name: value.tolist() for name, value in good.loaded.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    assert reason in engine.faults[bad.url]
    assert f"{bad.url} did not take the weights of update 5: " in capsys.readouterr().err
    assert all(completion.token_ids for completion in ask(engine))
    assert not bad.asked


IMPATIENT_S = 0.5
LONG = json.dumps({"results": [[*range(1000)]]}).encode()
WHILE_IT_TAKES_WEIGHTS = {
    "/pause": (trickle, f"TimeoutError: no complete answer within {IMPATIENT_S:g} s"),
    "/pause without end": (flood, "BadAnswer: the answer has more than 1,048,576 bytes"),
    "/collective_rpc": (flood, "BadAnswer: the answer has more than 1,048,576 bytes"),
    "/reset_prefix_cache": (
        answer_with(b'{"success": 1}'),
        "/reset_prefix_cache: not vLLM's answer: success: Input",
    ),
    "/update_weight_version": (answer_with(b"[" * 100_000), "RecursionError: "),
    "/resume": (answer_with(b"9" * 5000), "ValueError: Exceeds the limit"),
}


@pytest.mark.parametrize("call", WHILE_IT_TAKES_WEIGHTS)
def test_a_server_that_misbehaves_while_it_takes_weights_costs_itself(call, connected, capsys):
    """The other server has the weights, and the run waits no longer than for a slow server."""
    bad = Peer()
    good = Peer()
    engine = connected(bad, good, transfer=FileTransfer(torch.float32, IMPATIENT_S))
    push_weights(nn.Linear(2, 3), engine, version=1)
    habit, fault = WHILE_IT_TAKES_WEIGHTS[call]
    bad.habits[call.partition(" ")[0]] = habit
    push_weights(nn.Linear(2, 3), engine, version=2)
    assert list(engine.faults) == [bad.url]
    assert fault in engine.faults[bad.url]
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert errors.startswith(f"{bad.url} did not take the weights of update 2: ")
    assert good.version == "2"
    assert servers_of(ask(engine)) == {good.url}
    assert all(sent < 64 << 20 for sent in flooded)
    bad.habits.clear()
    push_weights(nn.Linear(2, 3), engine, version=3)
    assert not engine.faults
    assert bad.version == "3"


def test_a_server_that_says_it_holds_more_adapters_than_it_can_takes_none(tmp_path):
    bad = Peer()
    good = Peer()
    loaded_before = answer_with(b"The lora adapter has already been loaded.", 400)
    for peer, adapters in ((bad, LONG), (good, b'{"results": [[7]]}')):
        peer.habits["/v1/load_lora_adapter"] = loaded_before
        peer.habits["list_loras"] = answer_with(adapters)
        peer.habits["remove_lora"] = answer_with(b'{"results": [true]}')
    transfer = AdapterTransfer(torch.float32, TIMEOUT_S, tmp_path, LoraConfig(rank=4, alpha=8.0))
    weights = iter([("base_model.model.lora_A.weight", torch.ones(4, 4))])
    faults = transfer.send(weights, [bad.url, good.url], version=1)
    transfer.close()
    assert list(faults) == [bad.url]
    assert "results: 0: List should have at most 64 items" in faults[bad.url]
    assert good.version == "1"
    assert bad.version == "default"


@pytest.mark.parametrize("size", ["0", "true", "1e400", DIGITS, "9" * 5000])
def test_a_server_of_an_odd_number_of_gpus_is_left_out(size, connected):
    peer = Peer()
    peer.habits["/get_world_size"] = answer_with(f'{{"world_size": {size}}}'.encode())
    engine = connected(peer, transfer=NcclTransfer(torch.bfloat16, TIMEOUT_S, "127.0.0.1"))
    with pytest.raises(
        UserError, match=f"^engine.urls: {peer.url}: .*(world_size|Exceeds)"
    ) as caught:
        push_weights(nn.Linear(2, 3), engine, version=1)
    assert "\n" not in str(caught.value)


IMPOSSIBLE = "an entropy of .*; it must be between 0 and 3.91"


@pytest.mark.parametrize(
    ("entropy", "fault"),
    [
        (1e308, IMPOSSIBLE),
        (4.0, IMPOSSIBLE),
        (-0.1, IMPOSSIBLE),
        (float("nan"), "not vLLM's answer"),
        ("high", "not vLLM's answer"),
    ],
)
def test_entropies_that_no_distribution_has_cost_their_server(entropy, fault, connected):
    bad = Peer()
    good = Peer()
    bad.entropy = good.entropy = 1.5
    engine = connected(bad, good, entropy=True)
    push_weights(nn.Linear(2, 3), engine, version=1)
    assert all(completion.entropy == [1.5] * 4 for completion in ask(engine))
    bad.entropy = entropy
    completions = ask(engine)
    assert all(completion.entropy == [1.5] * 4 for completion in completions)
    assert servers_of(completions) == {good.url}
    assert re.search(fault, engine.faults[bad.url])


STREAMS = {
    "streams a line without end": "endless stream: ",
    "streams empty lines without end": "it has more than 98,304 bytes",
    "streams tokens of another vocabulary": "token 50 of a vocabulary of 50",
    "trickles": "no complete answer within engine.timeout_s = 2",
}


@pytest.mark.parametrize("habit", STREAMS)
def test_a_stream_is_bounded_before_it_is_read(habit, connected):
    bad = Peer()
    good = Peer()
    waits = "timeout_s" in STREAMS[habit]
    engine = connected(bad, good, timeout_s=TIMEOUT_S if waits else 60)
    push_weights(nn.Linear(2, 3), engine, version=1)
    bad.habit = habit
    completions = ask(engine, count=4, stopped=lambda ids: len(ids) == 5)
    assert servers_of(completions) == {good.url}
    assert not any(completion.failure for completion in completions)
    assert STREAMS[habit] in engine.faults[bad.url]
    assert all(sent < 64 << 20 for sent in flooded)


def test_a_server_sets_no_cookies_for_another(connected):
    bad = Peer()
    good = Peer()
    engine = connected(bad, good)
    bad.habits["/resume"] = answer_with(b"{}", **{"Set-Cookie": f"a={'x' * 4000}; Path=/"})
    for version in (1, 2):
        push_weights(nn.Linear(2, 3), engine, version=version)
        assert all(completion.token_ids for completion in ask(engine))
    assert bad.cookies == good.cookies == []


def test_all_weights_are_gathered_even_if_no_server_takes_them(connected):
    """Gathering is collective: other ranks would wait."""
    engine = connected(Peer(), transfer=NcclTransfer(torch.bfloat16, TIMEOUT_S, "127.0.0.1"))
    gathered = []

    class Model(nn.Linear):
        def named_parameters(self, *args, **options):
            for name, parameter in super().named_parameters(*args, **options):
                gathered.append(name)
                yield name, parameter

    with pytest.raises(UserError, match="get_world_size"):
        push_weights(Model(2, 3), engine, version=1)
    assert gathered == ["weight", "bias"]


def test_each_token_keeps_the_version_of_its_weights(connected):
    peer = Peer("takes new weights meanwhile")
    engine = connected(peer)
    push_weights(nn.Linear(2, 3), engine, version=1)
    for key in range(2):
        engine.submit(Request(key, [1, 2, 3], seed=key, temperature=1.0, max_tokens=8))
    peer.asked_for_tokens.wait()
    push_weights(nn.Linear(2, 3), engine, version=2)
    peer.has_new_weights.set()
    assert [completion.versions for completion in finish(engine)] == [[1, 1, 1, 2]] * 2
    assert not engine.faults


def test_a_response_that_is_complete_ends_the_request(connected):
    peer = Peer()
    engine = connected(peer)
    push_weights(nn.Linear(2, 3), engine, version=1)
    completions = ask(engine, count=2, stopped=lambda ids: len(ids) == 5)
    assert [completion.token_ids for completion in completions] == [[0, 1, 2, 3, 4]] * 2
    assert completions[0].logp == [-0.5] * 5
    wait_until(lambda: peer.dropped == 2, seconds=5)  # it notices that nobody listens any more
    peer.habit = "streams without end"
    assert "endless stream" in ask(engine, count=1, stopped=lambda ids: False)[0].failure


@pytest.mark.slow
def test_updates_played_ahead_are_those_that_are_asked_for(connected, tiny_llm, tmp_path, capfd):
    """No token comes from weights older than `ahead` updates. Episodes whose process was killed are
    played again; the end drops the rest."""
    peers = [Peer(), Peer()]
    urls = [peer.url for peer in peers]
    engine = connected(*peers)
    engine.positions = 512
    config = Config(
        model=ModelConfig(path="-"), env=ENV, engine=ServerConfig(type="server", urls=["http://127.0.0.1:1"]),
        rollout=RolloutConfig(tasks=2, group_size=2, max_prompt_tokens=400, max_response_tokens=3, ahead=2),
        run=RunConfig(updates=6),
    )  # fmt: skip
    folder = str(tiny_llm(tmp_path))
    plain = Rollouts(make_factory(), engine, Chat(load_tokenizer(folder)), config, Ranks())
    push_weights(nn.Linear(2, 3), engine, version=0)
    rollouts = AsyncRollouts(plain, folder)
    rollouts._player._process.kill()

    played_ahead = [[1, 2], [2, 3], [3, 4], [4, 5]]
    for step, updates in enumerate(played_ahead):
        groups, stats = rollouts.training(step, 2)
        expected, _ = plain.training(step, 2)
        turns = turns_of(groups)
        assert len(turns) > 4
        assert responses_of(groups) == responses_of(expected)
        assert tasks_of(groups) == tasks_of(expected)
        assert all(step - 2 <= turn.version <= step for turn in turns)
        assert all(turn.server in urls for turn in turns)
        assert stats.response_tokens
        assert sorted(rollouts._updates) == updates
        push_weights(nn.Linear(2, 3), engine, version=step + 1)
    errors = capfd.readouterr().err
    assert errors.count("has ended (killed by SIGKILL); playing its episodes again") == 1
    assert "Traceback" not in errors

    again, _ = rollouts.training(3, 2)
    assert tasks_of(again) == tasks_of(groups)
    assert {turn.version for turn in turns_of(again)} == {4}
    process = rollouts._player._process
    rollouts.close()
    assert process.returncode == 0
    assert plain.loop.is_closed()


def turns_of(groups):
    episodes = [episode for group in groups for episode in group.trajectories]
    return [turn for episode in episodes for turn in episode.turns]


def responses_of(groups):
    return [turn.response_ids.tolist() for turn in turns_of(groups)]


def tasks_of(groups):
    return [(group.task, group.task.payload) for group in groups]


@pytest.mark.slow
def test_what_cannot_play_ahead_says_so(connected, tiny_llm, tmp_path, monkeypatch):
    monkeypatch.setattr(
        ahead,
        "subprocess",
        SimpleNamespace(Popen=Supervisor, PIPE=-1, TimeoutExpired=TimeoutExpired),
    )
    config = Config(
        model=ModelConfig(path="-"), env=ENV, engine=ServerConfig(type="server", urls=["http://127.0.0.1:1"]),
        rollout=RolloutConfig(tasks=2, group_size=2, ahead=1),
        agent=AgentConfig(type=plugins.give(lambda env, model: None)),
    )  # fmt: skip
    engine = connected(Peer())
    push_weights(nn.Linear(2, 3), engine, version=0)
    rollouts = AsyncRollouts(
        Rollouts(make_factory(), engine, None, config), str(tiny_llm(tmp_path))
    )
    with pytest.raises(UserError, match="was passed by a program"):
        rollouts.training(0, 2)
    rollouts.close()


SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Health).serve_forever()
"""


@pytest.mark.slow
def test_a_server_that_ends_is_started_once_more(tmp_path):
    servers = Servers([sys.executable, "-c", SERVER], [[]], tmp_path)

    def kill():
        servers.wait()
        killed = int(httpx.get(f"{servers.urls[0]}/health", trust_env=False).text)
        os.kill(killed, signal.SIGKILL)
        servers._running[0].wait(timeout=10)
        return killed

    killed_first = kill()
    (message,) = servers.revive()
    assert "vLLM server 0 has ended (killed by SIGKILL; " in message
    assert "server-0.log" in message
    assert kill() != killed_first
    assert servers.revive() == []  # once in a run
    with pytest.raises(UserError, match="vLLM server 0 ended during startup: killed by SIGKILL"):
        servers.wait()
    servers.close()
    broken = "raise SystemExit('WARNING: an Error of no weight\\nValueError: the card is on fire')"
    servers = Servers([sys.executable, "-c", broken], [[]], tmp_path / "broken")
    with pytest.raises(
        UserError, match=r"0 ended during startup: ValueError: the card is on fire; .*0\.log"
    ):
        servers.wait()
    servers.close()
