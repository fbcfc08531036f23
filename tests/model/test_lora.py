"""LoRA: what is trained, its gradient, and the merged weights that engine and export see."""

import sys

import numpy as np
import pytest
import torch
from joint import Objective, make_lm, make_rows, packed, relative, tiny_policy
from test_models import make

from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw.config.recipe import dump
from paw.config.sections import Config, LoraConfig, ModelConfig, RunConfig
from paw.errors import UserError
from paw.model.lora import adapters_off, add_adapters, check_targets
from paw.model.policy import DTYPES, Policy, full_parameters
from paw.rollouts.engines.base import Request
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.sync import push_weights, sampler_mismatch
from paw.trainer import train

pytest.importorskip("peft")
CONFIG = LoraConfig(rank=4, alpha=6.0)


def lora_policy(family="qwen2-tied", *, trained=True, config=CONFIG, **options):
    """A tiny policy with adapters, which `trained` moves away from zero."""
    policy = Policy(make_lm(family).to(DTYPES[options.get("dtype", "float32")]), **options)
    add_adapters(policy.lm, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters_once().items():
        if trained and ".lora_B." in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return policy


def logps(policy, rows):
    """The log-probs of all response tokens."""
    scored = log_probs(policy, rows, Packing(budget=200), temperature=1.0)
    return np.concatenate([logp for logp, _ in scored.values()])


def merged_policy(policy, family):
    lm = make_lm(family, seed=1)
    lm.load_state_dict(dict(full_parameters(policy.lm)))
    return Policy(lm)


@pytest.mark.parametrize("family", ["qwen2-tied", "llama"])
def test_without_its_adapters_the_model_is_the_base_and_merged_it_is_the_policy(family):
    base = tiny_policy(family)
    policy = lora_policy(family)
    rows = make_rows(base)
    trained_logps = logps(policy, rows)
    base_logps = logps(base, rows)
    assert trained_logps.tolist() != base_logps.tolist()
    untrained_policy = lora_policy(family, trained=False)
    assert logps(untrained_policy, rows).tolist() == base_logps.tolist()
    with adapters_off(policy.lm), adapters_off(base.lm):  # which has none
        assert logps(policy, rows).tolist() == base_logps.tolist()
        assert logps(base, rows).tolist() == base_logps.tolist()
    assert logps(policy, rows).tolist() == trained_logps.tolist()

    sent_weights = dict(full_parameters(policy.lm))
    base_weights = base.lm.state_dict()
    assert sent_weights.keys() == base_weights.keys()
    changed_names = {
        name for name in sent_weights if not torch.equal(sent_weights[name], base_weights[name])
    }
    assert changed_names == {
        name
        for name in sent_weights
        if name.split(".")[-2] in CONFIG.targets and name.endswith(".weight")
    }
    mismatch = sampler_mismatch(logps(merged_policy(policy, family), rows), trained_logps)
    assert mismatch["health/sampler_mismatch"] < 1e-5


@pytest.mark.parametrize("own_weights", [True, False])
def test_the_transformers_engine_samples_from_the_merged_policy(own_weights):
    policy = lora_policy("qwen3")
    lm = make_lm("qwen3", seed=1) if own_weights else policy.lm
    engine = TransformersEngine(lm, end_ids=[1], own_weights=own_weights)
    push_weights(policy.lm, engine, version=3)
    rows = make_rows(policy)
    for number, row in enumerate(rows):
        engine.submit(Request(number, row.prompt_ids.tolist(), number, 1.0, 9))
    for row, completion in zip(rows, engine.step(), strict=True):
        row.response_ids = completion.token_ids
        row.sampled_logp = completion.logp
    mismatch = sampler_mismatch(
        logps(policy, rows), np.concatenate([row.sampled_logp for row in rows])
    )
    assert mismatch["health/sampler_mismatch"] < 1e-4


def named_gradients(policy, rows):
    """(loss, gradients by name in float64) of the joint objective."""
    gradients = {}
    parameters = policy.named_parameters_once().items()
    hooks = [
        parameter.register_hook(
            lambda gradient, name=name: gradients.update(
                {name: gradients.get(name, 0) + gradient.double()}
            )
        )
        for name, parameter in parameters
    ]
    loss, _ = packed(policy, rows, Objective(), update_samples=len(rows))
    for registered in hooks:
        registered.remove()
    return loss, gradients


@pytest.mark.parametrize("family", ["qwen2-tied", "llama"])
def test_the_gradient_is_that_of_the_merged_weights_by_the_chain_rule(family):
    policy = lora_policy(family)
    rows = make_rows(policy)
    parameters = dict(policy.lm.named_parameters())
    (loss, gradients), (merged_loss, merged_gradients) = (
        named_gradients(policy_or_merged, rows)
        for policy_or_merged in (policy, merged_policy(policy, family))
    )
    assert loss == pytest.approx(merged_loss, rel=1e-5)
    assert gradients.keys() == {name for name in parameters if ".lora_" in name}
    for name, gradient in gradients.items():
        layer, part = name.split(".lora_")
        matrix_a, matrix_b = (
            parameters[f"{layer}.lora_{letter}.default.weight"].detach().double() for letter in "AB"
        )
        weight_gradient = merged_gradients[f"{layer}.weight"] * CONFIG.alpha / CONFIG.rank
        assert (
            relative(
                gradient,
                matrix_b.T @ weight_gradient if part[0] == "A" else weight_gradient @ matrix_a.T,
            )
            < 1e-4
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_moves_the_adapters_alone_and_in_float32(dtype):
    policy = lora_policy(dtype=dtype)
    rows = make_rows(policy)
    weights_before = {
        name: parameter.detach().clone() for name, parameter in policy.lm.named_parameters()
    }
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for name, gradient in named_gradients(policy, rows)[1].items():
        policy.named_parameters_once()[name].grad = gradient.float()
    optimizer.step()
    adapters = policy.named_parameters_once()
    assert {
        name
        for name, parameter in policy.lm.named_parameters()
        if not torch.equal(parameter, weights_before[name])
    } == adapters.keys()
    assert all(
        parameter.dtype == (torch.float32 if name in adapters else policy.dtype)
        for name, parameter in weights_before.items()
    )
    assert adapters.keys() == {name for name in weights_before if ".lora_" in name}


def test_bfloat16_log_probs_are_close_to_the_exact_ones():
    exact_policy = lora_policy()
    policy = lora_policy(dtype="bfloat16")
    rows = make_rows(exact_policy)
    mismatch = sampler_mismatch(logps(policy, rows), logps(exact_policy, rows))
    assert 0 < mismatch["health/sampler_mismatch"] < 0.2


def test_the_same_seed_gives_the_same_adapters_and_leaves_the_random_state():
    first = make_lm()
    second = make_lm()
    states = []
    for model in (first, second):
        states.append(torch.get_rng_state())
        add_adapters(model, CONFIG, seed=5)
        states.append(torch.get_rng_state())
        torch.rand(1)
    assert all(
        torch.equal(left, right)
        for left, right in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_wrong_targets_are_named_and_missing_peft(monkeypatch):
    lm = make_lm()
    check_targets(lm, CONFIG)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'paw-trainer\[lora\]'"):
        add_adapters(lm, CONFIG, seed=0)
    with pytest.raises(
        UserError, match=r"lora\.targets: 'q_prj' is not a linear layer .* did you mean 'q_proj'\?"
    ):
        check_targets(lm, LoraConfig(rank=1, targets=["v_proj", "q_prj"]))
    for target in ("lm_head", "embed_tokens", ""):
        with pytest.raises(UserError, match=f"'{target}' is not a linear layer"):
            check_targets(lm, LoraConfig(rank=1, targets=[target]))


def test_targets_that_name_experts_are_refused():
    """GLM-4-MoE's first layer is dense, so that its names are those of linear layers too."""
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
    }
    lm = make("Glm4Moe", n_shared_experts=1, topk_group=1, first_k_dense_replace=1, **experts)
    check_targets(lm, CONFIG)
    with pytest.raises(
        UserError,
        match=r"""'glm4_moe' some.* experts.* '\["q_proj", "k_proj", "v_proj", "o_proj"\]'$""",
    ):
        add_adapters(lm, CONFIG, seed=0)


def test_a_run_keeps_its_adapters_shape(tmp_path):
    before = Config(model=ModelConfig(path="none"), run=RunConfig(dir=tmp_path), lora=CONFIG)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump(before))
    (tmp_path / "run" / "metrics.jsonl").touch()
    for change, words in (
        ({"rank": 8}, "rank = 4"),
        ({"rank": 0}, "rank = 4"),
        ({"alpha": 2.0}, r"alpha = 6\.0"),
    ):
        changed = before.model_copy(update={"lora": CONFIG.model_copy(update=change)})
        with pytest.raises(UserError, match=rf"run was trained with lora\.{words}"):
            train(changed, resume="auto")


def test_matrices_travel_in_the_dtype_that_is_asked_for_and_vectors_in_their_own():
    policy = tiny_policy("llama")
    sent = dict(full_parameters(policy.lm, dtype=torch.bfloat16))
    for name, parameter in policy.lm.named_parameters():
        wanted = parameter.to(torch.bfloat16) if parameter.dim() > 1 else parameter
        assert torch.equal(sent[name], wanted)
        assert sent[name].dtype == wanted.dtype
