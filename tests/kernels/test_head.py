"""The fused head against float64 autograd of full logits: every backend, loss, dtype and layout."""

from types import SimpleNamespace

import pytest
import torch
from dense_reference import (
    assert_close,
    dense,
    dense_pulled,
    fused_loss,
    leaves,
    problem,
    set_chunk_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paw_kernels import _measured, _rows, _torch, token_stats
from paw_kernels._native import cpu_library

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
OPTIONS = {
    "clip": {},
    "cmae": {"rho": 0.05},
    "mae": {"wm": "mae"},
    "ce": {"wm": "ce", "clip_high": 0.28},
    "gce": {"wm": "gce", "q": 0.4},
    "kl": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.05},
    "everything": {
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "rho": 0.05,
        "clip_low": 0.1,
        "dual_clip": 1.5,
    },
}
EVERYTHING, CAPPED = OPTIONS["everything"], {"wm": "gce", "kl_coef": 0.1, "entropy_coef": 0.05}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {  # T, V, D, size of the hidden states, the head, the loss
    "clip fp32": ((30, 70, 16), 2.0, {}, {}),
    # Of Triton's tiles: nothing divides a block, half a tile of columns, exactly one tile, no
    # tensor descriptors.
    "ragged fp32 bf16 fp16": ((21, 82, 24), 2.0, {"temperature": 0.7}, EVERYTHING),
    "half a tile fp32 bf16 fp16": ((20, 48, 16), 2.0, {"temperature": 0.7}, EVERYTHING),
    "one tile fp32 bf16 fp16": ((16, 32, 32), 2.0, {"temperature": 0.7}, EVERYTHING),
    "pointers fp32 bf16 fp16": ((17, 65, 13), 2.0, {"temperature": 0.7}, EVERYTHING),
    "the least fp32 bf16 fp16": ((1, 1, 1), 2.0, {"temperature": 0.7}, EVERYTHING),
    "one token fp32 bf16 fp16": ((3, 1, 8), 2.0, {"temperature": 0.7}, EVERYTHING),
    "one row fp32 bf16 fp16": ((1, 70, 8), 2.0, {"temperature": 0.7}, EVERYTHING),
    "linear fp32 bf16 fp16": ((30, 70, 16), 2.0, {"softcap": 1000.0}, CAPPED),
    "bent fp32 bf16 fp16": ((30, 70, 16), 2.0, {"softcap": 2.0, "temperature": 0.7}, CAPPED),
    # Most logits within 1e-3 of the cap or its negative.
    "saturated fp32 bf16 fp16": ((30, 70, 16), 30.0, {"softcap": 3.0}, CAPPED),
    "near one-hot fp32 bf16 fp16": (
        (30, 70, 16),
        40.0,
        {"softcap": 30.0, "temperature": 1.3},
        CAPPED,
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in CASES for dtype in name.split() if dtype in DTYPES],
)
def test_the_loss_and_that_of_statistics_match_float64(backend, name, dtype):
    (T, V, D), size, how, options = CASES[name]
    dtype, capped = DTYPES[dtype], "softcap" in how
    hidden, weight, target, bias, rows = problem(T, V, D, bias=True, scale=size, **how, **options)
    hidden, weight, bias = (t.to(dtype) for t in (hidden, weight, bias))
    target[0] = V - 1
    if capped:  # at the cap, and where the row is near one-hot the sure token
        u = hidden.double() @ weight.double().t() + bias.double()
        target[:15] = u.argmax(1)[:15]
        assert "saturated" not in name or (u.amax(1)[:15] > 2 * how["softcap"]).any()
    inputs = hidden, weight, target, rows, bias
    out, gradients = backend.loss(*inputs, upstream=-1.7, **how)
    stats, apart = backend.stats(
        hidden,
        weight,
        target,
        lambda *stats: -1.7 * rows.loss(*stats, rows.batch).sum(),
        bias,
        **how,
    )
    expected, want = dense(*inputs, upstream=-1.7, **how)
    plain = dense(*inputs, upstream=-1.7, dtype=dtype, **how)[1]
    assert torch.equal(out.logp, stats[0]) and torch.equal(out.entropy, stats[1])
    for got, exact, tolerance in zip(
        out[:4], expected, (1e-5, 1e-5, *[4e-6 if capped else 2e-6] * 2), strict=True
    ):
        assert_close(got, exact, tolerance)
    for found in (gradients, apart):
        for g, w, p in zip(found, want, plain, strict=True):
            assert g.dtype == dtype
            floor = 1e-5 * w.abs().max().clamp(min=1) if dtype == torch.float32 else 1e-4
            noise = 0 if dtype == torch.float32 and not capped else 2 * (p - w).abs().max()
            assert (g - w).abs().max() <= noise + floor
    assert (gradients[0][~out.has_gradient] == 0).all()


