"""Which weights are sent, and when log-probs say that they did not arrive."""

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paw.errors import UserError
from paw.rollout.sync import StaleWeightsError, full_parameters, push_weights, sampler_mismatch


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


def test_push_weights_hands_over_the_version():
    from paw.rollout.engines.transformers import TransformersEngine

    model = make_model(tied=True)
    engine = TransformersEngine(model, end_ids=[1])
    push_weights(model, engine, version=5)
    assert engine.version == 5


def test_mismatch_reports_the_largest_and_the_mean():
    found = sampler_mismatch([[-1.0, -2.0], [-0.5]], [[-1.0, -2.03], [-0.5]])
    assert found["health/sampler_mismatch"] == pytest.approx(0.03)
    assert found["health/sampler_mismatch_mean"] == pytest.approx(0.01)


def test_one_odd_token_of_many_is_tolerated_many_are_stale_weights():
    same = [[-1.0] * 99]
    assert sampler_mismatch([*same, [-2.0]], [*same, [-1.0]])["health/sampler_mismatch"] == 1.0
    with pytest.raises(StaleWeightsError, match=r"stale weights.*0\.5 nats on 10% of 10 tokens"):
        sampler_mismatch([[-1.0] * 9 + [-3.0]], [[-1.0] * 10])
    with pytest.raises(StaleWeightsError):
        sampler_mismatch([[float("nan")]], [[-1.0]])


def test_rows_must_match():
    with pytest.raises(ValueError, match="2 tokens has 1"):
        sampler_mismatch([[-1.0]], [[-1.0, -1.0]])
    with pytest.raises(ValueError, match="no tokens"):
        sampler_mismatch([[]], [[]])


def test_missing_vllm_names_the_extra(monkeypatch, tmp_path):
    from paw.rollout.engines.vllm import VllmEngine

    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")  # restores what the import sets
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install 'paw-trainer\[vllm\]'"):
        VllmEngine(tmp_path, end_ids=[1], max_model_len=8)


def test_engines_are_imported_on_demand():
    code = "import sys, paw.rollout.engines; sys.exit(any(m in sys.modules for m in ('torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
