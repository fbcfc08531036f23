"""bf16 gives the same results in one rank and in two: log-probs, and gradients of all weights or
LoRA's adapters."""

import copy
from dataclasses import replace

import pytest
import torch
from forked import call_in_ranks
from joint import Objective, make_lm, make_rows, tiny_policy
from together import shared

from paw.algo import loss
from paw.algo.batches import micro_batches
from paw.algo.packing import Packing
from paw.build import join_ranks
from paw.config.sections import LoraConfig
from paw.distributed.ranks import Ranks, full_tensor
from paw.model.attention import decoder_layers
from paw.model.lora import add_adapters
from paw.model.policy import Policy

SHARP = {"initializer_range": 0.1, "num_hidden_layers": 4}


def packing_of(policy, ranks):
    return Packing(
        budget=1,  # each row by itself, because in bf16 a result depends on the rest of the batch
        pads=policy.pads_sequences,
        quadratic=policy.quadratic,
        ranks=ranks if ranks.world_size > 1 else None,
    )


def held_in_turn(rows, ranks):
    return shared(rows, ranks) if ranks.world_size > 1 else rows


def log_probs(policy, rows, ranks):
    rows = held_in_turn(rows, ranks)
    scored = loss.log_probs(policy, rows, packing_of(policy, ranks), temperature=1.0)
    parts = ranks.gather(scored, dict[int, tuple[list[float], float]])
    found = {i: logp for part in parts for i, (logp, _) in part.items()}
    return torch.tensor([value for i in range(len(rows)) for value in found[i]])


def gradient(policy, rows, ranks):
    rows = held_in_turn(rows, ranks)
    objective = Objective(rho=0.05)
    batches = micro_batches(
        rows, packing_of(policy, ranks), with_observation=True, device=policy.device
    )
    for batch in batches:
        ranks.sync_gradients(policy, True)
        tokens = objective.tokens(batch, rows, len(rows))
        scaled = replace(tokens, weight=ranks.world_size * tokens.weight)
        loss.joint_loss(policy, batch, scaled, objective.loss, temperature=1.0).loss.backward()
    found = {
        n: full_tensor(p.grad).double().flatten() for n, p in policy.named_parameters_once().items()
    }
    return torch.cat([found[name] for name in sorted(found)])


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def make(kind, checkpointing):
    lm = make_lm("qwen2-untied" if kind == "untied" else "qwen3", **SHARP)
    if kind == "lora":
        for parameter in lm.parameters():
            parameter.data = parameter.data.bfloat16()
        add_adapters(lm, LoraConfig(rank=4), seed=0)
        for name, parameter in lm.named_parameters():
            if ".lora_B" in name:
                torch.nn.init.normal_(
                    parameter, std=0.1, generator=torch.Generator().manual_seed(len(name))
                )
    return Policy(lm, dtype="bfloat16", checkpointing=checkpointing)


def check(kind, checkpointing, ranks):
    single = Ranks()
    rows = make_rows(tiny_policy("qwen3", **SHARP), 4)
    alone, shared = make(kind, checkpointing), make(kind, checkpointing)
    exact = Policy(copy.deepcopy(make(kind, "none").lm).float(), dtype="float32")
    for layer in (part for part in exact.lm.modules() if part._forward_pre_hooks):
        layer._forward_pre_hooks.clear(), layer._forward_hooks.clear()
    ranks.shard(shared, shared.dtype, layers=decoder_layers(shared))
    one, two, wanted = (
        log_probs(p, rows, r) for p, r in ((alone, single), (shared, ranks), (exact, single))
    )
    rounding = float((one - wanted).abs().max())
    apart = float((one - two).abs().max())
    assert apart <= 1e-3 < rounding, f"{kind}: log-probs {apart:.1e} apart, rounding {rounding:.1e}"
    one, two, wanted = (
        gradient(p, rows, r) for p, r in ((alone, single), (shared, ranks), (exact, single))
    )
    apart, rounding = error(two, one), error(one, wanted)
    assert apart <= 0.5 * rounding, f"{kind}: gradients {apart:.1e} apart, rounding {rounding:.1e}"
    assert {p.grad.dtype for p in alone.named_parameters_once().values()} == {torch.float32}


def check_all(rank):
    ranks = join_ranks(torch.device("cpu"))
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
