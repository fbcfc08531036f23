"""The Triton backend: a persistent matmul whose epilogue writes statistics and e = 2^x.

Then dL/dz takes the place of e. Passes without gradients keep no logits at all. With gradients, a
chunk's e has the dtype of the inputs. It takes half the bytes of float32 logits, and is read and
written once more. Memory: CHUNK_BYTES, or without gradients STATISTICS_BYTES, whatever T. The
kernels and their arithmetic are in `_triton_kernels`.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paw_kernels import _triton_kernels as kernels
from paw_kernels._head import Head, chunk_bytes, equal_chunks
from paw_kernels._measured import fastest

CHUNK_BYTES = 1440 << 20
"""Bytes of a chunk's e, statistics and copies of hidden states.

It is large, because each chunk reads and writes all of dW. With this, 4,096 rows make one chunk up
to the 152,064 x 8,192 of Qwen2.5 72B.
"""
STATISTICS_BYTES = 96 << 20
"""Bytes of a chunk's statistics in a pass without gradients, which does not keep e."""


class Tiles(NamedTuple):
    """The tiles into which the forward kernel cuts its matmul and the gradient kernel its rows."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    halves: bool = True
    """Whether the epilogue handles the columns in two steps."""
    tma: bool = True
    """Whether loads and stores use tensor descriptors instead of pointers (cp.async)."""
    flatten: bool = True
    """Whether one loop covers tiles and depth, so that the next tile loads during the epilogue."""
    specialize: bool = False
    """Whether loads, products and epilogue each have their own warps (warp_specialize). Only for
    sm_100: it does not compile on sm_90. No table has it, because no GPU has run it: only tiles that
    `paw doctor --kernels` has found right and fast turn it on."""
    group: int = 16
    """Number of row tiles that share a tile of the weight in the L2 cache."""
    span: int = 4096
    """Number of columns of a row that one program of the gradient kernel handles."""


_POINTERS = {"halves": False, "tma": False, "flatten": False, "specialize": False}
TILES = {
    ("sm_80", 2): Tiles(128, 256, 64, 8, 4, **_POINTERS),
    ("sm_90", 2): Tiles(128, 256, 64, 8, 4),
    ("sm_100", 2): Tiles(128, 256, 64, 8, 3, halves=False, flatten=False),
    ("other", 2): Tiles(128, 128, 64, 8, 3, **_POINTERS),
    ("sm_80", 4): Tiles(64, 128, 32, 8, 3, **_POINTERS),
    ("sm_90", 4): Tiles(128, 128, 32, 8, 4),
    ("sm_100", 4): Tiles(128, 128, 32, 8, 3, **_POINTERS),
    ("other", 4): Tiles(64, 64, 32, 4, 3, **_POINTERS),
    ("interpreter", 2): Tiles(16, 32, 16, 1, 1, group=2, span=64),
    ("interpreter", 4): Tiles(16, 32, 16, 1, 1, group=2, span=64),
}
"""By architecture and bytes of an element. Chosen ahead of time (bench/results/triton_aot.csv) and
not yet timed. 128 x 256 has the arithmetic per loaded byte that tensor cores need, and its sums
fill half the registers of 8 warps. Among tiles that fit in shared memory and spill almost nothing,
the table takes those with the most loads in flight. On sm_90, `flatten` keeps wgmma asynchronous
and loads the next tile during the epilogue. On sm_100, it doubles the epilogue's code and spills.
There, `specialize` would keep the sums of two tiles in tensor memory, so that one grows while the
other is read. float32 takes smaller tiles, because each operand is split in two. "other" is for 99 KiB of
shared memory."""

CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "sm_80": (
        {"stages": 3},
        {"halves": True},
        {"depth": 32, "stages": 5},
        {"rows": 256, "cols": 128},
        {"cols": 128, "depth": 32, "warps": 4},
    ),
    "sm_90": (
        {"stages": 3},
        {"flatten": False},
        {"group": 8},
        {"cols": 128, "warps": 4, "stages": 3},
        {"tma": False, "flatten": False},
    ),
    "sm_100": (
        {"specialize": True},
        {"specialize": True, "group": 8},
        {"specialize": True, "cols": 128, "stages": 4},
        {"halves": True, "stages": 4},
        {"cols": 128, "stages": 5},
    ),
    "other": (
        {"cols": 64},
        {"warps": 4, "cols": 64},
        {"rows": 64},
        {"depth": 32, "stages": 4},
        {"group": 8},
    ),
    "interpreter": (
        {"cols": 16},
        {"halves": False},
        {"tma": False, "halves": False},
        {"rows": 32},
        {"group": 1},
    ),
}
"""Changes to the table's 16-bit entry that may be faster on a GPU, by architecture.

