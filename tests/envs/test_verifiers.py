"""Environments written with verifiers (`verifiers_packages`), played by the real package."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from run_examples import SMALL, in_their_folder, run_example
from toyworld import Scripted, make_chat

from paw import cli
from paw.config.plugins import CALLBACKS, give
from paw.config.recipe import load
from paw.config.sections import Config, ModelConfig
from paw.envs import make_factory
from paw.envs.base import eval_tasks, train_tasks
from paw.envs.inverted import InvertedEnv
from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.scheduler import Rollouts
from paw.trainer import train
from paw.types import Reply, Task, ToolCall

# Importing it takes seconds, in each process that collects tests.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None,
        reason="verifiers is not installed: pip install 'paw-trainer[verifiers]'",
    ),
]
PACKAGES = Path(__file__).with_name("verifiers_packages")


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """The packages can be imported during a test, by the processes of tool servers too."""
    monkeypatch.syspath_prepend(PACKAGES)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES), prepend=os.pathsep)
    modules_before = {*sys.modules}
    yield monkeypatch.syspath_prepend
    for name in {*sys.modules} - modules_before:
        if name in ("sums", "sums_taskset", "guess", "library", "mine"):
            del sys.modules[name]


def config_of(name, **env):
    return Config.model_validate(
        {
            "model": ModelConfig(path="-"),
            "env": {"name": "verifiers", "id": name, "max_turns": 4, **env},
        }
    )


def start(name, split="train", number=0, **env):
    config = config_of(name, **env)
    factory = make_factory(config)
    environment = CheckedEnv(factory.make(), config.env)
    return environment, environment.reset(factory.tasks(split, 0)[number])


def test_one_turn_with_an_answer():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    assert (PACKAGES / "sums.py").read_text(encoding="utf-8").partition('"""\n\n')[2] in page
    factory = make_factory(config_of("sums"))
    assert [task.id for task in eval_tasks(factory, "eval", 0, 0)] == [
        "sums/eval/0",
        "sums/eval/1",
        "sums/eval/2",
    ]
    assert len({task.id for task in train_tasks(factory, 0, 27, 0)}) == 27
    assert factory.may_block
    assert factory.reward_max == 1.0
    assert factory.fingerprint().startswith("verifiers 0.4")
    assert factory.fingerprint() == make_factory(config_of("sums")).fingerprint()
    assert (
        len(
            {
                make_factory(config_of("guess", tasks=tasks_count)).fingerprint()
                for tasks_count in (20, 30, 30)
            }
        )
        == 2
    )
    for answer, reward in (("38", 1.0), (" 38 ", 1.0), ("39", 0.0)):
        environment, question = start("sums", "eval", 1)
        assert question == "What is 19 + 19?"
        assert environment.context() == [{"role": "user", "content": question}]
        outcome = environment.step(answer)
        assert outcome.reward == reward
        assert outcome.won == (reward == 1.0)
        assert outcome.score == reward
        assert outcome.done
        assert outcome.valid
        assert outcome.observation == ""
        environment.close()


def test_a_conversation_grows_and_its_rewards_come_at_the_end():
    environment, opening = start("guess", reward=4.0, won_at=2.0, tasks=20)  # the number is 2
    system = {"role": "system", "content": "Only the number."}
    assert environment.context() == [system, {"role": "user", "content": opening}]
    assert [
        (outcome_of_guess.observation, outcome_of_guess.reward, outcome_of_guess.done)
        for outcome_of_guess in map(environment.step, ("1", "9"))
    ] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
    ]
    assert [message["content"] for message in environment.context()[2:]] == [
        "1",
        "higher",
        "9",
        "lower",
    ]
    assert [message["role"] for message in environment.context()[2:]] == ["assistant", "user"] * 2
    outcome = environment.step("2")
    assert outcome.reward == 2.0
    assert outcome.score == 0.5
    assert outcome.won is True
    assert outcome.done is True
    # The same one again.
    environment.reset(make_factory(config_of("guess", tasks=20)).tasks("train", 0)[1])
    outcomes = [environment.step(guess) for guess in ("4", "", "6", "7")]
    assert [outcome_of_guess.observation for outcome_of_guess in outcomes] == [
        "lower",
        "lower",
        "lower",
        "",
    ]
    # env.max_turns ends it, and it is scored.
    assert outcomes[-1].done
    assert outcomes[-1].reward == 0.0
    assert [outcome_of_guess.valid for outcome_of_guess in outcomes] == [True, False, True, True]
    environment.close()
    environment, _ = start("guess", reward=4.0, tasks=20)  # without won_at the maximum wins alone
    assert not environment.step("2").won
    environment.close()


