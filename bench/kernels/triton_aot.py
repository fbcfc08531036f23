"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, shared memory, matrix instructions.

    python bench/kernels/triton_aot.py               compile the tabled configurations and the candidates, write the CSV
    python bench/kernels/triton_aot.py --tabled all  only what the table uses, as JSON lines on the standard output

The backend runs on tensors without data; its launches are recorded and compiled ahead of time for
each architecture, with the specialisations that a real launch would have.
bench/results/triton_aot.csv gets a line for each kernel, and keeps the lines of other versions of
Triton.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from paw_kernels import _triton
from paw_kernels._head import Head
from paw_kernels._triton import Tiles, TritonRows

CSV = Path(__file__).parents[1] / "results" / "triton_aot.csv"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SIZES = {
    "dtype": "bfloat16",
    "n": 4096,
    "V": 128_256,
    "D": 4096,
    "bias": False,
    "gradients": True,
    "softcap": None,
}
"""Llama 3.1 8B; one chunk."""
QWEN = {"V": 151_936, "D": 2048, "bias": True}
"""Half a tile of columns is left over; the gradient with entropy."""
GEMMA = {"V": 256_000, "D": 2304, "softcap": 30.0, "n": 2048}
"""Gemma 2 2B, with a soft cap."""
SHALLOW = {"V": 151_936, "D": 64, "bias": True}
"""One step of depth: without a loop over it the compiler may pipeline the tiles instead."""
FLOAT32 = {"dtype": "float32", "n": 2048}
CASES = {
    "sm_80": [{}, {"gradients": False}, QWEN, FLOAT32, GEMMA],
    "sm_90": [
        {},
        {"gradients": False},
        QWEN,
        SHALLOW,
        FLOAT32,
        {"dtype": "float16"},
        {"D": 4095},
        GEMMA,
    ],
    "sm_100": [{}, {"gradients": False}, QWEN, SHALLOW, {"D": 64}, FLOAT32, GEMMA],
    "sm_89": [{}, FLOAT32],
    "sm_120": [{}, FLOAT32],
}
"""By architecture. D = 4095 rules tensor descriptors out."""
CAPABILITY = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_100": 100, "sm_120": 120}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--tabled",
        choices=("first", "all"),
        help="only the table, JSON lines to the standard output; first: a case an architecture",
    )
    options = parser.parse_args()
    if options.tabled:
        for row in tabled(first=options.tabled == "first"):
            print(json.dumps(row), flush=True)
        return

    rows = rows_of_other_versions()
    rows += [{"table": "yes", **row} for row in tabled()]
    rows += [{"table": "no", **row} for row in candidates()]
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[-1])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{CSV}: {len(rows)} kernels")


def rows_of_other_versions() -> list[dict[str, Any]]:
    """What the table holds of other versions of Triton."""
    if not CSV.exists():
        return []
    with CSV.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["triton"] != triton.__version__]


def tabled(*, first: bool = False) -> Iterator[dict[str, Any]]:
    """Every kernel of every case (`first`: of each architecture's first), with the configuration
    that the table gives it."""
    for arch, cases in CASES.items():
        for case in cases[:1] if first else cases:
            size = SIZES | case
            dtype = getattr(torch, size["dtype"])
            weight = torch.empty(size["V"], size["D"], dtype=dtype, device="meta")
            tiles = _triton.tiles_for(weight, size["softcap"], table_key(arch))
            yield from compiled(arch, tiles, size)


def table_key(arch: str) -> str:
    """The key of `_triton.TILES` for an architecture: sm_89 and sm_120 share an entry."""
    return _triton._architecture(divmod(CAPABILITY[arch], 10))


def candidates() -> Iterator[dict[str, Any]]:
    """The forward kernel of Llama's size with the configurations that the table does not use."""
    for arch, capability in CAPABILITY.items():
        for tiles in _triton.candidates(divmod(capability, 10))[1:]:
            yield from compiled(arch, tiles, SIZES, only="forward_kernel")


