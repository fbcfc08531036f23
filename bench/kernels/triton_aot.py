"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, shared memory, matrix instructions.

    python bench/kernels/triton_aot.py               compiles tabled configurations and candidates, writes the CSV
    python bench/kernels/triton_aot.py --tabled all  only what the table uses, as JSON lines on standard output

The backend runs on tensors without data. Its launches are recorded and compiled ahead of time for
each architecture, with the specialisations of a real launch. bench/results/triton_aot.csv gets a
line for each kernel and keeps the lines of other versions of Triton.
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
"""Llama 3.1 8B, one chunk."""
QWEN = {"V": 151_936, "D": 2048, "bias": True}
"""Half a tile of columns is left over, and the gradient includes the entropy."""
GEMMA = {"V": 256_000, "D": 2304, "softcap": 30.0, "n": 2048}
"""Gemma 2 2B, with a soft cap."""
SHALLOW = {"V": 151_936, "D": 64, "bias": True}
"""A single step of depth. Without a loop over depth, the compiler may pipeline the tiles
instead."""
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
"""Changes to SIZES, by architecture. D = 4095 rules out tensor descriptors."""
CAPABILITY = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_100": 100, "sm_120": 120}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--tabled",
        choices=("first", "all"),
        help="only the table, as JSON lines on standard output; first: one case per table entry",
    )
    options = parser.parse_args()
    if options.tabled:
        for record in tabled(first_only=options.tabled == "first"):
            print(json.dumps(record), flush=True)
        return

    records = rows_of_other_versions()
    records += [{"table": "yes", **record} for record in tabled()]
    records += [{"table": "no", **record} for record in candidates()]
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, records[-1])
        writer.writeheader()
        writer.writerows(records)
    print(f"{CSV}: {len(records)} kernels")


def rows_of_other_versions() -> list[dict[str, Any]]:
    """The rows of the table that other versions of Triton have written."""
    if not CSV.exists():
        return []
    with CSV.open(newline="", encoding="utf-8") as file:
        return [record for record in csv.DictReader(file) if record["triton"] != triton.__version__]


def tabled(*, first_only: bool = False) -> Iterator[dict[str, Any]]:
    """Every kernel of every case, with the configuration that the table gives it.

    With `first_only`, only the first case of each entry of the table.
    """
    entries = set()
    for architecture, case_changes in CASES.items():
        if first_only and table_key(architecture) in entries:
            continue
        entries.add(table_key(architecture))
        for changes in case_changes[:1] if first_only else case_changes:
            problem_size = SIZES | changes
            dtype = getattr(torch, problem_size["dtype"])
            weight = torch.empty(problem_size["V"], problem_size["D"], dtype=dtype, device="meta")
            tiles = _triton.tiles_for(weight, problem_size["softcap"], table_key(architecture))
            yield from compiled(architecture, tiles, problem_size)


def table_key(architecture: str) -> str:
    """The key of `_triton.TILES` for an architecture. sm_89 and sm_120 share an entry."""
    return _triton._architecture(divmod(CAPABILITY[architecture], 10))


def candidates() -> Iterator[dict[str, Any]]:
    """The forward kernel of Llama's size with the configurations that the table does not use."""
    for architecture, capability in CAPABILITY.items():
        for tiles in _triton.candidates(divmod(capability, 10))[1:]:
            yield from compiled(architecture, tiles, SIZES, only_kernel="forward_kernel")


