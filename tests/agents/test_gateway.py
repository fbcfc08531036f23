"""Agents that know nothing about PaW: they call its endpoint with the openai package."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import openai
import pytest
import templates
from jsonl import write_jsonl
from processes import is_alive, wait_until
from test_conversations import TOKENIZERS
from toyworld import Scripted, make_chat, make_engine, make_model

from paw.agents.command import Command, parse_result
from paw.config.sections import Config
from paw.envs import make_factory
from paw.envs.tools import checked_tools
from paw.errors import UserError
from paw.gateway import server
from paw.gateway.messages import RequestError, parse_request
from paw.gateway.server import Gateway, Incoming
from paw.processes.program import run_program
from paw.rollouts.engine_model import EngineModel
from paw.rollouts.engines.base import Completion
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.episode import Episode
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.session import Notes, Session
from paw.rollouts.text.chat import Chat
from paw.tools.evaluate.recorded import read_episodes
from paw.tools.play import serve_gateway
from paw.tools.play.serve_gateway import Recorder, SessionsFactory
from paw.types import Reply, Task, ToolCall, Trajectory

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
AGENT_WITH_OPENAI = Path(__file__).parents[2] / "examples" / "own_agent.py"
QWEN3 = Chat(TOKENIZERS["qwen3"], tool_parser="transformers")
QUESTION = {"role": "user", "content": "Reach 7."}


@pytest.fixture
def config(tmp_path):
    write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": f"{n}", "do": "ask"} for n in range(12)])

    def make(agent=None, **sections):
        env = {"name": "tasks", "data": str(tmp_path / "tasks.jsonl")} | sections.pop("env", {})
        return Config.model_validate(
            {"model": {"path": "-"}, "env": env, "agent": agent or {}, **sections}
        )

    return make


def play(config, agent, answers, *, chat=None, engine=None, members=1):
    """Play a task with a coroutine that gets (client, env). Returns the trajectories."""
    chat = chat or QWEN3
    engine = engine or Scripted(chat, answers)
    gateway = Gateway()

    async def run(env, model):
        await env.reset()
        session = Session(env, model, Notes())
        async with (
            gateway.session(session.complete) as (url, key),
            openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
        ):
            with env.patience.pause():
                await agent(client, env)
        if session.turns:
            env.finish(reward=1.0, won=True, score=1.0)

    rollouts = Rollouts(make_factory(config), engine, chat, config, agent=run)
    groups, stats = rollouts.play_tasks(
        rollouts.tasks(0, 1), group_size=members, temperature=1.0, seed=0, stream="t"
    )
    rollouts.close()
    assert not stats.failures, stats.failures
    return groups[0].trajectories


def ids_through(turn):
    return [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]


def test_an_agent_with_tools_is_one_sequence_of_the_engines_own_tokens(config, capfd):
    """Thoughts, which the template drops from earlier answers, stay in the prompt. Neither edits
    nor a second conversation disturb that."""
    thought = "<think>\nthree first\n</think>\n\n"
    answers = [
        thought + Reply.of("I add.", ToolCall("add", {"n": 3})),
        "a sub-agent's answer, and more",
        Reply.of("", ToolCall("add", {"n": 4}), ToolCall("add", {"n": 0})),
        "it is 7",
        "edited",
    ]
    prompts = []

    async def agent(client, env):
        ask = partial(client.chat.completions.create, model="any", tools=[ADD])
        assert [model.id for model in (await client.models.list()).data] == ["paw"]
        messages = [{"role": "developer", "content": "Use the tool."}, QUESTION]

        first = await ask(messages=messages, temperature=0.2, logprobs=True)
        check_call_after_thought(first, answers[0])
        message = first.choices[0].message
        messages += [message, tool_result(message, 0, "3")]

        await ask_as_sub_agent(client)

        # The client drops the empty text and formats the arguments differently.
        stream = await ask(messages=messages, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        check_chunks_of_two_calls(chunks)
        delta = chunks[1].choices[0].delta
        messages.append(reformatted(delta.tool_calls))
        messages += [tool_result(delta, index, "7") for index in (0, 1)]
        last = await ask(messages=messages)
        assert last.choices[0].message.content == "it is 7"

        # The agent shortens its history.
        edited = await ask(messages=[messages[0], {"role": "user", "content": "What is it?"}])
        assert edited.choices[0].message.content == "edited"

    def answer(prompt):
        prompts.append(prompt)
        return answers[len(prompts) - 1]

    (trajectory,) = play(config(), agent, answer)
    assert "three first" in prompts[3]
    assert "three first" not in prompts[4]
    check_prompts_of_turns(trajectory)
    check_outcomes_of_turns(trajectory)
    assert capfd.readouterr().err.splitlines() == [
        "the agent asks for temperature = 0.2, which is ignored: the model samples from its own "
        "distribution at temperature 1 (reported once)"
    ]


async def ask_as_sub_agent(client):
    answer = await client.chat.completions.create(model="any", messages=[QUESTION], stop=[", and"])
    assert answer.choices[0].message.content == "a sub-agent's answer"
    assert answer.choices[0].finish_reason == "stop"


def check_call_after_thought(completion, sampled_text):
    """The completion of `sampled_text`, a thought and a call, which was asked for with log-probs."""
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert choice.message.reasoning_content == "three first"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"n": 3}
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == sampled_text + "<|im_end|>"
    assert {token.logprob for token in tokens} == {-1.0}
    assert completion.usage.completion_tokens == len(tokens)


def check_chunks_of_two_calls(chunks):
    assert [call.index for call in chunks[1].choices[0].delta.tool_calls] == [0, 1]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.total_tokens > chunks[-1].usage.completion_tokens > 0


def reformatted(calls):
    """A message with these calls whose arguments are indented."""
    message = {"role": "assistant", "tool_calls": []}
    for call in calls:
        arguments = json.dumps(json.loads(call.function.arguments), indent=4)
        function = {"name": "add", "arguments": arguments}
        message["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    return message


def check_prompts_of_turns(trajectory):
    """Three turns are one sequence. The sub-agent's and the edited conversation are others."""
    first, sub_agent, second, third, edited = trajectory.turns
    for turn, following in ((first, second), (second, third)):
        so_far = ids_through(turn)
        assert following.prompt_ids[: len(so_far)].tolist() == so_far
    system = {"role": "system", "content": "Use the tool."}
    shortened = [system, {"role": "user", "content": "What is it?"}]
    assert edited.prompt_ids.tolist() == QWEN3.conversation_ids(shortened, checked_tools([ADD]))
    assert sub_agent.prompt_ids.tolist() == QWEN3.conversation_ids([QUESTION], [])


