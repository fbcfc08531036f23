"""A user's own engine: it plays and trains, `paw plan` asks it, and mistakes are one line."""

import re
from pathlib import Path

import pytest

import paw
from paw.config.recipe import load
from paw.errors import UserError
from paw.rollouts.engines import find_engine

FILE = Path(__file__).with_name("own_engine.py")
SLOW = f"{FILE}:Slow"
GUESS = f"{Path(__file__).parents[2]}/docs/example_environment.py:Guess"


@pytest.fixture(scope="module")
def model(tiny_llm, tmp_path_factory):
    return tiny_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model, tmp_path):
    return {
        "model.path": model, "model.dtype": "float32", "run.dir": tmp_path, "run.name": "run",
        "run.threads": 1, "run.updates": 2, "run.save_every": 0, "env.name": GUESS, "env.max_turns": 2,
        "rollout.tasks": 2, "rollout.group_size": 2, "rollout.max_response_tokens": 4, "eval.games": 2,
        "policy.old_logp": "engine", "policy.kl_coef": 0, "engine.type": SLOW, "engine.at_once": 3,
    }  # fmt: skip


def test_it_plays_and_trains(paw_here, read_metrics, settings, tmp_path):
    """With `old_logp = "engine"`, so that a wrong log-prob or a wrong entropy ends the run."""
    paw_here("train", "quickstart", settings)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["health/env_failures"] == 0
        assert line["optim/grad_norm"] > 0
        assert line["health/sampler_mismatch"] < 1e-4
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "at_once = 3" in text
    assert "sleep_level" not in text


def test_its_settings_are_keys_of_the_engine_section():
    engine = load("quickstart", {"engine.type": SLOW, "engine.at_once": "2"}).engine
    assert engine.settings() == {"at_once": 2}
    for key, hint in (("engine.at_one", "did you mean"), ("engine.sleep_level", "it needs")):
        with pytest.raises(UserError, match=f"unknown key '(--)?{key}'.*{hint}"):
            load("quickstart", {"engine.type": SLOW, key: "1"})


def plan(engine_type, **options):
    changes = {"engine.type": engine_type}
    return paw.plan("alfworld-grpo-paw-7b", gpus="8x80GB", changes=changes, **options)


def test_the_plan_asks_it():
    shared = plan(SLOW)
    separate = plan(f"{FILE}:Small")
    copy_gib = 2 * shared.shape.parameters / 2**30
    for phase in ("rollout", "score", "update", "step"):
        assert shared.phases[phase]["engine"] == pytest.approx(copy_gib)
        assert "engine" not in separate.phases[phase]
    assert separate.phases["server"]["engine"] == pytest.approx(copy_gib)
    assert shared.engine.engines == 8
    assert separate.engine.engines == 2
    assert separate.seconds["rollout"] > shared.seconds["rollout"]  # fewer sequences at a time


def test_the_plan_prints_it(paw_here):
    for name, line in (("Slow", "training and rollouts: 8 x 80 GB"), ("Small", "servers: 2, each")):
        options = ("--gpus", "8x80GB", "--engine.type", f"{FILE}:{name}")
        assert line in paw_here("plan", "alfworld-grpo-paw-7b", *options).stdout


def test_a_pass_gives_the_entropies_that_an_engine_does_not():
    """The plan counts that pass."""
    from_engine = {"policy.old_logp": "engine", "policy.kl_coef": 0.0}
    seconds = {}
    for name in ("Slow", "Silent"):
        changes = {"engine.type": f"{FILE}:{name}", **from_engine}
        seconds[name] = paw.plan("alfworld-grpo-paw-7b", gpus="8x80GB", changes=changes).seconds
    assert seconds["Slow"]["score"] == 0 < seconds["Silent"]["score"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "it is not an engine, a class derived from paw.rollouts.engines.base.Engine"),
        ("Unfinished", "Unfinished has no method step"),
        ("Hasty", r"Hasty.__init__ must call super\(\).__init__\(positions\)"),
        ("Broken", r"ValueError: no room for \d+ tokens \(own_engine.py, line \d+\)"),
        ("Elsewhere", "it makes a str, not an Engine"),
        ("Gone", "the file has no 'Gone'"),
    ],
)
def test_mistakes_are_one_line(paw_here, settings, name, problem):
    settings["engine.type"] = f"{FILE}:{name}"
    if name in ("nothing", "Unfinished", "Gone"):
        del settings["engine.at_once"]
    finished = paw_here("train", "quickstart", settings, code=2)
    assert finished.stderr.count("\n") == 1
    assert name == "Gone" or finished.stderr.startswith(f"paw: engine.type = '{FILE}:{name}': ")
    assert re.search(problem, finished.stderr), finished.stderr


def test_built_in_engines_say_what_they_can():
    transformers, vllm, server = map(find_engine, ("transformers", "vllm", "server"))
    assert transformers.runs_policy
    assert not vllm.runs_policy
    assert vllm.shares_card
    assert not server.shares_card
    assert server.gives_versions
    assert not vllm.gives_versions


def test_the_doctor_says_what_engines_can(paw_here):
    lines = paw_here("doctor").stdout.splitlines()
    [transformers] = [line for line in lines if "engine transformers" in line]
    assert transformers.endswith("on the trainer's device; gives log-probs, entropies")
    assert any("engine server" in line for line in lines)
