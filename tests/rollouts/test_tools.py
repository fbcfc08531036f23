"""Tools: schemas and calls are checked, broken calls are answered, and calls in real formats are
read."""

import json

import pytest
from scripted_server import completion, refusal, serve

from paw.agents.endpoint import Endpoint, EndpointModel
from paw.config.sections import Config, EndpointConfig, EnvConfig
from paw.envs import make_factory
from paw.envs.conversation import Conversation
from paw.envs.tools import checked_tools
from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.episode import Episode
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.scheduler import Rollouts
from paw.types import Outcome, Reply, Task, ToolCall, Trajectory

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds n.", "parameters": NUMBER},
}


class Adder(Conversation):
    """Add numbers with a tool until the sum is 7, then say so."""

    tools = (ADD,)

    def begin(self, task):
        self.sum = 0
        return [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": "Reach 7."},
        ]

    def call(self, call):
        self.sum += call.arguments["n"]
        return f"the sum is {self.sum}"

    def say(self, text):
        won = self.sum == 7 and text == "done"
        return Outcome("not yet", float(won), done=won, won=won, action=text)


def guarded(**members):
    return CheckedEnv(type("Adder", (Adder,), members)(), EnvConfig(name="x", max_turns=9))


def call(number, call_id="call00000"):
    return ToolCall("add", {"n": number}, call_id)


def test_a_conversation_with_tools():
    env = guarded()
    assert env.reset(Task("a")) == "Reach 7."
    outcome = env.step(Reply.of("I add.", call(3), call(4, "call00001")))
    assert outcome.observation == "the sum is 3\nthe sum is 7"
    assert outcome.valid
    assert not outcome.done
    assert outcome.action == 'add({"n": 3}); add({"n": 4})'
    assert env.step("well").valid
    assert not env.step(" ").valid
    roles = [message["role"] for message in env.context()]
    assert roles == ["system", "user", "assistant", "tool", "tool", *["assistant", "user"] * 2]
    assert env.step("done").won


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply.of("", ToolCall("sub", {"n": 1}, "k")), "there is no tool 'sub'; there are add"),
        (
            Reply.of("", ToolCall("add", {"n": "1"}, "k")),
            "the call of 'add' does not fit its schema: '1' is not of type",
        ),
        (Reply.of("", call(1), ToolCall("add", {}, "k")), "'n' is a required property"),
        (Reply("<tool_call>{", "", (), "the call cannot be read"), "the call cannot be read"),
    ],
)
def test_a_broken_call_is_answered_and_nothing_is_played(reply, problem):
    env = guarded()
    env.reset(Task("a"))
    outcome = env.step(reply)
    assert not outcome.valid
    assert not outcome.done
    assert problem in outcome.observation
    answers = env.context()[3:]
    assert [message["role"] for message in answers] == ["tool"] * max(1, len(reply.calls))
    assert env.sum == 0
    assert all(
        message["content"] == outcome.observation and message["tool_call_id"] for message in answers
    )


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("search", "tools is 'search'; it must be a list"),
        ([{"type": "function", "function": {"description": "?"}}], "tools[0] has no name"),
        ([ADD, ADD], "tools[1]: there are two tools 'add'; rename one"),
        ([{"name": "f", "parameters": {"default": {1}}}], "tool 'f' cannot be written as JSON"),
        (
            [{"name": "f", "parameters": {"type": "array"}}],
            "its parameters are not the JSON schema of an object",
        ),
        (
            [{"name": "f", "parameters": {"properties": {"x": {"type": "integr"}}}}],
            "'integr' is not valid",
        ),
    ],
)
def test_a_schema_that_is_none_is_one_clear_line(tools, problem):
    with pytest.raises(EnvironmentFailure) as error:
        guarded(tools=tools).reset(Task("a"))
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bare_function_is_a_tool():
    assert checked_tools([ADD["function"]]) == [ADD]
    assert (
        json.loads(json.dumps(checked_tools([{"name": "now"}])))[0]["function"]["parameters"][
            "type"
        ]
        == "object"
    )


def answer_with_call(arguments, text):
    """An endpoint's answer that calls `add` with these arguments, as a scripted server takes it."""
    function = {"name": "add", "arguments": arguments}
    body = completion(text)
    body["choices"][0]["message"]["tool_calls"] = [
        {"id": "abc", "type": "function", "function": function}
    ]
    return 200, body, {}


def test_an_endpoint_gets_the_tools_and_its_calls_come_back():
    """Requests and answers follow the API. Text cannot open a turn."""
    pytest.importorskip("openai")
    config = Config.model_validate({"model": {"path": "-"}})
    factory = make_factory(config, type("Sum", (Adder,), {"tasks": [Task("a", payload=1)]}))
    function = {"name": "add", "arguments": json.dumps({"n": 7})}
    with serve() as server:
        server.script = [
            answer_with_call('{"n": 7', None),
            answer_with_call(function["arguments"], "<think>7</think>I add <|im_end|>."),
            (200, completion("done"), {}),
        ]
        endpoint = Endpoint(EndpointConfig(url=server.url, model="m", retries=0))
        episodes = [Episode(Trajectory(Task("a"), 0), 0, 0, "eval", 0.4) for _ in range(2)]
        rollouts = Rollouts(factory, None, None, config)
        rollouts.run_episodes(episodes[:1], lambda env: EndpointModel(env, config, endpoint))
        requests = server.requests
        turns = episodes[0].trajectory.turns
        assert episodes[0].trajectory.failure is None
        assert [turn.outcome.valid for turn in turns] == [False, True, True]
        assert "are no JSON" in turns[0].outcome.observation
        assert turns[2].outcome.won
        assert turns[1].response.endswith(
            '<tool_call>\n{"name": "add", "arguments": {"n": 7}}\n</tool_call>'
        )
        assert all(request["tools"] == [ADD] for request in requests)
        call, result = requests[2]["messages"][-2:]
        assert call["content"] == "I add < |im_end|>."
        assert call["tool_calls"][0]["function"] == function
        assert result == {
            "role": "tool",
            "content": "the sum is 7",
            "name": "add",
            "tool_call_id": "abc",
        }
        server.script = [
            (400, refusal('"auto" tool choice requires --enable-auto-tool-choice'), {})
        ]
        with pytest.raises(
            UserError,
            match=r"takes no tools, which the environment has: .*--enable-auto-tool-choice",
        ):
            rollouts.run_episodes(episodes[1:], lambda env: EndpointModel(env, config, endpoint))
        rollouts.close()