def check_outcomes_of_turns(trajectory):
    first, _, second, _, _ = trajectory.turns
    assert [turn.outcome.observation for turn in trajectory.turns] == ["3", "", "7\n7", "", ""]
    assert second.outcome.results == ["7", "7"]
    assert len(second.spans) == 2
    assert first.outcome.action == 'add({"n": 3})'
    assert [turn.outcome.reward for turn in trajectory.turns] == [0, 0, 0, 0, 1]
    assert first.anchor == "Reach 7."
    assert second.anchor == "3"


def tool_result(message, index, text):
    call = message.tool_calls[index]
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def test_limits_of_a_request_and_of_an_episode(config):
    """max_tokens limits an answer. A full context and a turn too many are errors in OpenAI's
    format."""
    rollout = {"max_response_tokens": 6, "max_prompt_tokens": 120}
    limited = config(env={"max_turns": 4, "max_text": 3000}, rollout=rollout)

    async def agent(client, env):
        ask = partial(client.chat.completions.create, model="any")
        choices = []
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(messages=[{"role": "user", "content": "long " * 200}])
        assert refused.value.code == "context_length_exceeded"
        assert "the first prompt has" in str(refused.value)
        for options in ({"max_tokens": 2}, {"max_completion_tokens": 100}, {}):
            answer = await ask(messages=[QUESTION], **options)
            choices.append(answer.choices[0])
        assert [choice.finish_reason for choice in choices] == ["length"] * 3
        turns = env.episode.trajectory.turns
        assert [len(turn.response_ids) for turn in turns] == [2, 6, 6]

        with pytest.raises(openai.BadRequestError) as refused:
            await ask(messages=[{"role": "user", "content": "long " * 200}])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match=r"env\.max_text = 3000") as refused:
            await ask(messages=[QUESTION, {"role": "user", "content": "x" * 3000}])
        assert refused.value.code == "context_length_exceeded"
        await ask(messages=[QUESTION])
        with pytest.raises(openai.BadRequestError, match=r"env\.max_turns = 4") as refused:
            await ask(messages=[QUESTION])
        assert refused.value.code == "max_turns"

    chat = make_chat()
    (trajectory,) = play(limited, agent, None, chat=chat, engine=make_engine(make_model()))
    assert len(trajectory.turns) == 4