def compiled(
    architecture: str, tiles: Tiles, problem_size: dict[str, Any], *, only_kernel: str | None = None
) -> Iterator[dict[str, Any]]:
    """A record for each kernel that a chunk of this size launches, or only for `only_kernel`."""
    for kernel, arguments, options in launches(tiles, **problem_size):
        kernel_name = kernel.__name__
        if only_kernel and kernel_name != only_kernel:
            continue
        # The other kernels have no tiles to choose.
        columns = dict.fromkeys(tiles._fields, "")
        if kernel_name == "forward_kernel":
            columns = tiles._asdict()
        yield {
            "triton": triton.__version__,
            "arch": architecture,
            **problem_size,
            "kernel": kernel_name,
            **columns,
            **resources(kernel, arguments, options, CAPABILITY[architecture]),
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
            triton_rows = TritonRows(Head(weight, offset, 0.7, softcap), n, gradients, tiles)
            target = torch.empty(n, dtype=torch.int64)
            logp_slope = torch.empty(n)
            triton_rows.forward(torch.empty(n, D, dtype=weight_dtype), target)
            if gradients:
                triton_rows.gradient(target, target, logp_slope, logp_slope if bias else None)
    finally:
        _triton._launch = launch
    return recorded


def resources(
    kernel: Any, arguments: tuple, options: dict[str, Any], capability: int
) -> dict[str, Any]:
    """Compiles a kernel as a launch would. Returns the resources and instructions of its machine
    code."""
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
    """The kernel with the types, constants and divisibilities of a launch with these values."""
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for position, parameter in enumerate(kernel.params):
        argument = values[parameter.name]
        parameter_type = "constexpr"
        type_hint = None
        if not parameter.is_constexpr:
            specialise = not parameter.do_not_specialize
            parameter_type, type_hint = native_specialize_impl(
                CUDABackend, argument, False, specialise, specialise
            )
        signature[parameter.name] = parameter_type
        if parameter_type == "constexpr":
            constants[parameter.name] = argument
        elif type_hint == "D":
            attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)


@cache  # cases share kernels
def machine_code(cubin: bytes) -> dict[str, int | None]:
    """Registers, stack, spills and instructions of a kernel, as listed by cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin_file:
        cubin_file.write(cubin)
        cubin_file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", "-sass", cubin_file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resource_usage = {}
    for resource, count in re.findall(r"\b(REG|STACK):(\d+)", listing):
        resource_usage[resource] = int(count)
    code = []
    code_lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    for address, instruction in code_lines:
        code.append((int(address, 16), instruction))
    return {
        "registers": resource_usage["REG"],
        "stack": resource_usage["STACK"],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        "instructions": len(code),
        "tile": shortest_loop(code, "MUFU.EX2"),
    }


def shortest_loop(code: list[tuple[int, str]], through: str) -> int | None:
    """Instructions of the shortest path from the first instruction of that name back to itself.

    None if there is no such path. In the forward kernel this is a warp's work on a tile that holds
    no target and is not the last, with one step of depth.
    """
    start = next(
        (index for index, (_, instruction) in enumerate(code) if through in instruction), None
    )
    if start is None:
        return None

    next_instructions = successors(code)
    reached = {start}
    frontier = {start}
    for step_count in range(1, len(code) + 1):
        frontier = {following for index in frontier for following in next_instructions[index]}
        if start in frontier:
            return step_count
        frontier -= reached
        reached |= frontier
    return None


def successors(code: list[tuple[int, str]]) -> list[list[int]]:
    """The instructions that may follow each one: the next, the target of its branch, or both."""
    index_of = {address: index for index, (address, _) in enumerate(code)}
    next_instructions = []
    for index, (_, instruction) in enumerate(code):
        following = []
        ends_here = re.match(r"BRA\S* 0x|EXIT", instruction)
        if not ends_here and index + 1 < len(code):
            following.append(index + 1)
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction)
        if branch:
            following.append(index_of[int(branch[1], 16)])
        next_instructions.append(following)
    return next_instructions


def instructions(asm: dict[str, Any]) -> dict[str, int]:
    """Counts of instructions in the PTX, and of layout conversions (trips through shared memory) in
    Triton's own representation."""
    patterns = {
        "wgmma": r"wgmma\.mma_async",
        "tcgen05": r"tcgen05\.mma",
        "mma_sync": r"mma\.sync",
        "tma_loads": r"cp\.async\.bulk\.tensor[\w.:]*shared::c\w+\.global",
        "tma_stores": r"cp\.async\.bulk\.tensor[\w.:]*\.global\.shared",
        "cp_async": r"cp\.async\.c[ag]\.",
        "exp2": r"ex2\.approx",
    }
    counts = {
        counter: len(re.findall(pattern, asm["ptx"])) for counter, pattern in patterns.items()
    }
    return counts | {"conversions": asm["ttgir"].count("ttg.convert_layout")}


if __name__ == "__main__":
    sys.exit(main())
