"""The fused head against float64 autograd of full logits: every backend, loss, dtype and layout."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from dense_reference import assert_close, dense, dense_pulled, dense_stats, fused_loss, leaves, problem, set_chunk_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paw.algo import loss as losses
from paw_kernels import _rows, _torch, token_loss, token_stats

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
PARITY = Path(__file__).parents[2] / ".." / "shared" / "data" / "parity" / "losses.json"
OPTIONS = {
    "clip": {},
    "cmae": {"rho": 0.05},
    "mae": {"wm": "mae"},
    "ce": {"wm": "ce", "clip_high": 0.28},
    "gce": {"wm": "gce", "q": 0.4},
    "kl": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.05},
    "everything": {"kl_coef": 0.1, "entropy_coef": 0.05, "rho": 0.05, "clip_low": 0.1, "dual_clip": 1.5},
}
EVERYTHING, CAPPED = OPTIONS["everything"], {"wm": "gce", "kl_coef": 0.1, "entropy_coef": 0.05}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {  # T, V, D, size of the hidden states, the head, the loss
    "clip fp32": ((30, 70, 16), 2.0, {}, {}),
    # Of Triton's tiles: nothing divides a block, half a tile of columns, exactly one tile, no tensor descriptors.
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
    "near one-hot fp32 bf16 fp16": ((30, 70, 16), 40.0, {"softcap": 30.0, "temperature": 1.3}, CAPPED),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in CASES for dtype in name.split() if dtype in DTYPES]
)
def test_the_loss_and_that_of_statistics_match_float64(backend, name, dtype):
    (T, V, D), size, how, options = CASES[name]
    dtype, capped = DTYPES[dtype], "softcap" in how
    hidden, weight, target, bias, rows = problem(T, V, D, bias=True, scale=size, **how, **options)
    hidden, weight, bias = (t.to(dtype) for t in (hidden, weight, bias))
    target[0] = V - 1
    if capped:  # at the cap, and where the row is near one-hot the sure token
        target[:15] = (hidden.double() @ weight.double().t() + bias.double()).argmax(1)[:15]
    inputs = hidden, weight, target, rows, bias
    out, gradients = backend.loss(*inputs, upstream=-1.7, **how)
    stats, apart = backend.stats(
        hidden, weight, target, lambda *stats: -1.7 * rows.loss(*stats, rows.batch).sum(), bias, **how
    )
    expected, want = dense(*inputs, upstream=-1.7, **how)
    plain = dense(*inputs, upstream=-1.7, dtype=dtype, **how)[1]
    assert torch.equal(out.logp, stats[0]) and torch.equal(out.entropy, stats[1])
    for got, exact, tolerance in zip(out[:4], expected, (1e-5, 1e-5, *[4e-6 if capped else 2e-6] * 2), strict=True):
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
    hidden, weight, target, _, rows = problem(40 * size, 130 * size, 24 * size, scale=2.0, **OPTIONS[name])
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
    @settings(max_examples=6 if backend.name == "triton" else backend.examples, deadline=None, derandomize=True)
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
            stats, gradients = backend.stats(hidden, weight, target, pull, offset, temperature=temperature)
        exact, want = dense_pulled(hidden, weight, target, pull, offset, temperature=temperature)
        assert (stats[0] <= 0).all() and (stats[1] >= 0).all()
        for got, wide, tolerance in zip((*stats, *gradients), (*exact, *want), [1e-5] * 2 + [5e-5] * 3, strict=False):
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
        assert_close(gradients[2].sum(), torch.zeros(()), 1e-4)  # sum over the vocabulary of each row's dL/dz is 0
        if scale < 60:  # at |z| in the hundreds float32 logits may fall on the other side of a clip
            for got, want in zip(gradients, dense(*inputs, temperature=temperature)[1], strict=True):
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
    inputs, tiles = (hidden, weight, target, rows, bias), backend.name == "triton"  # which chooses its own chunks
    whole, gradients = backend.loss(*inputs)
    stats = backend.stats(hidden, weight, target, lambda logp, _: logp.sum(), bias)[0]
    for chunk in (7,) if tiles else (1, 7, 20):
        set_chunk_rows(monkeypatch, chunk, vocabulary=150)
        with LargestTensor() as largest:
            split, others = backend.loss(*inputs)
        # Full logits are never allocated.
        assert largest.numel <= (40 * 150 / 2 if tiles else max(chunk * 150, 150 * 8))
        for ours, theirs in zip((*split, *others), (*whole, *gradients), strict=True):
            assert_close(ours, theirs, 1e-6)
    again = backend.loss(*inputs)
    assert torch.equal(again[0].loss, split.loss) and all(map(torch.equal, again[1], others))
    if tiles:
        apart = backend.stats(hidden, weight, target, lambda logp, _: logp.sum(), bias)[0]
        assert all(map(torch.equal, (split.logp, split.entropy, *apart), (whole.logp, whole.entropy, *stats)))


@pytest.mark.parametrize("live", [[], [39], [0, 17, 38], list(range(1, 40)), list(range(40))], ids=len)
def test_any_number_of_live_rows(backend, live, monkeypatch):
    """Packed in place, gradients come from the rows they belong to; no others are computed again."""
    hidden, weight, target, _, _ = problem(40, 70, 8)
    upstream, seen = torch.zeros(40), []
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


@pytest.mark.parametrize(("dtype", "softcap"), [("fp32", None), ("bf16", None), ("fp16", None), ("fp32", 5.0)])
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
        backend.stats(hidden, *of, pull)[0] for of in ((weight, target), (weight[order], order.argsort()[target]))
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
    y, on = torch.stack([target, target], 1)[:, 0].to(backend.device), rows.to(backend.device, torch.float32)
    with torch.autocast(backend.device, dtype=torch.bfloat16):  # which leaves inputs of one dtype alone
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


# --- what does not depend on the backend ------------------------------------------------------------------------------


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
    wide = Margins(rows.old_logp.double())
    d_hidden, d_weight = dense_pulled(hidden, weight, target, lambda *stats: loss(*stats, wide).sum())[1]
    assert_close(h.grad, d_hidden)
    assert_close(w.grad, d_weight)
    assert torch.equal(out.has_gradient, (d_hidden != 0).any(1)) and 0 < out.has_gradient.sum() < 150


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
    reference = rows.sampled_logp + 1 + gap
    rows = rows.replace(observation=zero.bool(), weight=zero + 1, advantage=advantage, ref_logp=reference, old_logp=old)
    (h,) = leaves(hidden)
    out = fused_loss(h, weight, target, rows)
    out.loss.backward()
    assert out.has_gradient[:8].tolist() == [True] * 4 + [False] * 4 and (h.grad[4:8] == 0).all()
    torch.testing.assert_close(out.token_loss[4:8], zero[:4] + 5)
    assert_close(h.grad, dense(hidden, weight, target, rows)[1][0])
    out = fused_loss(hidden.requires_grad_(), weight, target, dataclasses.replace(rows, options={}))
    torch.testing.assert_close(out.token_loss[8:], torch.tensor([-1.2, 0.0, 3.0]))
    assert not out.has_gradient[8:].any()


def test_gce_lies_between_ce_and_mae():
    hidden, weight, target, _, rows = problem(150, 37, 12, scale=2.0, kl_coef=0.1)

    def of(loss, **q):
        h, w = leaves(hidden, weight)
        out = fused_loss(h, w, target, dataclasses.replace(rows, options={"wm": loss, **q}))
        return out.token_loss, *torch.autograd.grad(out.loss, (h, w))

    assert all(map(torch.equal, of("gce", q=1.0), of("mae")))
    for got, want in zip(of("gce", q=1e-3), of("ce"), strict=True):
        assert_close(got, want, 2e-2)  # of order q log(p)^2
    learned = rows.observation & (rows.weight > 0)
    assert (of("mae")[0] < of("gce")[0])[learned].all() and (of("gce")[0] < of("ce")[0])[learned].all()


def test_tied_weights_receive_both_gradients_and_micro_batches_add_up():
    _, weight, target, _, rows = problem(40, 31, 8)
    ids, (tied,), (expected,) = torch.arange(40) % 31, leaves(weight), leaves(weight, dtype=torch.float64)
    for part in (slice(0, 30), slice(30, 40)):
        hidden = torch.nn.functional.embedding(ids[part], tied)
        fused_loss(hidden, tied, target[part], rows.map(lambda values, part=part: values[part])).loss.backward()
    stats = dense_stats(expected[ids], expected, target)
    rows.loss(*stats, rows.to("cpu", torch.float64).batch).sum().backward()
    assert_close(tied.grad, expected.grad)


@pytest.mark.parametrize("upstream", [1.0, -0.3])
def test_backward_hands_over_its_gradients_once_unless_the_graph_is_kept(upstream):
    hidden, weight, target, _, rows = problem(40, 31, 8)
    h, w = leaves(hidden, weight)
    want = torch.autograd.grad(upstream * fused_loss(h, w, target, rows).loss, (h, w))
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


def test_only_wanted_gradients_are_formed():
    hidden, weight, target, _, rows = problem(40, 31, 8)
    h, w = leaves(hidden, weight)
    whole = fused_loss(h, w, target, rows)
    whole.loss.backward()
    (alone,), (head,) = leaves(hidden), leaves(weight)
    fused_loss(alone, weight, target, rows).loss.backward()
    fused_loss(hidden, head, target, rows).loss.backward()
    assert torch.equal(h.grad, alone.grad) and torch.equal(w.grad, head.grad)
    frozen = fused_loss(hidden, weight, target, rows)
    assert not frozen.loss.requires_grad and torch.equal(frozen.has_gradient, whole.has_gradient)
    with torch.no_grad():
        results = fused_loss(h, w, target, rows).loss, token_stats(h, w, target).logp, whole.logp
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("T", [0, 1, 5])
def test_batches_without_a_gradient(T):
    hidden, weight, target, _, rows = problem(T, 31, 8)
    h, w = leaves(hidden, weight)
    out = fused_loss(h, w, target, rows.replace(weight=torch.zeros(T)))
    out.loss.backward()
    assert out.loss.item() == 0 and not out.has_gradient.any()
    assert h.grad.shape == hidden.shape and w.grad.shape == weight.shape and not h.grad.any() and not w.grad.any()


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
    "target must be in [0, 11": lambda h, w, y, r: (h, w, with_value(y, 1, -1), r),
    "batch.weight must have shape": lambda h, w, y, r: (h, w, y, r.replace(weight=r.weight[:2])),
    "batch.weight must be finite": lambda h, w, y, r: (h, w, y, r.replace(weight=r.weight + torch.inf)),
    "batch.old_logp must be torch.float32": lambda h, w, y, r: (h, w, y, r.replace(old_logp=r.old_logp.double())),
    "bias must have shape [11]": {"bias": torch.zeros(8)},
    "temperature must be positive and finite, got 0.0": {"temperature": 0.0},
    "temperature must be positive and finite, got -1.0": {"temperature": -1.0},
    "temperature must be positive and finite, got nan": {"temperature": float("nan")},
    "softcap must be None, or positive and finite, got 0.0": {"softcap": 0.0},
    "softcap must be None, or positive and finite, got nan": {"softcap": float("nan")},
    "softcap must be None, or positive and finite, got -1.0": {"softcap": -1.0},
    "softcap must be None, or positive and finite, got inf": {"softcap": float("inf")},
    "known backends: auto, triton, cuda, cpu, torch": {"backend": "fast"},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    hidden, weight, target, _, rows = problem(4, 11, 6)
    change, how = ERRORS[message], {}
    inputs = hidden, weight, target, rows
    if isinstance(change, dict):
        how = change
    else:
        inputs = change(*inputs)
    with pytest.raises(ValueError) as error:
        fused_loss(*inputs, **how)
    assert message in str(error.value)
    if not message.startswith("batch"):
        with pytest.raises(ValueError) as error:
            token_stats(*inputs[:3], **how)
        assert message in str(error.value)


def test_a_loss_of_another_shape_and_a_batch_that_is_none_are_refused():
    hidden, weight, target, _, rows = problem(4, 11, 6)
    with pytest.raises(ValueError, match=r"one float32 number for each token, \[4\], got torch.float32 of shape \[\]"):
        token_loss(hidden, weight, target, lambda logp, entropy, batch: -logp.mean(), rows.batch)
    with pytest.raises(ValueError, match="batch must be a dataclass of tensors, got dict"):
        token_loss(hidden, weight, target, rows.loss, {})


@pytest.mark.skipif(not PARITY.exists(), reason="parity data of the reference code is not on this machine")
def test_clipped_surrogate_and_k3_match_the_reference_code():
    """Token-mean losses and their gradients by logp, of the functions that the trainer hands to the head."""
    for data in json.loads(PARITY.read_text())[:8]:
        mask = torch.tensor(data["mask"]).flatten()
        values = {n: torch.tensor(data[n]).flatten() for n in ("logp", "old_logp", "ref_logp", "advantage")}
        weight, logp, expected = mask / mask.sum(), values.pop("logp").requires_grad_(), data["expected"]
        batch = losses.TokenBatch(weight=weight, observation=mask < 0, sampled_logp=weight, **values)
        policy, kl = losses.ppo(logp, torch.zeros_like(mask), batch), losses.k3(logp, batch)
        assert (policy * weight).sum().item() == pytest.approx(expected["policy_loss_token_mean"], abs=1e-5)
        assert (kl * weight).sum().item() == pytest.approx(expected["k3_token_mean"], abs=1e-5)
        (a,) = torch.autograd.grad((policy * weight).sum(), logp)
        clipped = (((a == 0) & (batch.advantage != 0)) * weight).sum().item()
        assert clipped == pytest.approx(expected["clip_frac"] + expected["clip_frac_dual"], abs=1e-6)
        torch.testing.assert_close(a, torch.tensor(expected["d_policy_loss_d_logp"]).flatten(), rtol=1e-5, atol=1e-6)
        (a,) = torch.autograd.grad((kl * weight).sum(), logp)
        torch.testing.assert_close(a, torch.tensor(expected["d_k3_d_logp"]).flatten(), rtol=1e-4, atol=1e-6)
