"""Compares the fused head with float64 autograd of full logits: every backend, loss, dtype and
layout."""

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
EVERYTHING = OPTIONS["everything"]
CAPPED = {"wm": "gce", "kl_coef": 0.1, "entropy_coef": 0.05}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {  # T, V, D, size of the hidden states, the head, the loss
    "clip fp32": ((30, 70, 16), 2.0, {}, {}),
    # Of Triton's tiles: nothing divides a block, half a tile of columns, exactly one tile, no
    # tensor descriptors.
    "ragged fp32 bf16 fp16": ((17, 82, 24), 2.0, {"temperature": 0.7}, EVERYTHING),
    "half a tile fp32 bf16 fp16": ((17, 48, 16), 2.0, {"temperature": 0.7}, EVERYTHING),
    "one tile fp32 bf16 fp16": ((16, 32, 32), 2.0, {"temperature": 0.7}, EVERYTHING),
    "pointers fp32 bf16 fp16": ((17, 65, 13), 2.0, {"temperature": 0.7}, EVERYTHING),
    "the least fp32 bf16 fp16": ((1, 1, 1), 2.0, {"temperature": 0.7}, EVERYTHING),
    "one token fp32 bf16 fp16": ((3, 1, 8), 2.0, {"temperature": 0.7}, EVERYTHING),
    "one row fp32 bf16 fp16": ((1, 70, 8), 2.0, {"temperature": 0.7}, EVERYTHING),
    "linear fp32 bf16 fp16": ((17, 40, 16), 2.0, {"softcap": 1000.0}, CAPPED),
    "bent fp32 bf16 fp16": ((17, 40, 16), 2.0, {"softcap": 2.0, "temperature": 0.7}, CAPPED),
    # Most logits within 1e-3 of the cap or its negative.
    "saturated fp32 bf16 fp16": ((17, 40, 16), 30.0, {"softcap": 3.0}, CAPPED),
    "near one-hot fp32 bf16 fp16": (
        (17, 40, 16),
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
    (T, V, D), size, settings, loss_options = CASES[name]
    dtype = DTYPES[dtype]
    capped = "softcap" in settings
    hidden, weight, target, bias, rows = problem(
        T, V, D, bias=True, scale=size, **settings, **loss_options
    )
    hidden, weight, bias = (tensor.to(dtype) for tensor in (hidden, weight, bias))
    target[0] = V - 1
    if capped:  # at the cap, and the certain token if the row is nearly one-hot
        logits = hidden.double() @ weight.double().t() + bias.double()
        target[:15] = logits.argmax(1)[:15]
        assert "saturated" not in name or (logits.amax(1)[:15] > 2 * settings["softcap"]).any()
    inputs = hidden, weight, target, rows, bias
    results, gradients = backend.loss(*inputs, upstream=-1.7, **settings)
    statistics, separate = backend.stats(
        hidden,
        weight,
        target,
        lambda *statistics: -1.7 * rows.loss(*statistics, rows.batch).sum(),
        bias,
        **settings,
    )
    exact_results, exact_gradients = dense(*inputs, upstream=-1.7, **settings)
    plain_gradients = dense(*inputs, upstream=-1.7, dtype=dtype, **settings)[1]
    assert torch.equal(results.logp, statistics[0])
    assert torch.equal(results.entropy, statistics[1])
    for actual, expected, tolerance in zip(
        results[:4], exact_results, (1e-5, 1e-5, *[4e-6 if capped else 2e-6] * 2), strict=True
    ):
        assert_close(actual, expected, tolerance)
    for formed in (gradients, separate):
        for gradient, exact_gradient, plain_gradient in zip(
            formed, exact_gradients, plain_gradients, strict=True
        ):
            assert gradient.dtype == dtype
            floor = (
                1e-5 * exact_gradient.abs().max().clamp(min=1) if dtype == torch.float32 else 1e-4
            )
            rounding = (
                0
                if dtype == torch.float32 and not capped
                else 2 * (plain_gradient - exact_gradient).abs().max()
            )
            assert (gradient - exact_gradient).abs().max() <= rounding + floor
    assert (gradients[0][~results.has_gradient] == 0).all()


LOSSES = [
    *((name, "fp32") for name in OPTIONS),
    *((name, "bf16") for name in ("clip", "mae", "gce", "everything")),
    ("everything", "fp16"),
]


@pytest.mark.parametrize(("name", "dtype"), LOSSES)
def test_every_loss_matches_float64_and_runs_repeat(backend, name, dtype):
    """Without a bias, and on a GPU with several tiles per program."""
    if backend.device == "cuda":
        T, V, D = 480, 1560, 288
    elif backend.name == "triton":
        T, V, D = 20, 70, 24  # several tiles too, but the interpreter takes seconds
    else:
        T, V, D = 40, 130, 24
    dtype = DTYPES[dtype]
    hidden, weight, target, _, rows = problem(T, V, D, scale=2.0, **OPTIONS[name])
    inputs = hidden.to(dtype), weight.to(dtype), target, rows
    results, gradients = backend.loss(*inputs, upstream=-1.7)
    exact_results, exact_gradients = dense(*inputs, upstream=-1.7)
    for actual, expected in zip(results[:4], exact_results, strict=True):
        assert_close(actual, expected)
    plain_gradients = dense(*inputs, upstream=-1.7, dtype=dtype)[1]
    for gradient, exact_gradient, plain_gradient in zip(
        gradients, exact_gradients, plain_gradients, strict=True
    ):
        assert gradient.dtype == dtype
        if dtype == torch.float32:
            assert_close(gradient, exact_gradient)
        else:
            assert (gradient - exact_gradient).abs().max() <= 2 * (
                plain_gradient - exact_gradient
            ).abs().max() + 1e-4
    if backend.name == "triton" and name != "everything":  # its interpreter takes seconds
        return
    if dtype == torch.float32:  # the same loss from separately computed statistics
        pull = lambda *statistics: -1.7 * rows.loss(*statistics, rows.batch).sum()  # noqa: E731
        for gradient, separate in zip(gradients, backend.stats(*inputs[:3], pull)[1], strict=True):
            assert_close(separate, gradient, 2e-6)
    repeated = backend.loss(*inputs, upstream=-1.7)
    assert torch.equal(repeated[0].loss, results.loss)
    assert all(map(torch.equal, repeated[1], gradients))


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

        def pull(logp, entropy):  # both upstream gradients, each of them zero on some rows
            return (logp * rows.advantage).sum() + (entropy * rows.weight).sum()

        with pytest.MonkeyPatch.context() as patch:
            set_chunk_rows(patch, chunk, vocabulary=V)
            statistics, gradients = backend.stats(
                hidden, weight, target, pull, offset, temperature=temperature
            )
        exact_statistics, exact_gradients = dense_pulled(
            hidden, weight, target, pull, offset, temperature=temperature
        )
        assert (statistics[0] <= 0).all()
        assert (statistics[1] >= 0).all()
        for actual, expected, tolerance in zip(
            (*statistics, *gradients),
            (*exact_statistics, *exact_gradients),
            [1e-5] * 2 + [5e-5] * 3,
            strict=False,
        ):
            assert actual.dtype == torch.float32
            assert_close(actual, expected, tolerance)

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
            results, gradients = backend.loss(*inputs, temperature=temperature)
        assert (results.logp <= 0).all()
        assert (results.entropy >= 0).all()
        assert (results.entropy <= torch.tensor(V).log() * (1 + 1e-6)).all()
        assert (gradients[0][~results.has_gradient] == 0).all()
        # Each row's dL/dz sums to 0 over the vocabulary.
        assert_close(gradients[2].sum(), torch.zeros(()), 1e-4)
        if (
            scale < 60
        ):  # with |z| in the hundreds, float32 logits may fall on the other side of a clip
            for actual, expected in zip(
                gradients, dense(*inputs, temperature=temperature)[1], strict=True
            ):
                assert_close(actual, expected, 1e-4)

    check()


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


def test_chunks_change_nothing_but_rounding_and_runs_nothing(backend, monkeypatch):
    is_triton = backend.name == "triton"  # it chooses its own chunks, and takes seconds
    T, V, D = (36, 70, 8) if is_triton else (40, 150, 8)
    hidden, weight, target, bias, rows = problem(T, V, D, bias=True, **EVERYTHING)
    inputs = (hidden, weight, target, rows, bias)
    whole, gradients = backend.loss(*inputs)
    statistics = backend.stats(hidden, weight, target, lambda logp, _: logp.sum(), bias)[0]
    for chunk_rows in (7,) if is_triton else (1, 7, 20):
        set_chunk_rows(monkeypatch, chunk_rows, vocabulary=V)
        with LargestTensor() as largest:
            split, split_gradients = backend.loss(*inputs)
        # Full logits are never allocated.
        assert largest.numel <= (T * V / 2 if is_triton else max(chunk_rows * V, V * D))
        for actual, expected in zip((*split, *split_gradients), (*whole, *gradients), strict=True):
            # A sum of that many parts is rounded as often.
            assert_close(actual, expected, max(1e-6, T / chunk_rows * 2**-24))
    repeated = backend.loss(*inputs)
    assert torch.equal(repeated[0].loss, split.loss)
    assert all(map(torch.equal, repeated[1], split_gradients))
    if is_triton:
        separate = backend.stats(hidden, weight, target, lambda logp, _: logp.sum(), bias)[0]
        assert torch.equal(split.logp, whole.logp)
        assert torch.equal(split.entropy, whole.entropy)
        assert all(map(torch.equal, separate, statistics))


@pytest.mark.skipif(cpu_library() is None, reason="the C++ row operations are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_keep_logits_that_fit_and_may_go_backward_twice(dtype, monkeypatch):
    hidden, weight, target, bias, _ = problem(40, 150, 8, bias=True)
    inputs = leaves(hidden, weight, bias, dtype=dtype)
    upstream = torch.arange(40.0) % 3  # 26 rows with a gradient
    row_counts = []
    logits = _rows.logits

    def counted_logits(hidden_rows, *rest):
        row_counts.append(len(hidden_rows))
        return logits(hidden_rows, *rest)

    monkeypatch.setattr(_rows, "logits", counted_logits)

    def gradients(times=1):
        row_counts.clear()
        statistics = token_stats(*inputs[:2], target, bias=inputs[2], temperature=0.7, softcap=3.0)
        total = (statistics.logp * upstream).sum() + (statistics.entropy * upstream).sum()
        return [
            torch.autograd.grad(total, inputs, retain_graph=number + 1 < times)
            for number in range(times)
        ]

    (kept,) = gradients()
    assert row_counts == [40]
    of_two_passes = gradients(times=2)
    assert row_counts == [40, 26]  # only the last backward pass may overwrite them
    set_chunk_rows(monkeypatch, 24, vocabulary=150)
    (chunked,) = gradients()
    assert row_counts == [20, 20, 13, 13]  # equal chunks
    for actual, expected in zip(
        (*kept, *of_two_passes[0], *of_two_passes[1]), (*chunked, *chunked, *chunked), strict=True
    ):
        assert_close(actual, expected, 1e-5 if dtype == torch.float32 else 4e-3)
    monkeypatch.setattr(_rows, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(_measured, "fastest", lambda *_: SimpleNamespace(backend="torch"))
    gradients()
    assert row_counts == []  # auto is a different backend here


@pytest.mark.parametrize(
    "live", [[], [39], [0, 17, 38], list(range(1, 40)), list(range(40))], ids=len
)
def test_any_number_of_live_rows(backend, live, monkeypatch):
    """Rows are packed in place, gradients come from their own rows, and no other row is computed
    again."""
    hidden, weight, target, _, _ = problem(40, 40, 8)
    upstream = torch.zeros(40)
    row_counts = []
    monkeypatch.setattr(_rows, "KEPT_BYTES", 0)
    upstream[live] = torch.randn(len(live), generator=torch.Generator().manual_seed(1))
    for rows in (_torch.TorchRows, _rows.NativeRows):

        def spy(self, hidden_rows, *rest, forward=rows.forward):
            row_counts.append(len(hidden_rows))
            return forward(self, hidden_rows, *rest)

        monkeypatch.setattr(rows, "forward", spy)

    def pull(logp, entropy):
        return ((logp + 0.3 * entropy) * upstream).sum()

    gradients = backend.stats(hidden, weight, target, pull)[1]
    dead = [token for token in range(40) if token not in live]
    assert (gradients[0][dead] == 0).all()
    for actual, expected in zip(
        gradients, dense_pulled(hidden, weight, target, pull)[1], strict=True
    ):
        assert_close(actual, expected)
    if backend.name != "triton":
        assert row_counts == ([40, len(live)] if live else [40])


@pytest.mark.parametrize(
    ("dtype", "softcap"), [("fp32", None), ("bf16", None), ("fp16", None), ("fp32", 5.0)]
)
@pytest.mark.parametrize("D", [16, 21])  # with tensor descriptors and without
def test_rows_with_nan_stay_alone(backend, D, dtype, softcap):
    hidden, weight, target, _, _ = problem(24, 70, D)
    hidden[21, 0] = torch.nan  # the first value that a row read beyond its end would hit
    hidden, weight = (tensor.to(DTYPES[dtype]) for tensor in (hidden, weight))
    odd_rows = torch.arange(24) % 2
    other_rows = torch.arange(24) != 21
    (logp, entropy), (d_hidden, d_weight) = backend.stats(
        hidden, weight, target, lambda logp, _: (logp * odd_rows).sum(), softcap=softcap
    )
    assert logp.isnan().nonzero().tolist() == [[21]]
    assert entropy.isnan().nonzero().tolist() == [[21]]
    assert d_hidden[21].isnan().all()
    assert d_hidden[other_rows].isfinite().all()
    assert d_weight.isnan().all()


def test_permuting_the_vocabulary_changes_nothing(backend):
    hidden, weight, target, _, _ = problem(20, 70, 16)
    permutation = torch.randperm(70, generator=torch.Generator().manual_seed(1))

    def pull(logp, _):
        return logp.sum()

    plain = backend.stats(hidden, weight, target, pull)[0]
    moved_target = permutation.argsort()[target]
    permuted = backend.stats(hidden, weight[permutation], moved_target, pull)[0]
    for actual, expected in zip(permuted, plain, strict=True):
        assert_close(actual, expected, 1e-6)


def test_nan_reaches_every_loss_and_its_gradient():
    hidden, weight, target, _, _ = problem(6, 31, 8)
    hidden[2, 3] = torch.nan
    for options in OPTIONS.values():
        for observation in (False, True):
            rows = problem(6, 31, 8, **options)[-1]
            rows = rows.replace(observation=torch.full((6,), observation), weight=torch.ones(6))
            hidden_leaf, weight_leaf = leaves(hidden, weight)
            results = fused_loss(hidden_leaf, weight_leaf, target, rows)
            results.loss.backward()
            assert results.logp[2].isnan()
            assert results.entropy[2].isnan()
            assert results.loss.isnan()
            assert weight_leaf.grad.isnan().any()
            assert hidden_leaf.grad[2].isnan().any()


@pytest.mark.parametrize("layout", ["columns", "strided", "offset"])
def test_any_layout_of_weight_hidden_and_target(backend, layout):
    """Pointers are used where tensor descriptors are impossible."""
    hidden, weight, target, _, rows = problem(20, 70, 16)
    expected, gradients = backend.loss(hidden, weight, target, rows)

    def with_layout(tensor):
        if layout == "columns":
            return tensor.t().contiguous().t()
        if layout == "strided":
            return torch.stack([tensor, tensor], 1)[:, 0]
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)

    hidden_view, weight_view = (
        with_layout(tensor.to(backend.device)).requires_grad_() for tensor in (hidden, weight)
    )
    target_view = torch.stack([target, target], 1)[:, 0].to(backend.device)
    device_rows = rows.to(backend.device, torch.float32)
    # It leaves inputs of one dtype alone.
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        results = fused_loss(
            hidden_view, weight_view, target_view, device_rows, backend=backend.key
        )
    results.loss.backward()
    assert_close(results.loss, expected.loss, 1e-6)
    assert_close(hidden_view.grad, gradients[0], 1e-6)
    assert_close(weight_view.grad, gradients[1], 1e-6)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        repeated = backend.loss(hidden, weight, target, rows)
    assert torch.equal(repeated[0].loss, expected.loss)
    assert all(map(torch.equal, repeated[1], gradients))
    if backend.name == "triton":
        from paw_kernels import _triton

        plain = _triton.tiles_for(weight.to(backend.device), None).tma
        assert _triton.tiles_for(weight_view, None).tma == (layout == "strided" and plain)
