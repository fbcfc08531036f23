"""The one-pass loss against float64 autograd of a dense reference, with the trainer's losses and with others."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from dense_reference import (
    assert_close,
    assert_invariants,
    dense_loss,
    dense_stats,
    fused_loss,
    leaves,
    problem,
    set_chunk_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import paw_kernels._backend
from paw.algo import loss as losses
from paw_kernels import token_loss, token_stats

PARITY = Path(__file__).parents[2] / ".." / "shared" / "data" / "parity" / "losses.json"

OPTIONS = {
    "clip": {},
    "cmae": {"rho": 0.05},
    "mae": {"wm": "mae"},
    "ce": {"wm": "ce", "clip_high": 0.28},
    "gce": {"wm": "gce", "q": 0.4},
    "kl": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.05},
    "everything": {"kl_coef": 0.1, "entropy_coef": 0.02, "clip_low": 0.1, "dual_clip": 1.5},
}


@pytest.fixture(params=["torch", "cpu"], scope="module", autouse=True)
def backend(request):
    """Every test here runs with each backend of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paw_kernels._backend, "best_backend", lambda device, dtype: request.param)
        yield request.param


def fused(hidden, weight, target, rows, bias=None, temperature=1.0, upstream=1.0):
    h, w, b = leaves(hidden, weight, bias)
    out = fused_loss(h, w, target, rows, bias=b, temperature=temperature)
    (upstream * out.loss).backward()
    return out, [x.grad for x in (h, w, b) if x is not None]


def dense(hidden, weight, target, rows, bias=None, temperature=1.0, upstream=1.0, dtype=torch.float64):
    h, w, b = leaves(hidden, weight, bias, dtype=dtype)
    out = dense_loss(h, w, target, rows, b, temperature)
    (upstream * out[0]).backward()
    return out, [x.grad for x in (h, w, b) if x is not None]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_statistics_and_gradients_match_float64(name, bias, temperature):
    hidden, weight, target, offset, rows = problem(
        150, 37, 12, bias=bias, scale=2.0, temperature=temperature, **OPTIONS[name]
    )
    out, grads = fused(hidden, weight, target, rows, offset, temperature, upstream=-1.7)
    expected, expected_grads = dense(hidden, weight, target, rows, offset, temperature, -1.7)
    for got, want in zip(out[:4], expected, strict=True):
        assert_close(got, want)
    for got, want in zip(grads, expected_grads, strict=True):
        assert_close(got, want)
    with torch.enable_grad():  # the same loss of separately computed statistics
        h, w, b = leaves(hidden, weight, offset)
        stats = token_stats(h, w, target, bias=b, temperature=temperature)
        (-1.7 * rows.loss(*stats, rows.batch).sum()).backward()
    for got, leaf in zip(grads, [leaf for leaf in (h, w, b) if leaf is not None], strict=True):
        assert_close(got, leaf.grad, 2e-6)


@dataclasses.dataclass
class Margins:
    margin: torch.Tensor
    unused: torch.Tensor | None = None


def test_any_function_of_log_prob_and_entropy_is_a_loss():
    """A hinge on log p and a pull of the entropy, neither of which is among ours."""
    hidden, weight, target, _, rows = problem(150, 37, 12, scale=2.0)

    def loss(logp, entropy, batch):
        assert batch.unused is None
        return (batch.margin - logp).clamp(min=0) ** 2 + 0.1 * (entropy - 1).square() * (logp > -3)

    h, w = leaves(hidden, weight)
    out = token_loss(h, w, target, loss, Margins(rows.old_logp))
    out.loss.backward()
    h64, w64 = leaves(hidden, weight, dtype=torch.float64)
    stats = dense_stats(h64, w64, target)
    loss(*stats, Margins(rows.old_logp.double())).sum().backward()
    assert_close(h.grad, h64.grad)
    assert_close(w.grad, w64.grad)
    assert torch.equal(out.has_gradient, (h64.grad != 0).any(1)) and 0 < out.has_gradient.sum() < 150


