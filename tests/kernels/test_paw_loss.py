"""The one-pass loss against float64 autograd of a dense reference."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from dense_reference import dense_loss, problem, set_chunk_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import paw_kernels._backend
from paw_kernels import ACTION, OBSERVATION, SKIP, LossRows, paw_loss

PARITY = Path(__file__).parents[2] / ".." / "shared" / "data" / "parity" / "losses.json"

OPTIONS = {
    "clip": {},
    "cmae": {"rho": 0.05},
    "mae": {"observation_loss": "mae"},
    "ce": {"observation_loss": "ce", "clip_high": 0.28},
    "gce": {"observation_loss": "gce", "q": 0.4},
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


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def fused(hidden, weight, target, rows, bias=None, temperature=1.0, upstream=1.0):
    h, w, b = leaves(hidden, weight, bias)
    out = paw_loss(h, w, target, rows, bias=b, temperature=temperature)
    (upstream * out.loss).backward()
    return out, [x.grad for x in (h, w, b) if x is not None]


def dense(hidden, weight, target, rows, bias=None, temperature=1.0, upstream=1.0, dtype=torch.float64):
    h, w, b = leaves(*(None if x is None else x.to(dtype) for x in (hidden, weight, bias)))
    out = dense_loss(h, w, target, rows, b, temperature)
    (upstream * out[0]).backward()
    return out, [x.grad for x in (h, w, b) if x is not None]


def assert_close(got, want, tolerance=1e-5):
    got, want = got.double(), want.double()
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_statistics_and_gradients_match_float64(name, bias, temperature):
    hidden, weight, target, offset, rows = problem(
        150, 37, 12, bias=bias, scale=2.0, temperature=temperature, **OPTIONS[name]
    )
    out, grads = fused(hidden, weight, target, rows, offset, temperature, upstream=-1.7)
    (loss, row_loss, logp, entropy), expected = dense(hidden, weight, target, rows, offset, temperature, -1.7)
    on = rows.kind != SKIP
    assert_close(out.loss, loss)
    assert_close(out.row_loss, row_loss)
    assert_close(out.logp, logp * on)
    assert_close(out.entropy, entropy * on)
    for got, want in zip(grads, expected, strict=True):
        assert_close(got, want)


def test_masks_say_which_branch_each_row_took():
    hidden, weight, target, _, rows = problem(400, 20, 8, scale=2.0, kl_coef=0.0)
    out = paw_loss(hidden.requires_grad_(), weight, target, rows)
    action, observation = rows.kind == ACTION, rows.kind == OBSERVATION
    ratio = (out.logp - rows.old_logp).exp()
    above, below = ratio > 1.2, ratio < 0.8
    positive, negative = rows.advantage > 0, rows.advantage < 0
    clipped = action & ((positive & above) | (negative & below) | (negative & (ratio > 3)))
    for case in (positive & above, negative & below, negative & (ratio > 3)):
        assert (action & case).any()
    masked = observation & (out.logp.exp() > rows.rho)
    assert masked.any() and (observation & ~masked).any()
    assert torch.equal(out.clipped, clipped)
    assert torch.equal(out.masked, masked)
    learns = (action & ~clipped & (rows.advantage != 0)) | (observation & ~masked)
    assert torch.equal(out.live, learns & (rows.weight != 0))


def test_the_kl_clamp_stops_its_gradient():
    hidden, weight, target, _, rows = problem(8, 11, 4)
    rows = dataclasses.replace(
        rows,
        kind=torch.full((8,), ACTION, dtype=torch.uint8),
        advantage=torch.zeros(8),
        weight=torch.ones(8),
        ref_logp=rows.ref_logp + torch.tensor([0, 0, 0, 0, 9, 95, -30, -200.0]),
        kl_coef=0.5,
    )
    out, (d_hidden, _) = fused(hidden, weight, target, rows)
    assert out.kl[4:].tolist() == [10, 10, 10, 10] and (out.kl[:4] < 10).all()
    assert out.live.tolist() == [True] * 4 + [False] * 4
    assert (d_hidden[4:] == 0).all()
    assert_close(d_hidden, dense(hidden, weight, target, rows)[1][0])


def test_huge_ratios_stay_finite():
    hidden, weight, target, _, rows = problem(3, 11, 4)
    rows = dataclasses.replace(
        rows,
        kind=torch.ones(3, dtype=torch.uint8),
        weight=torch.ones(3),
        advantage=torch.tensor([1.0, 0.0, -1.0]),
        old_logp=torch.full((3,), -500.0),
    )
    out, (d_hidden, _) = fused(hidden, weight, target, rows)
    torch.testing.assert_close(out.row_loss, torch.tensor([-1.2, 0.0, 3.0]))
    assert out.clipped.tolist() == [True, False, True] and (d_hidden == 0).all()


def test_gce_lies_between_ce_and_mae():
    hidden, weight, target, _, rows = problem(150, 37, 12, scale=2.0, kl_coef=0.1)

    def of(loss, q=0.7):
        out, grads = fused(hidden, weight, target, dataclasses.replace(rows, observation_loss=loss, q=q))
        return *out, *grads

    assert all(map(torch.equal, of("gce", 1.0), of("mae")))
    for got, want in zip(of("gce", 1e-5), of("ce"), strict=True):
        assert_close(got, want, 2e-4)  # of order q log(p)^2
    assert (of("mae")[1] < of("gce")[1])[rows.kind == OBSERVATION].all()
    assert (of("gce")[1] < of("ce")[1])[rows.kind == OBSERVATION].all()


@pytest.mark.parametrize("name", ["clip", "everything", "mae", "gce"])
def test_bf16_error_is_at_most_twice_that_of_plain_torch(name):
    hidden, weight, target, _, rows = problem(200, 301, 64, scale=2.0, **OPTIONS[name])
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    _, want = dense(hidden, weight, target, rows)
    _, naive = dense(hidden, weight, target, rows, dtype=torch.bfloat16)
    out, got = fused(hidden, weight, target, rows)
    reference = dense_loss(hidden.double(), weight.double(), target, rows)
    assert_close(out.logp, reference[2] * (rows.kind != SKIP))
    assert_close(out.loss, reference[0])
    for g, n, w in zip(got, naive, want, strict=True):
        assert g.dtype == torch.bfloat16
        assert (g - w).abs().max() <= 2 * (n - w).abs().max() + 1e-4


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 64])
def test_chunks_change_nothing_but_rounding(monkeypatch, rows_per_chunk):
    args = problem(100, 33, 8, bias=True, **OPTIONS["everything"])
    hidden, weight, target, bias, rows = args
    whole, whole_grads = fused(hidden, weight, target, rows, bias)
    set_chunk_rows(monkeypatch, rows_per_chunk, vocabulary=33)
    split, split_grads = fused(hidden, weight, target, rows, bias)
    for ours, theirs in zip(split, whole, strict=True):
        assert_close(ours, theirs, 1e-6)
    for a, b in zip(split_grads, whole_grads, strict=True):
        assert_close(a, b, 1e-6)


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_no_full_logits_are_ever_allocated(monkeypatch):
    T, V, D = 300, 500, 4
    hidden, weight, target, _, rows = problem(T, V, D, **OPTIONS["everything"])
    set_chunk_rows(monkeypatch, 10, vocabulary=V)
    with LargestTensor() as largest:
        fused(hidden, weight, target, rows)
    assert largest.numel <= max(10 * V, V * D, T * D) < T * V


def test_repeated_runs_agree_bit_for_bit():
    hidden, weight, target, bias, rows = problem(300, 50, 16, bias=True, **OPTIONS["everything"])
    first, grads = fused(hidden, weight, target, rows, bias)
    again, grads_again = fused(hidden, weight, target, rows, bias)
    assert torch.equal(first.loss, again.loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


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
    assert (out.logp <= 0).all()
    assert (out.entropy >= 0).all() and (out.entropy <= torch.tensor(V).log() * (1 + 1e-6)).all()
    assert (d_hidden[~out.live] == 0).all()
    assert not (out.live & (rows.kind == SKIP)).any()
    assert_close(d_bias.sum(), torch.zeros(()), 1e-4)  # sum over the vocabulary of each row's dL/dz is 0
    _, expected = dense(hidden, weight, target, rows, bias, temperature)
    if scale < 60:  # at |z| in the hundreds float32 logits may fall on the other side of a clip
        for got, want in zip((d_hidden, d_weight, d_bias), expected, strict=True):
            assert_close(got, want, 1e-4)


def test_backward_adds_up_over_micro_batches():
    hidden, weight, target, _, rows = problem(90, 31, 8)
    h, w = leaves(hidden, weight)
    for part in (slice(0, 30), slice(30, 50), slice(50, 90)):
        paw_loss(h[part], w, target[part], rows.take(part)).loss.backward()
    _, (d_hidden, d_weight) = fused(hidden, weight, target, rows)
    assert_close(h.grad, d_hidden, 1e-6)
    assert_close(w.grad, d_weight, 1e-6)


@pytest.mark.parametrize("upstream", [1.0, -0.3])
def test_backward_hands_over_its_gradients_once_unless_the_graph_is_kept(upstream):
    hidden, weight, target, _, rows = problem(40, 31, 8)
    (_, want), (h, w) = fused(hidden, weight, target, rows, upstream=upstream), leaves(hidden, weight)
    loss = upstream * paw_loss(h, w, target, rows).loss
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert_close(h.grad, times * want[0], 1e-6)
        assert_close(w.grad, times * want[1], 1e-6)
    assert_close(torch.autograd.grad(loss, w)[0], want[1], 1e-6)
    out = paw_loss(h, w, target, rows)
    torch.autograd.grad(out.loss, w)
    with pytest.raises(RuntimeError, match="second time"):
        out.loss.backward()


def test_tied_weights_receive_both_gradients():
    _, weight, target, _, rows = problem(40, 31, 8)
    ids = torch.arange(40) % 31
    (tied,) = leaves(weight)
    paw_loss(torch.nn.functional.embedding(ids, tied), tied, target, rows).loss.backward()
    (expected,) = leaves(weight.double())
    dense_loss(expected[ids], expected, target, rows)[0].backward()
    assert_close(tied.grad, expected.grad)


def test_only_wanted_gradients_are_formed():
    hidden, weight, target, _, rows = problem(40, 31, 8)
    _, (d_hidden, d_weight) = fused(hidden, weight, target, rows)
    (h,) = leaves(hidden)
    paw_loss(h, weight, target, rows).loss.backward()
    assert torch.equal(h.grad, d_hidden) and weight.grad is None
    (w,) = leaves(weight)
    paw_loss(hidden, w, target, rows).loss.backward()
    assert torch.equal(w.grad, d_weight)
    with torch.no_grad():
        out = paw_loss(h, w, target, rows)
    assert not out.loss.requires_grad
    frozen = paw_loss(hidden, weight, target, rows)
    assert not frozen.loss.requires_grad and torch.equal(frozen.live, out.live)
    assert not paw_loss(h, w, target, rows).logp.requires_grad


def test_non_contiguous_inputs():
    hidden, weight, target, _, rows = problem(40, 31, 8)
    expected = paw_loss(hidden, weight, target, rows).loss
    padded = torch.stack([target, target], 1)[:, 0]
    h, w = leaves(hidden.t().contiguous().t(), weight.t().contiguous().t())
    out = paw_loss(h, w, padded, rows)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), expected)
    assert h.grad.abs().sum() > 0


def test_autocast_does_not_lower_the_precision():
    hidden, weight, target, _, rows = problem(40, 31, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grads = fused(hidden, weight, target, rows)
    expected, expected_grads = fused(hidden, weight, target, rows)
    assert torch.equal(out.loss, expected.loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize("T", [0, 1, 5])
def test_batches_without_a_live_row(T):
    hidden, weight, target, _, rows = problem(T, 31, 8)
    for dead in (
        dataclasses.replace(rows, kind=torch.zeros(T, dtype=torch.uint8)),
        dataclasses.replace(rows, weight=torch.zeros(T)),
    ):
        out, grads = fused(hidden, weight, target, dead)
        assert out.loss.item() == 0 and not out.live.any()
        assert [g.shape for g in grads] == [hidden.shape, weight.shape]
        assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("kind", [ACTION, OBSERVATION])
@pytest.mark.parametrize("name", OPTIONS)
def test_nan_reaches_the_loss_and_the_gradient(name, kind):
    hidden, weight, target, _, rows = problem(6, 31, 8, **OPTIONS[name])
    rows = dataclasses.replace(rows, kind=torch.full((6,), kind, dtype=torch.uint8), weight=torch.ones(6))
    hidden[2, 3] = torch.nan
    out, (d_hidden, d_weight) = fused(hidden, weight, target, rows)
    assert out.loss.isnan() and d_weight.isnan().any() and d_hidden[2].isnan().any()
    kind_of_2 = rows.kind.clone()
    kind_of_2[2] = SKIP
    out, grads = fused(hidden, weight, target, dataclasses.replace(rows, kind=kind_of_2))
    assert out.loss.isfinite() and all(g.isfinite().all() for g in grads)


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
    "rows.kind must be torch.uint8": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, kind=r.kind.long())),
    "rows.kind must be 0": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, kind=with_value(r.kind, 0, 3))),
    "rows.weight must have shape": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, weight=r.weight[:2])),
    "rows.weight must be finite": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, weight=with_value(r.weight, 1, torch.inf)))
    ),
    "rows.advantage must be finite": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, advantage=with_value(r.advantage, 1, torch.nan)))
    ),
    "rows.old_logp must be finite": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, old_logp=with_value(r.old_logp, 1, -torch.inf)))
    ),
    "rows.old_logp must be torch.float32": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, old_logp=r.old_logp.double()))
    ),
    "rows.ref_logp is needed": lambda h, w, y, r: ((h, w, y, dataclasses.replace(r, ref_logp=None, kl_coef=0.1))),
    "rows.observation_loss='mse'": lambda h, w, y, r: ((h, w, y, dataclasses.replace(r, observation_loss="mse"))),
    "rows.q must be in (0, 1], got 0.0": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, q=0.0)),
    "rows.rho must be in [0, 1], got nan": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, rho=math.nan)),
    "rows.rho must be in [0, 1], got 1.5": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, rho=1.5)),
    "rows.rho must be in [0, 1], got -0.1": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, rho=-0.1)),
    "rows.kl_coef must be finite and at least 0, got nan": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, kl_coef=math.nan))
    ),
    "rows.kl_coef must be finite and at least 0, got -1.0": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, kl_coef=-1.0))
    ),
    "rows.entropy_coef must be finite and at least 0, got nan": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, entropy_coef=math.nan))
    ),
    "rows.entropy_coef must be finite and at least 0, got inf": lambda h, w, y, r: (
        (h, w, y, dataclasses.replace(r, entropy_coef=math.inf))
    ),
    "dual_clip > 1": lambda h, w, y, r: (h, w, y, dataclasses.replace(r, dual_clip=0.5)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    hidden, weight, target, _, rows = problem(4, 11, 6)
    rows = dataclasses.replace(rows, kind=torch.tensor([0, 1, 1, 2], dtype=torch.uint8))
    paw_loss(hidden, weight, target, rows)
    with pytest.raises(ValueError) as error:
        paw_loss(*ERRORS[message](hidden, weight, target, rows))
    assert message in str(error.value)


def test_skipped_rows_may_hold_anything():
    hidden, weight, target, _, rows = problem(4, 11, 6)
    rows = dataclasses.replace(rows, kind=torch.tensor([0, 1, 1, 2], dtype=torch.uint8))
    expected = paw_loss(hidden, weight, target, rows).loss
    values = {n: with_value(getattr(rows, n), 0, torch.nan) for n in ("weight", "advantage", "old_logp", "ref_logp")}
    values = {n: v if n == "weight" else with_value(v, 3, torch.nan) for n, v in values.items()}
    rows = dataclasses.replace(rows, **values)
    out = paw_loss(with_value(hidden, 0, torch.nan), weight, with_value(target, 0, -100), rows)
    assert torch.equal(out.loss, expected)


@pytest.mark.parametrize("backend", ["nope", "cublas"])
def test_unknown_backends_list_the_known(backend):
    hidden, weight, target, _, rows = problem(4, 11, 6)
    with pytest.raises(ValueError, match=r"known backends: .*torch"):
        paw_loss(hidden, weight, target, rows, backend=backend)


@pytest.mark.skipif(not PARITY.exists(), reason="parity data of the reference code is not on this machine")
@pytest.mark.parametrize("case", range(8))
def test_clipped_surrogate_and_k3_match_the_reference_code(case):
    """Token-mean losses and their gradients by logp, from the row coefficients that every backend uses."""
    from paw_kernels.coefficients import row_terms, slopes

    data = json.loads(PARITY.read_text())[case]
    mask = torch.tensor(data["mask"]).flatten()
    values = {n: torch.tensor(data[n]).flatten() for n in ("logp", "old_logp", "ref_logp", "advantage")}
    expected = data["expected"]
    rows = LossRows(
        kind=torch.ones_like(mask, dtype=torch.uint8),
        weight=mask / mask.sum(),
        advantage=values["advantage"],
        old_logp=values["old_logp"],
        ref_logp=values["ref_logp"],
    )
    of, with_kl = slopes(rows), slopes(dataclasses.replace(rows, kl_coef=1.0))
    policy = row_terms(values["logp"], torch.zeros_like(mask), rows, of)
    a, a_with_kl = (s.at(values["logp"])[0] for s in (of, with_kl))
    assert (policy.loss * rows.weight).sum().item() == pytest.approx(expected["policy_loss_token_mean"], abs=1e-5)
    clipped = (policy.clipped * rows.weight).sum().item()
    assert clipped == pytest.approx(expected["clip_frac"] + expected["clip_frac_dual"], abs=1e-6)
    want = torch.tensor(expected["d_policy_loss_d_logp"]).flatten()
    torch.testing.assert_close(a, want, rtol=1e-5, atol=1e-6)
    assert (policy.kl * rows.weight).sum().item() == pytest.approx(expected["k3_token_mean"], abs=1e-5)
    want = torch.tensor(expected["d_k3_d_logp"]).flatten()
    torch.testing.assert_close(a_with_kl - a, want, rtol=1e-4, atol=1e-6)