def test_what_breaks_or_hangs_costs_its_episode():
    config = config_of("guess", tasks=20, step_timeout_s=2)
    chat = make_chat()
    before = threading.active_count()
    first_answers = [
        "raise",
        "wait",
        "block",
        "1",
        "1",
    ]  # what each begins with, in the order of asking; they go on with 2
    engine = Scripted(chat, lambda prompt: "2" if "higher" in prompt else first_answers.pop(0))
    rollouts = Rollouts(make_factory(config), engine, chat, config)
    tasks = [rollouts.factory.tasks("train", 0)[0]]
    groups, statistics = rollouts.play_tasks(
        tasks, group_size=5, temperature=1.0, seed=0, stream="t"
    )
    assert sorted(failure.partition(": ")[2] for failure in statistics.failures) == [
        "EnvironmentFailure: guess: RuntimeError: the game broke",
        "EnvironmentFailure: guess: neither a request nor an end within env.step_timeout_s = 2",
        "TimeoutError: no answer within 2 s",
    ]
    (group,) = groups
    for episode in group.trajectories:
        assert [turn.outcome.observation for turn in episode.turns] == [
            "higher",
            "",
        ]
        assert episode.episode_return == 2.0
        first_turn, second_turn = episode.turns
        assert second_turn.prompt_ids.tolist()[
            : len(first_turn.prompt_ids) + len(first_turn.response_ids)
        ] == [*first_turn.prompt_ids, *first_turn.response_ids]
    assert statistics.threads_lost == 1
    rollouts.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