def test_which_tokens_have_a_gradient():
    hidden, weight, target, _, rows = problem(400, 20, 8, scale=2.0)
    out = fused_loss(hidden.requires_grad_(), weight, target, rows)
    ratio = (out.logp - rows.old_logp).exp()
    positive, negative = rows.advantage > 0, rows.advantage < 0
    clips = positive & (ratio > 1.2), negative & (ratio < 0.8), negative & (ratio > 3)
    masked = out.logp.exp() > 0.2
    assert all((~rows.observation & case).any() for case in clips)
    assert (rows.observation & masked).any() and (rows.observation & ~masked).any()
    clipped = clips[0] | clips[1] | clips[2]
    learns = torch.where(rows.observation, ~masked, ~clipped & (rows.advantage != 0))
    assert torch.equal(out.has_gradient, learns & (rows.weight != 0))


def test_the_kl_clamp_stops_its_gradient_and_huge_ratios_stay_finite():
    hidden, weight, target, _, rows = problem(11, 11, 4, kl_coef=0.5)
    zero, gap = torch.zeros(11), torch.tensor([0, 0, 0, 0, 9, 95, -30, -200.0, 0, 0, 0])
    advantage = torch.tensor([0.0] * 8 + [1.0, 0.0, -1.0])
    old = torch.where(torch.arange(11) < 8, rows.old_logp, -500.0)
    rows = rows.replace(
        observation=zero.bool(), weight=zero + 1, advantage=advantage, ref_logp=rows.sampled_logp + 1 + gap
    )
    rows = rows.replace(old_logp=old)
    out, (d_hidden, _) = fused(hidden, weight, target, rows)
    assert out.has_gradient[:8].tolist() == [True] * 4 + [False] * 4 and (d_hidden[4:8] == 0).all()
    torch.testing.assert_close(out.token_loss[4:8], zero[:4] + 5)
    assert_close(d_hidden, dense(hidden, weight, target, rows)[1][0])
    no_kl = dataclasses.replace(rows, options={})
    out, (d_hidden, _) = fused(hidden, weight, target, no_kl)
    torch.testing.assert_close(out.token_loss[8:], torch.tensor([-1.2, 0.0, 3.0]))
    assert (d_hidden[8:] == 0).all()


def test_gce_lies_between_ce_and_mae():
    hidden, weight, target, _, rows = problem(150, 37, 12, scale=2.0, kl_coef=0.1)

    def of(loss, **q):
        out, grads = fused(hidden, weight, target, dataclasses.replace(rows, options={"wm": loss, **q}))
        return out.token_loss, *grads

    assert all(map(torch.equal, of("gce", q=1.0), of("mae")))
    for got, want in zip(of("gce", q=1e-3), of("ce"), strict=True):
        assert_close(got, want, 2e-2)  # of order q log(p)^2
    learned = rows.observation & (rows.weight > 0)
    assert (of("mae")[0] < of("gce")[0])[learned].all() and (of("gce")[0] < of("ce")[0])[learned].all()


@pytest.mark.parametrize("name", ["clip", "everything", "mae", "gce"])
def test_bf16_error_is_at_most_twice_that_of_plain_torch(name):
    hidden, weight, target, _, rows = problem(200, 301, 64, scale=2.0, **OPTIONS[name])
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    reference, want = dense(hidden, weight, target, rows)
    _, naive = dense(hidden, weight, target, rows, dtype=torch.bfloat16)
    out, got = fused(hidden, weight, target, rows)
    assert_close(out.logp, reference[2])
    assert_close(out.loss, reference[0])
    for g, n, w in zip(got, naive, want, strict=True):
        assert g.dtype == torch.bfloat16
        assert (g - w).abs().max() <= 2 * (n - w).abs().max() + 1e-4


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 64])
def test_chunks_change_nothing_but_rounding_and_runs_nothing(monkeypatch, rows_per_chunk):
    hidden, weight, target, bias, rows = problem(100, 333, 8, bias=True, **OPTIONS["everything"])
    whole, whole_grads = fused(hidden, weight, target, rows, bias)
    set_chunk_rows(monkeypatch, rows_per_chunk, vocabulary=333)
    with LargestTensor() as largest:
        split, split_grads = fused(hidden, weight, target, rows, bias)
    assert largest.numel <= max(rows_per_chunk * 333, 333 * 8) < 100 * 333  # full logits are never allocated
    again, again_grads = fused(hidden, weight, target, rows, bias)
    assert all(map(torch.equal, (again.loss, *again_grads), (split.loss, *split_grads)))
    for ours, theirs in zip((*split, *split_grads), (*whole, *whole_grads), strict=True):
        assert_close(ours, theirs, 1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    T=st.integers(0, 40),
    V=st.integers(1, 70),
    D=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 0.5, 4.0, 60.0]),
    name=st.sampled_from(list(OPTIONS)),
    temperature=st.sampled_from([0.4, 1.0, 2.0]),
)
def test_invariants_hold_for_any_shape(T, V, D, seed, scale, name, temperature):
    hidden, weight, target, _, rows = problem(T, V, D, seed=seed, scale=scale, **OPTIONS[name])
    bias = torch.zeros(V)
    out, (d_hidden, d_weight, d_bias) = fused(hidden, weight, target, rows, bias, temperature)
    assert_invariants(out, d_hidden, d_bias, V)
    if scale < 60:  # at |z| in the hundreds float32 logits may fall on the other side of a clip
        _, expected = dense(hidden, weight, target, rows, bias, temperature)
        for got, want in zip((d_hidden, d_weight, d_bias), expected, strict=True):
            assert_close(got, want, 1e-4)