def test_an_answer_that_nobody_reads_is_no_turn(config):
    """The client repeats the request and gets the same tokens."""

    async def agent(client, env):
        engine.hold = True
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(
                model="any", messages=[QUESTION]
            )
        engine.hold = False
        await client.chat.completions.create(model="any", messages=[QUESTION])

    class Held(Scripted):
        hold = False

        def step(self):
            return [] if self.hold else super().step()

    chat = make_chat()
    engine = Held(chat, lambda prompt: "yes")
    (trajectory,) = play(config(), agent, None, chat=chat, engine=engine)
    assert len(trajectory.turns) == 1


def test_an_answer_that_comes_after_the_end_is_no_turn(config):
    """Such a request can come from a process that outlives the program that started it."""

    async def run(env, model):
        await env.reset()
        session = Session(env, model, Notes())
        incoming = Incoming({"messages": [QUESTION]}, is_open=lambda: True)
        await session.complete(incoming)
        late_calls = [asyncio.ensure_future(session.complete(incoming)) for _ in range(2)]
        await asyncio.sleep(0)
        session.end()
        env.finish(reward=1.0, won=True, score=1.0)
        for answer in late_calls:
            with pytest.raises(RequestError, match="the episode has ended"):
                await answer

    settings = config()
    engine = Scripted(QWEN3, lambda prompt: "yes")
    rollouts = Rollouts(make_factory(settings), engine, QWEN3, settings, agent=run)
    groups, stats = rollouts.play_tasks(
        rollouts.tasks(0, 1), group_size=1, temperature=1.0, seed=0, stream="t"
    )
    rollouts.close()
    assert not stats.failures, stats.failures
    (turn,) = groups[0].trajectories[0].turns
    assert turn.outcome.reward == 1.0


def test_a_hostile_request_is_answered_and_the_next_one_is_served(config, monkeypatch):
    monkeypatch.setattr(server, "MAX_BYTES", 50_000)

    async def agent(client, env):
        url = f"{client.base_url}chat/completions"

        async def status(content, to=url):
            answer = await client._client.post(to, content=content)
            assert "\n" not in answer.json()["error"]["message"]
            return answer.status_code

        assert await status("[" * 40_000) == 400
        assert await status(b"\xff\x00") == 400
        assert await status(json.dumps({"messages": ["x" * 60_000]})) == 413
        assert await status("{}", url.replace("paw-", "paw-0")) == 404, "a forged session"
        assert await status(json.dumps({"messages": [{"role": ["user"]}]})) == 400
        for header in ({"Content-Type": "a/b; charset=none"}, {"Content-Encoding": "gzip"}):
            assert (await client._client.post(url, content="{}", headers=header)).status_code == 400
        body = {"messages": [QUESTION], "stream": True, "stream_options": "yes"}
        assert (await client._client.post(url, json=body)).status_code == 200

    (trajectory,) = play(config(), agent, lambda prompt: "fine")
    assert len(trajectory.turns) == 1


def test_a_failing_engine_is_an_error_of_the_server_and_leaves_no_turn(config):
    class Failing(Scripted):
        def step(self):
            failed = [
                Completion(request.key, [], [], None, failure="no server is left")
                for request in self.queue
            ]
            self.queue = []
            return failed

    async def agent(client, env):
        with pytest.raises(openai.InternalServerError, match="no server is left"):
            await client.chat.completions.create(model="any", messages=[QUESTION])

    chat = make_chat()
    with pytest.raises(AssertionError, match="the agent ended without a call of the model"):
        play(config(), agent, None, chat=chat, engine=Failing(chat, None))


@pytest.mark.parametrize(
    ("change", "param", "problem"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]", "role is 'king'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the last message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0]",
            "image_url; only text",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "a", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0]",
            "not a JSON object",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0]", "role is ['user']"),
        (
            {"messages": [{"role": "assistant", "tool_calls": 5}]},
            "messages[0]",
            "tool_calls is 5; it must be a list",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "a", "arguments": "[" * 100_000}}],
                    }
                ]
            },
            "messages[0]",
            "not a JSON object",
        ),
        ({"n": 2}, "n", "only n = 1"),
        ({"stop": [1]}, "stop", "must be a string"),
        ({"stop": 1}, "stop", "must be a string"),
        ({"stop": {"a": 1}}, "stop", "must be a string"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"tools": [{"type": "custom"}]}, "tools", "'function'"),
        ({"functions": [{"name": "a"}]}, "functions", "use tools"),
    ],
)
def test_a_bad_request_is_one_line_that_names_the_parameter(change, param, problem):
    with pytest.raises(RequestError) as refused:
        parse_request({"messages": [QUESTION], **change})
    assert refused.value.body()["error"]["param"] == param
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(RequestError, match="not a JSON object"):
        parse_request([])


