"""Choice of the implementation behind `token_stats` and `token_loss`, and why another one cannot run here."""

import importlib.util
import os

import torch
from torch import Tensor

from paw_kernels import _rows
from paw_kernels._head import MakeRows

BACKENDS = ("triton", "cuda", "cpu", "torch")
"""Fastest first; "auto" is the first that can run."""


def resolve(backend: str, hidden: Tensor) -> MakeRows:
    """The implementation called `backend` for these hidden states.

    Raises ValueError for an unknown name, or one that cannot run on the tensor's device and dtype.
    """
    name = best_backend(hidden.device, hidden.dtype) if backend == "auto" else backend
    reason = why_not_backend(name, hidden.device, hidden.dtype)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot run here: {reason}")
    if name == "triton":
        from paw_kernels import _triton as implementation
    elif name == "torch":
        from paw_kernels import _torch as implementation
    else:
        implementation = _rows
    return implementation.make_rows


def best_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest backend that runs for hidden states on this device, of this dtype."""
    # Triton multiplies float32 as three tf32 products, where cuBLAS does better; on a CPU it is only interpreted.
    names = BACKENDS if device.type == "cuda" and dtype != torch.float32 else BACKENDS[1:]
    return next(name for name in names if why_not_backend(name, device, dtype) is None)


def why_not_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `backend` cannot run there, and what would help; None if it can. Raises ValueError for an unknown name."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; known backends: {', '.join(['auto', *BACKENDS])}")
    if backend == "triton":
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":  # the interpreter runs on the CPU
            return f"it needs tensors of device cuda, these are on {device}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; pip install triton"
        from paw_kernels import _triton

        return _triton.why_not(device, dtype)
    return None if backend == "torch" else _rows.why_not(backend, device)
