"""Segment sums, top-alpha selection and packing: plain torch, and the CUDA kernels emulated or on a GPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paw.algo.world_model import select
from paw.types import Sample
from paw_kernels import segments

OPS = torch.ops.paw_kernels
TIES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, math.inf, -math.inf, 1.0000001, 3e38]
cases = settings(max_examples=50, deadline=None, derandomize=True)


@cases
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 31, 255, 256, 257, 3000]), max_size=8),
    size=st.sampled_from([1.0, 1e30]),
    nan=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_segments_match_float64(machine, lengths, size, nan, seed):
    values = size * torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    if nan and len(values):
        values[len(values) // 2] = torch.nan
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    parts = [part.double() for part in values.split(lengths)] if lengths else []
    sums = torch.stack([p.sum() for p in parts]) if parts else torch.empty(0, dtype=torch.float64)
    operators, device = machine
    arguments = values.to(device), offsets.to(device)
    for mean, want in ((False, sums), (True, sums / torch.tensor(lengths).clamp(min=1))):
        got = operators.segment_reduce(*arguments, mean)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.cpu(), want.float(), rtol=2e-7, atol=1e-12 * size, equal_nan=True)
        assert torch.equal(got.nan_to_num(), operators.segment_reduce(*arguments, mean).nan_to_num())


def chosen(score, valid, alpha):
    candidates = [i for i, v in enumerate(valid) if v]
    best = sorted(candidates, key=lambda i: -score[i])[: max(0, math.ceil(alpha * len(candidates) - 1e-9))]
    return [i in best for i in range(len(score))]


@cases
@given(
    st.lists(st.tuples(st.sampled_from(TIES) | st.floats(width=32, allow_nan=False), st.booleans()), max_size=40),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]) | st.floats(0, 1),
)
def test_top_alpha_is_the_highest_scores_ties_to_the_lower_index(machine, rows, alpha):
    score, valid = [s for s, _ in rows], [v for _, v in rows]
    operators, device = machine
    got = operators.top_alpha(
        torch.tensor(score, device=device), torch.tensor(valid, dtype=torch.bool, device=device), alpha
    )
    assert got.dtype == torch.bool and got.tolist() == chosen(score, valid, alpha)


@pytest.mark.parametrize("kind", ["random", "few values", "all equal", "neighbours"])
def test_top_alpha_of_thousands(machine, kind):
    g = torch.Generator().manual_seed(0)
    score = {
        "random": torch.randn(4000, generator=g),
        "all equal": torch.full((4000,), -0.5),
        "few values": torch.randint(-2, 3, (4000,), generator=g).float(),
        "neighbours": 1 + torch.randint(3000, (4000,), generator=g) * 2.0**-23,
    }[kind]
    valid = torch.rand(4000, generator=g) < 0.8
    score[(~valid).nonzero()[0]] = torch.nan  # which is never read
    operators, device = machine
    for alpha in (0.0, 0.1, 0.25, 0.999, 1.0):
        got = operators.top_alpha(score.to(device), valid.to(device), alpha).tolist()
        order = sorted(valid.nonzero().squeeze(1).tolist(), key=lambda i: -score[i].item())
        best = set(order[: math.ceil(alpha * len(order) - 1e-9)])
        assert got == [i in best for i in range(4000)]


def test_top_alpha_selects_as_the_trainer_does():
    g = torch.Generator().manual_seed(0)
    entropy = torch.rand(200, generator=g).mul(20).round().div(20)
    valid = torch.rand(200, generator=g) < 0.7
    rows = [
        Sample(0, i, 0, [], [], observation_ids=[1] * v, entropy=h)
        for i, (h, v) in enumerate(zip(entropy.tolist(), valid.tolist(), strict=True))
    ]
    want = select(rows, alpha=0.3, weight=1.0, reward_max=1.0, n_groups=1).selected
    assert segments.top_alpha(entropy, valid, 0.3).tolist() == want


@cases
@given(st.lists(st.booleans(), max_size=40), st.sampled_from([0, 0, 3000]), st.booleans())
def test_packing_fills_every_hole_from_behind(machine, pattern, more, last):
    live = pattern + [last, not last, last] * (more // 3)
    operators, device = machine
    source, count = operators.pack(torch.tensor(live, dtype=torch.bool, device=device))
    L, source = int(count), source.tolist()
    assert sum(live) == L and source[L:] == [-1] * (len(live) - L)
    assert sorted(source[:L]) == [i for i, alive in enumerate(live) if alive]
    assert all(i == k if live[k] else i >= L for k, i in enumerate(source[:L]))
    moved = [i for k, i in enumerate(source[:L]) if i != k]
    assert moved == sorted(moved)


VALUES, OFFSETS = torch.ones(5), torch.tensor([0, 2, 5])


ERRORS = {
    "values must be one-dimensional torch.float32": lambda: segments.segment_sum(VALUES.double(), OFFSETS),
    "values must be one-dimensional torch.float32, got shape [5, 1]": lambda: segments.segment_sum(
        VALUES[:, None], OFFSETS
    ),
    "offsets must be one-dimensional torch.int64": lambda: segments.segment_mean(VALUES, OFFSETS.int()),
    "offsets must have at least one element": lambda: segments.segment_mean(VALUES, OFFSETS[:0]),
    "on cpu as values has; got shape [3] on meta": lambda: segments.segment_mean(VALUES, OFFSETS.to("meta")),
    "offsets must go from 0 to 5": lambda: segments.segment_sum(VALUES, OFFSETS[:-1]),
    "offsets must go from 0 to 5, the number of values": lambda: segments.segment_sum(VALUES, OFFSETS + 1),
    "offsets must not fall": lambda: segments.segment_sum(VALUES, torch.tensor([0, 4, 3, 5])),
    "score must be one-dimensional torch.float32": lambda: segments.top_alpha(VALUES.half(), VALUES > 0, 0.5),
    "valid must be one-dimensional torch.bool": lambda: segments.top_alpha(VALUES, VALUES, 0.5),
    "valid must have the shape and device of score": lambda: segments.top_alpha(VALUES, VALUES[1:] > 0, 0.5),
    "alpha must be in [0, 1], got 1.5": lambda: segments.top_alpha(VALUES, VALUES > 0, 1.5),
    "alpha must be in [0, 1], got nan": lambda: segments.top_alpha(VALUES, VALUES > 0, math.nan),
    "score must not be NaN on valid rows": lambda: segments.top_alpha(VALUES * math.nan, VALUES > 0, 0.5),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_input_is_named(message):
    with pytest.raises(ValueError) as error:
        ERRORS[message]()
    assert message in str(error.value)


def test_inputs_need_not_be_contiguous():
    values, offsets = torch.arange(10.0)[::2], torch.tensor([0, 9, 2, 9, 5])[::2]
    assert segments.segment_sum(values, offsets).tolist() == [2.0, 18.0]
    assert segments.top_alpha(values, (values > 2).repeat_interleave(2)[::2], 0.5).tolist() == [False] * 3 + [True] * 2
    assert segments.pack(torch.tensor([False, True, True, True])[::2])[0].tolist() == [1, -1]


def test_results_on_fake_cuda_tensors_have_the_shapes_and_dtypes():
    with FakeTensorMode(allow_non_fake_inputs=True):
        values, offsets = torch.empty(5, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
        valid = torch.empty(5, dtype=torch.bool, device="cuda")
        results = [OPS.segment_reduce(values, offsets, True), OPS.top_alpha(values, valid, 0.5), *OPS.pack(valid)]
        x, n = torch.empty(4, 7, device="cuda"), torch.empty(4, device="cuda")
        target = torch.empty(4, dtype=torch.int64, device="cuda")
        statistics = OPS.row_statistics(x, None, target, 1.0)
        assert OPS.row_gradient_(x, None, target, target, n, n, n, n, None, 1.0, torch.float16) is None
    assert [tuple(r.shape) for r in results] == [(2,), (5,), (5,), (1,)]
    assert [r.dtype for r in results] == [torch.float32, torch.bool, torch.int64, torch.int64]
    assert all(r.shape == (4,) and r.dtype == torch.float32 for r in statistics)
    assert all(r.device.type == "cuda" for r in (*results, *statistics))


def test_operators_pass_the_checks_of_torch_library():
    torch.library.opcheck(OPS.segment_reduce, (VALUES, OFFSETS, True))
    torch.library.opcheck(OPS.top_alpha, (torch.randn(9), torch.rand(9) > 0.5, 0.4))
    torch.library.opcheck(OPS.pack, (torch.rand(9) > 0.5,))