AGENT = """
import json, os, sys, time, urllib.request
task = json.loads(sys.stdin.readline())
assert task == json.loads(os.environ["PAW_TASK"])
assert "127.0.0.1" in os.environ["NO_PROXY"]
def ask():
    body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
what = task["do"]
if what != "nothing":
    ask()
if what == "die":
    print("no such book", file=sys.stderr)
    sys.exit(3)
while what == "flood":
    print("x" * 65536)
if what == "spend":
    while True:
        ask()
print("done\\n" + {"mumble": "done", "answer": '{"answer": "7"}'}.get(what, '{"reward": 0.5}'))
"""


def test_what_a_program_does_costs_its_own_episode(config, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    deeds = ["die", "flood", "mumble", "nothing", "spend", "answer", "ask"]
    write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": what, "do": what} for what in deeds])
    agent_settings = {"type": "command", "command": f"{sys.executable} -S {script}"}
    chat = make_chat()

    def played(**agent):
        settings = config(
            agent_settings | agent, env={"eval_data": str(tmp_path / "tasks.jsonl"), "max_turns": 3}
        )
        rollouts = Rollouts(
            make_factory(settings), Scripted(chat, lambda prompt: "yes"), chat, settings
        )
        groups, stats = rollouts.evaluation()
        rollouts.close()
        failures = {}
        for trajectory in stats.failed:
            failures[trajectory.task.payload["do"]] = trajectory.failure.partition(": ")[2]
        returns = {}
        for group in groups:
            for trajectory in group.trajectories:
                returns[trajectory.task.payload["do"]] = trajectory.episode_return
        return failures, returns

    asks_nothing = "agent.command ended without asking the model; does it use OPENAI_BASE_URL?"
    failures, returns = played()
    bad_line = 'it must be a number, {"reward": 0.5} or {"answer": "..."}'
    assert failures == {
        "die": "agent.command: exit code 3: no such book",
        "flood": "agent.command: it wrote more than 16 MiB",
        "mumble": f"agent.command: the last line of its output is 'done'; {bad_line}",
        "nothing": asks_nothing,
    }
    assert returns == {"spend": 0.0, "answer": 0.0, "ask": 0.5}

    write_jsonl(
        tmp_path / "tasks.jsonl", [{"prompt": what, "do": what} for what in ("die", "nothing")]
    )
    failures, returns = played(failure_reward=-1.0)
    assert returns == {"die": -1.0}
    assert failures == {"nothing": asks_nothing}


def test_a_program_that_hangs_is_ended():
    async def hang():
        unanswered = asyncio.get_running_loop().create_future()
        return await run_program(
            ["sh", "-c", "echo begun; sleep 1000"],
            variables=os.environ,
            stdin="",
            timeout_s=0.5,
            interrupt=unanswered,
        )

    assert asyncio.run(hang()).problem == "it did not end within 0.5 s"


def test_a_program_ends_with_the_process_that_started_it(tmp_path):
    """Its children end too, even though SIGKILL ends the process that started it."""
    script = textwrap.dedent("""
        import asyncio, os
        from paw.processes.program import run_program
        async def main():
            never = asyncio.get_running_loop().create_future()
            words = ["sh", "-c", "setsid sleep 1000 & echo $! $$ > pid; sleep 1000 & wait"]
            await run_program(words, variables=os.environ, stdin="", timeout_s=99, interrupt=never)
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    pid_file = tmp_path / "pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
    daemon, group = map(int, pid_file.read_text().split())
    wait_until(lambda: os.getsid(daemon) == daemon)
    process.kill()
    process.wait()
    wait_until(lambda: not (_is_alive(group) or is_alive(daemon)), seconds=30)


def _is_alive(group):
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def test_what_a_last_line_may_be():
    assert parse_result("0.25").reward == 0.25
    assert parse_result('{"answer": "42"}').answer == "42"
    for line in ("", "true", "1e999", "NaN", '{"reward": "1"}', "[1]", "2e6"):
        with pytest.raises(ValueError, match="last line of its output"):
            parse_result(line)


def test_bad_input_is_one_line(config, tmp_path):
    for command, problem in (
        ("", "needs agent.command"),
        ("nosuchprogram --x", "there is no program 'nosuchprogram'"),
        ("python3 missing.py", "there is no file 'missing.py'"),
        ("python3 'a", "No closing quotation"),
    ):
        with pytest.raises(UserError, match=problem):
            Command(Command.Config(command=command))
    data = tmp_path / "tasks.jsonl"
    for content, problem in (
        ("", "it holds no tasks"),
        ("[1]\n", "line 1: Input should be an object"),
        ('{"kind": "all"}\n', "of the kind 'all'"),
    ):
        data.write_text(content)
        with pytest.raises(UserError, match=problem):
            make_factory(config())
    with pytest.raises(UserError, match=r"needs env\.data"):
        make_factory(config(env={"data": None}))
    with pytest.raises(UserError, match="No such file"):
        make_factory(config(env={"data": "gone.jsonl"}))


@pytest.mark.slow
def test_an_unchanged_agent_trains(tiny_llm, says_only, paw_here, read_metrics, tmp_path):
    """An update with the torch engine. The recorded log-probs are those of the trainer."""
    calls = [Reply.of("", ToolCall("add", {"n": n})) for n in (3, 4)]
    model = says_only(
        tiny_llm(tmp_path / "model"), *calls, "<|im_end|>", template=templates.QWEN25_TEMPLATE
    )
    rows = [{"question": f"Reach {goal}.", "goal": goal} for goal in (7, 3, 4, 8)]
    write_jsonl(tmp_path / "tasks.jsonl", rows)
    settings = {
        "env.name": "tasks", "env.data": tmp_path / "tasks.jsonl", "env.max_turns": 4,
        "agent.type": "command", "agent.command": f"{sys.executable} {AGENT_WITH_OPENAI}",
        "model.path": model, "model.dtype": "float32", "model.tool_parser": "transformers",
        "engine.type": "transformers", "run.threads": 1, "run.dir": tmp_path, "run.name": "run",
        "run.updates": 1, "rollout.tasks": 1, "rollout.group_size": 2, "eval.every": 0, "eval.games": 1,
        "rollout.max_response_tokens": 6, "rollout.max_prompt_tokens": 1500, "wm.alpha": 1.0,
        "policy.kl_coef": 0, "policy.old_logp": "trainer", "optim.lr": 1e-3, "run.seed": 1,
    }  # fmt: skip
    paw_here("train", "quickstart", settings, cwd=tmp_path)
    _, metrics = read_metrics(tmp_path / "run")
    assert metrics["health/env_failures"] == 0
    assert metrics["health/sampler_mismatch"] < 1e-4
    assert metrics["optim/skipped"] == 0
    assert metrics["wm/loss"] > 0
    assert metrics["optim/grad_norm"] > 0


def test_sessions_are_recorded_by_hand(config, tmp_path, monkeypatch):
    """`paw serve gateway`: any name opens a session, and a POST ends it. Its turns can be read
    back."""
    monkeypatch.setattr(serve_gateway, "MAX_OPEN", 2)
    sessions_file = tmp_path / "sessions.jsonl"
    settings = config()
    rollouts = Rollouts(SessionsFactory(), Scripted(QWEN3, lambda prompt: "yes"), QWEN3, settings)

    with sessions_file.open("w") as file, socket.create_server(("127.0.0.1", 0)) as listener:
        recorder = Recorder(settings, lambda env: EngineModel(env, rollouts), "mine", file)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        async def serve_and_use(env, model):
            stopped = asyncio.Event()
            with env.patience.pause():
                serving = asyncio.create_task(recorder.serve(env, listener, stopped))
                try:
                    await use_sessions(url)
                finally:
                    stopped.set()
                    await serving

        rollouts.agent = serve_and_use
        keeper = Episode(Trajectory(Task("gateway"), 0), 0, 0, "gateway", 1.0)
        rollouts.run_episodes([keeper])
    rollouts.close()
    assert keeper.trajectory.failure == "RuntimeError: the agent ended without a call of the model"

    assert recorded_sessions(sessions_file) == {
        ("monday", 0): (2, 1.0, True),
        ("monday", 1): (1, 0.0, False),
        ("tuesday", 0): (1, 0.0, False),
    }


async def use_sessions(url):
    """Play sessions by path and by key, and make every mistake with them."""

    def client(base_url, key="x"):
        return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)

    async def ask(session):
        await session.chat.completions.create(model="any", messages=[QUESTION])

    async def post(path, **body):
        return await by_path.post(f"{url}/{path}", body=body, cast_to=object)

    async with client(f"{url}/monday/v1") as by_path, client(f"{url}/v1", "tuesday") as by_key:
        await ask(by_path)
        await ask(by_key)
        await ask(by_path)
        for number in range(5):  # only a request to the model opens a session
            await by_path.get(f"{url}/other{number}/v1/models", cast_to=object)
        async with client(f"{url}/wednesday/v1") as third:
            with pytest.raises(openai.RateLimitError, match="2 sessions are open"):
                await ask(third)
        assert await post("monday/reward", reward=1) == {"session": "monday", "turns": 2}
        await ask(by_path)  # another session with that name
        for path, body, problem in (
            ("monday/reward", {"reward": "much"}, "must be"),
            ("friday/reward", {"reward": 1}, "no session 'friday'"),
            ("monday/end", {}, "there is no POST"),
        ):
            with pytest.raises(openai.APIStatusError, match=problem):
                await post(path, **body)
        created = await post("sessions")
        assert created["path"] == f"/{created['session']}/v1"
        with pytest.raises(openai.NotFoundError, match="chat_completions"):
            await by_path.responses.create(model="any", input="x")


def recorded_sessions(path):
    """{(name, number): (turns, return, won)} of the sessions in a file."""
    sessions = {}
    for group in read_episodes(path):
        for trajectory in group.trajectories:
            lengths = [len(turn.response_ids) for turn in trajectory.turns]
            assert min(lengths) > 0
            key = (trajectory.task.id, trajectory.member)
            sessions[key] = (len(lengths), trajectory.episode_return, trajectory.won)
    return sessions


SERVER_SETTINGS = {
    "engine.type": "transformers",
    "model.dtype": "float32",
    "run.threads": 1,
    "rollout.max_prompt_tokens": 500,
    "rollout.max_response_tokens": 3000,
}


def test_serve_gateway_answers_until_ctrl_c_and_keeps_open_sessions(
    tiny_llm, paw_here, tmp_path, monkeypatch
):
    """The recipe own-agent names no program, so any client is the agent. Ctrl-C does not wait for
    an answer that is still being written."""
    model = tiny_llm(tmp_path / "model")
    sessions_file = tmp_path / "sessions.jsonl"
    port = _free_port()
    serving = threading.Event()
    writing = threading.Event()
    contents = []
    engine_step = TransformersEngine.step

    def noted_step(engine):
        writing.set()
        return engine_step(engine)

    def ask():
        url = f"http://127.0.0.1:{port}/monday/v1"
        try:
            wait_until(lambda: _listens(port))
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
                contents.append(_short_answer(client, model))
                writing.clear()
                monkeypatch.setattr(TransformersEngine, "step", noted_step)
                stopper = threading.Thread(target=stop_while_it_writes, daemon=True)
                stopper.start()
                with pytest.raises(openai.OpenAIError):
                    client.chat.completions.create(model="any", messages=[QUESTION])
                stopper.join()
        finally:
            if serving.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    def stop_while_it_writes():
        writing.wait(60)
        serving.clear()
        os.kill(os.getpid(), signal.SIGINT)

    serving.set()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    options = ("--port", port, "--out", sessions_file)
    served = paw_here("serve", "gateway", model, SERVER_SETTINGS, *options)
    serving.clear()
    thread.join()
    assert f"http://127.0.0.1:{port}/NAME/v1: sessions go to {sessions_file}" in served.stderr
    (group,) = read_episodes(sessions_file)
    assert [turn.response for turn in group.trajectories[0].turns] == contents


def _short_answer(client, model):
    """The answer of a model without tools, which the server calls by its path."""
    create = partial(client.chat.completions.create, model="any", messages=[QUESTION])
    answer = create(max_tokens=3)
    assert [listed.id for listed in client.models.list()] == [str(model)]
    with pytest.raises(openai.InternalServerError, match="does not support tools"):
        create(tools=[ADD])
    return answer.choices[0].message.content


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        return free_socket.getsockname()[1]


def _listens(port):
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def test_what_serve_gateway_needs_is_one_line(paw_here, tmp_path):
    refused = paw_here("serve", "gateway", code=2)
    assert refused.stderr.count("\n") == 1
    assert "say which model answers: MODEL, or --endpoint URL --model NAME" in refused.stderr