They are compiled ahead of time, like the table.
"""

SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "other": 99}
"""Shared memory that a block may have, by architecture. The interpreter has no limit."""

TUNED: dict[tuple[int, int, int], Tiles] = {}
"""Tiles by V, D and bytes of an element. They take precedence over measured tiles and the table."""

NCCL_PROCESSORS = 16
"""Multiprocessors that the forward kernel leaves to a process group's collectives, while these may
be in flight (`_collectives_may_run`). This is assumed, not measured."""

_MERGE_ROWS = 32
"""Rows of one program of the merge kernel: few, so that each multiprocessor gets a program."""

INTERPRETED = not isinstance(kernels.forward_kernel, triton.JITFunction)
"""Whether TRITON_INTERPRET=1 was set when the kernels were defined. Then they run in numpy, on
tensors of any device."""


class TritonRows:
    """See `_head.Rows`.

    Holds the tile statistics of n rows and, with `gradients`, their e or dL/dz.
    """

    def __init__(self, head: Head, n: int, gradients: bool, tiles: Tiles) -> None:
        weight = head.weight
        # On the CPU (interpreter), torch's 16-bit matmuls could not return float32 sums.
        self.head = weight.float() if weight.is_cpu else weight
        self._weight = weight
        self._bias = None
        if head.bias is not None:
            self._bias = head.bias.contiguous()
        self._softcap = head.softcap
        self._entropy = head.entropy
        self._tiles = tiles
        self._scale = math.log2(math.e) / head.temperature
        self._inverse_temperature = 1 / head.temperature
        blocks = triton.cdiv(weight.shape[0], tiles.cols)
        self._partial = weight.new_empty((blocks, n, 4), dtype=torch.float32)
        self._result = weight.new_empty((4, n), dtype=torch.float32)
        self._buffer = None
        if gradients:
            self._buffer = weight.new_empty((n, _padded(weight.shape[0])))

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        n = x.shape[0]
        self._launch_forward(x, target)
        self._launch_merge(n)
        return self._result[0, :n], self._result[1, :n]

    def _launch_forward(self, x: Tensor, target: Tensor) -> None:
        """Fill the statistics of all tiles and, with gradients, e."""
        tiles = self._tiles
        weight = self._weight
        V, D = weight.shape
        n = x.shape[0]
        blocks, capacity, _ = self._partial.shape
        _launch(
            kernels.forward_kernel,
            min(_processors(weight.device), triton.cdiv(n, tiles.rows) * blocks),
            *self._operands(x),
            self._bias,
            target.contiguous(),
            self._partial,
            n,
            V,
            D,
            self._scale,
            self._softcap,
            *weight.stride(),
            _padded(V),
            capacity,
            ROWS=tiles.rows,
            COLS=tiles.cols,
            DEPTH=tiles.depth,
            GROUP=tiles.group,
            HALVES=tiles.halves,
            TMA=tiles.tma,
            FLATTEN=tiles.flatten,
            SPECIALIZE=tiles.specialize,
            RAGGED=V % tiles.cols != 0,
            ENTROPY=self._entropy,
            PRECISION="tf32x3",  # exact to 2^-22 for float32 inputs, on the tensor cores; not read for 16 bits
            INTERPRETED=INTERPRETED,  # the interpreter's dot reads the bits of bfloat16 as integers
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _operands(self, x: Tensor) -> tuple[Any, ...]:
        """Return x, the weight and e (None without gradients) as the forward kernel takes them."""
        tiles = self._tiles
        weight = self._weight
        x = x.to(weight.dtype).contiguous()
        e = None
        if self._buffer is not None:
            e = self._buffer[: len(x), : len(weight)]
        if not tiles.tma:
            return x, weight, e

        if x.data_ptr() % 16:
            x = x.clone()
        if e is not None:
            e_cols = tiles.cols // 2 if tiles.halves else tiles.cols
            e = TensorDescriptor.from_tensor(e, [tiles.rows, e_cols])
        return (
            TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
            TensorDescriptor.from_tensor(weight, [tiles.cols, tiles.depth]),
            e,
        )

    def _launch_merge(self, n: int) -> None:
        """Merge the statistics of the tiles of n rows."""
        blocks, capacity, _ = self._partial.shape
        _launch(
            kernels.merge_kernel,
            triton.cdiv(n, _MERGE_ROWS),
            self._partial,
            self._result,
            n,
            blocks,
            capacity,
            self._scale,
            ROWS=_MERGE_ROWS,
            BLOCKS=64,
            num_warps=8,
        )

    def gradient(self, target: Tensor, source: Tensor, a: Tensor, c: Tensor | None) -> Tensor:
        assert self._buffer is not None, "gradient of a pass without gradients"
        blocks, capacity, _ = self._partial.shape
        V = self._weight.shape[0]
        L = source.numel()
        width = _padded(V)
        if c is not None:
            c = c.contiguous()
        blocks_per_program = max(1, self._tiles.span // self._tiles.cols)
        _launch(
            kernels.gradient_kernel,
            L * triton.cdiv(width, blocks_per_program * self._tiles.cols),
            self._buffer,
            self._partial,
            self._result,
            target.contiguous(),
            source.contiguous(),
            a.contiguous(),
            c,
            width,
            blocks,
            capacity,
            self._scale,
            self._inverse_temperature,
            self._softcap,
            COLS=self._tiles.cols,
            BLOCKS=blocks_per_program,
            LOSSY=self._buffer.dtype != torch.float32,
            INTERPRETED=INTERPRETED,
            num_warps=4,
        )
        return self._buffer[:L, :V].to(self.head.dtype)


def make_rows(head: Head, N: int, gradients: bool) -> tuple[TritonRows, int]:
    """See `_head.MakeRows`.

    Chunks are as few as possible and of equal size. 6,000 rows become two chunks of 3,072.
    """
    tiles = tiles_for(head.weight, head.softcap, n=N)
    V, D = head.weight.shape
    element = head.weight.element_size()
    row_bytes = 16 * triton.cdiv(V, tiles.cols) + D * element
    available = STATISTICS_BYTES
    if gradients:
        # This counts e, and the packed hidden states and their gradient.
        row_bytes += (_padded(V) + 2 * D) * element
        available = chunk_bytes(CHUNK_BYTES, head.weight.device)
    most_row_tiles = max(1, available // (row_bytes * tiles.rows))
    step = equal_chunks(triton.cdiv(N, tiles.rows), most_row_tiles) * tiles.rows
    return TritonRows(head, step, gradients, tiles), step


def tiles_for(
    weight: Tensor, softcap: float | None, arch: str | None = None, n: int | None = None
) -> Tiles:
    """Return the tiles for a weight [V, D]: tuned, measured (for about n rows), or from the table.

    They are smaller and use pointers if tensor descriptors cannot describe the weight. They are
    also smaller with a soft cap, whose arithmetic would spill beside the sums of 128 x 256 logits.
    Raises ValueError if tuned or measured tiles need more shared memory than the GPU has.
    """
    if arch is None:
        capability = None
        if not INTERPRETED:
            capability = torch.cuda.get_device_capability(weight.device)
        arch = _architecture(capability)
    V, D = weight.shape
    element = weight.element_size()
    tiles = TILES[arch, element]
    time = fastest(weight.device, weight.dtype, V, D, n, "triton")
    if time and time.tiles:
        tiles = Tiles(**time.tiles)
    tiles = TUNED.get((V, D, element), tiles)
    _check_shared_memory(tiles, element, arch)

    if softcap is not None:
        tiles = tiles._replace(cols=min(tiles.cols, 128), specialize=False)
    if arch == "sm_100" and tiles.depth >= D and not tiles.specialize:
        # Without a loop over the depth the compiler pipelines whole tiles, and wider ones spill.
        tiles = tiles._replace(cols=min(tiles.cols, 128))

    aligned_bytes = (weight.data_ptr(), element * weight.stride(0), element * D)
    describable = weight.stride(1) == 1 and all(count % 16 == 0 for count in aligned_bytes)
    if not describable:
        tiles = tiles._replace(cols=min(tiles.cols, 128), **_POINTERS)
    return tiles


def _check_shared_memory(tiles: Tiles, element: int, arch: str) -> None:
    """Raise ValueError if the loads in flight alone exceed the GPU's shared memory."""
    if arch not in SHARED_KIB:
        return
    # Pointer loads put the newest stage into shared memory while the oldest is multiplied.
    stages = tiles.stages - (not tiles.tma)
    needed = stages * (tiles.rows + tiles.cols) * tiles.depth * element
    if needed > SHARED_KIB[arch] * 1024:
        raise ValueError(
            f"tiles of {tiles.rows} x {tiles.cols} x {tiles.depth} in {tiles.stages} stages need "
            f"{needed / 1024:.0f} KiB of shared memory, and this GPU has {SHARED_KIB[arch]} KiB for "
            "a block; use smaller tiles or fewer stages"
        )