TOOLS = """{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


async def librarian(env, model):
    """Whatever the model says first, a book is looked up."""
    await env.reset()
    while not env.done:
        response = await model.generate(env.context())
        is_first = env.observation.startswith("When")
        await env.step(
            Reply.of("", ToolCall("books_year", {"title": "Emma"}, "call00000"))
            if is_first
            else response
        )


def test_tools_of_a_server_that_episodes_share(tiny_llm, tmp_path, read_metrics, monkeypatch):
    config = config_of("library", eval_split="test")
    factory = make_factory(config)
    assert [len(factory.tasks(split, 0)) for split in ("train", "test")] == [3, 1]
    first, second = (CheckedEnv(factory.make(), config.env) for _ in range(2))
    for environment in (first, second):
        assert environment.reset(factory.tasks("test", 0)[0]) == "When did Ulysses appear?"
        assert [tool["function"]["name"] for tool in environment.tools] == ["books_year"]

    def call(**arguments):
        return Reply.of("I look.", ToolCall("books_year", arguments, "c1"))

    outcome = first.step(call(title="Ulysses"))
    assert outcome.observation == "Ulysses appeared in 1922."
    assert outcome.valid
    assert not outcome.done
    assert outcome.action == 'books_year({"title": "Ulysses"})'
    message, result = first.context()[1:]
    assert message["tool_calls"][0]["function"] == {
        "name": "books_year",
        "arguments": {"title": "Ulysses"},
    }
    assert result == {
        "role": "tool",
        "name": "books_year",
        "tool_call_id": "c1",
        "content": outcome.observation,
    }
    for broken, problem in (
        (Reply("<tool_call>{", "", problem="it is no JSON"), "Invalid call: it is no JSON"),
        (Reply.of("", ToolCall("shelf", {}, "c2")), "No tool 'shelf'."),
        (call(book="Emma"), "Field required"),
    ):
        outcome = second.step(broken)
        assert problem in outcome.observation
        assert not outcome.valid
        assert not outcome.done
    assert first.step("In 1922.").won
    assert not second.step("In 1815.").won
    first.close(), second.close()

    folder = tiny_llm(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TOOLS)
    same_factory = type("Same", (), {"__new__": lambda cls: factory})  # with the server that runs
    settings = {
        "run.dir": str(tmp_path), "run.name": "r", "run.updates": 1, "run.threads": 1, "eval.games": 1, "eval.every": 0,
        "model.path": str(folder), "model.chat_template_kwargs": {}, "agent.type": give(librarian),
        "env.name": give(same_factory), "env.eval_split": "test", "env.max_turns": 2, "rollout.max_response_tokens": 8,
        "rollout.tasks": 2, "rollout.group_size": 2, "wm.rho": 1.0, "wm.alpha": 1.0, "wm.weight": 1.0,
        "policy.kl_coef": 0.0,
    }  # fmt: skip
    monkeypatch.setitem(CALLBACKS, "report", "builtins:object")
    train(load("own-environment", settings))
    (metrics,) = [metrics for metrics in read_metrics(tmp_path / "r") if "wm/loss" in metrics]
    # The first turn of two has a target.
    assert metrics["health/env_failures"] == 0
    assert metrics["wm/selected_frac"] == 0.5
    # Nothing else to learn.
    assert metrics["wm/loss"] > 0
    assert metrics["optim/grad_norm"] > 0
    assert metrics["policy/loss"] == 0
    turns = json.loads((tmp_path / "r" / "samples.jsonl").read_text().splitlines()[-1])["turns"]
    assert ["".join(turn["observation_tokens"]) for turn in turns] == ["Emma appeared in 1815.", ""]


@pytest.mark.slow
def test_the_example_trains(tiny_llm, paw_env, read_metrics, tmp_path, monkeypatch, capfd):
    in_their_folder(monkeypatch, paw_env["PAW_CACHE"], tmp_path)
    settings = SMALL | {"model.path": tiny_llm(tmp_path / "model"), "engine.type": "transformers"}
    assert run_example(monkeypatch, "verifiers_taskset", settings) == 0, capfd.readouterr().err
    assert "right answers, share, on held-out sums: " in capfd.readouterr().out
    _, metrics = read_metrics(tmp_path / "runs" / "verifiers-taskset")
    assert metrics["health/env_failures"] == 0
    assert metrics["optim/skipped"] == 0


def test_a_program_may_stream_and_write_text_in_parts():
    openai = pytest.importorskip(
        "openai", reason="openai is not installed: pip install 'paw-trainer[agents]'"
    )

    async def play(part, url, model):
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            create = client.chat.completions.create
            with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here"):
                await create(model="gpt", messages=[])
            messages = [{"role": "user", "content": [{"type": "text", "text": "Yes"}, part]}]
            chunks = [
                chunk async for chunk in await create(model=model, messages=messages, stream=True)
            ]
        return float(chunks[0].choices[0].delta.content == "\U0001f600?")

    config = config_of("none").env
    environment = CheckedEnv(InvertedEnv(play, config), config)
    assert environment.reset(Task("a", payload={"type": "text", "text": "or no?"})) == "Yes\nor no?"
    assert environment.step("\U0001f600\ud800").won
    with pytest.raises(
        EnvironmentFailure, match="content of type image_url; only text is supported"
    ):
        environment.reset(Task("b", payload={"type": "image_url", "image_url": {"url": "data:,"}}))
    environment.close()


def test_a_mistake_is_one_line(path, tmp_path):
    path(tmp_path)
    (tmp_path / "mine.py").write_text("def load_environment(): ...")
    (tmp_path / "needs.py").write_text("import a_package_that_is_missing")
    judged = {"taskset": {"task": {"judges": [{"id": "reference", "api_key_var": "NO_SUCH_KEY"}]}}}
    for name, env, message in (
        ("", {}, r"needs env\.id, the name of an environment's package"),
        (
            "no_such_one",
            {},
            "env.id = 'no_such_one': .*No module named 'no_such_one'; install its package",
        ),
        ("needs", {}, "No module named 'a_package_that_is_missing'"),
        ("json", {}, "env.id = 'json': .*exports no Taskset"),
        ("mine", {}, r"for verifiers before 0\.4 \(load_environment\)"),
        (
            "sums",
            {"args": {"taskset": {"level": 3}}},
            "env.args of env.id = 'sums': taskset: level: Extra inputs",
        ),
        ("sums", {"args": judged}, "key is missing; set the environment variable NO_SUCH_KEY"),
    ):
        with pytest.raises(UserError, match=message) as error:
            make_factory(config_of(name, **env))
        assert "\n" not in str(error.value)
    with pytest.raises(
        EnvironmentFailure, match=r"'user' is not trained; give it a client in env\.args"
    ):
        start("sums", args={"id": "user-sim"})


def test_without_verifiers_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.delitem(sys.modules, "paw.envs.bridges.verifiers", raising=False)
    with pytest.raises(
        UserError, match=r"needs verifiers 0\.4 .*: pip install 'paw-trainer\[verifiers\]'"
    ):
        make_factory(config_of("sums"))


def test_ctrl_c_ends_tool_servers_too():
    def servers() -> set[str]:
        pids = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command_words = (process / "cmdline").read_bytes().split(b"\0")
                if (
                    b"library" in command_words
                    and str(PACKAGES).encode() in (process / "environ").read_bytes()
                ):
                    pids.add(process.name)
        return pids

    command_words = [
        "env",
        "check",
        "verifiers",
        "--env.id",
        "library",
        "--env.eval_split",
        "test",
        "--env.max_turns",
        "2",
    ]
    program = (
        "import paw.cli, paw.tools.env_check.env_check as c; c.TELL_S = 0.05;"
        f" paw.cli.sys.argv[1:] = {command_words}; paw.cli.entry()"
    )
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PACKAGES), *filter(None, sys.path)])
    }
    before = servers()
    with subprocess.Popen(
        [sys.executable, "-c", program], env=variables, stderr=subprocess.PIPE, text=True
    ) as child:
        trainer = {str(child.pid)}
        assert any("outcomes: 1 episodes begun" in line for line in child.stderr)
        started = servers() - before - trainer
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert child.returncode == 130
    assert started
    deadline = time.monotonic() + 20
    while servers() & started and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not servers() & started


def test_it_keeps_the_rules(capsys):
    command = [
        "env",
        "check",
        "verifiers",
        "--env.id",
        "guess",
        "--env.tasks",
        "40",
        "--env.max_turns",
        "3",
    ]
    assert cli.main(command) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert "'train': 36, 'eval': 4\n" in output
    assert "all 15 rules hold" in output
