"""Differentiable log-probabilities and entropies against float64 autograd."""

import pytest
import torch
from dense_reference import dense_stats, problem, set_chunk_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import paw_kernels._backend
from paw_kernels import _rows, _torch, token_stats


@pytest.fixture(params=["torch", "cpu"], scope="module", autouse=True)
def backend(request):
    """Every test here runs with each backend of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paw_kernels._backend, "best_backend", lambda device, dtype: request.param)
        yield request.param


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def assert_close(got, want, tolerance=1e-5):
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance * scale)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    T=st.integers(0, 40),
    V=st.integers(1, 70),
    D=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    bias=st.booleans(),
    temperature=st.sampled_from([0.4, 1.0, 2.0]),
    rows_per_chunk=st.sampled_from([1, 7, 100]),
)
def test_statistics_and_gradients_match_float64(T, V, D, seed, bias, temperature, rows_per_chunk):
    hidden, weight, target, offset, rows = problem(T, V, D, seed=seed, bias=bias, scale=3.0)
    h, w, b = leaves(hidden, weight, offset)
    h64, w64, b64 = leaves(*(None if x is None else x.double() for x in (hidden, weight, offset)))
    with pytest.MonkeyPatch.context() as patch:
        set_chunk_rows(patch, rows_per_chunk, vocabulary=V)
        logp, entropy = token_stats(h, w, target, bias=b, temperature=temperature)
        # Both upstream gradients, each zero on some rows: advantage and weight are zero now and then.
        ((logp * rows.advantage).sum() + (entropy * rows.weight).sum()).backward()
    logp64, entropy64 = dense_stats(h64, w64, target, b64, temperature)
    ((logp64 * rows.advantage).sum() + (entropy64 * rows.weight).sum()).backward()
    assert logp.dtype == entropy.dtype == torch.float32
    assert (logp <= 0).all() and (entropy >= 0).all()
    assert_close(logp, logp64)
    assert_close(entropy, entropy64)
    for got, want in ((h, h64), (w, w64), (b, b64)):
        if got is not None:
            assert_close(got.grad, want.grad, 5e-5)


def test_near_deterministic_rows_keep_relative_precision():
    hidden, weight = torch.eye(3) * 40, torch.eye(3)
    target = torch.arange(3)
    logp, entropy = token_stats(hidden, weight, target)
    z = (hidden.double() @ weight.double()).log_softmax(-1)
    assert (logp <= 0).all() and (entropy > 0).all()
    torch.testing.assert_close(entropy.double(), -(z.exp() * z).sum(-1), rtol=1e-4, atol=0)


def test_bf16_inputs_give_fp32_exact_statistics():
    hidden, weight, target, _, _ = problem(100, 301, 64, scale=4.0)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logp, entropy = token_stats(hidden, weight, target)
    logp64, entropy64 = dense_stats(hidden.double(), weight.double(), target)
    assert_close(logp, logp64, 2e-6)
    assert_close(entropy, entropy64, 2e-6)


def test_permuting_the_vocabulary_changes_nothing():
    hidden, weight, target, _, _ = problem(50, 101, 16)
    order = torch.randperm(101, generator=torch.Generator().manual_seed(1))
    permuted = token_stats(hidden, weight[order], order.argsort()[target])
    for got, want in zip(permuted, token_stats(hidden, weight, target), strict=True):
        assert_close(got, want, 1e-6)


def test_backward_recomputes_live_rows_only(monkeypatch):
    hidden, weight, target, _, _ = problem(50, 31, 8)
    (h,) = leaves(hidden)
    logp, _ = token_stats(h, weight, target)
    seen = []
    for rows in (_torch.TorchRows, _rows.NativeRows):

        def spy(self, x, *rest, forward=rows.forward):
            seen.append(len(x))
            return forward(self, x, *rest)

        monkeypatch.setattr(rows, "forward", spy)
    logp[10:13].sum().backward()
    assert seen == [3]
    assert (h.grad[:10] == 0).all() and (h.grad[13:] == 0).all() and (h.grad[10:13] != 0).any()


def test_nan_and_no_grad():
    hidden, weight, target, _, _ = problem(5, 31, 8)
    hidden[1, 0] = torch.nan
    h, w = leaves(hidden, weight)
    logp, entropy = token_stats(h, w, target)
    assert logp.isnan().tolist() == entropy.isnan().tolist() == [False, True, False, False, False]
    with torch.no_grad():
        assert not token_stats(h, w, target).logp.requires_grad


def test_errors_name_the_argument():
    hidden, weight, target, _, _ = problem(5, 31, 8)
    for bad in (-1, 31):
        with pytest.raises(ValueError, match=r"target must be in \[0, 31\)"):
            token_stats(hidden, weight, torch.full_like(target, bad))
    with pytest.raises(ValueError, match=r"bias must have shape \[31\]"):
        token_stats(hidden, weight, target, bias=torch.zeros(8))
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature must be positive"):
            token_stats(hidden, weight, target, temperature=temperature)
    with pytest.raises(ValueError, match=r"known backends: auto, .*torch"):
        token_stats(hidden, weight, target, backend="fast")
