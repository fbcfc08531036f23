"""The transformers engine against a loop of full forward passes; whether weights arrived."""

import sys
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paw.errors import UserError
from paw.model.policy import full_parameters
from paw.rollouts.engines.base import Completion, Request
from paw.rollouts.engines.generation import sample, uniforms
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.engines.vllm import VllmEngine
from paw.rollouts.sync import StaleWeightsError, sampler_mismatch

VOCAB, END = 61, 3


def make_model(**more):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, eos_token_id=END,
        **{"tie_word_embeddings": True, **more},
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_requests(count):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (count,), generator=g).tolist()
    prompts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in lengths]
    return [
        Request(100 + i, prompt, i, temperature=1.0, max_tokens=12)
        for i, prompt in enumerate(prompts)
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
    tokens, logps, entropies = [], [], []
    while len(tokens) < request.max_tokens:
        logits = model(input_ids=torch.tensor([request.prompt_ids + tokens])).logits[0, -1].double()
        logp = (logits / (request.temperature or 1.0)).log_softmax(-1)
        u = float(uniforms(torch.tensor([request.seed]).numpy().astype("uint64"), len(tokens))[0])
        token = (
            int(logits.argmax())
            if request.temperature == 0
            else int((logp.exp().cumsum(-1) <= u).sum())
        )
        tokens.append(token)
        logps.append(float(logp[token]))
        entropies.append(float(-(logp.exp() * logp).sum()))
        if token in end_ids:
            break
    return Completion(request.key, tokens, logps, entropies)


def assert_same(got, want):
    assert (got.key, got.token_ids) == (want.key, want.token_ids)
    assert got.logp == pytest.approx(want.logp, abs=1e-5, rel=1e-5)
    assert got.entropy == pytest.approx(want.entropy, abs=1e-5, rel=1e-5)


def test_equals_a_loop_of_full_forward_passes():
    """Each request by its own settings; some answers are one token, some outgrow the cache, some end."""
    model, ends = make_model(), {END, 7}
    settings = [(1.0, 12), (0.4, 40), (0.0, 5), (2.0, 1)]
    requests = [
        replace(request, temperature=settings[i % 4][0], max_tokens=settings[i % 4][1])
        for i, request in enumerate(make_requests(20))
    ]
    completions = run(TransformersEngine(model, end_ids=ends, max_batch_tokens=400), requests)
    # Rows left the batch at different times.
    assert len({len(c.token_ids) for c in completions}) > 3
    assert 0 < sum(c.token_ids[-1] in ends for c in completions) < 20
    for request, completion in zip(requests, completions, strict=True):
        assert_same(completion, naive(model, request, ends))
    longest = [replace(request, max_tokens=80) for request in requests[:3]]
    for request, completion in zip(
        longest, run(TransformersEngine(model, end_ids=()), longest), strict=True
    ):
        assert len(completion.token_ids) == 80
        assert_same(completion, naive(model, request, ()))
    assert {
        len(c.token_ids) for c in run(TransformersEngine(model, end_ids=()), requests[3::4])
    } == {1}


def test_tokens_depend_on_the_seed_and_not_on_the_batch():
    model = make_model()
    requests = make_requests(16)
    engine, small = (
        TransformersEngine(model, end_ids={END}, max_batch_tokens=most) for most in (65536, 150)
    )
    together, alone = run(engine, requests), [run(engine, [request])[0] for request in requests]
    for a, b, c in zip(together, alone, run(small, requests[::-1])[::-1], strict=True):
        assert_same(a, b)
        assert_same(a, c)
    other = run(engine, [replace(request, seed=request.seed + 10**6) for request in requests])
    assert all(a.token_ids != b.token_ids for a, b in zip(together, other, strict=True))


def test_sampling_follows_the_distribution():
    """Over seeds and over positions; never what is impossible."""
    logits, temperature = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, -0.5, -torch.inf]), 0.7
    seeds = torch.arange(2000).numpy().astype("uint64")
    u = torch.stack([torch.from_numpy(uniforms(seeds, t)) for t in range(50)])
    assert u.min() >= 0 and u.max() < 1 and len(u.unique()) == u.numel()
    counts = torch.histc(u, bins=100, min=0, max=1)
    # 99.9 % quantile at 99 degrees of freedom.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 149
    for neighbours in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert (
            abs(float(torch.corrcoef(torch.stack([part.flatten() for part in neighbours]))[0, 1]))
            < 0.01
        )
    n = u.numel()
    token, logp, entropy = sample(logits.expand(n, -1), torch.full((n,), temperature), u.flatten())
    p = (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(token, minlength=9).double()
    chi2 = float(((counts - n * p) ** 2 / (n * p))[:8].sum())
    assert chi2 < 24.3 and counts[8] == 0  # 99.9 % quantile at 7 degrees of freedom
    assert torch.allclose(logp.double(), p.log()[token], atol=1e-6)
    assert torch.allclose(entropy.double(), torch.special.entr(p).sum().expand(n), atol=1e-6)
    impossible = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf]])
    for most in (0.0, 0.5, 1 - 2**-53):
        token, logp, entropy = sample(
            impossible, torch.ones(1), torch.tensor([most], dtype=torch.float64)
        )
        assert (
            token.item() in (1, 3) and torch.isfinite(logp).all() and torch.isfinite(entropy).all()
        )