LOSSES = [
    *((name, "fp32") for name in OPTIONS),
    *((name, "bf16") for name in ("clip", "mae", "gce", "everything")),
    ("everything", "fp16"),
]


@pytest.mark.parametrize(("name", "dtype"), LOSSES)
def test_every_loss_matches_float64_and_runs_repeat(backend, name, dtype):
    """Without a bias; on a GPU with several tiles for each program."""
    size, dtype = 12 if backend.device == "cuda" else 1, DTYPES[dtype]
    hidden, weight, target, _, rows = problem(
        40 * size, 130 * size, 24 * size, scale=2.0, **OPTIONS[name]
    )
    inputs = hidden.to(dtype), weight.to(dtype), target, rows
    out, gradients = backend.loss(*inputs, upstream=-1.7)
    expected, want = dense(*inputs, upstream=-1.7)
    for got, exact in zip(out[:4], expected, strict=True):
        assert_close(got, exact)
    plain = dense(*inputs, upstream=-1.7, dtype=dtype)[1]
    for g, w, p in zip(gradients, want, plain, strict=True):
        assert g.dtype == dtype
        if dtype == torch.float32:
            assert_close(g, w)
        else:
            assert (g - w).abs().max() <= 2 * (p - w).abs().max() + 1e-4
    if backend.name == "triton" and name != "everything":  # whose interpreter takes seconds
        return
    if dtype == torch.float32:  # the same loss of separately computed statistics
        pull = lambda *stats: -1.7 * rows.loss(*stats, rows.batch).sum()  # noqa: E731
        for g, apart in zip(gradients, backend.stats(*inputs[:3], pull)[1], strict=True):
            assert_close(apart, g, 2e-6)
    again = backend.loss(*inputs, upstream=-1.7)
    assert torch.equal(again[0].loss, out.loss) and all(map(torch.equal, again[1], gradients))


def test_statistics_match_float64_for_any_shape(backend):
    @settings(
        max_examples=6 if backend.name == "triton" else backend.examples,
        deadline=None,
        derandomize=True,
    )
    @given(
        T=st.integers(0, 40),
        V=st.integers(1, 70),
        D=st.integers(1, 20),
        seed=st.integers(0, 10_000),
        bias=st.booleans(),
        temperature=st.sampled_from([0.4, 1.0, 2.0]),
        chunk=st.sampled_from([1, 7, 100]),
    )
    def check(T, V, D, seed, bias, temperature, chunk):
        hidden, weight, target, offset, rows = problem(T, V, D, seed=seed, bias=bias, scale=3.0)

        def pull(logp, entropy):  # both upstream gradients, each zero on some rows
            return (logp * rows.advantage).sum() + (entropy * rows.weight).sum()

        with pytest.MonkeyPatch.context() as patch:
            set_chunk_rows(patch, chunk, vocabulary=V)
            stats, gradients = backend.stats(
                hidden, weight, target, pull, offset, temperature=temperature
            )
        exact, want = dense_pulled(hidden, weight, target, pull, offset, temperature=temperature)
        assert (stats[0] <= 0).all() and (stats[1] >= 0).all()
        for got, wide, tolerance in zip(
            (*stats, *gradients), (*exact, *want), [1e-5] * 2 + [5e-5] * 3, strict=False
        ):
            assert got.dtype == torch.float32
            assert_close(got, wide, tolerance)

    check()


