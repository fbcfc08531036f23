"""The Triton backend against float64: in Triton's interpreter on the CPU, and the same on a GPU with `-m gpu`."""

import pytest
import torch
from dense_reference import assert_close, assert_invariants, dense_loss, dense_stats, fused_loss, leaves, problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_interpreted import backend as _triton

from paw_kernels import token_stats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
OPTIONS = {
    "clip": {},
    "mae": {"wm": "mae"},
    "ce": {"wm": "ce"},
    "gce": {"wm": "gce", "q": 0.4},
    "everything": {"kl_coef": 0.1, "entropy_coef": 0.05, "rho": 0.05, "clip_low": 0.1, "dual_clip": 1.5},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the kernels run: in the interpreter with its small blocks, or on a GPU with those of its architecture."""
    if (request.param == "cpu") != _triton.INTERPRETED:
        pytest.skip("no CUDA device" if _triton.INTERPRETED else "the interpreter is for machines without a GPU")
    if _triton.INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device(request.param)


def to(device, *tensors, dtype=None):
    return [None if t is None else t.to(device, dtype if t.is_floating_point() else None) for t in tensors]


def fused(hidden, weight, target, rows, bias=None, temperature=1.0):
    h, w, b = leaves(hidden, weight, bias)
    on = rows.to(hidden.device, torch.float32)
    out = fused_loss(h, w, target, on, bias=b, temperature=temperature, backend="triton")
    out.loss.backward()
    return out, [x.grad for x in (h, w, b) if x is not None]


def dense(hidden, weight, target, rows, bias=None, temperature=1.0, dtype=torch.float64):
    h, w, b = leaves(*to("cpu", hidden, weight, bias, dtype=dtype))
    out = dense_loss(h, w, target.cpu(), rows, b, temperature)
    out[0].backward()
    return out, [x.grad for x in (h, w, b) if x is not None]


# T, V, D: nothing divides a block; half a tile of columns left over; exactly one tile; the smallest of everything.
SHAPES = [(37, 130, 24), (20, 48, 16), (16, 32, 32), (33, 97, 13), (1, 1, 1), (3, 1, 8), (1, 70, 8)]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_statistics_and_gradients_match_float64(device, dtype, shape):
    temperature = 0.7
    hidden, weight, target, bias, rows = problem(
        *shape, bias=True, scale=2.0, temperature=temperature, **OPTIONS["everything"]
    )
    target[0] = shape[1] - 1
    hidden, weight, bias = to(device, hidden, weight, bias, dtype=dtype)
    target = target.to(device)
    out, grads = fused(hidden, weight, target, rows, bias, temperature)
    (loss, _, logp, entropy), expected = dense(hidden, weight, target, rows, bias, temperature)
    assert_close(out.loss, loss)
    assert_close(out.logp, logp, 2e-6)
    assert_close(out.entropy, entropy, 2e-6)
    _, naive = dense(hidden, weight, target, rows, bias, temperature, dtype)
    for got, plain, want in zip(grads, naive, expected, strict=True):
        assert got.dtype == dtype
        if dtype == torch.float32:
            assert_close(got, want)
        else:
            assert (got.cpu() - want).abs().max() <= 2 * (plain - want).abs().max() + 1e-4


@pytest.mark.parametrize("name", OPTIONS)
def test_every_loss_at_larger_size(device, name):
    scale = 1 if device.type == "cpu" else 12  # several tiles for each program either way
    shape = 40 * scale, 130 * scale, 24 * scale
    hidden, weight, target, _, rows = problem(*shape, scale=2.0, **OPTIONS[name])
    hidden, weight, target = to(device, hidden, weight, target)
    out, grads = fused(hidden, weight, target, rows)
    (loss, row_loss, *_), expected = dense(hidden, weight, target, rows)
    assert_close(out.loss, loss)
    assert_close(out.token_loss, row_loss)
    assert (grads[0][~out.has_gradient] == 0).all()
    for got, want in zip(grads, expected, strict=True):
        assert_close(got, want)


# On a GPU every new D is compiled.
@settings(
    max_examples=15 if _triton.INTERPRETED else 8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    T=st.integers(0, 40),
    V=st.integers(1, 70),
    D=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 0.5, 4.0, 60.0]),
    name=st.sampled_from(list(OPTIONS)),
    temperature=st.sampled_from([0.4, 1.0, 2.0]),
)
def test_invariants_hold_for_any_shape(device, T, V, D, seed, scale, name, temperature):
    hidden, weight, target, _, rows = problem(T, V, D, seed=seed, scale=scale, **OPTIONS[name])
    hidden, weight, target, bias = to(device, hidden, weight, target, torch.zeros(V))
    out, (d_hidden, d_weight, d_bias) = fused(hidden, weight, target, rows, bias, temperature)
    assert_invariants(out, d_hidden, d_bias, V)
    if scale < 60:  # at |z| in the hundreds float32 logits may fall on the other side of a clip
        _, expected = dense(hidden, weight, target, rows, bias, temperature)
        for got, want in zip((d_hidden, d_weight, d_bias), expected, strict=True):
            assert_close(got, want, 1e-4)


@pytest.mark.parametrize("live", [[], [39], [0, 17, 38], list(range(1, 40)), list(range(40))], ids=len)
def test_any_number_of_live_rows(device, live):
    """Packed in place, gradients come from the rows they belong to."""
    hidden, weight, target, _, _ = problem(40, 70, 8)
    upstream = torch.zeros(40)
    upstream[live] = torch.randn(len(live), generator=torch.Generator().manual_seed(1))
    h, w = leaves(*to(device, hidden, weight))
    logp, entropy = token_stats(h, w, target.to(device), backend="triton")
    ((logp + 0.3 * entropy) * upstream.to(device)).sum().backward()
    h64, w64 = leaves(hidden.double(), weight.double())
    logp64, entropy64 = dense_stats(h64, w64, target)
    ((logp64 + 0.3 * entropy64) * upstream).sum().backward()
    dead = [t for t in range(40) if t not in live]
    assert (h.grad[dead] == 0).all()
    assert_close(h.grad, h64.grad)
    assert_close(w.grad, w64.grad)


@DTYPES
@pytest.mark.parametrize("D", [16, 21], ids=["descriptors", "pointers"])
def test_rows_with_nan_stay_alone(device, dtype, D):
    hidden, weight, target, _, _ = problem(40, 70, D)
    hidden[21, 0] = torch.nan  # the first that a row read beyond its end would meet
    h, w = leaves(*to(device, hidden, weight, dtype=dtype))
    logp, entropy = token_stats(h, w, target.to(device), backend="triton")
    rows = torch.arange(40, device=device)
    assert logp.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[21]]
    (logp * (rows % 2)).sum().backward()
    assert h.grad[21].isnan().all()
    assert h.grad[rows != 21].isfinite().all()
    assert w.grad.isnan().all()


@DTYPES
@pytest.mark.parametrize("peak", [3, 20, 40, 69])
def test_a_logit_far_above_the_others_anywhere_in_the_row(device, dtype, peak):
    """Neither half of a tile, nor one tile for another, may overflow or vanish."""
    hidden, weight, target, _, _ = problem(20, 70, 16, scale=0.5)
    hidden[:, 0], weight[peak, 0] = 16.0, 20.0
    target[::2] = peak
    h, w = leaves(*to(device, hidden, weight, dtype=dtype))
    logp, entropy = token_stats(h, w, target.to(device), backend="triton")
    (logp + entropy).sum().backward()
    h64, w64 = leaves(*to("cpu", h, w, dtype=torch.float64))
    logp64, entropy64 = dense_stats(h64, w64, target)
    (logp64 + entropy64).sum().backward()
    assert_close(logp, logp64, 2e-6)
    assert_close(entropy, entropy64, 2e-6)
    assert_close(h.grad, h64.grad, 1e-5 if dtype == torch.float32 else 1e-2)
    assert_close(w.grad, w64.grad, 1e-5 if dtype == torch.float32 else 1e-2)


def test_sure_tokens_keep_their_gradient_in_bfloat16(device):
    """1 - p of the target is exact: an error of half a bfloat16 step of p would be as large as 1 - p is here."""
    hidden = torch.tensor([[8.0, 0, 0, 0, 0, 0, 0, 0]])
    weight = torch.zeros(40, 8)
    weight[3, 0] = 1.25  # z = 10, 39 others at 0: 1 - p = 0.00177
    h, w = leaves(*to(device, hidden, weight, dtype=torch.bfloat16))
    token_stats(h, w, torch.tensor([3], device=device), backend="triton").logp.sum().backward()
    h64, w64 = leaves(hidden.double(), weight.double())
    dense_stats(h64, w64, torch.tensor([3]))[0].sum().backward()
    torch.testing.assert_close(w.grad[3, 0].double().cpu(), w64.grad[3, 0], rtol=0.005, atol=0)


def test_chunks_change_nothing_but_rounding(device, monkeypatch):
    hidden, weight, target, bias, rows = problem(40, 70, 8, bias=True, **OPTIONS["everything"])
    hidden, weight, target, bias = to(device, hidden, weight, target, bias)
    whole, whole_grads = fused(hidden, weight, target, rows, bias)
    stats = token_stats(hidden, weight, target, bias=bias, backend="triton")
    monkeypatch.setattr(_triton, "CHUNK_BYTES", 1)
    monkeypatch.setattr(_triton, "STATISTICS_BYTES", 1)
    split, split_grads = fused(hidden, weight, target, rows, bias)
    assert torch.equal(split.logp, whole.logp) and torch.equal(split.entropy, whole.entropy)
    for got, want in zip(token_stats(hidden, weight, target, bias=bias, backend="triton"), stats, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(split_grads, whole_grads, strict=True):
        assert_close(got, want, 1e-6)


@DTYPES
def test_repeated_runs_and_both_passes_agree_bit_for_bit(device, dtype):
    hidden, weight, target, bias, rows = problem(40, 70, 16, bias=True, **OPTIONS["everything"])
    hidden, weight, target, bias = to(device, hidden, weight, target, bias, dtype=dtype)
    first, grads = fused(hidden, weight, target, rows, bias)
    again, grads_again = fused(hidden, weight, target, rows, bias)
    assert torch.equal(first.loss, again.loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    stats = token_stats(hidden, weight, target, bias=bias, backend="triton")
    assert torch.equal(first.logp, stats.logp) and torch.equal(first.entropy, stats.entropy)


@pytest.mark.parametrize("layout", ["columns", "strided", "offset"])
def test_any_layout_of_weight_and_hidden(device, layout):
    """Where tensor descriptors cannot go, pointers do."""
    hidden, weight, target, _, rows = problem(20, 70, 16)
    hidden, weight, target = to(device, hidden, weight, target)
    want, want_grads = fused(hidden, weight, target, rows)

    def lay(x):
        if layout == "columns":
            return x.t().contiguous().t()
        if layout == "strided":
            return torch.stack([x, x], 1)[:, 0]
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)

    h, w = (lay(x).requires_grad_() for x in (hidden, weight))
    assert _triton.tiles_for(w, None).tma == (layout == "strided" and _triton.tiles_for(weight, None).tma)
    out = fused_loss(h, w, target, rows.to(device, torch.float32), backend="triton")
    out.loss.backward()
    assert_close(out.loss, want.loss, 1e-6)
    assert_close(h.grad, want_grads[0], 1e-6)
    assert_close(w.grad, want_grads[1], 1e-6)


@pytest.mark.parametrize(("V", "D"), [(128_256, 8192), (151_936, 2048), (152_064, 3584), (152_064, 8192)])
def test_chunks_are_few_equal_and_flat_in_T(monkeypatch, V, D):
    """4,096 rows are one chunk at the vocabularies of Llama 3 and Qwen2.5, and no chunk takes 1.5 GiB."""
    for tiles in ("interpreter", 2), ("interpreter", 4):
        monkeypatch.setitem(_triton.TILES, tiles, _triton.TILES["sm_90", tiles[1]])
    monkeypatch.setattr(_triton, "INTERPRETED", True)
    weight = torch.empty(V, D, dtype=torch.bfloat16, device="meta")

    def step(N, gradients=True):
        rows, step = _triton.make_rows(weight, None, 1.0, None, N, gradients)
        held = sum(t.nbytes for t in (rows._buffer, rows._partial, rows._result) if t is not None)
        copies = 3 if gradients else 1  # of the chunk's hidden states: taken, packed, their gradient
        assert held + copies * step * D * 2 <= (1.45 * 2**30 if gradients else 100 * 2**20)
        return step

    assert step(4096) == 4096
    assert step(0) == step(1) == step(128) == 128
    assert step(5700) == 2944  # not 5,120 and 580
    assert 4096 <= step(32_768) <= 5504
    assert step(10**6) >= 4096
    assert step(10**6, gradients=False) >= 3840


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_rows_than_a_grid_axis_and_more_weights_than_int32():
    g = torch.Generator("cuda").manual_seed(0)
    of = {"device": "cuda", "dtype": torch.bfloat16, "generator": g}
    for T, V, D in ((70_000, 300, 64), (40, 300_000, 8192)):
        hidden, weight = torch.randn(T, D, **of), torch.randn(V, D, **of) / D**0.5
        target = torch.randint(V, (T,), device="cuda", generator=g)
        target[-1] = V - 1
        h, w = leaves(hidden, weight)
        logp, entropy = token_stats(h, w, target, backend="triton")
        logp.sum().backward()
        last = slice(T - 3, T)
        logp64, entropy64 = dense_stats(hidden[last].double(), weight.double(), target[last])
        assert_close(logp[last], logp64)
        assert_close(entropy[last], entropy64)
        assert h.grad.isfinite().all() and (h.grad[last] != 0).any()


def test_why_not_names_value_and_fix(monkeypatch):
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    assert "cpu" in _triton.why_not(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    reason = _triton.why_not(torch.device("cuda", 0), torch.bfloat16)
    assert "cuda:0 has 7.5" in reason and "backend='torch'" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert _triton.why_not(torch.device("cuda", 0), torch.bfloat16) is None
