"""Which weights are sent, and when log-probs say that they did not arrive."""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paw.errors import UserError
from paw.model.policy import full_parameters
from paw.rollout.sync import StaleWeightsError, sampler_mismatch


def make_model(*, tied):
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))


@pytest.mark.parametrize("tied", [True, False])
def test_every_checkpoint_name_is_sent_and_the_head_always(tied):
    model = make_model(tied=tied)
    sent = dict(full_parameters(model))
    assert set(sent) == set(model.state_dict())
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"]) is tied
    assert not any(tensor.requires_grad for tensor in sent.values())


def test_one_odd_token_of_many_is_tolerated_many_are_stale_weights():
    found = sampler_mismatch([[-1.0, -2.0], [-0.5]], [[-1.0, -2.03], [-0.5]])
    expected = {"health/sampler_mismatch": 0.03, "health/sampler_mismatch_mean": 0.01}
    assert found == pytest.approx(expected)
    same = [[-1.0] * 99]
    assert sampler_mismatch([*same, [-2.0]], [*same, [-1.0]])["health/sampler_mismatch"] == 1.0
    with pytest.raises(StaleWeightsError, match=r"stale weights.*0\.5 nats on 10% of 10 tokens"):
        sampler_mismatch([[-1.0] * 9 + [-3.0]], [[-1.0] * 10])
    with pytest.raises(StaleWeightsError):
        sampler_mismatch([[float("nan")]], [[-1.0]])
    with pytest.raises(ValueError, match="zip"):
        sampler_mismatch([[-1.0]], [[-1.0, -1.0]])


def test_missing_vllm_names_the_extra(monkeypatch, tmp_path):
    from paw.rollout.engines.vllm import VllmEngine

    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")  # restores what the import sets
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install 'paw-trainer\[vllm\]'"):
        VllmEngine(tmp_path, end_ids=[1], max_model_len=8)
