"""The kernels give the same bits whatever the order in which threads take turns, and the emulation sees mistakes."""

import ctypes
from pathlib import Path

import cuda_on_cpu
import pytest
import torch

pytestmark = pytest.mark.slow

OPS = torch.ops.paw_on_cpu
ORDERS = range(12)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def statistics():
    x, target = random(3, 9001), torch.tensor([0, 9000, 5])
    return OPS.row_statistics(x, None, target, 1.0)


def gradient():
    # Five tiles, rows at every alignment, one row that comes from behind.
    x, target, ones = random(5, 20_001), torch.arange(5), torch.ones(5)
    source = torch.tensor([0, 4, 2, 3])
    OPS.row_gradient_(x, None, target, source, 0 * ones, 10 * ones, ones, ones, ones, 1.0, torch.bfloat16)
    return (x.view(torch.bfloat16)[:4, :20_001],)


def select():
    # The threshold lies among scores that differ from it in any byte, and some not at all.
    g = torch.Generator().manual_seed(0)
    close = 1 + torch.randint(200, (2500,), generator=g) * 2.0**-23
    score = torch.where(torch.rand(2500, generator=g) < 0.5, close, random(2500))
    return (OPS.top_alpha(score, random(2500, seed=1) > -1, 0.5),)


CALLS = {
    "row_statistics": statistics,
    "row_gradient_": gradient,
    "segment_reduce": lambda: (OPS.segment_reduce(random(999), torch.tensor([0, 0, 500, 999]), True),),
    "top_alpha": select,
    "pack": lambda: OPS.pack(random(5000) > 0.5),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_the_order_of_turns(name, emulator):
    emulator.paw_emulate(0)
    want = [t.clone().view(torch.uint8) for t in CALLS[name]()]
    for order in ORDERS:
        emulator.paw_emulate(order)
        assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(CALLS[name](), want, strict=True)), order


def test_mistakes_show(tmp_path):
    """A missing barrier in results, one that a thread never reaches as an error."""
    library = cuda_on_cpu.compile_for_cpu(tmp_path / "bad.so", Path(__file__).with_name("bad_kernels.cu"))

    def run(which, order):
        out = torch.zeros(128)
        library.paw_emulate(order)
        return library.run_bad(which, ctypes.c_void_p(out.data_ptr())), out.tolist()

    assert len({tuple(run(0, order)[1]) for order in ORDERS}) > 1
    assert all(run(1, order)[0] != 0 for order in ORDERS)
