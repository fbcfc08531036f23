"""Fixtures for every backend of the head, and for the operators of csrc/ on a CPU, emulated, or on
a GPU."""

import ctypes
import fcntl

import pytest
import torch

BACKENDS = [
    *("torch", "cpu"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("triton", "cuda")),
    *(pytest.param(f"{name} on a GPU", marks=pytest.mark.gpu) for name in ("triton", "cuda")),
]
MACHINES = [
    "cpu",
    pytest.param("emulated", marks=pytest.mark.slow),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session")
def emulator(shared):
    """The CUDA kernels built for the CPU, with `emulator.paw_emulate(order, dropped)` as described in
    cuda_on_cpu.h."""
    import cuda_on_cpu

    library = shared / "cuda_on_cpu.so"
    with (shared / "cuda_on_cpu.lock").open("w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # the first process that needs it builds it for all processes
        if not library.exists():
            return cuda_on_cpu.compile_for_cpu(library, *cuda_on_cpu.SOURCES)
    return ctypes.CDLL(str(library))


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Without a GPU, Triton runs in its interpreter and "cuda" in the emulation."""
    from dense_reference import Backend

    from paw_kernels import why_not_backend

    name, _, on_gpu = request.param.partition(" on ")
    if on_gpu:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        if reason := why_not_backend(name, torch.device("cuda"), torch.float32):
            pytest.skip(reason)
        return Backend(name, name, "cuda", examples=8)  # Triton compiles anew for every D
    if name == "triton":
        from triton_interpreted import backend as triton

        if not triton.INTERPRETED:
            pytest.skip("the interpreter is for machines without a GPU")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    if name == "cuda":
        # The threads of a block take turns in random order.
        request.getfixturevalue("emulator").paw_emulate(2, -1)
        monkeypatch.setattr("paw_kernels._rows.KEPT_BYTES", 0)  # logits are kept only on a CPU
        for passes in ("token_loss", "token_stats"):  # a dispatch mode looks it up by name
            monkeypatch.setattr(
                torch.ops.paw_on_cpu, passes, getattr(torch.ops.paw_kernels, passes), raising=False
            )
        monkeypatch.setattr(torch.ops, "paw_kernels", torch.ops.paw_on_cpu)
        return Backend(name, "cpu", "cpu", examples=10)
    return Backend(name, name, "cpu", examples=8 if name == "triton" else 30)


@pytest.fixture(scope="module", params=MACHINES)
def machine(request):
    """Where the operators of csrc/ run."""
    import cuda_on_cpu

    from paw_kernels import _native

    if request.param == "cpu":
        return cuda_on_cpu.Machine(torch.ops.paw_kernels, "cpu")
    if request.param == "gpu":
        if not torch.cuda.is_available() or _native.why_no_cuda():
            pytest.skip(_native.why_no_cuda() or "no CUDA device")
        return cuda_on_cpu.Machine(torch.ops.paw_kernels, "cuda")
    request.getfixturevalue("emulator").paw_emulate(2, -1)
    return cuda_on_cpu.Machine(torch.ops.paw_on_cpu, "cpu")
