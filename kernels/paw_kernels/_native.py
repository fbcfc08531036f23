"""The compiled row operations of csrc/ as torch.library operators, by device.

On the CPU they are plain C functions called through ctypes (which releases the GIL); building them needs no torch.
"""

import ctypes
import importlib.util
from functools import cache

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("paw_kernels", "FRAGMENT")
_LIBRARY.define(
    "row_statistics(Tensor logits, Tensor? bias, Tensor target, float scale) -> (Tensor, Tensor, Tensor)",
)
_LIBRARY.define(
    "row_gradient_(Tensor(a!) logits, Tensor? bias, Tensor target, Tensor source, Tensor log_sum, Tensor entropy, "
    "Tensor a, Tensor? c, float scale) -> ()"
)


@cache
def cpu_library() -> ctypes.CDLL | None:
    """The C++ row operations, or None where the package was installed without a compiler."""
    spec = importlib.util.find_spec("paw_kernels._cpu")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    pointer, real, size, integer = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64, ctypes.c_int
    library.paw_row_statistics.argtypes = [pointer, size, *[pointer] * 2, real, size, size, *[pointer] * 3, integer]
    library.paw_row_gradient.argtypes = [pointer, size, *[pointer] * 7, real, size, size, integer]
    library.paw_row_statistics.restype = library.paw_row_gradient.restype = None
    return library


def row_statistics(logits: Tensor, bias: Tensor | None, target: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and log-sum-exp ([n] float32) of z = (logits + bias) * scale.

    logits [n, V] float32, rows contiguous; bias [V] float32; target [n] int64 in [0, V).
    """
    return torch.ops.paw_kernels.row_statistics(logits, bias, target, scale)


def row_gradient_(
    logits: Tensor,
    bias: Tensor | None,
    target: Tensor,
    source: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    a: Tensor,
    c: Tensor | None,
    scale: float,
) -> None:
    """In place: row k < L of logits becomes scale (a (1[j = y] - p_j) - c p_j (log p_j + H)) of row source[k].

    `source` [L] int64 comes from `_head.pack`; target, log_sum, entropy, a and c are those of all n rows.
    """
    torch.ops.paw_kernels.row_gradient_(logits, bias, target, source, log_sum, entropy, a, c, scale)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _cpu() -> ctypes.CDLL:
    library = cpu_library()
    if library is None:
        raise RuntimeError("the C++ row operations are not built")
    return library


def _row_statistics_cpu(logits: Tensor, bias: Tensor | None, target: Tensor, scale: float) -> tuple[Tensor, ...]:
    n, V = logits.shape
    target = target.contiguous()
    results = tuple(torch.empty(n, dtype=torch.float32) for _ in range(3))
    _cpu().paw_row_statistics(
        logits.data_ptr(),
        logits.stride(0),
        _pointer(bias),
        target.data_ptr(),
        scale,
        n,
        V,
        *(r.data_ptr() for r in results),
        torch.get_num_threads(),
    )
    return results


def _row_gradient_cpu(
    logits: Tensor,
    bias: Tensor | None,
    target: Tensor,
    source: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    a: Tensor,
    c: Tensor | None,
    scale: float,
) -> None:
    per_row = [t if t is None else t.contiguous() for t in (target, source, log_sum, entropy, a, c)]
    _cpu().paw_row_gradient(
        logits.data_ptr(),
        logits.stride(0),
        _pointer(bias),
        *map(_pointer, per_row),
        scale,
        source.numel(),
        logits.shape[1],
        torch.get_num_threads(),
    )


_LIBRARY.impl("row_statistics", _row_statistics_cpu, "CPU")
_LIBRARY.impl("row_gradient_", _row_gradient_cpu, "CPU")


@torch.library.register_fake("paw_kernels::row_statistics")
def _(logits, bias, target, scale):
    return tuple(logits.new_empty(logits.shape[0]) for _ in range(3))


@torch.library.register_fake("paw_kernels::row_gradient_")
def _(logits, bias, target, source, log_sum, entropy, a, c, scale):
    return None
