"""The Triton kernels, compiled ahead of time for GPUs that this machine lacks: the resources and
instructions of their code."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "kernels" / "triton_aot.py"
SHARED_KIB = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


@pytest.fixture(scope="module", params=["first", pytest.param("all", marks=pytest.mark.long)])
def compiled(request):
    """A dict for each kernel, of the first case of each entry of the table or of all cases. They
    are compiled in a separate process, because kernels may be interpreted in this one."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--tabled", request.param]
    finished = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=500)
    assert finished.returncode == 0, finished.stderr[-2000:]
    rows = [json.loads(line) for line in finished.stdout.splitlines()]
    # sm_120 shares the entry of sm_89.
    architectures = SHARED_KIB.keys() - ({"sm_120"} if request.param == "first" else set())
    for kernel in ("forward_kernel", "merge_kernel", "gradient_kernel"):
        assert {row["arch"] for row in the(rows, kernel)} == architectures
    return rows


def the(compiled, kernel):
    return [row for row in compiled if row["kernel"] == kernel]


def test_registers_and_shared_memory_suffice(compiled):
    for row in compiled:
        assert row["stack"] <= 96, row
        assert row["shared"] <= SHARED_KIB[row["arch"]] * 1024, row


def test_matrix_products_run_on_tensor_cores(compiled):
    instruction = dict.fromkeys(SHARED_KIB, "mma_sync") | {"sm_90": "wgmma", "sm_100": "tcgen05"}
    for row in the(compiled, "forward_kernel"):
        products = {name for name in set(instruction.values()) if row[name]}
        assert products == {instruction[row["arch"]]}, row


def test_loads_run_ahead_of_the_products(compiled):
    """Through tensor descriptors if the hardware has them. A barrier or branch in the wrong place
    makes the compiler silently drop the pipeline."""
    for row in the(compiled, "forward_kernel"):
        if row["D"] % 8:
            continue  # rows that are not aligned can only be loaded through registers
        assert row["tma_loads" if row["tma"] else "cp_async"], row
        tile = (row["rows"] + row["cols"]) * row["depth"] * BYTES[row["dtype"]]
        assert row["shared"] >= (row["stages"] - (not row["tma"])) * tile, row
        if row["arch"] in ("sm_90", "sm_100") and row["dtype"] != "float32":
            assert row["tma_loads"], row
            assert bool(row["tma_stores"]) == row["gradients"], row


def test_the_gradient_can_be_in_place(compiled):
    """A layout conversion between load and store would let a thread write what another has yet to
    read."""
    for row in the(compiled, "gradient_kernel"):
        assert row["conversions"] == 0, row
        assert row["shared"] == 0, row
        assert row["spills"] == 0, row
