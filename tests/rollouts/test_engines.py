"""The transformers engine equals a loop of full forward passes, and stale weights are noticed."""

import itertools
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paw.config.recipe import load
from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.model.policy import full_parameters
from paw.rollouts.engines import servers
from paw.rollouts.engines.base import Completion, Request
from paw.rollouts.engines.generation import sample, uniforms
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.engines.vllm import VllmEngine
from paw.rollouts.sync import (
    SampledBy,
    StaleWeightsError,
    push_weights,
    sampled_by,
    sampler_mismatch,
)
from paw.types import Sample

VOCAB = 61
END = 3


def make_model(**settings):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, eos_token_id=END,
        **{"tie_word_embeddings": True, **settings},
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_requests(count):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    prompts = [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths
    ]
    return [
        Request(100 + number, prompt, number, temperature=1.0, max_tokens=12)
        for number, prompt in enumerate(prompts)
    ]


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    assert engine.pending == len(requests)
    completions = engine.step()
    assert engine.pending == 0
    return completions


@torch.no_grad()
def naive(model, request, end_ids):
    """One full forward pass over the whole sequence for every token."""
    tokens = []
    logps = []
    entropies = []
    while len(tokens) < request.max_tokens:
        logits = model(input_ids=torch.tensor([request.prompt_ids + tokens])).logits[0, -1].double()
        logp = (logits / (request.temperature or 1.0)).log_softmax(-1)
        uniform = float(
            uniforms(torch.tensor([request.seed]).numpy().astype("uint64"), len(tokens))[0]
        )
        token = (
            int(logits.argmax())
            if request.temperature == 0
            else int((logp.exp().cumsum(-1) <= uniform).sum())
        )
        tokens.append(token)
        logps.append(float(logp[token]))
        entropies.append(float(-(logp.exp() * logp).sum()))
        if token in end_ids:
            break
    return Completion(request.key, tokens, logps, entropies)


def assert_same(actual, expected):
    assert actual.key == expected.key
    assert actual.token_ids == expected.token_ids
    assert actual.logp == pytest.approx(expected.logp, abs=1e-5, rel=1e-5)
    assert actual.entropy == pytest.approx(expected.entropy, abs=1e-5, rel=1e-5)


def test_equals_a_loop_of_full_forward_passes():
    """Each request has its own settings. Some answers are one token, some outgrow the cache, and
    some end early."""
    model = make_model()
    end_ids = {END, 7}
    settings = itertools.cycle([(1.0, 12), (0.4, 40), (0.0, 5), (2.0, 1)])
    requests = []
    for request, (temperature, max_tokens) in zip(make_requests(20), settings, strict=False):
        requests.append(replace(request, temperature=temperature, max_tokens=max_tokens))
    completions = run(TransformersEngine(model, end_ids=end_ids, max_batch_tokens=400), requests)
    # Rows left the batch at different times.
    assert len({len(finished.token_ids) for finished in completions}) > 3
    assert 0 < sum(finished.token_ids[-1] in end_ids for finished in completions) < 20
    for request, completion in zip(requests, completions, strict=True):
        assert_same(completion, naive(model, request, end_ids))
    longest = [replace(request, max_tokens=80) for request in requests[:3]]
    completions = run(TransformersEngine(model, end_ids=()), longest)
    for request, completion in zip(longest, completions, strict=True):
        assert len(completion.token_ids) == 80
        assert_same(completion, naive(model, request, ()))
    for completion in run(TransformersEngine(model, end_ids=()), requests[3::4]):
        assert len(completion.token_ids) == 1


def test_tokens_depend_on_the_seed_and_not_on_the_batch():
    model = make_model()
    requests = make_requests(16)
    engine = TransformersEngine(model, end_ids={END}, max_batch_tokens=65536)
    small_engine = TransformersEngine(model, end_ids={END}, max_batch_tokens=150)
    together = run(engine, requests)
    in_small_batches = run(small_engine, requests[::-1])[::-1]
    for request, batched, reversed_batched in zip(
        requests, together, in_small_batches, strict=True
    ):
        assert_same(batched, run(engine, [request])[0])
        assert_same(batched, reversed_batched)
    other_requests = [replace(request, seed=request.seed + 10**6) for request in requests]
    for batched, unbatched in zip(together, run(engine, other_requests), strict=True):
        assert batched.token_ids != unbatched.token_ids


