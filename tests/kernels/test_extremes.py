"""Where numbers are very large or very small: every backend against float64."""

import math

import pytest
import torch
from dense_reference import Rows, dense_loss, dense_stats, fused_loss, problem, set_chunk_rows

from paw.algo.loss import TokenBatch
from paw_kernels import _head, _rows, token_stats


@pytest.mark.parametrize("exponent", [-10, -20])
def test_huge_logits_over_a_tiny_temperature_keep_every_digit(backend, exponent):
    """The difference to the largest logit is taken before it is scaled: z rounded to float32 is off by 2^-24 |z|."""
    step = 2.0**exponent
    weight = (
        1000 * step * 2**10 + step * torch.randint(12, (300, 1), generator=torch.Generator().manual_seed(0))
    ).float()
    hidden, target = torch.ones(3, 1), torch.tensor([0, 7, 299])
    results = []
    for dtype in (torch.float32, torch.float64):
        w = weight.to(dtype, copy=True).requires_grad_()
        of = {"temperature": 0.7 * step}
        if dtype == torch.float32:
            logp, entropy = token_stats(hidden, w, target, backend=backend, **of)
        else:
            logp, entropy = dense_stats(hidden.double(), w, target, **of)
        (logp * torch.tensor([1.0, -2.0, 0.5]) + 0.3 * entropy).sum().backward()
        results.append((logp.detach(), entropy.detach(), w.grad))
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).abs().max() <= 2e-6 * want.abs().max()


FLOAT16 = {  # size of the hidden states, row weight, advantage, temperature, upstream factor
    "large hidden states": (100.0, 1.0, 1.0, 100.0, 1.0),
    "weights below the smallest number": (1.0, 1e-9, 1.0, 1.0, 1e8),
    "a large advantage": (1.0, 1.0, 1e6, 1.0, 1e-6),
    "a small advantage": (1.0, 1.0, 1e-7, 1.0, 1e4),
    "a loss scale": (1.0, 1e-5, 1.0, 1.0, 65536.0),
    "a tiny temperature": (1e-3, 1e-4, 1.0, 1e-4, 1.0),
    "a huge temperature": (1.0, 1.0, 1.0, 1e4, 1e3),
}


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["float32 matmuls", "float16 matmuls"])
def matmuls(request, backend, monkeypatch):
    """As on a GPU, the gradient matmuls of the cuda backend take float16; of others here they take float32."""
    if not request.param:
        return
    if torch.ops.paw_kernels is not getattr(torch.ops, "paw_on_cpu", None):
        pytest.skip("the kernels of csrc/*.cu only")

    class Half(_rows.NativeRows):
        def __init__(self, *args):
            super().__init__(*args)
            self.head = self.head.half()

    def add_product(total, left, right, *, add, factor):
        assert left.dtype == right.dtype == torch.float16 and total.dtype == torch.float32
        total.copy_((total if add else 0) + factor * (left.float() @ right.float()))

    def product(left, right, out=None):
        assert left.dtype == right.dtype
        return torch.mm(left.float(), right.float(), out=out)

    monkeypatch.setattr(_rows, "NativeRows", Half)
    monkeypatch.setattr(_head, "_add_product", add_product)
    monkeypatch.setattr(_head, "float32_product", product)
    monkeypatch.setattr(_rows, "logits", lambda x, head, out: product(x.float(), head.t().float(), out[: len(x)]))


@pytest.mark.parametrize("chunks", [False, True], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("case", FLOAT16)
def test_float16_gradients_are_those_of_the_loss(backend, matmuls, case, chunks, monkeypatch):
    size, row_weight, advantage, temperature, factor = FLOAT16[case]
    T, V, D, of = 50, 70, 16, {"temperature": temperature}
    hidden, weight, target, bias, rows = problem(T, V, D, bias=True, **of)
    hidden, weight, bias = ((0.1 * t).half() for t in (10 * size * hidden, weight, temperature * bias))
    rows = Rows(rows.batch, {"wm": "ce", "entropy_coef": 0.1}).replace(
        weight=row_weight * torch.logspace(0, -6, T),  # the lightest a millionth of the heaviest
        advantage=advantage * rows.advantage,
        old_logp=dense_stats(hidden.double(), weight.double(), target, bias.double(), **of)[0].float(),
    )
    if chunks:
        set_chunk_rows(monkeypatch, 20, vocabulary=V)
        if backend == "triton":
            from triton_interpreted import backend as triton

            monkeypatch.setattr(triton, "CHUNK_BYTES", 1)

    def gradients(dtype, loss):
        head = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight, bias)]
        return torch.autograd.grad(factor * loss(*head), head)

    for ours, dense in (
        (
            lambda h, w, b: fused_loss(h, w, target, rows, bias=b, backend=backend, **of).loss,
            lambda h, w, b: dense_loss(h, w, target, rows, b, **of)[0],
        ),
        (
            lambda h, w, b: pulled(token_stats(h, w, target, bias=b, backend=backend, **of), rows),
            lambda h, w, b: pulled(dense_stats(h, w, target, b, **of), rows),
        ),
    ):
        assert_float16(gradients(torch.float16, ours), gradients(torch.float64, dense))


