"""The CUDA build: nvcc compiles the kernels for every architecture without spills, and the library
loads anywhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import CONTEXT

from paw_kernels import _native

ROOT = Path(__file__).parents[2]
OPERATORS = ("row_statistics", "row_gradient_", "pack")
KERNELS = ("statistics", "gradient", "pack")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def build(folder: Path, *python: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        *python,
        "setup.py",
        "build_ext",
        "-b",
        folder / "lib",
        "-t",
        folder / "temp",
    ]
    # The row operations for a CPU are built too, which is not the point: by a compiler that hardly
    # optimises.
    compiler = str(ROOT / "tests" / "support" / "quick_c++")
    changes = {**os.environ, "PAW_BUILD_CUDA": "1", "CXX": compiler, **changes}
    return subprocess.run(command, cwd=ROOT, env=changes, capture_output=True, text=True)


def nvcc_for(architectures: tuple[str, ...], folder: Path) -> str:
    """A PATH on which nvcc leaves out the other architectures, since each takes seconds."""
    folder.mkdir()
    (folder / "nvcc").write_text(f"""#!{sys.executable} -IS
import os, re, sys
words = []
for word in sys.argv[1:]:
    architecture = re.match("arch=compute_([0-9]+)", word)
    if architecture and architecture[1] not in {architectures}:
        assert words.pop() == "-gencode"
    else:
        words.append(word)
os.execv({shutil.which("nvcc")!r}, ["nvcc", *words])
""")
    (folder / "nvcc").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    "architectures", [("80",), pytest.param(("80", "90", "100"), marks=pytest.mark.long)], ids=len
)
def test_the_library_builds_without_spills_and_loads_beside_a_torch_without_cuda(
    tmp_path, architectures
):
    strict = "-Xptxas -v,--warn-on-spills,--warning-as-error -Werror all-warnings"
    path = nvcc_for(architectures, tmp_path / "bin")
    finished = build(tmp_path, NVCC_APPEND_FLAGS=strict, PATH=path, CUDA_HOME="", CUDA_PATH="")
    assert finished.returncode == 0, finished.stderr
    report = finished.stdout + finished.stderr
    compiled = re.findall(r"Compiling entry function '\w*?(\w+_kernel)\w*' for 'sm_(\d+)'", report)
    assert {compiled_for for _, compiled_for in compiled} == set(architectures)
    for architecture in architectures:
        kernels = [name for name, compiled_for in compiled if compiled_for == architecture]
        assert len(kernels) == 9
        assert all(any(name.endswith(f"{kernel}_kernel") for name in kernels) for kernel in KERNELS)
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    assert len(frames) == len(compiled)
    assert set(frames) == {("0", "0", "0")}
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", report)) <= 64

    library = tmp_path / "lib" / "paw_kernels" / "_cuda.so"
    child = CONTEXT.Process(target=load, args=(str(library),))
    child.start()
    child.join()
    assert child.exitcode == 0


def load(library: str) -> None:
    """The library with a torch without CUDA, in a separate process."""
    torch.ops.load_library(library)
    _native.why_no_cuda.cache_clear()  # asked during its import
    _native._CUDA_LIBRARY = Path(library)
    assert _native.why_no_cuda() is None
    assert _native.why_no_cuda((9, 0)) is None
    assert _native.why_no_cuda((8, 0)) is None
    message = "compute capability 8.0 and later, but this GPU has 7.5"
    assert message in _native.why_no_cuda((7, 5))
    for name in OPERATORS:
        operator = f"paw_kernels::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA"), name
    assert _native.pack(torch.tensor([False, True]))[0].tolist() == [1, -1]


@pytest.mark.slow
def test_what_a_build_lacks_is_said_in_one_line(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()

    def nvcc(release: str) -> None:
        (tools / "nvcc").write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "release {release}, V{release}.1"\n'
        )
        (tools / "nvcc").chmod(0o755)

    def last_line(path: str, *python: str, **variables: str) -> str:
        finished = build(tmp_path, *python, CUDA_HOME="", CUDA_PATH="", PATH=path, **variables)
        assert finished.returncode == 1, finished.stderr
        assert "Traceback" not in finished.stderr, finished.stderr
        return finished.stderr.splitlines()[-1]

    path = os.pathsep.join(
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not (Path(folder) / "nvcc").exists()
    )
    assert (
        last_line(path)
        == "PAW_BUILD_CUDA: no nvcc on PATH or in CUDA_HOME; install the CUDA toolkit"
    )
    path = f"{tools}{os.pathsep}{path}"
    nvcc("11.8")
    assert last_line(path) == f"PAW_BUILD_CUDA: {tools}/nvcc is 11.8; 12.0 or later is needed"
    nvcc("13.0")
    assert last_line(path) == "PAW_BUILD_CUDA: nvcc failed, see above"
    torch = tmp_path / "other" / "torch"
    (torch / "include/torch/csrc/stable/c").mkdir(parents=True)
    (torch / "include/torch/csrc/stable/c/shim.h").touch()
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("cuda: Optional[str] = '12.8'\n")
    message = last_line(path, PYTHONPATH=str(torch.parent))
    mismatch = f"{tools}/nvcc is of CUDA 13.0, the torch in {torch} of 12.8"
    assert message == f"PAW_BUILD_CUDA: {mismatch}; point CUDA_HOME to a toolkit 12.x"
    bare = tmp_path / "bare"
    bare.mkdir()
    for package in ("setuptools", "_distutils_hack"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        (bare / package).symlink_to(Path(spec.origin).parent)
    message = last_line(path, "-S", PYTHONPATH=str(bare))
    assert (
        message
        == "PAW_BUILD_CUDA: torch is not importable in this build; pip install --no-build-isolation ."
    )
