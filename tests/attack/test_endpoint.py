"""An endpoint that misbehaves: a real HTTP server on loopback, whose answers a test scripts one by
one."""

import asyncio
import json
import os
import signal
import threading
import time
from email.utils import formatdate

import pytest
from command_line import as_words
from jsonl import read_jsonl, write_jsonl
from scripted_server import completion, refusal

from paw import cli
from paw.agents.endpoint import ChatCompletion, Endpoint, EndpointError
from paw.config.sections import EndpointConfig
from paw.errors import UserError
from paw.rollouts.text.chat import ContextFull

pytest.importorskip("openai")
SAMPLING = {"temperature": 0.4, "max_tokens": 16, "seed": 7}


@pytest.fixture
def ask(server, monkeypatch):
    """`ask("hello")` asks once, and `ask.pauses` are the pauses it made, which pass at once."""
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("paw.agents.endpoint.sleep", pause)

    def ask(prompt="hello", *, retries=3, timeout_s=5, endpoint=None, **options):
        if endpoint is None:
            endpoint = Endpoint(
                EndpointConfig(url=server.url, model="m", retries=retries, timeout_s=timeout_s)
            )
        return asyncio.run(endpoint.complete(prompt, **SAMPLING, **options))

    ask.pauses = pauses
    return ask


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
    """Text that the server's template opened is part of the answer."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    server.script = [(200, completion("x</think><action>look</action>"), {})]
    reply = ask("hello", stop=["</action>"])
    assert reply == ChatCompletion("<think>x</think><action>look", 11, 5, "</action>")
    (request,) = server.requests
    assert request == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.4,
        "max_tokens": 16,
        "seed": 7,
        "stop": ["</action>"],
    }


def test_what_passes_is_tried_again_after_growing_pauses(server, ask):
    server.script = list(PASSING.values())
    reply = ask(retries=len(PASSING))
    assert reply.text.endswith("<action>look</action>")
    assert len(server.requests) == len(PASSING) + 1
    assert len(ask.pauses) == len(PASSING)
    for retry, pause in enumerate(ask.pauses):
        longest = min(2**retry, 60)
        assert longest / 2 <= pause <= longest


def test_what_does_not_pass_names_the_url(server, ask):
    server.default = PASSING["cut"]
    with pytest.raises(EndpointError, match=rf"^{server.url}/v1: .+ \(tried 4 times\)$") as caught:
        ask()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"[" * 1_000_000, b'{"usage": ' + b"9" * 5000 + b"}", b'"\\ud800"']
)
def test_what_an_endpoint_makes_up_is_one_line(server, ask, body):
    server.default = (200, body, {})
    with pytest.raises(EndpointError, match="malformed answer: ") as caught:
        ask(retries=0)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("usage", "prompt_tokens", "completion_tokens"),
    [
        ({"prompt_tokens": 11, "completion_tokens": 5.0}, 11, 5),
        ({"prompt_tokens": -11, "completion_tokens": 10**12}, 0, 0),
        ({"prompt_tokens": int("9" * 400), "completion_tokens": float("nan")}, 0, 0),
        (None, 0, 0),
    ],
)
def test_usage_that_cannot_be_is_not_counted(server, ask, usage, prompt_tokens, completion_tokens):
    server.script = [(200, completion() | {"usage": usage}, {})]
    reply = ask()
    assert reply.prompt_tokens == prompt_tokens
    assert reply.completion_tokens == completion_tokens


def test_usage_beyond_what_was_asked_makes_no_request_wait(server, ask):
    """A limit of 6,000 tokens a minute would hold the next request for a day."""
    config = EndpointConfig(url=server.url, model="m", tokens_per_minute=6000)
    for prompt_tokens, completion_tokens in ((9_000_000, 5), (11, 10**9)):
        endpoint = Endpoint(config)
        answer = completion(prompt=prompt_tokens, answer=completion_tokens)
        server.script = [(200, answer, {})]
        reply = ask(endpoint=endpoint)
        assert 0 in (reply.prompt_tokens, reply.completion_tokens)
        endpoint._client = None  # it belongs to the event loop that has ended
        ask(endpoint=endpoint)
        assert sum(ask.pauses) < 60


def test_a_slow_answer_is_given_up(server, ask):
    asked_again = threading.Event()

    def answer(handler):
        asked_again.set()
        handler.answer(200, completion(), {})

    server.script = [lambda _: asked_again.wait(60)]
    server.default = answer
    assert ask(retries=5, timeout_s=0.2).completion_tokens == 5
    assert asked_again.is_set()
    assert len(server.requests) >= 2


def test_retry_after_is_honoured_but_a_wait_of_hours_is_cut_and_named(server, ask, capfd):
    def pause_after(value):
        server.script = [(429, refusal("slow down"), {"Retry-After": value})]
        ask()
        return ask.pauses[-1]

    assert pause_after("12.5") == pytest.approx(12.5, abs=1.0)
    assert pause_after(formatdate(time.time() + 30.5, usegmt=True)) == pytest.approx(30, abs=1.0)
    for nonsense in ("soon", "-5"):
        assert 0.5 <= pause_after(nonsense) <= 1.0
    assert capfd.readouterr().err == ""

    for hours in ("99999", "9" * 400, "Fri, 31 Dec 2199 23:59:59 GMT"):
        assert pause_after(hours) == 120.0
        (warning,) = capfd.readouterr().err.splitlines()
        assert f"asks to wait (Retry-After: {hours[:40]}" in warning
        assert warning.endswith(": waiting only 120 s")


@pytest.mark.parametrize(("status", "key"), [(401, ""), (403, "wrong")])
def test_a_wrong_key_names_its_variable(server, ask, monkeypatch, status, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server.default = (status, refusal("who are you"), {})
    server.models = status
    problem = "holds a key" if key else "is not set"
    with pytest.raises(UserError, match=f"OPENAI_API_KEY {problem}"):
        ask()
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        Endpoint(EndpointConfig(url=server.url, model="m")).check()
    assert len(server.requests) == 1


def test_an_unknown_model_names_those_there_are(server, ask):
    server.default = (404, refusal("The model `m` does not exist."), {})
    with pytest.raises(UserError, match=f"{server.url}/v1: no model 'm'; it serves: m, n$"):
        ask()
    server.models = 404
    with pytest.raises(UserError, match="no chat endpoint here"):
        ask()


def test_a_list_of_models_is_not_needed(server):
    for server.models in (404, 500, ["other"]):
        Endpoint(EndpointConfig(url=server.url, model="m")).check()


def test_a_wrong_request_is_not_repeated(server, ask):
    server.default = (400, refusal("messages: too funny"), {})
    with pytest.raises(EndpointError, match=r"400 .*too funny"):
        ask()
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        refusal("This model's maximum context length is 4096 tokens, 'max_tokens' is too large",
                param="max_tokens"),
        refusal("Too long", code="context_length_exceeded"),
    ],
)  # fmt: skip
def test_a_full_context_is_told_apart_from_other_wrong_requests(server, ask, answer):
    server.default = (400, answer, {})
    with pytest.raises(ContextFull):
        ask()
    assert len(server.requests) == 1


def test_refused_parameters_are_left_out_from_then_on(server, ask, capfd):
    endpoint = Endpoint(EndpointConfig(url=server.url, model="m"))
    other_name = refusal(
        "Use 'max_completion_tokens' instead.", param="max_tokens", code="unsupported_parameter"
    )
    other_value = refusal(
        "Unsupported value: 'temperature' does not support 0.4", code="unsupported_value"
    )
    server.script = [(400, other_name, {}), (400, other_value, {})]
    for _ in range(2):
        ask(endpoint=endpoint)
    _, _, *requests = server.requests
    assert len(requests) == 2
    for request in requests:
        assert request.keys() == {"max_completion_tokens", "messages", "model", "seed"}
        assert request["max_completion_tokens"] == 16
    assert capfd.readouterr().err.count("does not take") == 2


def test_an_answer_goes_on_or_is_restated(server, ask):
    """A start of the answer is continued by the server; if it refuses that, the start is restated
    in the prompt. The options of the template go along."""
    options = {"enable_thinking": False}
    endpoint = Endpoint(EndpointConfig(url=server.url, model="m"), template_options=options)
    ask("why?", start="<think>Be", endpoint=endpoint)
    first = server.requests[-1]
    assert first["messages"][1:] == [{"role": "assistant", "content": "<think>Be"}]
    assert first["continue_final_message"] is True
    assert not first["add_generation_prompt"]
    assert first["chat_template_kwargs"] == options
    server.script = [(400, refusal("Unknown parameter: 'continue_final_message'."), {})]
    for _ in range(2):
        ask("why?", start="<think>Be", endpoint=endpoint)
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
    ask(text, start=text)
    for message in server.requests[0]["messages"]:
        assert message["content"].startswith(BENIGN)
        for forgery in FORGERIES:
            assert forgery not in message["content"]
        assert message["content"].replace(" ", "") == text.replace(" ", "")


def test_nobody_there_is_one_line_before_any_game(capfd, tmp_path):
    settings = {
        "env": "alfworld",
        "env.data": "none",
        "endpoint": "http://127.0.0.1:9",
        "model": "m",
    }
    assert cli.main(["eval", *as_words(settings), "--out", str(tmp_path / "out")]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 2
    assert errors[-1].startswith("paw: endpoint.url = 'http://127.0.0.1:9': no answer (")
    assert not (tmp_path / "out").exists()


# --- `paw eval` against it


@pytest.fixture
def evaluate(server, tmp_path, capfd):
    """`evaluate(*words)` runs `paw eval` of six short games against the server: (standard error,
    results)."""

    def run(*words, agent="plain", code=0):
        settings = {
            "agent": agent, "env": "alfworld", "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 3,
            "endpoint": server.url, "model": "m", "endpoint.retries": 1, "eval.games": 6, "out": tmp_path / "out",
        }  # fmt: skip
        capfd.readouterr()
        returned = cli.main(["eval", *as_words(settings), *words])
        errors = capfd.readouterr().err
        assert returned == code, errors
        file = tmp_path / "out" / "results.json"
        return errors, json.loads(file.read_text()) if file.exists() else {}

    return run


def episodes(tmp_path):
    return read_jsonl(tmp_path / "out" / "episodes.jsonl")


def without_clock(results):
    return results | {"wall_s": 0}


def test_an_evaluation_its_files_and_the_same_command_again(server, evaluate, tmp_path):
    prices = ("--endpoint.input_price", "2", "--endpoint.output_price", "10")
    errors, results = evaluate(*prices)
    assert "settings of the recipe alfworld-grpo" in errors
    assert results["calls"] == 18
    assert results["prompt_tokens"] == 198
    assert results["completion_tokens"] == 90
    assert results["cost"] == (198 * 2 + 90 * 10) / 1e6
    assert len(server.requests) == 18
    different = {json.dumps([request["messages"], request["seed"]]) for request in server.requests}
    assert len(different) == 18

    played = episodes(tmp_path)
    assert sorted(episode["place"] for episode in played) == [0, 1, 2, 3, 4, 5]
    assert all(episode["failure"] is None for episode in played)
    assert all(episode["steps"] == 3 for episode in played)
    turns = played[0]["turns"]
    assert [turn["action"] for turn in turns] == ["look"] * 3
    assert turns[0]["observation"].startswith("You are in the middle of a room.")
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| m | plain |" in table
    assert "| All |" in table
    assert "$0.00" in table
    assert "success 0.0% of 6 episodes" in table

    server.requests.clear()
    errors, again = evaluate(*prices)
    assert "6 of 6 episodes are there, playing 0" in errors
    assert not server.requests
    assert without_clock(again) == without_clock(results)


def test_an_interrupted_evaluation_goes_on(server, evaluate, tmp_path):
    # A shell's background jobs ignore Ctrl-C.
    handler_before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts = []

    def answer(handler):
        if len(server.requests) >= 10 and not interrupts:  # two at once may both find eleven
            interrupts.append(os.kill(os.getpid(), signal.SIGINT))
        handler.answer(200, completion(), {})

    server.default = answer
    try:
        errors, _ = evaluate("--endpoint.concurrency", "2", code=130)
    finally:
        signal.signal(signal.SIGINT, handler_before)
    episodes_file = tmp_path / "out" / "episodes.jsonl"
    lines = episodes_file.read_bytes().splitlines(keepends=True)
    assert "Traceback" not in errors
    assert 0 < len(lines) < 6
    assert f"stopped: {len(lines)} of 6 episodes are in" in errors.splitlines()[-1]
    episodes_file.write_bytes(b"".join(lines) + lines[0][:100])
    time.sleep(0.5)  # the server may still find a request that the evaluation sent before it ended
    server.requests.clear()
    server.default = (200, completion(), {})
    remaining = 6 - len(lines)
    errors, results = evaluate()
    assert "the last line is incomplete" in errors
    assert f"{len(lines)} of 6 episodes are there, playing {remaining}" in errors
    assert len(server.requests) == 3 * remaining
    assert results["episodes"] == 6
    assert episodes_file.read_bytes().startswith(b"".join(lines) + b'{"place"')
    for key, value in (("eval.seed", "5"), ("agent.type", "react"), ("model", "n")):
        errors, _ = evaluate(f"--{key}", value, code=2)
        assert f"holds an evaluation with {key} = " in errors.splitlines()[-1]
    episodes_file.write_text("{}\n" + episodes_file.read_text())
    assert f"{episodes_file}:1: this is not an episode" in evaluate(code=2)[0]
    for text in ("[]", "{", ""):
        episodes_file.with_name("settings.json").write_text(text)
        assert "settings.json does not belong to an evaluation" in evaluate(code=2)[0]


def test_an_evaluation_grows_and_shrinks(server, evaluate, tmp_path):
    _, four = evaluate("--eval.games", "4")
    assert len(server.requests) == 12
    errors, six = evaluate("--eval.games", "6")
    assert "eval.games = 4 becomes 6" in errors
    assert "4 of 6 episodes are there, playing 2" in errors
    assert len(server.requests) == 18
    assert six["episodes"] == 6
    errors, again = evaluate("--eval.games", "4")
    assert "2 episodes are not of these 4 games; they stay there and are not counted" in errors
    assert without_clock(again) == without_clock(four)
    errors, again = evaluate()
    assert "6 of 6 episodes are there, playing 0" in errors
    assert without_clock(again) == without_clock(six)
    assert len(server.requests) == 18
    assert len(episodes(tmp_path)) == 6


def test_a_larger_draw_in_another_order_keeps_what_is_in_both(server, tmp_path):
    """Of 22 questions `random.sample` draws 8 in another way than 4: three are in both draws, two
    of them at another place."""
    server.default = (200, completion("<answer>Tuk</answer>"), {})
    questions = []
    for number in range(22):
        town = "Tuk" if number % 2 else "Ohr"
        questions.append({"question": f"Where is {number}?", "golden_answers": [town]})
    write_jsonl(tmp_path / "test.jsonl", questions)
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": "0", "contents": '"Tuk"\nA place.'}])
    settings = {
        "agent": "search-r1", "env": "search", "env.data": tmp_path, "env.retriever": "bm25", "model": "m",
        "env.corpus": tmp_path / "corpus.jsonl", "endpoint": server.url, "out": tmp_path / "out",
    }  # fmt: skip

    def tasks_of(games):
        server.requests.clear()
        assert cli.main(["eval", *as_words(settings | {"eval.games": games})]) == 0
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        return [episode["task"] for episode in episodes(tmp_path)], results

    tasks_of_four, four = tasks_of(4)
    tasks_of_eight, eight = tasks_of(8)
    assert tasks_of_eight[:4] == tasks_of_four
    assert len(tasks_of_eight) == 4 + len(server.requests)
    assert len(tasks_of_eight) == 9
    assert len(set(tasks_of_eight)) == 9
    assert eight["episodes"] == 8
    tasks_again, four_again = tasks_of(4)
    assert tasks_again == tasks_of_eight
    assert not server.requests
    assert without_clock(four_again) == without_clock(four)


def test_an_endpoint_that_fails_costs_no_success(server, evaluate, tmp_path):
    server.script = [(200, completion(), {}), *[(400, refusal("no such luck"), {})] * 2]
    errors, results = evaluate("--endpoint.concurrency", "1", code=1)
    assert "2 episodes could not be played" in errors
    assert server.url in errors
    assert results["episodes"] == 4
    assert results["not_played"] == 2
    server.requests.clear()
    errors, results = evaluate()
    assert "4 of 6 episodes are there, playing 2" in errors
    assert len(server.requests) == 6
    assert results["episodes"] == 6
    assert results["not_played"] == 0
    assert results["calls"] == 19  # the one before the failure was paid for too


def test_an_endpoint_that_is_gone_is_given_up(server, evaluate, tmp_path):
    server.default = (400, refusal("gone"), {})
    errors, results = evaluate("--eval.games", "40", code=1)
    assert "32 episodes in a row could not be played: giving up" in errors
    assert len(episodes(tmp_path)) == 32
    assert results["episodes"] == 0
    assert results["success"] == 0.0


def test_a_full_context_is_a_loss(server, evaluate):
    server.default = (400, refusal("too long", code="context_length_exceeded"), {})
    errors, results = evaluate(code=1)
    assert (
        "all 6 episodes ran out of context: serve m with a longer one, or lower env.max_turns = 3"
        in errors
    )
    assert results["episodes"] == 6
    assert results["context_full"] == 6
    assert results["success"] == 0.0


def test_a_context_that_is_full_now_and_then_is_no_reason_to_fail(server, evaluate):
    server.script = [(400, refusal("too long", code="context_length_exceeded"), {})]
    errors, results = evaluate("--endpoint.concurrency", "1")
    assert results["episodes"] == 6
    assert results["context_full"] == 1
    assert "ran out of context" not in errors


def test_zerosearch_asks_a_second_model(server, capfd, tmp_path):
    def answer(handler):
        request = server.requests[-1]
        text = request["messages"][-1]["content"].split("Question:")[-1]
        if request["model"] == "engine":
            reply = "Doc 1: It lies in Tuk."
        elif "<information>" in text:
            reply = "<answer>Tuk"
        else:
            reply = "<search>where"
        handler.answer(200, completion(reply), {})

    server.default = answer
    settings = {
        "agent": "zerosearch", "env": "search", "env.data": "none", "env.entities": 50, "eval.games": 1,
        "endpoint": server.url, "model": "m", "endpoint.concurrency": 1, "env.simulator.url": server.url,
        "env.simulator.model": "engine", "env.simulator.noise_start": 1, "out": tmp_path / "out",
    }  # fmt: skip
    assert cli.main(["eval", *as_words(settings)]) == 0, capfd.readouterr().err
    (episode,) = episodes(tmp_path)
    search, answered = episode["turns"]
    assert search["action"] == "search[where]"
    assert answered["action"] == "answer[Tuk]"
    assert "Doc 1: It lies in Tuk." in search["observation"]
    (request,) = [request for request in server.requests if request["model"] == "engine"]
    assert "noisy documents" in request["messages"][0]["content"]
    assert "| m | zerosearch |" in capfd.readouterr().out
