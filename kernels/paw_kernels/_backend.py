"""Chooses the implementation of `token_stats` and `token_loss`, or says why one cannot run here."""

import importlib.util
import os
import warnings
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from paw_kernels import _measured, _rows
from paw_kernels._head import MakeRows

BACKENDS = ("triton", "cuda", "cpu", "torch")
"""All backends. `best_backend` chooses the one for "auto"."""
REFUSED = {
    "quack": (
        "the fused epilogue of quack-kernels (scaled_exp_target_epi, read in 0.6.5) lacks the sum "
        "of e x, from which the entropy and its gradient are formed, and temperature, bias and "
        "soft cap; its loss weights all tokens alike; use backend='triton'"
    )
}
"""Kernels of others that cannot form our gradient, and why (docs/kernels.md)."""


def resolve(backend: str, hidden: Tensor, weight: Tensor) -> MakeRows:
    """Return the implementation called `backend` for these hidden states [n, D] and weight [V, D].

    Raises ValueError if the name is unknown or cannot run on the tensor's device and dtype.
    """
    name = backend
    if backend == "auto":
        V, D = weight.shape
        name = best_backend(hidden.device, hidden.dtype, (V, D), len(hidden))
    reason = why_not_backend(name, hidden.device, hidden.dtype)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot run here: {reason}")
    return implementation(name)


def implementation(name: str) -> MakeRows:
    if name == "triton":
        from paw_kernels import _triton as module
    elif name == "torch":
        from paw_kernels import _torch as module
    else:
        module = _rows
    return module.make_rows


def best_backend(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int] | None = None,
    n: int | None = None,
) -> str:
    """Return the backend that "auto" means for hidden states of this device and dtype.

    It is the fastest one that `paw doctor --kernels` measured at the head's shape (V, D) and about
    n rows (None: many). Without measurements, it is the first that works in the expected order of
    speed.

    Compiled kernels for a GPU are tried once per process. One that fails is left out with a
    warning.
    """
    if shape:
        measured = _measured.fastest(device, dtype, *shape, n)
        if (
            measured
            and measured.backend in BACKENDS
            and why_not_backend(measured.backend, device, dtype) is None
        ):
            return measured.backend
    return first_that_works(order(device, dtype), device, dtype, shape)


def order(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the backends, the one expected to be fastest first."""
    if device.type != "cuda":
        return "cpu", "torch"
    # Triton multiplies these as three tf32 products, and cuBLAS is faster.
    if dtype == torch.float32:
        return "cuda", "torch"
    major, _ = torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return "cuda", "triton", "torch"
    return "triton", "cuda", "torch"


def first_that_works(
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int] | None = None,
) -> str:
    """Return the first backend that can run on such tensors and passes its trial.

    Warns of each backend that fails its trial.
    """
    for name in names:
        if why_not_backend(name, device, dtype) is not None:
            continue
        fault = fault_of_backend(name, device, dtype, shape)
        if fault is None:
            return name
        message = f"head backend '{name}' is left out: {fault}; see paw doctor --kernels"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    raise ValueError(f"no backend of the head works on {device}")


@cache
def fault_of_backend(
    backend: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int] | None = None
) -> str | None:
    """Compare a tiny pass of compiled GPU kernels with plain torch. Returns the fault, or None.

    `shape` is the head's (V, D). The pass uses a smaller V that ends like the full one, in one
    chunk and in two, so that gradients are summed over chunks too. It runs once per process, and
    takes seconds if kernels must be compiled, else milliseconds.
    """
    if backend not in ("triton", "cuda"):
        return None
    from paw_kernels.trial import largest_error

    V, D = shape or (600, 64)
    try:
        share = largest_error(implementation(backend), device, dtype, 300, 512 + V % 256, D)
    except Exception as error:  # any error of a compiler, assembler or driver
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if share <= 1:
        return None
    return f"its results are off by {share:.3g} times what rounding explains"


def why_not_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why `backend` cannot run there and what would help, or None if it can.

    Raises ValueError if the name is unknown.
    """
    if backend in REFUSED:
        return REFUSED[backend]
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; known backends: {', '.join(['auto', *BACKENDS])}"
        )
    if backend == "triton":
        # The interpreter runs on the CPU.
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"it needs tensors on cuda, but these are on {device}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; pip install triton"
        from paw_kernels import _triton

        return _triton.why_not(device, dtype)
    if backend == "torch":
        return None
    return _rows.why_not(backend, device)