def compiled(
    arch: str, tiles: Tiles, size: dict[str, Any], *, only: str | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each kernel that a chunk of that size launches, or for the one named `only`."""
    for kernel, arguments, options in launches(tiles, **size):
        name = kernel.__name__
        if only and name != only:
            continue
        # The other kernels have no tiles to choose.
        columns = tiles._asdict() if name == "forward_kernel" else dict.fromkeys(tiles._fields, "")
        yield {
            "triton": triton.__version__,
            "arch": arch,
            **size,
            "kernel": name,
            **columns,
            **resources(kernel, arguments, options, CAPABILITY[arch]),
        }


def launches(
    tiles: Tiles,
    *,
    dtype: str,
    n: int,
    V: int,
    D: int,
    bias: bool,
    gradients: bool,
    softcap: float | None,
) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """(kernel, arguments, options) of each launch of one chunk of n rows."""
    recorded = []

    def record(kernel: Any, programs: Any, *arguments: Any, **options: Any) -> None:
        recorded.append((kernel, arguments, options))

    weight_dtype = getattr(torch, dtype)
    launch = _triton._launch
    _triton._launch = record
    try:
        with torch.device("meta"):
            weight = torch.empty(V, D, dtype=weight_dtype)
            offset = torch.empty(V, dtype=weight_dtype) if bias else None
            rows = TritonRows(Head(weight, offset, 0.7, softcap), n, gradients, tiles)
            target = torch.empty(n, dtype=torch.int64)
            slope = torch.empty(n)
            rows.forward(torch.empty(n, D, dtype=weight_dtype), target)
            if gradients:
                rows.gradient(target, target, slope, slope if bias else None)
    finally:
        _triton._launch = launch
    return recorded


def resources(
    kernel: Any, arguments: tuple, options: dict[str, Any], capability: int
) -> dict[str, Any]:
    """Compiles a kernel as a launch would: what its machine code takes and which instructions it
    holds."""
    values = dict(zip(kernel.arg_names, arguments, strict=False))
    settings = {}
    for name, value in options.items():
        # Upper-case options are the kernel's constants, the others are the compiler's.
        if name.isupper():
            values[name] = value
        else:
            settings[name] = value

    result = triton.compile(
        specialised(kernel, values),
        target=GPUTarget("cuda", capability, 32),
        options={**settings, "enable_fp_fusion": True},
    )
    return {
        **machine_code(result.asm["cubin"]),
        **instructions(result.asm),
        "shared": result.metadata.shared,
    }


def specialised(kernel: Any, values: dict[str, Any]) -> ASTSource:
    """The kernel with the types, constants and divisibilities that a launch with these values
    has."""
    types: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        kind, hint = "constexpr", None
        if not parameter.is_constexpr:
            specialise = not parameter.do_not_specialize
            kind, hint = native_specialize_impl(CUDABackend, value, False, specialise, specialise)
        types[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif hint == "D":
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature=types, constexprs=constants, attrs=attributes)


@cache  # cases share kernels
def machine_code(cubin: bytes) -> dict[str, int | None]:
    """Registers, stack, spills and instructions of a kernel, as cuobjdump lists them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {}
    for name, count in re.findall(r"\b(REG|STACK):(\d+)", listing):
        usage[name] = int(count)
    code = []
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    for address, text in lines:
        code.append((int(address, 16), text))
    return {
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        "instructions": len(code),
        "tile": shortest_loop(code, "MUFU.EX2"),
    }


def shortest_loop(code: list[tuple[int, str]], through: str) -> int | None:
    """Instructions of the shortest way from the first of that name back to it, None if there is
    none.

    In the forward kernel: a warp's work on a tile that holds no target and is not the last, with
    one step of depth.
    """
    start = next((i for i, (_, text) in enumerate(code) if through in text), None)
    if start is None:
        return None

    nexts = successors(code)
    reached = {start}
    frontier = {start}
    for steps in range(1, len(code) + 1):
        frontier = {following for i in frontier for following in nexts[i]}
        if start in frontier:
            return steps
        frontier -= reached
        reached |= frontier
    return None


def successors(code: list[tuple[int, str]]) -> list[list[int]]:
    """The instructions that may follow each one: the next, the target of its branch, or both."""
    index_of = {address: i for i, (address, _) in enumerate(code)}
    nexts = []
    for i, (_, text) in enumerate(code):
        following = []
        ends_here = re.match(r"BRA\S* 0x|EXIT", text)
        if not ends_here and i + 1 < len(code):
            following.append(i + 1)
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if branch:
            following.append(index_of[int(branch[1], 16)])
        nexts.append(following)
    return nexts


def instructions(asm: dict[str, Any]) -> dict[str, int]:
    """Counts in the PTX and, for layout conversions (trips through shared memory), in Triton's own
    form."""
    patterns = {
        "wgmma": r"wgmma\.mma_async",
        "tcgen05": r"tcgen05\.mma",
        "mma_sync": r"mma\.sync",
        "tma_loads": r"cp\.async\.bulk\.tensor[\w.:]*shared::c\w+\.global",
        "tma_stores": r"cp\.async\.bulk\.tensor[\w.:]*\.global\.shared",
        "cp_async": r"cp\.async\.c[ag]\.",
        "exp2": r"ex2\.approx",
    }
    counts = {name: len(re.findall(pattern, asm["ptx"])) for name, pattern in patterns.items()}
    return counts | {"conversions": asm["ttgir"].count("ttg.convert_layout")}


if __name__ == "__main__":
    sys.exit(main())