def pulled(statistics, rows):
    return ((statistics[0] * rows.advantage + 0.3 * statistics[1]) * rows.weight).sum()


def assert_float16(got, want):
    """To some steps of float16, in each row of hidden by itself; from 6e-8 on, its smallest number."""
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float16 and 1e-4 < w.abs().max() < 65_504
        size = w.abs().amax(-1, keepdim=True) if g is got[0] else w.abs().max()
        torch.testing.assert_close(((g - w) / (size + 1e-4)).abs().max().item(), 0.0, rtol=0, atol=4e-3)


def test_a_mean_over_many_tokens_does_not_overflow_float16(backend):
    hidden, target = torch.full((128, 8), 640.0), torch.zeros(128).long()
    weight = 0.01 / 32 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    each = torch.full((128,), 1 / 128)
    rows = Rows(TokenBatch(each, each > 0, each, each, each), {"wm": "ce"})
    h, w, b = (t.half().requires_grad_() for t in (hidden, weight, torch.zeros(16)))
    fused_loss(h, w, target, rows, bias=b, backend=backend).loss.backward()
    h64, w64, b64 = (t.detach().double().requires_grad_() for t in (h, w, b))
    dense_loss(h64, w64, target, rows, b64)[0].backward()
    assert 18 * 32 < w64.grad.abs().max() < 20 * 32  # of each token; 128 of them are beyond 65,504
    for t, t64 in ((h, h64), (w, w64), (b, b64)):
        torch.testing.assert_close(t.grad.double(), t64.grad, rtol=2e-3, atol=1e-7)


MASKS = {"a few": [3, 40, 69], "a whole tile": list(range(32, 64)), "the first block": list(range(2100))}


@pytest.mark.parametrize("softly", [False, True], ids=["-inf", "the lowest number"])
@pytest.mark.parametrize("name", MASKS)
def test_masked_tokens_take_no_part(backend, name, softly):
    """Bias of -inf: statistics and gradients of the others; a masked target has log p = -inf and a finite gradient."""
    mask = torch.tensor(MASKS[name])
    if backend == "triton":  # blocks of 32 there, and seconds for thousands of columns
        mask = mask[mask < 70]
        mask = mask[:64]
    V = 2200 if len(mask) > 70 else 70
    hidden, weight, target, bias, rows = problem(20, V, 16, bias=True, scale=2.0, temperature=0.7)
    open_ = torch.ones(V, dtype=torch.bool)
    open_[mask] = False
    target = open_.nonzero()[:, 0][target % open_.sum()]
    bias[mask] = torch.finfo(torch.float32).min if softly else -math.inf

    def run(of, dtype, target, bias, **how):
        h, w = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
        b = bias.to(dtype, copy=True).requires_grad_()
        logp, entropy = of(h, w, target, bias=b, temperature=0.7, **how)
        ((logp * rows.advantage).sum() + (entropy * rows.weight).sum()).backward()
        return logp.detach(), entropy.detach(), h.grad, w.grad, b.grad

    got = run(token_stats, torch.float32, target, bias, backend=backend)
    want = run(dense_stats, torch.float64, target, bias.clamp(min=-1e9))  # the reference itself would be NaN
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=0, atol=2e-5 * max(1.0, w.abs().max().item()))
    assert (got[3][mask] == 0).all() and (got[4][mask] == 0).all()

    target[3] = mask[-1]
    logp, entropy, *gradients = run(token_stats, torch.float32, target, bias, backend=backend)
    assert logp[3] == -math.inf or (softly and logp[3] < -1e38)
    assert logp[[0, 1, 2, *range(4, 20)]].isfinite().all()
    torch.testing.assert_close(entropy, got[1])
    want = run(dense_stats, torch.float64, target, bias.clamp(min=-1e9))[2:]
    for g, w in zip(gradients, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=0, atol=2e-5 * max(1.0, w.abs().max().item()))


@pytest.mark.parametrize("loss", ["cmae", "ce"])
def test_the_loss_of_a_masked_target(backend, loss):
    """Infinite where the loss is, and nowhere NaN: a ratio of 0, a clamped KL, an observation of p = 0."""
    hidden, weight, target, bias, rows = problem(20, 70, 16, bias=True, kl_coef=0.1, wm=loss)
    bias[target[4]] = -math.inf
    rows.observation[4], rows.weight[4], rows.advantage[4] = loss == "ce", 1.0, 1.0
    h, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
    out = fused_loss(h, w, target, rows, bias=b, backend=backend)
    out.loss.backward()
    assert out.logp[4] == -math.inf and (out.entropy >= 0).all()
    assert out.token_loss[4].item() == pytest.approx(1.0) if loss == "cmae" else out.token_loss[4] == math.inf
    assert all(t.grad.isfinite().all() for t in (h, w, b))


def test_a_wholly_masked_vocabulary_has_no_distribution(backend):
    hidden, weight, target, _, _ = problem(5, 70, 16)
    h, w = (t.clone().requires_grad_() for t in (hidden, weight))
    logp, entropy = token_stats(h, w, target, bias=torch.full((70,), -math.inf), backend=backend)
    (logp + entropy).sum().backward()
    assert logp.isnan().all() and entropy.isnan().all() and h.grad.isnan().all()
