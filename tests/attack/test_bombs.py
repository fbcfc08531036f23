"""Patterns, schemas and numbers in data that would take for ever, or all memory, cost one line and
at most an episode."""

import io
import json
import os
import re
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonl import write_jsonl
from processes import is_alive, wait_until
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from paw import cli
from paw.config.recipe import load
from paw.config.sections import EnvConfig
from paw.envs import limited, make_factory
from paw.envs.tools import checked_reply, checked_tools
from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.text import calls
from paw.types import Outcome, Reply, Task, ToolCall

BOMB = r"(a+)+$"
FUSE = "a" * 40 + "b"


pytestmark = pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def quick():
    """A pattern gets a fifth of the usual time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited, "CPU_S", 0.2)
        patch.setattr(limited, "_child", limited._Child())
        yield
    limited._schema_problem.cache_clear()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A file of two questions whose answers are regular expressions; the first never ends."""
    pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    path = tmp_path_factory.mktemp("questions") / "bomb.jsonl"
    write_jsonl(path, [{"question": "a?", "answer": BOMB}, {"question": "b?", "answer": "b+"}])
    return path


def test_a_pattern_that_takes_for_ever_costs_its_episode(questions):
    config = load(
        "questions-grpo",
        {"env.data": str(questions), "env.score": "regex", "env.eval_split": "train"},
    )
    factory = make_factory(config)
    environment = CheckedEnv(factory.make(), config.env)
    tasks = factory.tasks("train", 0)
    bomb = tasks[0]
    sane = tasks[1]
    environment.reset(bomb)
    with pytest.raises(EnvironmentFailure) as error:
        environment.step(f"<answer>{FUSE}</answer>")
    assert str(error.value) == (
        "env.score = 'regex': the pattern '(a+)+$' takes more than 0.2 s of CPU time on an answer "
        "of 41 characters; write it without repeats of repeats"
    )
    environment.reset(bomb)
    assert environment.step("<answer>aaa</answer>").won
    environment.reset(sane)
    assert environment.step("<answer>bbb</answer>").won


def test_playing_it_at_the_terminal_ends_with_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "a?", "answer": BOMB}))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{FUSE}\n"))
    assert cli.main(["play", "questions", "--env.data", str(path), "--env.score", "regex"]) == 1
    errors = capsys.readouterr().err.splitlines()
    (message,) = [line for line in errors if line.startswith("paw play: ")]
    assert "takes more than 0.2 s of CPU time" in message


@pytest.mark.parametrize("answer", ["(" * 100_000, "a{99999999999}", "(", "[b-a]"])
def test_what_is_not_a_pattern_is_one_line_at_the_start(tmp_path, answer):
    pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": answer}))
    with pytest.raises(
        UserError, match=r"train, row 1: the answer .* is not a regular expression: "
    ) as error:
        make_factory(load("questions-grpo", {"env.data": str(path), "env.score": "regex"}))
    assert "\n" not in str(error.value)


PARTS = st.sampled_from(
    [
        "a",
        "b+",
        "[^c]*",
        r"\d",
        r"\w?",
        "(a|b)",
        "(?i)K",
        "{e}",
        "x{2}",
        r"\bab",
        "[[:alpha:]]",
        "$",
        "\n",
    ]
)


@given(
    pattern=st.lists(PARTS, max_size=5).map("".join),
    text=st.text("aAbBxkKıe{}1 \n\ud800", max_size=6),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_sane_pattern_matches_as_pythons_does(pattern, text):
    try:
        expected = re.fullmatch(pattern, text) is not None
    except re.error as error:
        assert limited.pattern_problem(pattern) == str(error)
    else:
        assert limited.fullmatch(pattern, text) is expected
        assert not limited.pattern_problem(pattern)


def doubling(levels: int = 60) -> dict:
    """A schema, each level of which refers to the next one twice."""
    definitions = {f"l{levels}": {"type": "object"}}
    for level in range(levels):
        definitions[f"l{level}"] = {"allOf": [{"$ref": f"#/$defs/l{level + 1}"}] * 2}
    return {"$defs": definitions, "$ref": "#/$defs/l0"}


def nested(levels: int = 60) -> dict:
    schema: dict = {"type": "object"}
    for _ in range(levels):
        schema = {"allOf": [schema], "unevaluatedProperties": False}
    return schema


class Shelf:
    def __init__(self, schema):
        self.tools = [{"name": "put", "parameters": schema}]

    def reset(self, task):
        return "begin"

    def context(self):
        return [{"role": "user", "content": "begin"}]

    def step(self, response):
        return Outcome("done", 0.0, done=True, won=False)


def played(schema, arguments) -> Outcome:
    environment = CheckedEnv(Shelf(schema), EnvConfig(name="x"))
    environment.reset(Task("a"))
    return environment.step(Reply.of("", ToolCall("put", arguments, "k")))


@pytest.mark.parametrize(
    ("schema", "arguments", "problem"),
    [
        (
            {"properties": {"x": {"pattern": BOMB}}},
            {"x": FUSE},
            "takes more than 0.2 s of CPU time",
        ),
        ({"patternProperties": {BOMB: {}}}, {FUSE: 1}, "takes more than 0.2 s of CPU time"),
        (
            {"patternProperties": {BOMB: {}}, "additionalProperties": False},
            {FUSE: 1},
            "takes more than 0.2 s",
        ),
        (
            doubling(),
            {},
            "parameters are not the JSON schema of an object: it takes more than 0.2 s of CPU time",
        ),
        (
            nested(),
            {},
            "parameters are not the JSON schema of an object: it takes more than 0.2 s of CPU time",
        ),
        (
            {"properties": {"x": doubling() | {"$ref": "#/properties/x/$defs/l0"}}},
            {"x": {}},
            "cannot be applied",
        ),
        ({"$ref": "#"}, {}, "it is nested too deeply, or refers to itself"),
        (
            {"$ref": "#/nowhere"},
            {},
            "it cannot be applied (_WrappedReferencingError: PointerToNowhere",
        ),
    ],
)
def test_a_schema_that_takes_for_ever_costs_the_episode(schema, arguments, problem):
    with pytest.raises(EnvironmentFailure) as error:
        played(schema, arguments)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert played({"type": "object"}, {}).done  # the next one is played


def test_a_schema_refused_once_is_refused_at_once(monkeypatch):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"takes more than 0\.2 s of CPU time"):
            checked_tools([{"name": "put", "parameters": doubling()}])
        monkeypatch.setattr(limited._child, "ask", lambda *_: pytest.fail("asked again"))