def test_the_model_is_left_as_it_was_and_its_update_is_seen_at_once():
    model = make_model().train()
    model.config._attn_implementation = "eager"
    engine, requests = TransformersEngine(model, end_ids={END}), make_requests(8)
    before = run(engine, requests)
    assert model.training and model.config._attn_implementation == "eager"
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    engine.sync((pair for pair in ()), version=7)
    after = run(engine, requests)
    assert engine.version == 7 and [c.logp for c in before] != [c.logp for c in after]
    assert_same(after[0], naive(model, requests[0], {END}))


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
    sent = dict(full_parameters(model))
    assert set(sent) == set(model.state_dict())
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"]) is tied
    assert not any(tensor.requires_grad for tensor in sent.values())


def test_one_odd_token_of_many_is_tolerated_many_are_stale_weights():
    found = sampler_mismatch([[-1.0, -2.0], [-0.5]], [[-1.0, -2.03], [-0.5]])
    assert found == pytest.approx(
        {"health/sampler_mismatch": 0.03, "health/sampler_mismatch_mean": 0.01}
    )
    same = [[-1.0] * 99]
    assert sampler_mismatch([*same, [-2.0]], [*same, [-1.0]])["health/sampler_mismatch"] == 1.0
    with pytest.raises(StaleWeightsError, match=r"stale weights.*0\.5 nats on 10% of 10 tokens"):
        sampler_mismatch([[-1.0] * 9 + [-3.0]], [[-1.0] * 10])
    servers = [["http://b"] * 4 + [None], ["http://a"] * 99]  # None: of other weights
    with pytest.raises(
        StaleWeightsError, match=r"0\.5 nats on 100% of 4 tokens of http://b \(mean 2, max 2\)"
    ):
        sampler_mismatch([[-1.0] * 5, *same], [[-3.0] * 5, *same], servers)
    with pytest.raises(StaleWeightsError):
        sampler_mismatch([[float("nan")]], [[-1.0]])
    with pytest.raises(ValueError, match="zip"):
        sampler_mismatch([[-1.0]], [[-1.0, -1.0]])


def test_missing_vllm_names_the_extra(monkeypatch, tmp_path):
    for name in (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
        "VLLM_LOGGING_LEVEL",
    ):
        monkeypatch.setenv(name, "0")  # restores what the import sets
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install 'paw-trainer\[vllm\]'"):
        VllmEngine(tmp_path, end_ids=[1], max_model_len=8)
