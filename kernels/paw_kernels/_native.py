"""The compiled row operations of csrc/ as torch.library operators, by device.

On the CPU they are plain C functions, called through ctypes (which releases the GIL). Building them
does not need torch. On CUDA devices they are kernels. The library built from csrc/*.cu registers
them when it is loaded here.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("paw_kernels", "FRAGMENT")

_CPU_LIBRARY = Path(__file__).with_name("_cpu.so")
_CUDA_LIBRARY = Path(__file__).with_name("_cuda.so")

_REUSED = 32 << 20
"""Largest allocation, in bytes, for which the C library reuses memory that a process has mapped."""

# Takes logits [n, V] float32 with contiguous rows, bias [V] float32 and target [n] int64 in [0, V).
# With u = logits + bias, or under a soft cap softcap tanh((logits + bias) / softcap), and z = u
# scale, it returns logp, entropy, top = max u and the log-sum-exp of z - top scale: [n] float32
# each.
_LIBRARY.define(
    "row_statistics(Tensor logits, Tensor? bias, Tensor target, float scale, float? softcap=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
# Works in place. Row k < L of logits becomes scale (a (1[j = y] - p_j) - c p_j (log p_j + H))
# du/dlogit of row source[k]. source [L] int64 comes from `pack`. target, the statistics, a and c
# cover all n rows. Read the result with `packed_rows(logits, L, dtype)`. On the CPU, dtype is
# float32.
_LIBRARY.define(
    "row_gradient_(Tensor(a!) logits, Tensor? bias, Tensor target, Tensor source, Tensor top, Tensor log_total, "
    "Tensor entropy, Tensor a, Tensor? c, float scale, ScalarType dtype, float? softcap=None) -> ()"
)
_LIBRARY.define("pack(Tensor chosen) -> (Tensor, Tensor)")


def pack(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Say which chosen row goes to each of the first L rows, for parallel packing in place.

    Takes chosen [n] bool. Returns source [n] int64 and L [1] int64, the number of chosen rows,
    without waiting for the device. For k < L, source[k] = k if row k is chosen. The other rows
    below L are filled by the chosen rows from L on, in order. From L on, source is -1. So no row
    reads a row that is overwritten.

    >>> source, count = pack(torch.tensor([True, False, True, False, False, True]))
    >>> source.tolist(), count.tolist()
    ([0, 5, 2, -1, -1, -1], [3])
    """
    return torch.ops.paw_kernels.pack(chosen.contiguous())