def test_a_call_that_is_not_json_is_an_invalid_one():
    (tool,) = checked_tools([{"name": "put", "parameters": {}}])
    cycle: dict = {}
    cycle["self"] = cycle
    for arguments in (cycle, {"x": object()}):
        problem = checked_reply(Reply("", "", [ToolCall("put", arguments)]), [tool]).problem
        assert problem.startswith("the arguments of 'put' cannot be written as JSON: ")


def test_many_threads_a_fork_and_a_death_of_the_helper_get_right_answers():
    """Answers are never another caller's, and a forked process does not share the helper."""
    wrong: list[str] = []

    def match(caller: int) -> None:
        for attempt in range(30):
            text = f"{caller} {attempt}"
            if limited.fullmatch(text, text) is not True:
                wrong.append(text)
            if limited.fullmatch(f"{caller}", "x") is not False:
                wrong.append(text)

    threads = [threading.Thread(target=match, args=(caller,)) for caller in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if limited.fullmatch("a", "a") and not limited.fullmatch("a", "b") else 1)
    assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()
    assert not wrong
    assert limited._child._process is not None
    limited._child._process.kill()
    limited._child._process.wait()
    assert limited.fullmatch("a", "a")


HELPED = """
from paw.envs import limited
limited.fullmatch("a", "a")
print(limited._child._process.pid, flush=True)
input()
"""


def test_the_helper_ends_with_a_process_that_is_killed():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", HELPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as user:
        helper = int(user.stdout.readline())
        user.kill()
    wait_until(lambda: not is_alive(helper), seconds=10)


MCP = {
    "name": "put",
    "title": "Put",
    "inputSchema": {"type": "object", "required": ["thing"]},
    "annotations": {},
}


def test_a_tool_of_mcp_has_its_schema():
    (tool,) = checked_tools([MCP])
    parameters = MCP["inputSchema"]
    assert tool == {
        "type": "function",
        "function": {"name": "put", "description": "", "parameters": parameters},
    }
    assert (
        "'thing' is a required property"
        in checked_reply(Reply.of("", ToolCall("put", {})), [tool]).problem
    )
    assert checked_tools([{**MCP, "parameters": parameters}]) == checked_tools(
        [{"type": "function", "function": MCP}]
    )


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (
            {"name": "put", "input_schema": SCHEMA},
            "tool 'put' has 'input_schema'; the schema of its arguments must be",
        ),
        (
            {"name": "put", "args": SCHEMA},
            "tool 'put' has 'args'; the schema of its arguments must be 'parameters'",
        ),
        (
            {"type": "function", "function": {"name": "put"}, "schema": SCHEMA},
            "tool 'put' has 'schema'; ",
        ),
        (
            {"type": "function", "function": {"name": "put"}, "parameters": SCHEMA},
            "tool 'put' has 'parameters'; ",
        ),
        (
            {"name": "put", "parameters": SCHEMA, "inputSchema": {}},
            "has 'parameters' and another 'inputSchema'",
        ),
        (
            {"name": "put", "inputSchema": None},
            "its parameters are not the JSON schema of an object: None",
        ),
    ],
)
def test_a_schema_in_another_place_is_refused(tool, problem):
    with pytest.raises(ValueError, match=r"^tool 'put'") as error:
        checked_tools([tool])
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_models_own_format_that_never_ends_is_one_line(monkeypatch):
    """The patterns of transformers' `response_template` come with the tokenizer: this one takes
    some seconds."""
    monkeypatch.setattr(calls, "PARSE_S", 0.2)
    fields = {
        "tool_calls": {"open_pattern": "<c>(?:a|aa)+$", "close": "</c>"},
        "content": {"close": "</s>"},
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    read = calls._reader(
        calls._by_transformers(tokenizer, {"start_anchor": "<a>", "fields": fields}), ""
    )
    hello = read("hello", [], 0)
    assert hello.content == "hello"
    assert not hello.problem
    with pytest.raises(
        UserError,
        match=r"has not read an answer of \d+ characters in 0\.2 s: its patterns do not finish",
    ):
        read("<c>" + "a" * 30 + "b", [], 0)