def test_invariants_hold_for_any_shape(backend):
    @settings(max_examples=backend.examples, deadline=None, derandomize=True)
    @given(
        T=st.integers(0, 40),
        V=st.integers(1, 70),
        D=st.integers(1, 20),
        seed=st.integers(0, 10_000),
        scale=st.sampled_from([0.0, 0.5, 4.0, 60.0]),
        name=st.sampled_from(list(OPTIONS)),
        temperature=st.sampled_from([0.4, 1.0, 2.0]),
        chunk=st.sampled_from([1, 7, 100]),
    )
    def check(T, V, D, seed, scale, name, temperature, chunk):
        hidden, weight, target, _, rows = problem(T, V, D, seed=seed, scale=scale, **OPTIONS[name])
        inputs = hidden, weight, target, rows, torch.zeros(V)
        with pytest.MonkeyPatch.context() as patch:
            if chunk < T:
                set_chunk_rows(patch, chunk, vocabulary=V)
            out, gradients = backend.loss(*inputs, temperature=temperature)
        assert (out.logp <= 0).all() and (out.entropy >= 0).all()
        assert (out.entropy <= torch.tensor(V).log() * (1 + 1e-6)).all()
        assert (gradients[0][~out.has_gradient] == 0).all()
        # Sum over the vocabulary of each row's dL/dz is 0.
        assert_close(gradients[2].sum(), torch.zeros(()), 1e-4)
        if scale < 60:  # at |z| in the hundreds float32 logits may fall on the other side of a clip
            for got, want in zip(
                gradients, dense(*inputs, temperature=temperature)[1], strict=True
            ):
                assert_close(got, want, 1e-4)

    check()


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_chunks_change_nothing_but_rounding_and_runs_nothing(backend, monkeypatch):
    hidden, weight, target, bias, rows = problem(40, 150, 8, bias=True, **EVERYTHING)
    inputs, tiles = (
        (hidden, weight, target, rows, bias),
        backend.name == "triton",
    )  # which chooses its own chunks
    whole, gradients = backend.loss(*inputs)
    stats = backend.stats(hidden, weight, target, lambda logp, _: logp.sum(), bias)[0]
    for chunk in (7,) if tiles else (1, 7, 20):
        set_chunk_rows(monkeypatch, chunk, vocabulary=150)
        with LargestTensor() as largest:
            split, others = backend.loss(*inputs)
        # Full logits are never allocated.
        assert largest.numel <= (40 * 150 / 2 if tiles else max(chunk * 150, 150 * 8))
        for ours, theirs in zip((*split, *others), (*whole, *gradients), strict=True):
            # A sum of that many parts rounds as often.
            assert_close(ours, theirs, max(1e-6, 40 / chunk * 2**-24))
    again = backend.loss(*inputs)
    assert torch.equal(again[0].loss, split.loss) and all(map(torch.equal, again[1], others))
    if tiles:
        apart = backend.stats(hidden, weight, target, lambda logp, _: logp.sum(), bias)[0]
        assert all(
            map(
                torch.equal,
                (split.logp, split.entropy, *apart),
                (whole.logp, whole.entropy, *stats),
            )
        )


