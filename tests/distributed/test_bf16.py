"""bf16 means the same in one rank and in two: log-probs, and gradients of all weights or of LoRA's
adapters."""

import copy
from dataclasses import replace

import pytest
import torch
from forked import call_in_ranks
from joint import Objective, make_lm, make_rows, tiny_policy

from paw.algo import loss
from paw.algo.samples import micro_batches
from paw.build import join_ranks
from paw.config.sections import LoraConfig
from paw.distributed.ranks import Ranks, full_tensor
from paw.model.attention import decoder_layers
from paw.model.lora import add_adapters
from paw.model.policy import Policy

SHARP = {"initializer_range": 0.1, "num_hidden_layers": 4}


def log_probs(policy, rows, ranks):
    """The log-probs of all rows, in their order, of which each rank scores its share."""
    share = (ranks.rank, ranks.world_size)
    scored = loss.log_probs(policy, rows, temperature=1.0, budget=100, share=share)
    scored_rows = {}
    for part in ranks.gather(scored, dict[int, tuple[list[float], float]]):
        scored_rows |= part
    values = []
    for place in range(len(rows)):
        logps, _ = scored_rows[place]
        values += logps
    return torch.tensor(values)


def gradient(policy, rows, ranks):
    """The gradient of the joint loss, to which each rank adds its share of the micro-batches."""
    objective = Objective(rho=0.05)
    batches = micro_batches(
        rows,
        budget=100,
        with_observation=True,
        device=policy.device,
        quadratic=policy.quadratic,
        share=(ranks.rank, ranks.world_size),
    )
    for batch in batches:
        ranks.sync_gradients(policy, True)
        tokens = objective.tokens(batch, rows, len(rows))
        scaled = replace(tokens, weight=ranks.world_size * tokens.weight)
        loss.joint_loss(policy, batch, scaled, objective.loss, temperature=1.0).loss.backward()
    parameters = policy.named_parameters_once()
    gradients = [full_tensor(parameters[name].grad) for name in sorted(parameters)]
    return torch.cat([part.double().flatten() for part in gradients])


def relative_error(gradient, expected):
    return float((gradient - expected).norm() / expected.norm())


def make(kind, checkpointing):
    lm = make_lm("qwen2-untied" if kind == "untied" else "qwen3", **SHARP)
    if kind == "lora":
        for parameter in lm.parameters():
            parameter.data = parameter.data.bfloat16()
        add_adapters(lm, LoraConfig(rank=4), seed=0)
        for name, parameter in lm.named_parameters():
            if ".lora_B" in name:
                generator = torch.Generator().manual_seed(len(name))
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return Policy(lm, dtype="bfloat16", checkpointing=checkpointing)


def check(kind, checkpointing, ranks):
    single = Ranks()
    rows = make_rows(tiny_policy("qwen3", **SHARP), 40)
    alone = make(kind, checkpointing)
    shared = make(kind, checkpointing)
    exact = Policy(copy.deepcopy(make(kind, "none").lm).float(), dtype="float32")
    for module in exact.lm.modules():
        if module._forward_pre_hooks:
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
    ranks.shard(shared, shared.dtype, layers=decoder_layers(shared))

    of_one = log_probs(alone, rows, single)
    of_two = log_probs(shared, rows, ranks)
    rounding = float((of_one - log_probs(exact, rows, single)).abs().max())
    apart = float((of_one - of_two).abs().max())
    assert apart <= 1e-3 < rounding, f"{kind}: log-probs {apart:.1e} apart, rounding {rounding:.1e}"

    of_one = gradient(alone, rows, single)
    of_two = gradient(shared, rows, ranks)
    rounding = relative_error(of_one, gradient(exact, rows, single))
    apart = relative_error(of_two, of_one)
    assert apart <= 0.5 * rounding, f"{kind}: gradients {apart:.1e} apart, rounding {rounding:.1e}"
    for parameter in alone.named_parameters_once().values():
        assert parameter.grad.dtype == torch.float32


def check_all(rank):
    ranks = join_ranks(torch.device("cpu"), episodes=2)
    for kind, checkpointing in (
        ("tied", "none"),
        ("tied", "selective"),
        ("untied", "full"),
        ("lora", "full"),
    ):
        check(kind, checkpointing, ranks)
    ranks.close()


@pytest.mark.slow
def test_two_ranks_give_what_one_gives_in_bf16():
    pytest.importorskip("peft")
    call_in_ranks(check_all, 2, on_host=2)
