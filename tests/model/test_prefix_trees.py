"""A prefix tree has the hidden states and gradients of its rows, in every kind of attention."""

import random

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from paw.algo.prefixes import prefix_tree
from paw.model.check import takes_prefix_trees
from paw.model.policy import Policy

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "windows": Gemma3TextConfig(**SIZES, sliding_window=5),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
    ),
    "soft cap": Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=3.0),
}


def make_policy(name: str, **options) -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(CONFIGS[name]), **options)


def random_rows(draw: random.Random) -> list[np.ndarray]:
    """Rows that go on from random places of each other."""
    rows = [[draw.randrange(97) for _ in range(draw.randrange(1, 30))]]
    for _ in range(6):
        parent = draw.choice(rows)
        kept = draw.randrange(len(parent) + 1)
        rows.append(parent[:kept] + [draw.randrange(97) for _ in range(draw.randrange(1, 9))])
    return [np.array(row) for row in rows]


def hidden_of_rows(policy: Policy, rows: list[np.ndarray]) -> torch.Tensor:
    return policy.hidden(torch.from_numpy(np.concatenate(rows)), [len(row) for row in rows])


def hidden_of_tree(policy: Policy, rows: list[np.ndarray]) -> torch.Tensor:
    tree = prefix_tree(rows)
    hidden = policy.hidden(
        torch.from_numpy(tree.input_ids),
        [len(segment) for segment in tree.segments],
        [segment.path for segment in tree.segments],
    )
    return hidden[torch.from_numpy(np.concatenate(tree.paths))]


def value_and_gradients(policy: Policy, hidden: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Of a function in which every token of every row has a weight of its own."""
    policy.zero_grad()
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    value = (hidden * weights.to(hidden.dtype)).tanh().sum()
    value.backward()
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    return float(value.detach()), gradients


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_tree_has_the_gradients_of_its_rows(name, checkpointing):
    policy = make_policy(name, checkpointing=checkpointing)
    for seed in range(3):
        rows = random_rows(random.Random(seed))
        expected_hidden = hidden_of_rows(policy, rows)
        hidden = hidden_of_tree(policy, rows)
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-5, atol=1e-5)

        expected_value, expected_gradients = value_and_gradients(policy, expected_hidden)
        value, gradients = value_and_gradients(policy, hidden)
        assert value == pytest.approx(expected_value, rel=1e-5)
        for gradient, expected in zip(gradients, expected_gradients, strict=True):
            scale = float(expected.abs().max())
            assert float((gradient - expected).abs().max()) <= 1e-5 * max(scale, 1e-3)


def test_in_float64_they_differ_by_rounding_alone():
    # Its norms compute in the dtype of their input; those of Llama compute in float32.
    policy = make_policy("gpt-neox").double()
    policy.dtype = torch.float64
    for seed in range(5):
        rows = random_rows(random.Random(seed))
        _, expected = value_and_gradients(policy, hidden_of_rows(policy, rows))
        _, gradients = value_and_gradients(policy, hidden_of_tree(policy, rows))
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)


def test_the_check_of_a_model_tries_a_tree():
    assert takes_prefix_trees(make_policy("windows"))
    broken = make_policy("llama")
    embed = broken.lm.get_decoder().embed_tokens
    # A layer that adds up what came before in the batch, as no packed row would show if it looked at
    # position ids to start anew.
    embed.register_forward_hook(lambda module, args, out: out.cumsum(1))
    assert not takes_prefix_trees(broken)


def test_recurrent_layers_share_nothing():
    config = Qwen3NextConfig(
        **SIZES,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )
    assert not Policy(AutoModelForCausalLM.from_config(config)).shares_prefixes