@pytest.mark.parametrize("upstream", [1.0, -0.3])
def test_backward_hands_over_its_gradients_once_unless_the_graph_is_kept(upstream):
    hidden, weight, target, _, rows = problem(40, 31, 8)
    (_, want), (h, w) = fused(hidden, weight, target, rows, upstream=upstream), leaves(hidden, weight)
    loss = upstream * fused_loss(h, w, target, rows).loss
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert_close(h.grad, times * want[0], 1e-6)
        assert_close(w.grad, times * want[1], 1e-6)
    assert_close(torch.autograd.grad(loss, w)[0], want[1], 1e-6)
    out = fused_loss(h, w, target, rows)
    torch.autograd.grad(out.loss, w)
    with pytest.raises(RuntimeError, match="second time"):
        out.loss.backward()


def test_tied_weights_receive_both_gradients_and_micro_batches_add_up():
    _, weight, target, _, rows = problem(40, 31, 8)
    ids, (tied,), (expected,) = torch.arange(40) % 31, leaves(weight), leaves(weight, dtype=torch.float64)
    for part in (slice(0, 30), slice(30, 40)):
        hidden = torch.nn.functional.embedding(ids[part], tied)
        fused_loss(hidden, tied, target[part], rows.take(part)).loss.backward()
    dense_loss(expected[ids], expected, target, rows)[0].backward()
    assert_close(tied.grad, expected.grad)


def test_only_wanted_gradients_are_formed():
    hidden, weight, target, _, rows = problem(40, 31, 8)
    whole, (d_hidden, d_weight) = fused(hidden, weight, target, rows)
    (h,), (w,) = leaves(hidden), leaves(weight)
    fused_loss(h, weight, target, rows).loss.backward()
    fused_loss(hidden, w, target, rows).loss.backward()
    assert torch.equal(h.grad, d_hidden) and torch.equal(w.grad, d_weight)
    with torch.no_grad():
        assert not fused_loss(h, w, target, rows).loss.requires_grad
    frozen = fused_loss(hidden, weight, target, rows)
    assert not frozen.loss.requires_grad and torch.equal(frozen.has_gradient, whole.has_gradient)
    assert not fused_loss(h, w, target, rows).logp.requires_grad