def _pack(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """`pack` in plain torch, for every device."""
    index = torch.arange(chosen.numel(), device=chosen.device)
    count = chosen.sum().reshape(1)
    # First the chosen rows, ascending, then the others.
    order = torch.argsort(chosen, descending=True, stable=True)
    is_packed = index < count
    is_hole = is_packed > chosen
    # The last chosen rows fill the holes, in order.
    hole_number = is_hole.cumsum(0)
    source = torch.where(is_hole, order[hole_number + (count - hole_number[-1:] - 1)], index)
    return torch.where(is_packed, source, -1), count


@cache
def cpu_library() -> ctypes.CDLL | None:
    """Return the C++ row operations, or None. `why_no_cpu_library` then says why."""
    if why_no_cpu_library() is not None:
        return None
    library = ctypes.CDLL(str(_CPU_LIBRARY))
    _declare(library)
    return library


@cache
def why_no_cpu_library() -> str | None:
    """Return why the C++ row operations cannot be used, or None.

    On Linux they need libgomp.so.1. torch's wheels include one, which the import of torch has
    loaded. The linker uses that one, so there is never a second set of threads.
    """
    if not _CPU_LIBRARY.is_file():
        return (
            "csrc/rows.cpp was not built; install a C++ compiler and install paw-trainer again"
            " (in a checkout: pip install -e .)"
        )
    try:
        library = ctypes.CDLL(str(_CPU_LIBRARY))
    except OSError as error:
        return f"{_CPU_LIBRARY} does not load: {error}"
    if not hasattr(library, "paw_cpu_interface_4"):
        return f"{_CPU_LIBRARY} was built from other sources; rerun pip install -e ."
    return None


def _declare(library: ctypes.CDLL) -> None:
    """Set the types of the functions in csrc/rows.cpp."""
    pointer = ctypes.c_void_p
    size = ctypes.c_int64
    real = ctypes.c_float
    integer = ctypes.c_int

    logits = [pointer, size]  # and the number of elements from one row to the next
    shape = [size, size]
    numbers = [real, real]  # scale, softcap
    row_inputs = [pointer, pointer]  # bias, target
    results = [pointer] * 4
    library.paw_row_statistics.argtypes = [
        *logits,
        *row_inputs,
        *numbers,
        *shape,
        *results,
        integer,
    ]
    library.paw_row_statistics.restype = None

    row_inputs = [pointer] * 8  # bias, target, source, top, log_total, entropy, a, c
    library.paw_row_gradient.argtypes = [*logits, *row_inputs, *numbers, *shape, integer]
    library.paw_row_gradient.restype = None

    library.paw_pack.argtypes = [pointer, size, pointer]
    library.paw_pack.restype = size
    library.paw_in_range.argtypes = [pointer, size, size]
    library.paw_in_range.restype = ctypes.c_bool
    library.paw_finite.argtypes = [pointer, size]
    library.paw_finite.restype = ctypes.c_bool
    library.paw_claim.argtypes = [pointer, size, integer]
    library.paw_claim.restype = None


@cache
def why_no_cuda(capability: tuple[int, int] | None = None) -> str | None:
    """Return why the CUDA kernels cannot be used (on a GPU of that compute capability), or None.

    The first call loads them.
    """
    if not _CUDA_LIBRARY.is_file():
        return "csrc/*.cu was not built; run PAW_BUILD_CUDA=1 pip install --no-build-isolation -e . (needs nvcc)"
    try:
        torch.ops.load_library(str(_CUDA_LIBRARY))
    except OSError as error:
        return f"{_CUDA_LIBRARY} does not load with this torch ({error}); build it again"
    try:
        # The oldest architecture it was built for, as in __CUDA_ARCH__: 900 for 9.0.
        oldest = ctypes.c_int.in_dll(ctypes.CDLL(str(_CUDA_LIBRARY)), "paw_cuda_interface_4").value
    except ValueError:
        return f"{_CUDA_LIBRARY} was built from older sources; build it again"
    major, minor = divmod(oldest // 10, 10)
    # There is no newest one, because the library also has PTX, which later GPUs compile.
    if capability and capability < (major, minor):
        return (
            f"csrc/*.cu was built for compute capability {major}.{minor} and later,"
            " but this GPU has {}.{}".format(*capability)
        )
    return None


why_no_cuda()  # registers the kernels, which operators on CUDA tensors use wherever they are called


def packed_rows(logits: Tensor, L: int, dtype: torch.dtype) -> Tensor:
    """Return the first L rows that `row_gradient_` left: [L, V] of dtype.

    They start at the first byte of each row of logits.
    """
    return logits.view(dtype)[:L, : logits.shape[1]]


def claim_memory(tensor: Tensor) -> Tensor:
    """Return the same tensor, which is about to be filled.

    If it is large and on a CPU, all its memory is mapped at once.
    """
    library = _library_for(tensor)
    if library and tensor.nbytes > _REUSED:
        library.paw_claim(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())
    return tensor


def in_range(values: Tensor, limit: int) -> bool:
    """Whether int64 values are known to be in [0, limit).

    False means nothing on a GPU, where a check would have to wait, or without the compiled library.
    """
    library = _library_for(values)
    values = values.contiguous()
    return bool(library and library.paw_in_range(values.data_ptr(), values.numel(), limit))


def are_finite(values: Tensor) -> bool:
    """Whether float32 values are known to be finite. For False see `in_range`."""
    library = _library_for(values)
    values = values.contiguous()
    return bool(library and library.paw_finite(values.data_ptr(), values.numel()))


def _library_for(tensor: Tensor) -> ctypes.CDLL | None:
    """Return the C++ row operations if they can read this tensor.

    For that, it must be on the CPU and not a subclass.
    """
    if type(tensor) is Tensor and tensor.device.type == "cpu":
        return cpu_library()
    return None


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _row_statistics_cpu(
    logits: Tensor, bias: Tensor | None, target: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, ...]:
    library = cpu_library()
    assert library, "the C++ row operations are not built"
    target = target.contiguous()
    n, V = logits.shape
    results = tuple(torch.empty(n, dtype=torch.float32) for _ in range(4))
    library.paw_row_statistics(
        logits.data_ptr(),
        logits.stride(0),
        _pointer(bias),
        target.data_ptr(),
        scale,
        softcap or 0.0,
        n,
        V,
        *map(_pointer, results),
        torch.get_num_threads(),
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
    # The list keeps copies alive while the C code reads them.
    per_row = [
        None if tensor is None else tensor.contiguous()
        for tensor in (target, source, top, log_total, entropy, a, c)
    ]
    library.paw_row_gradient(
        logits.data_ptr(),
        logits.stride(0),
        _pointer(bias),
        *map(_pointer, per_row),
        scale,
        softcap or 0.0,
        source.numel(),
        logits.shape[1],
        torch.get_num_threads(),
    )


def _pack_cpu(chosen: Tensor) -> tuple[Tensor, Tensor]:
    library = cpu_library()
    assert library, "the C++ row operations are not built"
    source = torch.empty(chosen.numel(), dtype=torch.int64)
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
    source = chosen.new_empty(chosen.shape[0], dtype=torch.int64)
    count = chosen.new_empty(1, dtype=torch.int64)
    return source, count
