"""Everything static is in pyproject.toml; this file builds the compiled parts of csrc/.

The CPU row operations need a C++ compiler and no torch. Without a compiler the installation goes
on: the head then falls back to plain torch, and `paw doctor` says so. PAW_RELEASE=1 ends the build
instead, because a wheel for others has to contain them.

The libraries have a C interface and do not call Python, so one wheel fits every version of it: the
tag is py3-none-PLATFORM, and the files are called _cpu.so and _cuda.so.

PAW_BUILD_CUDA=1 adds the CUDA kernels; they need nvcc, and torch's headers from the environment
that is installed to: PAW_BUILD_CUDA=1 pip install --no-build-isolation .
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command import editable_wheel
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

if sys.platform == "win32":
    raise SystemExit("paw-trainer runs on Linux and macOS; on Windows, install it inside WSL 2")

ROOT = Path(__file__).parent
RELEASE = os.environ.get("PAW_RELEASE", "0") not in ("", "0")
CUDA = "paw_kernels._cuda"
OLDEST_NVCC, OLDEST_TORCH = (12, 0), (2, 10)
openmp = ["-fopenmp"] if sys.platform.startswith("linux") else []

extensions = [
    Extension(
        "paw_kernels._cpu",
        ["csrc/rows.cpp"],
        language="c++",
        extra_compile_args=[
            "-O3",
            "-std=c++17",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fno-signed-zeros",
            *openmp,
        ],
        extra_link_args=openmp,
        optional=not RELEASE,
    )
]
if os.environ.get("PAW_BUILD_CUDA", "0") not in ("", "0"):
    extensions.append(Extension(CUDA, ["csrc/rows.cu", "csrc/select.cu", "csrc/torch_cuda.cpp"]))


class BuildExtensions(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """Leave out the version of Python: paw_kernels._cpu is paw_kernels/_cpu.so."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if ext.name == CUDA:
            return self.build_cuda(ext)
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            if RELEASE:
                raise SystemExit(f"PAW_RELEASE: csrc/rows.cpp was not compiled: {error}") from None
            raise

    def build_cuda(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [*nvcc_command(), *ext.sources, "-o", str(output)]
        print(*command, flush=True)
        if subprocess.run(command).returncode != 0:
            raise SystemExit("PAW_BUILD_CUDA: nvcc failed, see above")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Return py3-none-PLATFORM, or py3-none-any if no library was compiled."""
        _, _, platform = super().get_tag()
        is_compiled = any(Path(self.bdist_dir).rglob("*.so"))
        return "py3", "none", platform if is_compiled else "any"


class EditableWheel(editable_wheel.editable_wheel):
    """`pip install -e .` by a .pth file with the paths of both packages, in place of an import
    hook: type checkers and editors read paths, and run no hooks.

    setuptools has no option for two paths. Where a version of it lacks what is used here, its hook
    stays.
    """

    def _select_strategy(self, name: str, tag: str, build_lib: str) -> Any:
        paths = getattr(editable_wheel, "_StaticPth", None)
        if (
            paths is None or self.mode
        ):  # a mode that was asked for: --config-settings editable_mode=strict
            return super()._select_strategy(name, tag, build_lib)
        return paths(self.distribution, name, [ROOT, ROOT / "kernels"])


def nvcc_command() -> list[str]:
    """nvcc and its options, without sources and output.

    Ends with one line when nvcc or torch is missing or too old.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [*(str(Path(home) / "bin") for home in homes), os.environ.get("PATH", "")]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None:
        raise SystemExit(
            "PAW_BUILD_CUDA: no nvcc on PATH or in CUDA_HOME; install the CUDA toolkit"
        )
    version = tuple(map(int, re.findall(r"release (\d+)\.(\d+)", _output(nvcc, "--version"))[0]))
    if version < OLDEST_NVCC:
        raise SystemExit(
            f"PAW_BUILD_CUDA: {nvcc} is {_dots(version)}; {_dots(OLDEST_NVCC)} or later is needed"
        )

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "PAW_BUILD_CUDA: torch is not importable in this build; pip install --no-build-isolation ."
        )
    torch = Path(spec.origin).parent
    if not (torch / "include/torch/csrc/stable/c/shim.h").is_file():
        raise SystemExit(
            f"PAW_BUILD_CUDA: the torch in {torch} is older than {_dots(OLDEST_TORCH)}"
        )
    about = (torch / "version.py").read_text(
        encoding="utf-8"
    )  # cuda: Optional[str] = '13.0'; None for a CPU build
    cuda = re.search(r"^cuda\b.*= '(\d+)\.([\d.]+)'", about, re.MULTILINE)
    if cuda and int(cuda[1]) != version[0]:
        ours = f"{nvcc} is of CUDA {_dots(version)}, the torch in {torch} of {cuda[1]}.{cuda[2]}"
        raise SystemExit(f"PAW_BUILD_CUDA: {ours}; point CUDA_HOME to a toolkit {cuda[1]}.x")
    major, minor = OLDEST_TORCH
    options = [
        nvcc,
        "-shared",
        "-O3",
        "-std=c++17",
        "-Xcompiler",
        "-fPIC",
        "--threads",
        "0",
        "-I",
        str(torch / "include"),
    ]
    options += [f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000"]
    libraries = [
        name for name in ("torch", "torch_cuda") if (torch / "lib" / f"lib{name}.so").is_file()
    ]
    options += [
        "-L",
        str(torch / "lib"),
        "-Xlinker",
        "--no-as-needed",
        *(f"-l{name}" for name in libraries),
    ]
    architectures = [80, 90, 100] if version >= (12, 8) else [80, 90]
    for arch in architectures:
        options += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    return [
        *options,
        "-gencode",
        f"arch=compute_{arch},code=compute_{arch}",
    ]  # PTX, for what comes later


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


setup(
    ext_modules=extensions,
    cmdclass={
        "build_ext": BuildExtensions,
        "bdist_wheel": Wheel,
        "editable_wheel": EditableWheel,
    },
)
