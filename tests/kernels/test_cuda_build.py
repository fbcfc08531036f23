"""The CUDA build: nvcc accepts the kernels for every architecture, without spills, and the
library loads anywhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    changes = {**os.environ, "PAW_BUILD_CUDA": "1", **changes}
    return subprocess.run(command, cwd=ROOT, env=changes, capture_output=True, text=True)


@needs_nvcc
@pytest.mark.slow
def test_the_library_builds_without_spills_and_loads_beside_a_torch_without_cuda(tmp_path):
    strict = "-Xptxas -v,--warn-on-spills,--warning-as-error -Werror all-warnings"
    finished = build(tmp_path, NVCC_APPEND_FLAGS=strict)
    assert finished.returncode == 0, finished.stderr
    report = finished.stdout + finished.stderr
    compiled = re.findall(r"Compiling entry function '\w*?(\w+_kernel)\w*' for 'sm_(\d+)'", report)
    for architecture in ("80", "90", "100"):
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
    code = f"""if True:
        import torch, paw_kernels
        from pathlib import Path
        torch.ops.load_library({str(library)!r})
        from paw_kernels import _native
        _native.why_no_cuda.cache_clear()  # asked while it was imported
        _native._CUDA_LIBRARY = Path({str(library)!r})
        assert _native.why_no_cuda() is _native.why_no_cuda((9, 0)) is _native.why_no_cuda((8, 0)) is None
        assert "compute capability 8.0 and later, but this GPU has 7.5" in _native.why_no_cuda((7, 5))
        for name in {OPERATORS!r}:
            assert torch._C._dispatch_has_kernel_for_dispatch_key("paw_kernels::" + name, "CUDA"), name
        assert _native.pack(torch.tensor([False, True]))[0].tolist() == [1, -1]"""
    subprocess.run([sys.executable, "-c", code], check=True)


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
