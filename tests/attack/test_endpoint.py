"""An endpoint that misbehaves: a real HTTP server on loopback whose answers a test scripts, one by
one."""

import asyncio
import json
import os
import signal
import threading
import time
from email.utils import formatdate

import pytest
from scripted_server import completion, refusal

from paw import cli
from paw.agents.endpoint import Endpoint, EndpointError, Reply
from paw.config.sections import EndpointConfig
from paw.errors import UserError
from paw.rollouts.text.chat import ContextFull

pytest.importorskip("openai")
SAMPLING = {"temperature": 0.4, "max_tokens": 16, "seed": 7}


@pytest.fixture
def ask(server, monkeypatch):
    """(function that asks once, the pauses it made); pauses pass at once."""
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("paw.agents.endpoint.sleep", pause)

    def ask(prompt="hello", **options):
        config = EndpointConfig(
            url=server.url, model="m", **options.pop("config", {"retries": 3, "timeout_s": 5})
        )
        endpoint = options.pop("endpoint", None) or Endpoint(config)
        return asyncio.run(endpoint.complete(prompt, **SAMPLING, **options))

    return ask, pauses


def close(handler):
    handler.close_connection = True
    handler.connection.close()


def cut(handler):
    handler.answer(200, completion(), {}, cut=20)


PASSING = {
    "429": (429, refusal("slow down"), {}),
    "500": (500, b"oops", {}),
    "closed": close,
    "cut": cut,
    "a page": (200, b"<html>welcome</html>", {"Content-Type": "text/html"}),
    "no choices": (200, {**completion(), "choices": []}, {}),
    "no text": (200, completion(text=[{"type": "image"}]), {}),
}


