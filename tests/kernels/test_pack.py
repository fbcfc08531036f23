"""The compaction scan: plain torch, C++, and the CUDA kernel emulated or on a GPU."""

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
    L, source = int(count), source.tolist()
    assert sum(live) == L and source[L:] == [-1] * (len(live) - L)
    assert sorted(source[:L]) == [i for i, alive in enumerate(live) if alive]
    assert all(i == k if live[k] else i >= L for k, i in enumerate(source[:L]))
    moved = [i for k, i in enumerate(source[:L]) if i != k]
    assert moved == sorted(moved)


def test_inputs_need_not_be_contiguous():
    assert _native.pack(torch.tensor([False, True, True, True])[::2])[0].tolist() == [1, -1]


def test_results_on_fake_cuda_tensors_have_the_shapes_and_dtypes():
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = OPS.pack(torch.empty(5, dtype=torch.bool, device="cuda"))
        x, n = torch.empty(4, 7, device="cuda"), torch.empty(4, device="cuda")
        target = torch.empty(4, dtype=torch.int64, device="cuda")
        statistics = OPS.row_statistics(x, None, target, 1.0)
        assert (
            OPS.row_gradient_(x, None, target, target, n, n, n, n, None, 1.0, torch.float16) is None
        )
    assert [(tuple(r.shape), r.dtype) for r in results] == [
        ((5,), torch.int64),
        ((1,), torch.int64),
    ]
    assert all(r.shape == (4,) and r.dtype == torch.float32 for r in statistics)
    assert all(r.device.type == "cuda" for r in (*results, *statistics))


def test_the_operator_passes_the_checks_of_torch_library():
    torch.library.opcheck(OPS.pack, (torch.rand(9) > 0.5,))