def candidates(capability: tuple[int, int] | None, size: int = 2) -> list[Tiles]:
    """Return tiles worth timing on a GPU of that capability for elements of `size` bytes.

    None means the interpreter. The table's entry is first. To run the head with one of them, assign
    it to TUNED[V, D, size].
    """
    arch = _architecture(capability)
    tabled = TILES[arch, size]
    if size != 2:
        return [tabled]
    return [tabled, *(tabled._replace(**change) for change in CHANGES[arch])]


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run on that device and dtype and what would help, or None."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return (
            f"it needs tensors on cuda, but these are on {device}"
            " (or TRITON_INTERPRET=1 before triton is imported)"
        )
    if torch.version.hip is not None:
        return (
            "it is written for NVIDIA GPUs, but this torch is built for ROCm; use backend='torch'"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 or later, but {device} has {major}.{minor}; use backend='torch'"
    return None


def _launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Run a kernel on a one-dimensional grid, because the other dimensions end at 65,535."""
    with torch.cuda.device_of(next(a for a in arguments if isinstance(a, Tensor))):
        # This is set because its default differs between versions of Triton.
        kernel[(programs,)](*arguments, **options, enable_fp_fusion=True)


def _architecture(capability: tuple[int, int] | None) -> str:
    """Return a key of TILES.

    "other" is for at most 99 KiB of shared memory per block: capabilities 8.6, 8.9 and 12.x.
    """
    if capability is None:
        return "interpreter"
    if capability[0] == 10:
        return "sm_100"
    return {(8, 0): "sm_80", (9, 0): "sm_90"}.get(capability, "other")


def _processors(device: torch.device) -> int:
    """Return the number of programs of a persistent kernel.

    There is one per multiprocessor, except those that collectives may hold. A program takes a whole
    multiprocessor. If one had to wait for NCCL's kernels, the kernel would take twice as long.
    """
    if device.type != "cuda":
        return 3
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return count - NCCL_PROCESSORS if _collectives_may_run() else count


def _collectives_may_run() -> bool:
    """Whether NCCL's kernels may run beside the head's: in a backward pass of several ranks.

    FSDP and DDP send weights and gradients during the backward pass, and make the stream wait for
    them at its end. In a forward pass the head comes last: FSDP has nothing left to gather.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and torch.distributed.get_world_size() > 1


def _padded(V: int) -> int:
    """Return the elements from one row of e to the next.

    They fill whole cache lines, for wide accesses and tensor descriptors.
    """
    return triton.cdiv(V, 64) * 64
