"""Settings without effect are told, and only those."""

import pytest

from paw import cli
from paw.ignored import RULES, ignored
from paw.recipe import known_keys, load, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_a_packaged_recipe_sets_nothing_in_vain(name):
    assert ignored(load(name)) == []


def test_the_rules_name_keys_that_exist():
    for names, need, _ in RULES:
        for start in names.split():
            assert any(key == start or (start.endswith(".") and key.startswith(start)) for key in known_keys()), start
        assert not need.endswith(".")


@pytest.mark.parametrize(
    ("setting", "value", "need", "others"),
    [
        ("wm.rho", "0.3", "wm.loss = 'cmae'", {"wm.loss": "ce"}),
        ("wm.q", "0.5", "wm.loss = 'gce'", {}),
        ("wm.alpha", "0.5", "wm.enabled", {"wm.enabled": "false"}),
        ("policy.verl_rows", "8", "policy.loss_norm = 'verl'", {}),
        ("advantage.omega", "2.0", "advantage.estimator = 'gigpo'", {}),
        ("advantage.norm_std", "false", "advantage.estimator = 'grpo'", {"advantage.estimator": "gigpo"}),
        ("critic.lr", "0.1", "advantage.estimator = 'ppo'", {}),
        ("optim.final_lr", "0.5", "optim.schedule = 'cosine'", {}),
        ("lora.alpha", "8.0", "lora.rank > 0", {}),
        ("warmup.lr", "0.1", "model.path = 'quickstart'", {}),
        ("env.think", "false", "env.style = 'paper'", {"env.style": "compact"}),
        ("env.step_timeout_s", "5.0", "env.backend = 'textworld', env.name = 'tau2' or an environment of your own", {}),
        ("env.kinds", "['pick']", "env.name = 'alfworld'", {"env.name": "webshop"}),
        ("env.difficulty", "'tiny'", "env.name = 'alfworld'", {"env.name": "tau2", "env.data": "none"}),
        ("env.backend", "'textworld'", "env.name = 'alfworld'", {"env.name": "search"}),
        ("webshop.products", "9", "env.name = 'webshop'", {}),
        ("webshop.products", "9", "a generated shop: no env.data", {"env.name": "webshop"}),
        ("webshop.catalogue", "'full'", "env.data", {"env.name": "webshop", "env.data": "none"}),
        ("search.topk", "5", "env.name = 'search'", {}),
        ("search.entities", "99", "a generated world: no env.data", {"env.name": "search"}),
        ("search.encoder", "'x'", "search.retriever = 'dense'", {"env.name": "search"}),
        ("search.timeout_s", "9.0", "a server's URL as search.retriever", {"env.name": "search"}),
        ("simulator.noise_start", "0.5", "search.retriever = 'zerosearch'", {"env.name": "search"}),
        ("tau2.domain", "'airline'", "env.name = 'tau2'", {}),
        ("env.history", "5", "another env.name than 'tau2'", {"env.name": "tau2"}),
        ("agent.trials", "5", "paw eval", {}),
        ("endpoint.retries", "3", "paw eval", {}),
    ],
)
def test_a_setting_without_effect_is_told(setting, value, need, others):
    lines = ignored(load("alfworld-grpo-paw", {setting: value, **others}))
    shown = {"false": "False"}.get(value, value)
    assert lines == [f"warning: {setting} = {shown} has no effect: it needs {need}"]


@pytest.mark.parametrize(
    "given",
    [
        {"wm.loss": "gce", "wm.q": "0.5"},
        {"wm.enabled": "false", "wm.rho": "0.2"},  # as it is by default
        {"advantage.estimator": "ppo", "critic.lr": "0.1", "rollout.group_size": "1"},
        {"lora.rank": "8", "lora.alpha": "8.0"},
        {"env.name": "webshop", "webshop.catalogue": "full", "webshop.goals": "human"},
        {"env.name": "search", "search.retriever": "dense", "search.encoder": "x"},
        {"env.name": "search", "search.retriever": "http://127.0.0.1:8000", "search.timeout_s": "9.0"},
        {"env.name": "search", "search.retriever": "zerosearch", "simulator.model": "x"},
        {"env.name": "tau2", "tau2.domain": "airline", "env.step_timeout_s": "9.0"},
        {"env.name": "mine.py:Mine", "env.difficulty": "tiny", "env.data": "none", "env.kinds": "['pick']"},
    ],
)
def test_a_setting_with_effect_is_not(given):
    assert ignored(load("alfworld-grpo-paw", given)) == []


def test_a_dry_run_warns_on_stderr_alone(capsys):
    assert cli.main(["train", "quickstart", "--dry-run", "--wm.q", "0.5", "--critic.lr", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert [line.split(" = ")[0] for line in err.splitlines()] == ["warning: wm.q", "warning: critic.lr"]
    assert out.startswith("[run]") and "warning" not in out
