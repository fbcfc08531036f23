"""OpenEnv in both directions. The package itself runs in separate processes, because it needs a
different version of mcp than vLLM."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_line import as_words
from jsonl import read_jsonl
from run_examples import SMALL as SMALL_EXAMPLE
from run_examples import SMALL_WARMUP, in_their_folder, run_example
from templates import QWEN25_TEMPLATE

from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.rollouts.guard import CheckedEnv
from paw.tools.evaluate.played import load_played
from paw.types import Reply, ToolCall

PACKAGE = Path(sys.prefix) / "openenv"
HERE = Path(__file__).parent
SMALL = {
    "run.threads": 1, "run.updates": 1, "model.dtype": "float32", "engine.type": "transformers", "rollout.tasks": 2,
    "rollout.group_size": 2, "rollout.max_response_tokens": 8, "rollout.max_prompt_tokens": 3000, "eval.games": 2,
    "env.max_turns": 3, "policy.kl_coef": 0,
}  # fmt: skip
ROOM = {"env.data": "none", "env.difficulty": "tiny", "env.max_turns": "3"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PACKAGE.is_dir(), reason=f"openenv is not at {PACKAGE}; make test puts it there"
    ),
]


@pytest.fixture(scope="module")
def start(paw_env):
    """`start(*words)` starts the server `python *words`, which can import openenv, and returns a
    function that waits for its URL."""
    env = paw_env | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), paw_env["PYTHONPATH"]])}
    started = []

    def run(*words):
        child = subprocess.Popen(
            [sys.executable, *map(str, words)], env=env, stderr=subprocess.PIPE, text=True
        )
        started.append(child)

        def url():
            for line in child.stderr:
                if line.startswith("http"):
                    # A full pipe would stop the server.
                    threading.Thread(target=child.stderr.read, daemon=True).start()
                    return line.split(": ")[0].strip()
            raise AssertionError("the server ended")

        return url

    yield run
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def urls(start):
    """The URLs of a guessing game, of tools, and of `paw serve env alfworld`."""
    url_of_package = start(HERE / "openenv_server.py")
    url_of_paw = start("-m", "paw", "serve", "env", "alfworld", "--port", 0, *as_words(ROOM))
    package = url_of_package()
    return f"{package}/guess", f"{package}/shelf", url_of_paw()


def make(recipe=None, **settings):
    """(factory, configuration) of an environment with these settings of `env`."""
    config = load_played(recipe, {f"env.{key}": value for key, value in settings.items()})
    return make_factory(config), config


def test_training_on_an_environment_of_openenv(urls, paw_here, read_metrics, tiny_llm, tmp_path):
    game = {
        "env.name": "openenv",
        "env.url": f"['{urls[0]}', '{urls[0].replace('http', 'ws')}/ws']",
    }
    where = {"model.path": tiny_llm(tmp_path / "model"), "run.dir": tmp_path, "run.name": "run"}
    paw_here("train", "quickstart", SMALL, where, game)
    _, update = read_metrics(tmp_path / "run")
    assert update["health/env_failures"] == 0
    assert 0 < update["reward/mean"] < 1
    checked = paw_here("env", "check", "openenv", {"env.url": urls[0], "env.action_field": "*"})
    assert "rules hold" in checked.stdout


def test_training_on_tools_of_openenv(urls, paw_here, read_metrics, tiny_llm, says_only, tmp_path):
    """One or several calls of a turn are played over MCP. Their results are the world model's
    targets."""
    calls = [Reply.of("", ToolCall("put", {"thing": thing}, "")) for thing in ("cup", "cat")]
    model = says_only(tiny_llm(tmp_path / "model"), *calls, "<|im_end|>", template=QWEN25_TEMPLATE)
    settings = {
        "model.path": model, "model.tool_parser": "transformers", "run.dir": tmp_path, "run.name": "run",
        "env.name": "openenv", "env.url": urls[1], "wm.alpha": 1.0,
    }  # fmt: skip
    paw_here("train", "quickstart", SMALL, settings)
    _, update = read_metrics(tmp_path / "run")
    assert update["health/env_failures"] == 0
    assert update["optim/grad_norm"] > 0
    assert update["wm/loss"] > 0
    assert 0 < update["success/all"] < 1
    assert 0 < update["health/valid_actions"] <= 1
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    turns = [turn for sample in samples for turn in sample["turns"]]
    of_calls = [turn for turn in turns if turn["action"].startswith('put({"thing": "c')]
    assert any("1 on the shelf" in turn["observation"] for turn in of_calls)
    assert any("it jumped off" in turn["observation"] for turn in of_calls)
    of_several_calls = [turn for turn in turns if "; put" in turn["action"]]
    assert of_several_calls
    for turn in of_several_calls:
        assert "</tool_response>" in "".join(turn["observation_tokens"])


def test_an_environment_served_is_the_environment_itself(
    urls, paw_here, read_metrics, tiny_llm, tmp_path
):
    """Training over the server has the same metrics as training without one, except those by kind
    of task. Prompts arrive in a different order, so sums are rounded differently and different
    sequences share a forward pass."""
    direct = {"env.name": "alfworld", **ROOM}
    served = {
        "env.name": "openenv", "env.url": urls[2], "env.prompt_field": "prompt", "env.eval_split": "valid_unseen",
        "env.reward": 10,
    }  # fmt: skip
    model = tiny_llm(tmp_path / "model")

    def train(name, settings):
        run = {"model.path": model, "run.dir": tmp_path, "run.name": name}
        paw_here("train", "alfworld-grpo-paw", SMALL, run, settings)
        metrics = read_metrics(tmp_path / name)
        for line in metrics:
            line.pop("optim/shared_tokens", None)
        return [
            {key: value for key, value in line.items() if "success" not in key} for line in metrics
        ]

    expected = train("direct", direct)
    assert expected[1]["wm/loss"] > 0
    for line, expected_line in zip(train("served", served), expected, strict=True):
        assert line == pytest.approx(expected_line, rel=1e-5, abs=1e-6)


def test_the_example_trains_on_a_server_of_its_own(
    paw_env, read_metrics, tmp_path, monkeypatch, capfd
):
    in_their_folder(monkeypatch, paw_env["PAW_CACHE"], tmp_path)
    monkeypatch.setenv("PYTHONPATH", paw_env["PYTHONPATH"])
    settings = SMALL_EXAMPLE | SMALL_WARMUP
    assert run_example(monkeypatch, "openenv_server", settings) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("paw: ")
    assert "pip install 'paw-trainer[openenv]'" in errors
    assert errors.count("\n") == 1

    monkeypatch.setenv("PYTHONPATH", str(PACKAGE), prepend=os.pathsep)
    assert run_example(monkeypatch, "openenv_server", settings) == 0
    assert "Cups fetched from unseen places: " in capfd.readouterr().out
    _, update = read_metrics(tmp_path / "runs" / "openenv-server")
    assert update["health/env_failures"] == 0
    assert update["optim/skipped"] == 0
    assert update["eval/games"] == 4


def test_tools_of_openenv_are_tools(urls):
    factory, config = make(name="openenv", url=urls[1])
    environment = CheckedEnv(factory.make(), config.env)
    assert environment.reset(train_tasks(factory, 0, 1, 0)[0]) == '{"status": "ready"}'
    (put,) = [tool["function"] for tool in environment.tools]
    assert put["name"] == "put"
    assert put["parameters"]["required"] == ["thing"]
    assert "on the shelf" in put["description"]

    def call(**arguments):
        return environment.step(Reply.of("", ToolCall("put", arguments, "call00001")))

    assert "it jumped off" in call(thing="cat").observation
    assert not call(thang="cup").valid
    assert not environment.step("I am done.").valid
    assert call(thing="cup").observation == "1 on the shelf"
    assert call(thing="jug").won
    last_message = environment.context()[-1]
    assert last_message["role"] == "tool"
    assert last_message["content"] == "2 on the shelf"


def test_clients_of_openenv_play_what_is_served(urls, paw_env):
    env = paw_env | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), paw_env["PYTHONPATH"]])}
    client = [sys.executable, HERE / "openenv_client.py", urls[2]]
    printed = subprocess.run(client, env=env, capture_output=True, check=True).stdout
    played_there = json.loads(printed)
    factory, _ = make(
        "alfworld-grpo", name="alfworld", data="none", difficulty="tiny", max_turns="3"
    )
    episodes, state = played_there["two"]
    for place, texts in enumerate(episodes):
        environment = factory.make()
        expected = [environment.reset(factory.tasks("train", 5)[place]), environment.context()]
        for turn in range(3):
            played = environment.format_action(environment.admissible_actions()[turn])
            outcome = environment.step(played)
            prompt = "" if outcome.done else environment.context()
            expected += [outcome.observation, prompt, outcome.reward, outcome.done, outcome.valid]
        assert texts == expected
    assert state["step_count"] == 3
    assert played_there["first"] == factory.make().reset(factory.tasks("train", 0)[1])
    refused_action, refused_split = played_there["problems"]
    assert "VALIDATION_ERROR" in refused_action
    assert "no split 'nowhere'" in refused_split
