"""Everything static is in pyproject.toml; this file builds the compiled parts of csrc/.

The CPU row operations need a C++ compiler and no torch. Without a compiler the installation goes on: the head then
falls back to plain torch, and `paw doctor` says so.
"""

import sys

from setuptools import Extension, setup

openmp = ["-fopenmp"] if sys.platform.startswith("linux") else []

setup(
    ext_modules=[
        Extension(
            "paw_kernels._cpu",
            ["csrc/rows.cpp"],
            language="c++",
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", *openmp],
            extra_link_args=openmp,
            optional=True,
        )
    ]
)
