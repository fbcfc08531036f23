"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, shared memory, matrix instructions.

    python bench/kernels/triton_aot.py            compile the tabled configurations and the candidates, write the CSV
    python bench/kernels/triton_aot.py --tabled   only what the table uses, as JSON lines on the standard output

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
SMALL = {"V": 151_936, "D": 64, "bias": True}
"""One step of depth: without a loop over it the compiler may pipeline the tiles instead."""
FLOAT32 = {"dtype": "float32", "n": 2048}
CASES = {
    "sm_80": [{}, {"gradients": False}, QWEN, FLOAT32, GEMMA],
    "sm_90": [
        {},
        {"gradients": False},
        QWEN,
        SMALL,
        FLOAT32,
        {"dtype": "float16"},
        {"D": 4095},
        GEMMA,
    ],
    "sm_100": [{}, {"gradients": False}, QWEN, SMALL, {"D": 64}, FLOAT32, GEMMA],
    "other": [{}, FLOAT32],
}
"""By architecture; D = 4095 rules tensor descriptors out."""
CAPABILITY = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "other": 89}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--tabled", action="store_true", help="only the table, JSON lines to the standard output"
    )
    options = parser.parse_args()
    if options.tabled:
        for row in tabled():
            print(json.dumps(row), flush=True)
        return
    rows = [{"table": "yes", **row} for row in tabled()]
    for arch, number in CAPABILITY.items():
        for tiles in _triton.candidates(divmod(number, 10))[1:]:
            rows += [
                {"table": "no", **row}
                for row in compiled(arch, tiles, {}, kernels=("forward_kernel",))
            ]
    if CSV.exists():  # of other versions of Triton
        with CSV.open(newline="", encoding="utf-8") as file:
            rows = [
                row for row in csv.DictReader(file) if row["triton"] != triton.__version__
            ] + rows
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[-1])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{CSV}: {len(rows)} kernels")


def tabled() -> Iterator[dict[str, Any]]:
    """Every kernel of every case, with the configuration that the table gives it."""
    for arch, cases in CASES.items():
        for case in cases:
            size = {**SIZES, **case}
            weight = torch.empty(
                size["V"], size["D"], dtype=getattr(torch, size["dtype"]), device="meta"
            )
            yield from compiled(arch, _triton.tiles_for(weight, size["softcap"], arch), case)


def compiled(
    arch: str, tiles: Tiles, case: dict[str, Any], kernels: tuple[str, ...] | None = None
) -> Iterator[dict[str, Any]]:
    about = {"triton": triton.__version__, "arch": arch, **SIZES, **case}
    for kernel, arguments, options in launches(tiles, **{**SIZES, **case}):
        if kernels is None or kernel.__name__ in kernels:
            forward = kernel.__name__ == "forward_kernel"
            how = {f: value if forward else "" for f, value in tiles._asdict().items()}
            yield {
                **about,
                "kernel": kernel.__name__,
                **how,
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
    """(kernel, arguments, options) of one chunk of n rows."""
    recorded = []
    launch = _triton._launch
    _triton._launch = lambda kernel, programs, *arguments, **options: recorded.append(
        (kernel, arguments, options)
    )
    try:
        with torch.device("meta"):
            of = {"dtype": getattr(torch, dtype)}
            weight, offset = torch.empty(V, D, **of), torch.empty(V, **of) if bias else None
            rows = TritonRows(Head(weight, offset, 0.7, softcap), n, gradients, tiles)
            target, value = torch.empty(n, dtype=torch.int64), torch.empty(n)
            rows.forward(torch.empty(n, D, **of), target)
            if gradients:
                rows.gradient(target, target, value, value if bias else None)
    finally:
        _triton._launch = launch
    return recorded


def resources(
    kernel: Any, arguments: tuple, options: dict[str, Any], capability: int
) -> dict[str, Any]:
    """Compiles as a launch would; what the machine code takes and which instructions it holds."""
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | {
        k: options[k] for k in options if k.isupper()
    }
    settings = {k: v for k, v in options.items() if not k.isupper()}
    types, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            kind, hint = "constexpr", None
        else:
            specialise = not parameter.do_not_specialize
            kind, hint = native_specialize_impl(CUDABackend, value, False, specialise, specialise)
        types[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif hint == "D":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={**settings, "enable_fp_fusion": True})
    return {
        **machine_code(made.asm["cubin"]),
        **instructions(made.asm),
        "shared": made.metadata.shared,
    }


@cache  # cases share kernels
def machine_code(cubin: bytes) -> dict[str, int | None]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", "-sass", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", told)}
    code = [
        (int(at, 16), text)
        for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", told, re.MULTILINE)
    ]
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", told)),
        "instructions": len(code),
        "tile": shortest_loop(code, "MUFU.EX2"),
    }


def shortest_loop(code: list[tuple[int, str]], through: str) -> int | None:
    """Instructions of the shortest way from the first of that name back to it, None if there is none.

    In the forward kernel a warp's work on a tile that holds no target and is not the last, with one
    step of depth.
    """
    place = {at: i for i, (at, _) in enumerate(code)}
    nexts: list[list[int]] = []
    for i, (_, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        falls = not re.match(r"BRA\S* 0x|EXIT", text) and i + 1 < len(code)
        nexts.append([i + 1] * falls + ([place[int(jump[1], 16)]] if jump else []))
    start = next((i for i, (_, text) in enumerate(code) if through in text), None)
    if start is None:
        return None
    seen, edge = {start}, {start}
    for steps in range(1, len(code) + 1):
        edge = {j for i in edge for j in nexts[i]}
        if start in edge:
            return steps
        edge -= seen
        seen |= edge
    return None


def instructions(asm: dict[str, Any]) -> dict[str, int]:
    """Counts in the PTX and, for layout conversions (trips through shared memory), in Triton's own form."""
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
