"""A user's own engine plays and trains. `paw plan` asks it for its needs, and mistakes are one
line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from toyworld import make_chat, make_model

import paw
from paw.config.plugins import BUILT_IN
from paw.config.recipe import load
from paw.errors import UserError
from paw.model.policy import Policy
from paw.rollouts.engines import find_engine
from paw.rollouts.engines.make import make_engine
from paw.tools.doctor.doctor import _engine
from paw.tools.reference import page

FILE = Path(__file__).with_name("own_engine.py")
SLOW = f"{FILE}:Slow"
GUESS = f"{Path(__file__).parents[2]}/examples/number_game.py:Guess"


@pytest.fixture
def settings(tiny_llm, tmp_path):
    return {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.dir": tmp_path, "run.name": "run",
        "run.threads": 1, "run.updates": 2, "run.save_every": 0, "env.name": GUESS, "env.max_turns": 2,
        "rollout.tasks": 2, "rollout.group_size": 2, "rollout.max_response_tokens": 4, "eval.games": 2,
        "policy.old_logp": "engine", "policy.kl_coef": 0, "engine.type": SLOW, "engine.at_once": 3,
    }  # fmt: skip


def test_it_plays_and_trains(paw_here, read_metrics, settings, tmp_path):
    """With `old_logp = "engine"`, a wrong log-prob or entropy would end the run."""
    paw_here("train", "quickstart", settings)
    logged = read_metrics(tmp_path / "run")
    assert [metrics["step"] for metrics in logged] == [0, 1, 2]
    for metrics in logged[1:]:
        assert metrics["health/env_failures"] == 0
        assert metrics["optim/grad_norm"] > 0
        assert metrics["health/sampler_mismatch"] < 1e-4
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "at_once = 3" in text
    assert "sleep_level" not in text


def test_its_settings_are_keys_of_the_engine_section():
    engine = load("quickstart", {"engine.type": SLOW, "engine.at_once": "2"}).engine
    assert engine.settings() == {"at_once": 2}
    for key, suggestion in (
        ("engine.at_one", "did you mean"),
        ("engine.sleep_level", "engine.type = 'vllm' has it"),
    ):
        with pytest.raises(UserError, match=f"unknown key '(--)?{key}'.*{suggestion}"):
            load("quickstart", {"engine.type": SLOW, key: "1"})


def test_keys_that_need_an_ability_ask_the_class():
    """The message names the built-in engines that have the ability."""
    with_ability = {"engine.type": f"{FILE}:Able"}
    assert load("quickstart", {**with_ability, "rollout.ahead": "1"}).rollout.ahead == 1
    lora_settings = {"lora.rank": "8", "lora.send": "merged", "optim.name": "adamw"}
    assert load("quickstart", with_ability | lora_settings).lora.send == "merged"
    with pytest.raises(UserError, match=r"'rollout\.ahead'; it needs engine\.type = 'server'"):
        load("quickstart", {"engine.type": SLOW, "rollout.ahead": "1"})
    with pytest.raises(
        UserError, match=r"'lora\.send'; it needs engine\.type = 'vllm' or 'server'"
    ):
        load("quickstart", {"engine.type": SLOW} | lora_settings)


def test_one_of_ours_needs_a_module_and_a_name(monkeypatch, paw_here):
    monkeypatch.setitem(BUILT_IN["engines"], "slow", SLOW)
    engine = load("quickstart", {"engine.type": "slow", "engine.at_once": "2"}).engine
    assert (engine.type, engine.settings()) == ("slow", {"at_once": 2})
    assert plan("slow").seconds == plan(SLOW).seconds
    assert "| `engine.at_once` |" in page()
    assert _engine("slow", {}).text.endswith("on the trainer's device; gives log-probs, entropies")


def test_a_subclass_of_one_of_ours_has_its_settings():
    engine = load("quickstart", {"engine.type": f"{FILE}:Watched", "engine.max_batch_tokens": "9"})
    assert engine.engine.max_batch_tokens == 9
    assert find_engine(engine.engine.type).runs_policy


def test_a_refusal_names_the_engine_that_was_chosen():
    """Even if the chosen engine is a subclass of a built-in one."""
    chosen = f"{FILE}:Watched"
    config = load("quickstart", {"engine.type": chosen})
    model = make_model()
    model.config.attn_logit_softcapping = 50.0
    with pytest.raises(UserError, match=f"^engine.type = '{re.escape(chosen)}' samples from full"):
        make_engine(config, policy=Policy(model), chat=make_chat(), model_path="")


def plan(engine_type, **options):
    changes = {"engine.type": engine_type}
    return paw.plan("alfworld-grpo-paw-7b", gpus="8x80GB", changes=changes, **options)


def test_the_plan_asks_it():
    shared_gpus = plan(SLOW)
    own_gpus = plan(f"{FILE}:Small")
    copy_gib = 2 * shared_gpus.shape.parameters / 2**30
    for phase in ("rollout", "score", "update", "step"):
        assert shared_gpus.phases[phase]["engine"] == pytest.approx(copy_gib)
        assert "engine" not in own_gpus.phases[phase]
    assert own_gpus.phases["server"]["engine"] == pytest.approx(copy_gib)
    assert (shared_gpus.engine.engines, own_gpus.engine.engines) == (8, 2)
    assert own_gpus.seconds["rollout"] > shared_gpus.seconds["rollout"]  # fewer sequences at a time


def test_a_plan_counts_no_time_for_what_is_decoded_elsewhere():
    elsewhere = plan(f"{FILE}:Remote")
    assert elsewhere.seconds["rollout"] == 0 < plan(SLOW).seconds["rollout"]
    assert elsewhere.fits
    assert elsewhere.served
    assert "server" not in elsewhere.phases


def test_the_plan_prints_it(paw_here):
    for name, line in (("Slow", "training and rollouts: 8 x 80 GB"), ("Small", "servers: 2, each")):
        arguments = ("--gpus", "8x80GB", "--engine.type", f"{FILE}:{name}")
        assert line in paw_here("plan", "alfworld-grpo-paw-7b", *arguments).stdout


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
    refused = paw_here("train", "quickstart", settings, code=2)
    assert refused.stderr.count("\n") == 1
    assert name == "Gone" or refused.stderr.startswith(f"paw: engine.type = '{FILE}:{name}': ")
    assert re.search(problem, refused.stderr), refused.stderr


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FailsAtTheStart", r"OSError: no such service \(own_engine.py, line \d+\)"),
        ("FailsAtAStep", r"ZeroDivisionError: division by zero \(own_engine.py, line \d+\)"),
        ("FailsAtASync", r"KeyError: 'no such weight' \(own_engine.py, line \d+\)"),
        ("Exits", r"SystemExit: 3 \(own_engine.py, line \d+\)"),
        ("Sparse", r"TypeError: .*not iterable"),
    ],
)
def test_what_it_raises_is_one_line_that_names_it(paw_here, settings, name, problem):
    settings["engine.type"] = f"{FILE}:{name}"
    failed = paw_here("train", "quickstart", settings, code=2)
    *_, last_line = failed.stderr.splitlines()
    assert re.match(
        rf"paw: engine\.type = '{re.escape(FILE.as_posix())}:{name}': {problem}", last_line
    )
    assert "Traceback" not in failed.stderr


def test_it_has_the_chat():
    config = load("quickstart", {"engine.type": f"{FILE}:Speaks"})
    chat = make_chat()
    engine = make_engine(config, policy=Policy(make_model()), chat=chat, model_path="")
    assert engine.chat is chat


def test_built_in_engines_say_what_they_can():
    transformers, vllm, server = map(find_engine, ("transformers", "vllm", "server"))
    assert transformers.runs_policy
    assert not vllm.runs_policy
    assert vllm.shares_card
    assert not server.shares_card
    assert server.gives_versions
    assert not vllm.gives_versions


def test_built_in_engines_are_known_without_torch():
    program = (
        "import sys; from paw.config.plugins import BUILT_IN\n"
        "from paw.rollouts.engines import find_engine\n"
        "for name in BUILT_IN['engines']: find_engine(name)\n"
        "sys.exit(not {'torch', 'transformers', 'numpy', 'vllm'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_the_doctor_says_what_engines_can(paw_here):
    lines = paw_here("doctor").stdout.splitlines()
    [transformers] = [line for line in lines if "engine transformers" in line]
    assert transformers.endswith("on the trainer's device; gives log-probs, entropies")
    assert any("engine server" in line for line in lines)