def test_an_answer(server, ask, monkeypatch):
    """What the server's template opened is part of it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    server.script = [(200, completion("x</think><action>look</action>"), {})]
    reply = ask[0]("hello", stop=["</action>"])
    assert reply == Reply("<think>x</think><action>look", 11, 5, "</action>")
    (sent,) = server.requests
    assert sent == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.4,
        "max_tokens": 16,
        "seed": 7,
        "stop": ["</action>"],
    }


def test_what_passes_is_tried_again_after_growing_pauses(server, ask):
    server.script = list(PASSING.values())
    ask, pauses = ask
    assert ask(config={"retries": len(PASSING)}).text.endswith("<action>look</action>")
    assert len(server.requests) == len(pauses) + 1 == len(PASSING) + 1
    assert all(0.5 <= pause / min(2**n, 60) <= 1.0 for n, pause in enumerate(pauses))


def test_what_does_not_pass_names_the_url(server, ask):
    server.default = PASSING["cut"]
    with pytest.raises(EndpointError, match=rf"^{server.url}/v1: .+ \(tried 4 times\)$") as caught:
        ask[0]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"[" * 1_000_000, b'{"usage": ' + b"9" * 5000 + b"}", b'"\\ud800"']
)
def test_what_an_endpoint_makes_up_is_one_line(server, ask, body):
    server.default = (200, body, {})
    with pytest.raises(EndpointError, match="malformed answer: ") as caught:
        ask[0](config={"retries": 0})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_usage_that_is_none_is_not_counted(server, ask):
    given = [(11, 5.0), (-11, 10**12), (int("9" * 400), float("nan"))]
    server.script = [
        (200, completion(prompt=prompt, answer=answer), {}) for prompt, answer in given
    ]
    server.script.append((200, {**completion(), "usage": None}, {}))
    replies = [ask[0]() for _ in range(4)]
    assert [(r.prompt_tokens, r.completion_tokens) for r in replies] == [
        (11, 5),
        (0, 0),
        (0, 0),
        (0, 0),
    ]


def test_usage_beyond_what_was_asked_makes_no_request_wait(server, ask):
    """A limit of 6,000 tokens a minute would hold the next request for a day."""
    config = EndpointConfig(url=server.url, model="m", tokens_per_minute=6000)
    waits = []
    for counts in ((9_000_000, 5), (11, 10**9)):
        endpoint = Endpoint(config)
        server.script = [(200, completion(prompt=counts[0], answer=counts[1]), {})]
        reply = ask[0](endpoint=endpoint)
        assert reply.prompt_tokens * reply.completion_tokens == 0
        endpoint._client = None  # made on the loop that has ended
        ask[0](endpoint=endpoint)
        waits.append(sum(ask[1]))
    assert max(waits) < 60


def test_a_slow_answer_is_given_up(server, ask):
    asked_again = threading.Event()

    def answer(handler):
        asked_again.set()
        handler.answer(200, completion(), {})

    server.script = [lambda _: asked_again.wait(60)]
    server.default = answer
    assert ask[0](config={"retries": 5, "timeout_s": 0.2}).completion_tokens == 5
    assert asked_again.is_set()
    assert len(server.requests) >= 2


def test_retry_after_is_honoured_but_a_wait_of_hours_is_cut_and_named(server, ask, capfd):
    ask, pauses = ask
    hours = ("99999", "9" * 400, "Fri, 31 Dec 2199 23:59:59 GMT")
    for value in ("12.5", *hours, "soon", "-5", None):
        value = value or formatdate(time.time() + 30.5, usegmt=True)
        server.script = [(429, refusal("slow down"), {"Retry-After": value})]
        ask()
    assert pauses[1:4] == [120.0] * 3
    assert all(0.5 <= pause <= 1.0 for pause in pauses[4:6])
    assert [pauses[0], *pauses[6:]] == pytest.approx([12.5, 30], abs=1.0)
    said = capfd.readouterr().err.splitlines()
    for line, value in zip(said, hours, strict=True):
        assert f"asks to wait (Retry-After: {value[:40]}" in line
        assert line.endswith(": waiting 120 s of it")


@pytest.mark.parametrize(("status", "key"), [(401, ""), (403, "wrong")])
def test_a_wrong_key_names_its_variable(server, ask, monkeypatch, status, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server.default = (status, refusal("who are you"), {})
    server.models = status
    with pytest.raises(
        UserError, match="OPENAI_API_KEY " + ("holds a key" if key else "is not set")
    ):
        ask[0]()
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        Endpoint(EndpointConfig(url=server.url, model="m")).check()
    assert len(server.requests) == 1


def test_an_unknown_model_names_those_there_are(server, ask):
    server.default = (404, refusal("The model `m` does not exist."), {})
    with pytest.raises(UserError, match=f"{server.url}/v1: no model 'm'; it serves: m, n$"):
        ask[0]()
    server.models = 404
    with pytest.raises(UserError, match="no chat endpoint here"):
        ask[0]()


def test_a_list_of_models_is_not_needed(server):
    for server.models in (404, 500, ["other"]):
        Endpoint(EndpointConfig(url=server.url, model="m")).check()


def test_a_wrong_request_is_not_repeated_and_a_full_context_told_apart(server, ask):
    said = "This model's maximum context length is 4096 tokens, 'max_tokens' is too large"
    for error, kind in (
        (refusal("messages: too funny"), EndpointError),
        (refusal(said, param="max_tokens"), ContextFull),
        (refusal("Too long", code="context_length_exceeded"), ContextFull),
    ):
        server.default = (400, error, {})
        with pytest.raises(kind, match="400 .*too funny" if kind is EndpointError else None):
            ask[0]()
    assert len(server.requests) == 3


def test_refused_parameters_are_left_out_from_then_on(server, ask, capfd):
    endpoint = Endpoint(EndpointConfig(url=server.url, model="m"))
    server.script = [
        (
            400,
            refusal(
                "Use 'max_completion_tokens' instead.",
                param="max_tokens",
                code="unsupported_parameter",
            ),
            {},
        ),
        (
            400,
            refusal(
                "Unsupported value: 'temperature' does not support 0.4", code="unsupported_value"
            ),
            {},
        ),
    ]
    for _ in range(2):
        ask[0](endpoint=endpoint)
    assert [sorted(request) for request in server.requests[2:]] == [
        ["max_completion_tokens", "messages", "model", "seed"]
    ] * 2
    assert server.requests[-1]["max_completion_tokens"] == 16
    assert capfd.readouterr().err.count("does not take") == 2


def test_an_answer_goes_on_or_is_restated(server, ask):
    """And the options of the template go along."""
    options = {"enable_thinking": False}
    endpoint = Endpoint(EndpointConfig(url=server.url, model="m"), template_options=options)
    ask[0]("why?", start="<think>Be", endpoint=endpoint)
    first = server.requests[-1]
    assert first["messages"][1:] == [{"role": "assistant", "content": "<think>Be"}]
    assert first["continue_final_message"] is True
    assert not first["add_generation_prompt"]
    assert first["chat_template_kwargs"] == options
    server.script = [(400, refusal("Unknown parameter: 'continue_final_message'."), {})]
    for _ in range(2):
        ask[0]("why?", start="<think>Be", endpoint=endpoint)
    assert len(server.requests) == 4
    for request in server.requests[2:]:
        (message,) = request["messages"]
        assert message["content"].startswith("why?\n")
        assert message["content"].endswith("\n<think>Be")
        assert "continue_final_message" not in request
        assert request["chat_template_kwargs"] == options


FORGERIES = [
    "<|im_start|>system", "<|im_end|>", "<｜User｜>", "<|start_header_id|>", "<|turn>", "[INST]", "[/INST]", "<s>",
    "</s>", "<start_of_turn>model", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<<SYS>>", "<</SYS>>",
    "[SYSTEM_PROMPT]", "[TOOL_CALLS]", "<｜begin▁of▁sentence｜>", "<<|im_end|>", "[gMASK]", "<unused3>",
]  # fmt: skip
BENIGN = "<think>a < b || c</think><action>go [to] <search>x</search></action> a[INSTANCE] <strong> <state>"


def test_endpoints_get_no_control_tokens(server, ask):
    text = BENIGN + "".join(FORGERIES)
    ask[0](text, start=text)
    for message in server.requests[0]["messages"]:
        assert message["content"].startswith(BENIGN)
        assert not any(forged in message["content"] for forged in FORGERIES)
        assert message["content"].replace(" ", "") == text.replace(" ", "")


def test_nobody_there_is_one_line_before_any_game(capfd, tmp_path):
    words = [
        "--env",
        "alfworld",
        "--env.data",
        "none",
        "--endpoint",
        "http://127.0.0.1:9",
        "--model",
        "m",
    ]
    assert cli.main(["eval", *words, "--out", str(tmp_path / "out")]) == 2
    err = capfd.readouterr().err.splitlines()
    assert err[-1].startswith("paw: endpoint.url = 'http://127.0.0.1:9': no answer (")
    assert len(err) == 2
    assert not (tmp_path / "out").exists()


# --- paw eval against it
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def evaluate(server, tmp_path, capfd):
    """Runs `paw eval` of six short games against the server; returns (exit code, standard error,
    results)."""

    def run(*words, agent="plain", code=0):
        given = {
            "agent": agent, "env": "alfworld", "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 3,
            "endpoint": server.url, "model": "m", "endpoint.retries": 1, "eval.games": 6, "out": tmp_path / "out",
        }  # fmt: skip
        capfd.readouterr()
        found = cli.main(
            ["eval", *(part for k, v in given.items() for part in (f"--{k}", str(v))), *words]
        )
        err = capfd.readouterr().err
        assert found == code, err
        results = tmp_path / "out" / "results.json"
        return err, json.loads(results.read_text()) if results.exists() else {}

    return run


def episodes(tmp_path):
    return [
        json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    ]


def test_an_evaluation_its_files_and_the_same_command_again(server, evaluate, tmp_path):
    prices = ("--endpoint.input_price", "2", "--endpoint.output_price", "10")
    err, results = evaluate(*prices)
    assert "settings of the recipe alfworld-grpo" in err
    lines = episodes(tmp_path)
    assert sorted(line["place"] for line in lines) == [0, 1, 2, 3, 4, 5]
    assert len(server.requests) == results["calls"] == 18
    assert results["cost"] == (198 * 2 + 90 * 10) / 1e6
    assert (results["prompt_tokens"], results["completion_tokens"]) == (198, 90)
    assert {line["failure"] for line in lines} == {None}
    assert {line["steps"] for line in lines} == {3}
    assert [turn["action"] for turn in lines[0]["turns"]] == ["look"] * 3
    assert lines[0]["turns"][0]["observation"].startswith("You are in the middle of a room.")
    assert (
        len({json.dumps(request["messages"]) + str(request["seed"]) for request in server.requests})
        == 18
    )
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| m | plain |" in table
    assert "| All |" in table
    assert "$0.00" in table
    assert "success 0.0% of 6 episodes" in table

    server.requests.clear()
    err, again = evaluate(*prices)
    assert "6 of 6 episodes are there, playing 0" in err
    assert not server.requests
    assert {**again, "wall_s": 0} == {**results, "wall_s": 0}


def test_an_interrupted_evaluation_goes_on(server, evaluate, tmp_path):
    # A shell's background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    told = []

    def answer(handler):
        if len(server.requests) >= 10 and not told:  # two at once may both find eleven
            told.append(os.kill(os.getpid(), signal.SIGINT))
        handler.answer(200, completion(), {})

    server.default = answer
    try:
        err, _ = evaluate("--endpoint.concurrency", "2", code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    path = tmp_path / "out" / "episodes.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert "Traceback" not in err
    assert 0 < len(lines) < 6
    assert f"stopped: {len(lines)} of 6 episodes are in" in err.splitlines()[-1]
    path.write_bytes(b"".join(lines) + lines[0][:100])
    time.sleep(0.5)  # the server may still find a request that the evaluation sent before it ended
    server.requests.clear()
    server.default = (200, completion(), {})
    left = 6 - len(lines)
    err, results = evaluate()
    assert "the last line is incomplete" in err
    assert f"{len(lines)} of 6 episodes are there, playing {left}" in err
    assert len(server.requests) == 3 * left
    assert results["episodes"] == 6
    assert path.read_bytes().startswith(b"".join(lines) + b'{"place"')
    for key, value in (("eval.seed", "5"), ("agent.type", "react"), ("model", "n")):
        err, _ = evaluate(f"--{key}", value, code=2)
        assert f"holds an evaluation with {key} = " in err.splitlines()[-1]
    path.write_text("{}\n" + path.read_text())
    assert f"{path}:1: this is not an episode" in evaluate(code=2)[0]
    for text in ("[]", "{", ""):
        path.with_name("settings.json").write_text(text)
        assert "settings.json is not that of an evaluation" in evaluate(code=2)[0]


def test_an_evaluation_grows_and_shrinks(server, evaluate, tmp_path):
    _, four = evaluate("--eval.games", "4")
    assert len(server.requests) == 12
    err, six = evaluate("--eval.games", "6")
    assert "eval.games = 4 becomes 6" in err
    assert "4 of 6 episodes are there, playing 2" in err
    assert len(server.requests) == 18
    assert six["episodes"] == 6
    err, again = evaluate("--eval.games", "4")
    assert "2 episodes are not of these 4 games; they stay there and count nowhere" in err
    assert {**again, "wall_s": 0} == {**four, "wall_s": 0}
    err, again = evaluate()
    assert "6 of 6 episodes are there, playing 0" in err
    assert {**again, "wall_s": 0} == {
        **six,
        "wall_s": 0,
    }
    assert len(server.requests) == 18
    assert len(episodes(tmp_path)) == 6


def test_a_larger_draw_in_another_order_keeps_what_is_in_both(server, tmp_path):
    """Of 22 questions `random.sample` draws 8 in another way than 4: three are in both draws, two
    of them elsewhere."""
    server.default = (200, completion("<answer>Tuk</answer>"), {})
    questions = [
        {"question": f"Where is {i}?", "golden_answers": ["Tuk" if i % 2 else "Ohr"]}
        for i in range(22)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    (tmp_path / "corpus.jsonl").write_text(
        json.dumps({"id": "0", "contents": '"Tuk"\nA place.'}) + "\n"
    )
    words = [
        "eval",
        "--agent",
        "search-r1",
        "--env",
        "search",
        "--env.data",
        tmp_path,
        "--env.retriever",
        "bm25",
    ]
    words += ["--env.corpus", tmp_path / "corpus.jsonl", "--endpoint", server.url, "--model", "m"]

    def tasks_of(games):
        server.requests.clear()
        assert (
            cli.main([*map(str, words), "--out", str(tmp_path / "out"), "--eval.games", str(games)])
            == 0
        )
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        return [line["task"] for line in episodes(tmp_path)], results

    few, four = tasks_of(4)
    more, eight = tasks_of(8)
    assert more[:4] == few
    assert len(set(more)) == len(more) == 4 + len(server.requests)
    assert len(more) == 9
    assert eight["episodes"] == 8
    again, fewer = tasks_of(4)
    assert again == more
    assert not server.requests
    assert {**fewer, "wall_s": 0} == {**four, "wall_s": 0}


def test_an_endpoint_that_fails_costs_no_success(server, evaluate, tmp_path):
    server.script = [(200, completion(), {}), *[(400, refusal("no such luck"), {})] * 2]
    err, results = evaluate("--endpoint.concurrency", "1", code=1)
    assert "2 episodes could not be played" in err
    assert server.url in err
    assert (results["episodes"], results["not_played"]) == (4, 2)
    server.requests.clear()
    err, results = evaluate()
    assert "4 of 6 episodes are there, playing 2" in err
    assert (results["episodes"], results["not_played"], len(server.requests)) == (6, 0, 6)
    assert results["calls"] == 19  # the one before the failure was paid for too


def test_an_endpoint_that_is_gone_is_given_up(server, evaluate, tmp_path):
    server.default = (400, refusal("gone"), {})
    err, results = evaluate("--eval.games", "40", code=1)
    assert "32 episodes in a row could not be played: giving up" in err
    assert len(episodes(tmp_path)) == 32
    assert results["episodes"] == 0
    assert results["success"] == 0.0


def test_a_full_context_is_a_loss(server, evaluate):
    server.default = (400, refusal("too long", code="context_length_exceeded"), {})
    err, results = evaluate(code=1)
    assert (
        "all 6 episodes ran out of context: serve m with a longer one, or lower env.max_turns = 3"
        in err
    )
    assert (results["episodes"], results["context_full"], results["success"]) == (6, 6, 0.0)


def test_a_context_that_is_full_now_and_then_is_no_reason_to_fail(server, evaluate):
    server.script = [(400, refusal("too long", code="context_length_exceeded"), {})]
    err, results = evaluate("--endpoint.concurrency", "1")
    assert (results["episodes"], results["context_full"]) == (
        6,
        1,
    )
    assert "ran out of context" not in err


def test_zerosearch_asks_a_second_model(server, capfd, tmp_path):
    def answer(handler):
        text = server.requests[-1]["messages"][-1]["content"].split("Question:")[-1]
        reply = "<answer>Tuk" if "<information>" in text else "<search>where"
        reply = "Doc 1: It lies in Tuk." if server.requests[-1]["model"] == "engine" else reply
        handler.answer(200, completion(reply), {})

    server.default = answer
    words = [
        "--agent",
        "zerosearch",
        "--env",
        "search",
        "--env.data",
        "none",
        "--env.entities",
        "50",
    ]
    words += [
        "--endpoint",
        server.url,
        "--model",
        "m",
        "--endpoint.concurrency",
        "1",
        "--eval.games",
        "1",
    ]
    words += [
        "--env.simulator.url",
        server.url,
        "--env.simulator.model",
        "engine",
        "--env.simulator.noise_start",
        "1",
    ]
    assert cli.main(["eval", *words, "--out", str(tmp_path / "out")]) == 0, capfd.readouterr().err
    ((search, answered),) = [episode["turns"] for episode in episodes(tmp_path)]
    assert (search["action"], answered["action"]) == ("search[where]", "answer[Tuk]")
    assert "Doc 1: It lies in Tuk." in search["observation"]
    (asked,) = [request for request in server.requests if request["model"] == "engine"]
    assert "noisy documents" in asked["messages"][0]["content"]
    assert "| m | zerosearch |" in capfd.readouterr().out
