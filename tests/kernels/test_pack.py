"""The compaction scan in plain torch, in C++, and as the CUDA kernel, emulated or on a GPU."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paw_kernels import _native

OPS = torch.ops.paw_kernels
cases = settings(max_examples=50, deadline=None, derandomize=True)


@cases
@given(st.lists(st.booleans(), max_size=40), st.sampled_from([0, 0, 3000]), st.booleans())
def test_packing_fills_every_hole_from_behind(machine, pattern, more, last):
    live = pattern + [last, not last, last] * (more // 3)
    operators, device = machine
    source, count = operators.pack(torch.tensor(live, dtype=torch.bool, device=device))
    live_count = int(count)
    source = source.tolist()
    assert sum(live) == live_count
    assert source[live_count:] == [-1] * (len(live) - live_count)
    assert sorted(source[:live_count]) == [row for row, alive in enumerate(live) if alive]
    assert all(
        row == slot if live[slot] else row >= live_count
        for slot, row in enumerate(source[:live_count])
    )
    moved = [row for slot, row in enumerate(source[:live_count]) if row != slot]
    assert moved == sorted(moved)


def test_inputs_need_not_be_contiguous():
    assert _native.pack(torch.tensor([False, True, True, True])[::2])[0].tolist() == [1, -1]


def test_results_on_fake_cuda_tensors_have_the_shapes_and_dtypes():
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = OPS.pack(torch.empty(5, dtype=torch.bool, device="cuda"))
        logits = torch.empty(4, 7, device="cuda")
        per_row = torch.empty(4, device="cuda")
        target = torch.empty(4, dtype=torch.int64, device="cuda")
        statistics = OPS.row_statistics(logits, None, target, 1.0)
        four = [per_row] * 4
        gradient = OPS.row_gradient_(logits, None, target, target, *four, None, 1.0, torch.float16)
        assert gradient is None
    assert [(tuple(result.shape), result.dtype) for result in results] == [
        ((5,), torch.int64),
        ((1,), torch.int64),
    ]
    assert all(result.shape == (4,) and result.dtype == torch.float32 for result in statistics)
    assert all(result.device.type == "cuda" for result in (*results, *statistics))


def test_the_operator_passes_the_checks_of_torch_library():
    torch.library.opcheck(OPS.pack, (torch.rand(9) > 0.5,))
