"""The kernels give the same bits for every order in which threads take turns, and need all of their
barriers for that."""

import ctypes
import faulthandler
import os
import signal
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
    x = random(3, 9001)
    target = torch.tensor([0, 9000, 5])
    return OPS.row_statistics(x, None, target, 1.0)


def gradient():
    # Five tiles, rows at every alignment, and one row that comes from behind.
    x = random(5, 20_001)
    target = torch.arange(5)
    ones = torch.ones(5)
    source = torch.tensor([0, 4, 2, 3])
    OPS.row_gradient_(
        x, None, target, source, 0 * ones, 10 * ones, ones, ones, ones, 1.0, torch.bfloat16
    )
    return (x.view(torch.bfloat16)[:4, :20_001],)


CALLS = {
    "row_statistics": (statistics, 1),
    "row_gradient_": (gradient, 3),
    "pack": (lambda: OPS.pack(random(5000) > 0.5), 8),
}


def gives(call, expected):
    results = call()
    return all(
        torch.equal(actual.view(torch.uint8), exact.view(torch.uint8))
        for actual, exact in zip(results, expected, strict=True)
    )


def goes_wrong(call, expected):
    """Runs the call in a child, because a kernel that lacks a barrier may write anywhere."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3)
        exit_code = 1
        try:
            exit_code = 0 if gives(call, expected) else 1
        finally:
            os._exit(exit_code)
    return os.waitpid(child, 0)[1] != 0


@pytest.fixture
def emulate(emulator):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads of a parallel region do not survive in a child
    yield emulator.paw_emulate
    torch.set_num_threads(threads)
    emulator.paw_emulate(0, -1)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow
def test_results_depend_on_the_order_of_turns_only_where_a_barrier_is_left_out(name, emulate):
    call, barriers = CALLS[name]
    emulate(0, -1)
    expected = [tensor.clone() for tensor in call()]
    assert emulate(0, -1) == barriers
    for order in ORDERS:
        emulate(order, -1)
        assert gives(call, expected), f"order {order}"
    assert not goes_wrong(call, expected)
    for dropped in range(barriers):
        goes_wrong_once = False
        for order in ORDERS:
            emulate(order, dropped)
            goes_wrong_once = goes_wrong_once or goes_wrong(call, expected)
        assert goes_wrong_once, f"barrier {dropped} is not needed, or the emulation is blind"


def test_mistakes_show(tmp_path):
    """A missing barrier changes the results. A barrier that a thread never reaches is an error."""
    library = cuda_on_cpu.compile_for_cpu(
        tmp_path / "bad.so", Path(__file__).with_name("bad_kernels.cu")
    )

    def run(kernel, order):
        output = torch.zeros(128)
        library.paw_emulate(order, -1)
        return library.run_bad(kernel, ctypes.c_void_p(output.data_ptr())), output.tolist()

    assert len({tuple(run(0, order)[1]) for order in ORDERS}) > 1
    assert all(run(1, order)[0] != 0 for order in ORDERS)