def test_sampling_follows_the_distribution():
    """Checked over seeds and over positions. Impossible tokens are never sampled."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, -0.5, -torch.inf])
    temperature = 0.7
    seeds = torch.arange(2000).numpy().astype("uint64")
    numbers = torch.stack([torch.from_numpy(uniforms(seeds, position)) for position in range(50)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(numbers.unique()) == numbers.numel()
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    # 99.9 % quantile at 99 degrees of freedom.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 149
    for left, right in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.01
    draw_count = numbers.numel()
    token, logp, entropy = sample(
        logits.expand(draw_count, -1), torch.full((draw_count,), temperature), numbers.flatten()
    )
    probabilities = (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(token, minlength=9).double()
    chi_squared = float(
        ((counts - draw_count * probabilities) ** 2 / (draw_count * probabilities))[:8].sum()
    )
    assert chi_squared < 24.3  # 99.9 % quantile at 7 degrees of freedom
    assert counts[8] == 0
    assert torch.allclose(logp.double(), probabilities.log()[token], atol=1e-6)
    assert torch.allclose(
        entropy.double(), torch.special.entr(probabilities).sum().expand(draw_count), atol=1e-6
    )
    impossible = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        token, logp, entropy = sample(
            impossible, torch.ones(1), torch.tensor([uniform], dtype=torch.float64)
        )
        assert token.item() in (1, 3)
        assert torch.isfinite(logp).all()
        assert torch.isfinite(entropy).all()


def test_the_model_is_left_as_it_was_and_its_update_is_seen_at_once():
    model = make_model().train()
    model.config._attn_implementation = "eager"
    engine = TransformersEngine(model, end_ids={END})
    requests = make_requests(8)
    before = run(engine, requests)
    assert model.training
    assert model.config._attn_implementation == "eager"
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    engine.sync((pair for pair in ()), version=7)
    after_update = run(engine, requests)
    assert engine.version == 7
    assert [completion.logp for completion in before] != [
        completion.logp for completion in after_update
    ]
    assert_same(after_update[0], naive(model, requests[0], {END}))


def test_misuse():
    engine = TransformersEngine(make_model(), end_ids={END})
    assert engine.step() == []
    request = make_requests(1)[0]
    engine.submit(request)
    with pytest.raises(ValueError, match="key in flight"):
        engine.submit(request)
    for change in (engine.sleep, lambda: engine.sync([], version=1)):
        with pytest.raises(RuntimeError, match="1 requests pending"):
            change()
    with pytest.raises(UserError, match="256 positions"):
        engine.submit(Request(1, [1] * 250, 0, 1.0, 7))
    sliding = make_model(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UserError, match="sliding_attention"):
        TransformersEngine(sliding, end_ids={END})


@pytest.mark.parametrize("tied", [True, False])
def test_every_checkpoint_name_is_sent_and_the_head_always(tied):
    model = make_model(tie_word_embeddings=tied)
    parameters = dict(full_parameters(model))
    assert set(parameters) == set(model.state_dict())
    assert (
        torch.equal(parameters["lm_head.weight"], parameters["model.embed_tokens.weight"]) is tied
    )
    assert not any(tensor.requires_grad for tensor in parameters.values())


def test_one_odd_token_of_many_is_tolerated_many_are_stale_weights():
    mismatch = sampler_mismatch(np.array([-1.0, -2.0, -0.5]), np.array([-1.0, -2.03, -0.5]))
    assert mismatch == pytest.approx(
        {"health/sampler_mismatch": 0.03, "health/sampler_mismatch_mean": 0.01}
    )
    logps = np.full(100, -1.0)
    odd_logps = np.append(logps[:99], -2.0)
    assert sampler_mismatch(odd_logps, logps)["health/sampler_mismatch"] == 1.0
    with pytest.raises(StaleWeightsError, match=r"stale weights.*0\.5 nats on 10% of 10 tokens"):
        sampler_mismatch(np.append(logps[:9], -3.0), logps[:10])
    versions = [4, 4, 4, 4, 3]  # the last token comes from other weights
    samples = [
        Sample(0, 0, 0, [1], [2] * 5, versions=versions, server="http://b"),
        Sample(0, 1, 0, [1], [2] * 95, versions=[4] * 95, server="http://a"),
    ]
    other_logps = np.append(np.full(5, -3.0), logps[5:])
    with pytest.raises(
        StaleWeightsError, match=r"0\.5 nats on 100% of 4 tokens of http://b \(mean 2, max 2\)"
    ):
        sampler_mismatch(logps, other_logps, sampled_by(samples, 4))
    with pytest.raises(StaleWeightsError):
        sampler_mismatch(np.array([math.nan]), np.array([-1.0]))
    with pytest.raises(ValueError, match="1 log-probs and 2 of the sampler"):
        sampler_mismatch(logps[:1], logps[:2])


def test_stale_weights_say_what_was_compared_and_where_to_look():
    with pytest.raises(
        StaleWeightsError, match=r"log_softmax\(logits / temperature\).*`sync` copies"
    ):
        sampler_mismatch(np.array([-1.0]), np.array([-3.0]))
    by_server = SampledBy(servers=["http://a"], index=np.array([1], np.int32))
    with pytest.raises(StaleWeightsError) as error:
        sampler_mismatch(np.array([-1.0]), np.array([-3.0]), by_server)
    assert "`sync`" not in str(error.value)  # servers have none that the user wrote


class TakesTheFirst(TransformersEngine):
    """Its sync drops all parameters but the first."""

    def sync(self, parameters, version):
        next(iter(parameters))


def test_a_sync_that_stops_early_is_named_with_the_parameter():
    model = make_model()
    engine = TakesTheFirst(model, end_ids={END})
    message = r"sync of TakesTheFirst took 1 of 27 parameters and stopped after 'model.embed_tokens"
    with pytest.raises(UserError, match=message):
        push_weights(model, engine, version=1)
    for own_weights in (False, True):  # takes no parameter, takes all
        push_weights(model, TransformersEngine(model, end_ids={END}, own_weights=own_weights), 1)


def test_missing_vllm_names_the_extra(monkeypatch, tmp_path):
    for name in (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
        "VLLM_LOGGING_LEVEL",
    ):
        monkeypatch.setenv(name, "0")  # undoes what the import sets
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install 'paw-trainer\[vllm\]'"):
        VllmEngine(tmp_path, end_ids=[1], max_model_len=8)


def test_servers_are_started_with_engine_max_num_seqs(monkeypatch):
    config = load(
        "alfworld-grpo-paw",
        {"engine.type": "server", "engine.servers": 1, "engine.max_num_seqs": 9000},
    )
    monkeypatch.setattr(servers, "Servers", lambda command, *_, **__: command)
    command: Any = servers.start_servers(
        config, "model", device=torch.device("cpu"), ranks=Ranks(), lora=None
    )
    assert command[command.index("--max-num-seqs") + 1] == "9000"
    # vLLM requires at least as many tokens per step as sequences.
    assert command[command.index("--max-num-batched-tokens") + 1] == "9000"


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_number_of_sequences_that_is_none_is_one_line(value):
    for engine in ({}, {"engine.type": "server", "engine.servers": 1}):
        with pytest.raises(UserError, match=r"engine\.max_num_seqs") as error:
            load("alfworld-grpo-paw", {**engine, "engine.max_num_seqs": value})
        assert "\n" not in str(error.value)


def test_servers_that_already_run_have_a_number_of_their_own():
    server_settings = {"engine.type": "server", "engine.urls": "http://a:1"}
    with pytest.raises(UserError, match=r"engine\.max_num_seqs"):
        load("alfworld-grpo-paw", server_settings | {"engine.max_num_seqs": 8})