@pytest.mark.skipif(cpu_library() is None, reason="the C++ row operations are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_keep_logits_that_fit_and_may_go_backward_twice(dtype, monkeypatch):
    hidden, weight, target, bias, _ = problem(40, 150, 8, bias=True)
    inputs = leaves(hidden, weight, bias, dtype=dtype)
    pulled = torch.arange(40.0) % 3  # 26 rows with a gradient
    made, logits = [], _rows.logits
    monkeypatch.setattr(_rows, "logits", lambda x, *rest: made.append(len(x)) or logits(x, *rest))

    def gradients(times=1):
        made.clear()
        stats = token_stats(*inputs[:2], target, bias=inputs[2], temperature=0.7, softcap=3.0)
        value = (stats.logp * pulled).sum() + (stats.entropy * pulled).sum()
        return [
            torch.autograd.grad(value, inputs, retain_graph=i + 1 < times) for i in range(times)
        ]

    (kept,) = gradients()
    assert made == [40]
    twice = gradients(times=2)
    assert made == [40, 26]  # only the last backward pass may overwrite them
    set_chunk_rows(monkeypatch, 24, vocabulary=150)
    (again,) = gradients()
    assert made == [20, 20, 13, 13]  # equal chunks
    for got, want in zip((*kept, *twice[0], *twice[1]), (*again, *again, *again), strict=True):
        assert_close(got, want, 1e-5 if dtype == torch.float32 else 4e-3)
    monkeypatch.setattr(_rows, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(_measured, "fastest", lambda *_: SimpleNamespace(backend="torch"))
    gradients()
    assert made == []  # auto is another backend here


@pytest.mark.parametrize(
    "live", [[], [39], [0, 17, 38], list(range(1, 40)), list(range(40))], ids=len
)
def test_any_number_of_live_rows(backend, live, monkeypatch):
    """Packed in place, gradients come from the rows they belong to; no others are computed again."""
    hidden, weight, target, _, _ = problem(40, 70, 8)
    upstream, seen = torch.zeros(40), []
    monkeypatch.setattr(_rows, "KEPT_BYTES", 0)
    upstream[live] = torch.randn(len(live), generator=torch.Generator().manual_seed(1))
    for rows in (_torch.TorchRows, _rows.NativeRows):

        def spy(self, x, *rest, forward=rows.forward):
            seen.append(len(x))
            return forward(self, x, *rest)

        monkeypatch.setattr(rows, "forward", spy)

    def pull(logp, entropy):
        return ((logp + 0.3 * entropy) * upstream).sum()

    gradients = backend.stats(hidden, weight, target, pull)[1]
    assert (gradients[0][[t for t in range(40) if t not in live]] == 0).all()
    for got, want in zip(gradients, dense_pulled(hidden, weight, target, pull)[1], strict=True):
        assert_close(got, want)
    assert seen == [n for n in (40, len(live)) if n] or backend.name == "triton"


@pytest.mark.parametrize(
    ("dtype", "softcap"), [("fp32", None), ("bf16", None), ("fp16", None), ("fp32", 5.0)]
)
@pytest.mark.parametrize("D", [16, 21])  # with tensor descriptors and without
def test_rows_with_nan_stay_alone(backend, D, dtype, softcap):
    hidden, weight, target, _, _ = problem(40, 70, D)
    hidden[21, 0] = torch.nan  # the first that a row read beyond its end would meet
    hidden, weight = (t.to(DTYPES[dtype]) for t in (hidden, weight))
    odd, rest = torch.arange(40) % 2, torch.arange(40) != 21
    (logp, entropy), (d_hidden, d_weight) = backend.stats(
        hidden, weight, target, lambda logp, _: (logp * odd).sum(), softcap=softcap
    )
    assert logp.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[21]]
    assert d_hidden[21].isnan().all() and d_hidden[rest].isfinite().all() and d_weight.isnan().all()


def test_permuting_the_vocabulary_changes_nothing(backend):
    hidden, weight, target, _, _ = problem(50, 101, 16)
    order = torch.randperm(101, generator=torch.Generator().manual_seed(1))
    pull = lambda logp, _: logp.sum()  # noqa: E731
    plain, permuted = (
        backend.stats(hidden, *of, pull)[0]
        for of in ((weight, target), (weight[order], order.argsort()[target]))
    )
    for got, want in zip(permuted, plain, strict=True):
        assert_close(got, want, 1e-6)


def test_nan_reaches_every_loss_and_its_gradient():
    hidden, weight, target, _, _ = problem(6, 31, 8)
    hidden[2, 3] = torch.nan
    for options in OPTIONS.values():
        for observation in (False, True):
            rows = problem(6, 31, 8, **options)[-1]
            rows = rows.replace(observation=torch.full((6,), observation), weight=torch.ones(6))
            h, w = leaves(hidden, weight)
            out = fused_loss(h, w, target, rows)
            out.loss.backward()
            assert out.logp[2].isnan() and out.entropy[2].isnan()
            assert out.loss.isnan() and w.grad.isnan().any() and h.grad[2].isnan().any()


@pytest.mark.parametrize("layout", ["columns", "strided", "offset"])
def test_any_layout_of_weight_hidden_and_target(backend, layout):
    """Where tensor descriptors cannot go, pointers do."""
    hidden, weight, target, _, rows = problem(20, 70, 16)
    want, gradients = backend.loss(hidden, weight, target, rows)

    def lay(x):
        if layout == "columns":
            return x.t().contiguous().t()
        if layout == "strided":
            return torch.stack([x, x], 1)[:, 0]
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)

    h, w = (lay(x.to(backend.device)).requires_grad_() for x in (hidden, weight))
    y, on = (
        torch.stack([target, target], 1)[:, 0].to(backend.device),
        rows.to(backend.device, torch.float32),
    )
    # Which leaves inputs of one dtype alone.
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out = fused_loss(h, w, y, on, backend=backend.key)
    out.loss.backward()
    assert_close(out.loss, want.loss, 1e-6)
    assert_close(h.grad, gradients[0], 1e-6)
    assert_close(w.grad, gradients[1], 1e-6)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        same = backend.loss(hidden, weight, target, rows)
    assert torch.equal(same[0].loss, want.loss) and all(map(torch.equal, same[1], gradients))
    if backend.name == "triton":
        from paw_kernels import _triton

        plain = _triton.tiles_for(weight.to(backend.device), None).tma
        assert _triton.tiles_for(w, None).tma == (layout == "strided" and plain)
