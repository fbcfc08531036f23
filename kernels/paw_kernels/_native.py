"""The compiled row operations of csrc/ as torch.library operators, by device.

On the CPU they are plain C functions called through ctypes (which releases the GIL); building them
needs no torch. On CUDA devices they are kernels that the library built from csrc/*.cu registers
itself, when it is loaded here.
"""

import ctypes
import importlib.util
from functools import cache

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("paw_kernels", "FRAGMENT")

# logits [n, V] float32, rows contiguous; bias [V] float32; target [n] int64 in [0, V). u is logits
# + bias, or softcap tanh of that over softcap; z = u scale. Gives logp, entropy, top = max u,
# log-sum-exp of z - top scale: [n] float32.
_LIBRARY.define(
    "row_statistics(Tensor logits, Tensor? bias, Tensor target, float scale, float? softcap=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
# In place: row k < L of logits becomes scale (a (1[j = y] - p_j) - c p_j (log p_j + H)) du/dlogit
# of row source[k]. source [L] int64 comes from `pack`; target, the statistics, a and c are those of
# all n rows. The result is `packed_rows(logits, L, dtype)`; on the CPU dtype is float32.
_LIBRARY.define(
    "row_gradient_(Tensor(a!) logits, Tensor? bias, Tensor target, Tensor source, Tensor top, Tensor log_total, "
    "Tensor entropy, Tensor a, Tensor? c, float scale, ScalarType dtype, float? softcap=None) -> ()"
)
_LIBRARY.define("pack(Tensor chosen) -> (Tensor, Tensor)")


def pack(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of the L chosen rows of chosen [n] bool goes, so that packing in place can be done in parallel.

    Answers source [n] int64 and L itself, [1] int64, without waiting for the device. source[k] = k
    where row k < L is chosen; each hole there is filled by a chosen row from L on, in order; -1
    from L on. So no row written is read by another.

    >>> source, count = pack(torch.tensor([True, False, True, False, False, True]))
    >>> source.tolist(), count.tolist()
    ([0, 5, 2, -1, -1, -1], [3])
    """
    return torch.ops.paw_kernels.pack(chosen.contiguous())


def _pack(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """In plain torch, on every device."""
    index, count = torch.arange(chosen.numel(), device=chosen.device), chosen.sum().reshape(1)
    order = torch.argsort(
        chosen, descending=True, stable=True
    )  # the chosen rows, ascending; then what is left over
    inside = index < count
    hole = inside > chosen
    rank = hole.cumsum(0)  # the last of the chosen rows fill the holes, in order
    source = torch.where(hole, order[rank + (count - rank[-1:] - 1)], index)
    return torch.where(inside, source, -1), count


@cache
def cpu_library() -> ctypes.CDLL | None:
    """The C++ row operations, or None where they were not built, or from older sources."""
    spec = importlib.util.find_spec("paw_kernels._cpu")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    if not hasattr(library, "paw_cpu_interface_4"):
        return None
    pointer, real, size, integer = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64, ctypes.c_int
    shape, results = [size, size], [pointer] * 4
    library.paw_row_statistics.argtypes = [
        pointer,
        size,
        pointer,
        pointer,
        real,
        real,
        *shape,
        *results,
        integer,
    ]
    library.paw_row_gradient.argtypes = [
        pointer,
        size,
        *[pointer] * 8,
        real,
        real,
        size,
        size,
        integer,
    ]
    library.paw_pack.argtypes, library.paw_pack.restype = [pointer, size, pointer], size
    library.paw_in_range.argtypes, library.paw_finite.argtypes = (
        [pointer, size, size],
        [pointer, size],
    )
    library.paw_in_range.restype = library.paw_finite.restype = ctypes.c_bool
    library.paw_claim.argtypes = [pointer, size, integer]
    library.paw_row_statistics.restype = library.paw_row_gradient.restype = (
        library.paw_claim.restype
    ) = None
    return library


@cache
def why_no_cuda(capability: tuple[int, int] | None = None) -> str | None:
    """Why the CUDA kernels cannot be used (on a GPU of that compute capability), or None; the first call loads them."""
    spec = importlib.util.find_spec("paw_kernels._cuda")
    if spec is None or spec.origin is None:
        return "csrc/*.cu was not built; PAW_BUILD_CUDA=1 pip install --no-build-isolation -e . (needs nvcc)"
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        return f"{spec.origin} does not load beside this torch ({error}); build it again"
    try:
        oldest = divmod(
            ctypes.c_int.in_dll(ctypes.CDLL(spec.origin), "paw_cuda_interface_4").value // 10, 10
        )
    except ValueError:
        return f"{spec.origin} was built from older sources; build it again"
    if (
        capability and capability < oldest
    ):  # of the newest it has PTX too, which runs on whatever comes later
        return (
            "csrc/*.cu was built for compute capability {}.{} and later, this GPU has {}.{}".format(
                *oldest, *capability
            )
        )
    return None


why_no_cuda()  # registers the kernels: operators on CUDA tensors use them wherever they are called from


def packed_rows(logits: Tensor, L: int, dtype: torch.dtype) -> Tensor:
    """The first L rows as the operators above leave them: [L, V] of dtype, from the first byte of each row on."""
    return logits.view(dtype)[:L, : logits.shape[1]]


def claimed(tensor: Tensor) -> Tensor:
    """The same, with a large one's memory on a CPU mapped at once: it is about to be written from end to end."""
    library = cpu_library() if type(tensor) is Tensor and tensor.device.type == "cpu" else None
    if library and tensor.nbytes > _REUSED:
        library.paw_claim(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())
    return tensor


def in_range(values: Tensor, limit: int) -> bool:
    """Whether values int64 are seen, at no cost, to lie in [0, limit): on a CPU, where the library is built."""
    library = cpu_library() if type(values) is Tensor and values.device.type == "cpu" else None
    values = values.contiguous()
    return bool(library and library.paw_in_range(values.data_ptr(), values.numel(), limit))


def are_finite(values: Tensor) -> bool:
    """The same of values float32 that are finite."""
    library = cpu_library() if type(values) is Tensor and values.device.type == "cpu" else None
    values = values.contiguous()
    return bool(library and library.paw_finite(values.data_ptr(), values.numel()))


_REUSED = 32 << 20
"""Bytes up to which the C library hands out memory again that a process has mapped."""


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _row_statistics_cpu(
    logits: Tensor, bias: Tensor | None, target: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, ...]:
    library, target = cpu_library(), target.contiguous()
    assert library, "the C++ row operations are not built"
    results = tuple(torch.empty(len(logits), dtype=torch.float32) for _ in range(4))
    given = (
        logits.data_ptr(),
        logits.stride(0),
        _pointer(bias),
        target.data_ptr(),
        scale,
        softcap or 0.0,
    )
    library.paw_row_statistics(
        *given, *logits.shape, *map(_pointer, results), torch.get_num_threads()
    )
    return results


def _row_gradient_cpu(
    logits: Tensor,
    bias: Tensor | None,
    target: Tensor,
    source: Tensor,
    top: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    a: Tensor,
    c: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    softcap: float | None = None,
) -> None:
    if dtype != torch.float32:
        raise ValueError(f"dtype must be float32 on the CPU, got {dtype}")
    library = cpu_library()
    assert library, "the C++ row operations are not built"
    per_row = [
        t if t is None else t.contiguous() for t in (target, source, top, log_total, entropy, a, c)
    ]
    given = (
        logits.data_ptr(),
        logits.stride(0),
        _pointer(bias),
        *map(_pointer, per_row),
        scale,
        softcap or 0.0,
    )
    library.paw_row_gradient(*given, source.numel(), logits.shape[1], torch.get_num_threads())


def _pack_cpu(chosen: Tensor) -> tuple[Tensor, Tensor]:
    library, source = cpu_library(), torch.empty(chosen.numel(), dtype=torch.int64)
    assert library, "the C++ row operations are not built"
    L = library.paw_pack(chosen.data_ptr(), chosen.numel(), source.data_ptr())
    return source, torch.full((1,), L, dtype=torch.int64)


_LIBRARY.impl("row_statistics", _row_statistics_cpu, "CPU")
_LIBRARY.impl("row_gradient_", _row_gradient_cpu, "CPU")
_LIBRARY.impl("pack", _pack, "CompositeExplicitAutograd")
if cpu_library():
    _LIBRARY.impl("pack", _pack_cpu, "CPU")


@torch.library.register_fake("paw_kernels::row_statistics")
def _(logits, *rest):
    return tuple(logits.new_empty(logits.shape[0]) for _ in range(4))


@torch.library.register_fake("paw_kernels::row_gradient_")
def _(logits, bias, target, source, *rest):
    return None


@torch.library.register_fake("paw_kernels::pack")
def _(chosen):
    return chosen.new_empty(chosen.shape[0], dtype=torch.int64), chosen.new_empty(
        1, dtype=torch.int64
    )