def test_layouts_and_autocast_change_nothing():
    hidden, weight, target, _, rows = problem(40, 31, 8)
    expected, grads = fused(hidden, weight, target, rows)
    padded = torch.stack([target, target], 1)[:, 0]
    out, strided = fused(hidden.t().contiguous().t(), weight.t().contiguous().t(), padded, rows)
    assert_close(out.loss, expected.loss, 1e-6)
    assert all(assert_close(a, b, 1e-6) is None for a, b in zip(strided, grads, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, under = fused(hidden, weight, target, rows)
    assert torch.equal(out.loss, expected.loss) and all(map(torch.equal, under, grads))


@pytest.mark.parametrize("T", [0, 1, 5])
def test_batches_without_a_gradient(T):
    hidden, weight, target, _, rows = problem(T, 31, 8)
    out, grads = fused(hidden, weight, target, rows.replace(weight=torch.zeros(T)))
    assert out.loss.item() == 0 and not out.has_gradient.any()
    assert [g.shape for g in grads] == [hidden.shape, weight.shape] and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("observation", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_nan_reaches_the_loss_and_the_gradient(name, observation):
    hidden, weight, target, _, rows = problem(6, 31, 8, **OPTIONS[name])
    rows = rows.replace(observation=torch.full((6,), observation), weight=torch.ones(6))
    hidden[2, 3] = torch.nan
    out, (d_hidden, d_weight) = fused(hidden, weight, target, rows)
    assert out.logp[2].isnan() and out.entropy[2].isnan()
    assert out.loss.isnan() and d_weight.isnan().any() and d_hidden[2].isnan().any()


def with_value(tensor, position, value):
    tensor = tensor.clone()
    tensor[position] = value
    return tensor


ERRORS = {
    "hidden must be [T, D]": lambda h, w, y, r: (h[None], w, y, r),
    "hidden must be float32": lambda h, w, y, r: (h.double(), w.double(), y, r),
    "weight must be [V, D]": lambda h, w, y, r: (h, w[:, :3], y, r),
    "weight must be torch.float32": lambda h, w, y, r: (h, w.bfloat16(), y, r),
    "weight must be on cpu": lambda h, w, y, r: (h, w.to("meta"), y, r),
    "target must have shape": lambda h, w, y, r: (h, w, y[:3], r),
    "target must be torch.int64": lambda h, w, y, r: (h, w, y.int(), r),
    "target must be in [0, 11)": lambda h, w, y, r: (h, w, with_value(y, 1, 11), r),
    "batch.weight must have shape": lambda h, w, y, r: (h, w, y, r.replace(weight=r.weight[:2])),
    "batch.weight must be finite": lambda h, w, y, r: (h, w, y, r.replace(weight=r.weight + torch.inf)),
    "batch.old_logp must be torch.float32": lambda h, w, y, r: (h, w, y, r.replace(old_logp=r.old_logp.double())),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    hidden, weight, target, _, rows = problem(4, 11, 6)
    fused_loss(hidden, weight, target, rows)
    with pytest.raises(ValueError) as error:
        fused_loss(*ERRORS[message](hidden, weight, target, rows))
    assert message in str(error.value)


def test_a_loss_of_another_shape_and_a_batch_that_is_none_are_refused():
    hidden, weight, target, _, rows = problem(4, 11, 6)
    with pytest.raises(ValueError, match=r"one float32 number for each token, \[4\], got torch.float32 of shape \[\]"):
        token_loss(hidden, weight, target, lambda logp, entropy, batch: -logp.mean(), rows.batch)
    with pytest.raises(ValueError, match="batch must be a dataclass of tensors, got dict"):
        token_loss(hidden, weight, target, rows.loss, {})
    with pytest.raises(ValueError, match=r"known backends: .*torch"):
        fused_loss(hidden, weight, target, rows, backend="nope")


@pytest.mark.skipif(not PARITY.exists(), reason="parity data of the reference code is not on this machine")
@pytest.mark.parametrize("case", range(8))
def test_clipped_surrogate_and_k3_match_the_reference_code(case):
    """Token-mean losses and their gradients by logp, of the functions that the trainer hands to the head."""
    data = json.loads(PARITY.read_text())[case]
    mask = torch.tensor(data["mask"]).flatten()
    values = {n: torch.tensor(data[n]).flatten() for n in ("logp", "old_logp", "ref_logp", "advantage")}
    weight, logp, expected = mask / mask.sum(), values.pop("logp").requires_grad_(), data["expected"]
    batch = losses.TokenBatch(weight=weight, observation=mask < 0, sampled_logp=weight, **values)
    entropy = torch.zeros_like(mask)
    policy, kl = losses.ppo(logp, entropy, batch), losses.k3(logp, batch)
    assert (policy * weight).sum().item() == pytest.approx(expected["policy_loss_token_mean"], abs=1e-5)
    assert (kl * weight).sum().item() == pytest.approx(expected["k3_token_mean"], abs=1e-5)
    (a,) = torch.autograd.grad((policy * weight).sum(), logp)
    clipped = (((a == 0) & (batch.advantage != 0)) * weight).sum().item()
    assert clipped == pytest.approx(expected["clip_frac"] + expected["clip_frac_dual"], abs=1e-6)
    torch.testing.assert_close(a, torch.tensor(expected["d_policy_loss_d_logp"]).flatten(), rtol=1e-5, atol=1e-6)
    (a,) = torch.autograd.grad((kl * weight).sum(), logp)
    torch.testing.assert_close(a, torch.tensor(expected["d_k3_d_logp"]).flatten(), rtol=1e-4, atol=1e-6)
