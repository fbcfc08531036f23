"""Logits under a soft cap, z = softcap tanh(u / softcap) / temperature, against float64 autograd, on every backend."""

import math
from functools import partial

import pytest
import torch
from dense_reference import assert_close, dense_loss, dense_stats, fused_loss, problem

from paw_kernels import token_stats

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
CASES = {  # softcap, size of the hidden states, temperature
    "linear": (1000.0, 2.0, 1.0),
    "bent": (2.0, 2.0, 0.7),
    "saturated": (3.0, 30.0, 1.0),  # most logits within 1e-3 of the cap or its negative
    "near one-hot": (30.0, 40.0, 1.3),
}


def leaves(dtype, *tensors):
    return [None if t is None else t.detach().to(dtype, copy=True).requires_grad_() for t in tensors]


def assert_gradients(got, plain, want):
    """At most twice as far off as torch in the same dtype, plus 1e-5 or 1e-4."""
    for g, p, w in zip(got, plain, want, strict=True):
        floor = 1e-5 * w.abs().max().clamp(min=1) if g.dtype == torch.float32 else 1e-4
        assert (g - w).abs().max() <= 2 * (p - w).abs().max() + floor


@DTYPES
@pytest.mark.parametrize(("case", "bias"), [("bent", False), *((case, True) for case in CASES)])
def test_loss_and_gradients_match_float64(backend, case, bias, dtype):
    softcap, size, temperature = CASES[case]
    how = {"temperature": temperature, "softcap": softcap}
    hidden, weight, target, offset, rows = problem(
        30, 70, 16, bias=bias, scale=size, kl_coef=0.1, entropy_coef=0.05, wm="gce", **how
    )
    head = [None if t is None else t.to(dtype) for t in (hidden, weight, offset)]
    u = head[0].double() @ head[1].double().t() + (0 if offset is None else head[2].double())
    target[:15] = u.argmax(1)[:15]  # at the cap, and where the row is near one-hot the sure token
    assert case != "saturated" or (u.amax(1)[:15] > 2 * softcap).any()

    def gradients(of, loss):
        h, w, b = leaves(of, *head)
        out = loss(h, w, b)
        grads = torch.autograd.grad(out[0], [t for t in (h, w, b) if t is not None])
        return out, grads

    out, got = gradients(dtype, lambda h, w, b: fused_loss(h, w, target, rows, bias=b, backend=backend, **how))
    exact, want = gradients(torch.float64, lambda h, w, b: dense_loss(h, w, target, rows, b, **how))

    def in_torch(h, w, b):  # the loss in float32: its exponentials overflow float16
        logp, entropy = dense_stats(h, w, target, b, **how)
        return (rows.loss(logp.float(), entropy.float(), rows.batch).sum(),)

    plain = gradients(dtype, in_torch)[1]
    assert_close(out.loss, exact[0])
    assert_close(out.logp, exact[2], 4e-6)
    assert_close(out.entropy, exact[3], 4e-6)
    assert (out.logp <= 0).all() and (out.entropy >= 0).all()
    assert_gradients(got, plain, want)

    def pulled(of):
        """A loss of both statistics, as `of` computes them."""

        def loss(h, w, b):
            logp, entropy = of(h, w, target, bias=b, **how)
            return ((logp * rows.advantage).sum() + (entropy * rows.weight).sum(),)

        return loss

    got = gradients(dtype, pulled(partial(token_stats, backend=backend)))[1]
    want, plain = (gradients(of, pulled(dense_stats))[1] for of in (torch.float64, dtype))
    assert_gradients(got, plain, want)


@DTYPES
def test_an_unlikely_target_keeps_its_own_derivative(backend, dtype):
    """exp(z - max) of the target is 0 in the dtype, yet the whole pull is on it, times its 1 - tanh^2 and no other."""
    hidden = torch.zeros(2, 8)
    hidden[:, 0] = 1.0
    weight = torch.zeros(40, 8)
    weight[:, 0] = torch.linspace(-2, 34, 40)
    weight[3, 0] = -28.0
    target, how = torch.tensor([3, 3]), {"softcap": 30.0, "temperature": 0.25}
    (h,) = leaves(dtype, hidden)
    token_stats(h, weight.to(dtype), target, backend=backend, **how).logp.sum().backward()
    (h64,) = leaves(torch.float64, hidden)
    dense_stats(h64, weight.to(dtype).double(), target, **how)[0].sum().backward()
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=2e-5 if dtype == torch.float32 else 1e-2, atol=0)


def test_the_tanh_of_the_row_operations_is_accurate_everywhere(backend):
    """A row of one logit tells its own as the largest."""
    if backend != "cpu":
        pytest.skip("a row operation of csrc/ only")
    x = torch.cat([torch.logspace(-37, 2, 4000), torch.linspace(0.5, 0.6, 1000), torch.tensor([1e30, math.inf])])
    x = torch.cat([x, -x, torch.zeros(1)])
    top = torch.ops.paw_kernels.row_statistics(x[:, None].contiguous(), None, torch.zeros_like(x).long(), 1.0, 1.0)[2]
    torch.testing.assert_close(top.double(), x.double().tanh(), rtol=4e-7, atol=0)
    nan = torch.full((1, 1), torch.nan)
    assert all(t.isnan() for t in torch.ops.paw_kernels.row_statistics(nan, None, torch.tensor([0]), 1.0, 1.0)[:2])


def test_nan_reaches_the_row_and_no_other(backend):
    hidden, weight, target, _, _ = problem(5, 31, 8)
    hidden[1, 0] = torch.nan
    h, w = leaves(torch.float32, hidden, weight)
    logp, entropy = token_stats(h, w, target, softcap=5.0, backend=backend)
    (logp + entropy)[[0, 1]].sum().backward()
    assert logp.isnan().tolist() == entropy.isnan().tolist() == [False, True, False, False, False]
    assert h.grad.isnan().any(1).tolist() == [False, True, False, False, False] and w.grad.isnan().any()


def test_a_masked_token_is_a_logit_of_minus_the_cap(backend):
    """The cap comes after the bias, as the formula says: it does not mask."""
    hidden, weight, target, bias, _ = problem(20, 70, 16, bias=True)
    bias[5], target[0] = -math.inf, 5
    b64 = bias.double()
    b64[5] = -1e9
    for got, want in zip(
        token_stats(hidden, weight, target, bias=bias, softcap=3.0, backend=backend),
        dense_stats(hidden.double(), weight.double(), target, b64, softcap=3.0),
        strict=True,
    ):
        assert_close(got, want)


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.nan, math.inf])
def test_errors_name_argument_and_value(softcap):
    hidden, weight, target, _, rows = problem(5, 31, 8)
    message = f"softcap must be None, or positive and finite, got {softcap}"
    with pytest.raises(ValueError, match=message):
        token_stats(hidden, weight, target, softcap=softcap)
    with pytest.raises(ValueError, match=message):
        fused_loss(hidden, weight, target, rows, softcap=softcap)
