"""Puts the helpers of the tests here within reach (importlib mode adds no test folder to the path)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
EMULATED = [pytest.param(order, marks=pytest.mark.slow) for order in ("forward", "shuffled")]


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """The CUDA kernels built for the CPU; `emulator.paw_emulate(order, dropped)` as cuda_on_cpu.h says."""
    import cuda_on_cpu

    return cuda_on_cpu.compile_for_cpu(tmp_path_factory.mktemp("cuda") / "kernels.so", *cuda_on_cpu.SOURCES)


@pytest.fixture(scope="session")
def gpu():
    """The CUDA operators on a GPU, where there is one and they are built."""
    import cuda_on_cpu

    from paw_kernels import _native

    if not torch.cuda.is_available() or _native.why_no_cuda():
        pytest.skip(_native.why_no_cuda() or "no CUDA device")
    return cuda_on_cpu.Machine(torch.ops.paw_kernels, "cuda")


@pytest.fixture(params=["torch", "cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("triton", "cuda"))])
def backend(request, monkeypatch):
    """What to pass as `backend`; "cuda" are its kernels on the CPU."""
    if request.param == "triton":
        from triton_interpreted import backend as triton

        if not triton.INTERPRETED:
            pytest.skip("the interpreter is for machines without a GPU")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    if not request.param.startswith("cuda"):
        return request.param
    request.getfixturevalue("emulator")
    monkeypatch.setattr(torch.ops, "paw_kernels", torch.ops.paw_on_cpu)
    return "cpu"


@pytest.fixture(scope="module", params=["forward", "backward", "shuffled", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request):
    """Where the CUDA operators run in a test: emulated with three orders of turns, and on a GPU."""
    yield from _machine(request)


@pytest.fixture(scope="module", params=["torch", *EMULATED, pytest.param("gpu", marks=pytest.mark.gpu)])
def machine_or_torch(request):
    """The same for operators that also exist in plain torch."""
    import cuda_on_cpu

    if request.param == "torch":
        yield cuda_on_cpu.Machine(torch.ops.paw_kernels, "cpu")
    else:
        yield from _machine(request)


def _machine(request):
    import cuda_on_cpu

    if request.param == "gpu":
        yield request.getfixturevalue("gpu")
        return
    emulator = request.getfixturevalue("emulator")
    emulator.paw_emulate(["forward", "backward", "shuffled"].index(request.param), -1)
    yield cuda_on_cpu.Machine(torch.ops.paw_on_cpu, "cpu")
    emulator.paw_emulate(0, -1)
