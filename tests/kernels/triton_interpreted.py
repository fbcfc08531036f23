"""The Triton backend, in Triton's interpreter if there is no GPU.

Must be imported before anything imports Triton.
"""

import importlib.util
import inspect

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

with pytest.MonkeyPatch.context() as patch:
    # Whether kernels are interpreted is decided when they are defined. The variable is removed
    # again, because children that other tests start would inherit it.
    if not torch.cuda.is_available():
        patch.setenv("TRITON_INTERPRET", "1")
    from paw_kernels import _triton as backend

__all__ = ["backend"]


def patch_builtins_quickly():
    """Give the interpreter a `_patch_builtin` that remembers which members are built-in.

    The original looks through every member of triton.language each time a kernel, or a function
    that kernels share, is called. That takes a sixth of the tests' time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    builtins = {}
    for package in packages:
        members = inspect.getmembers(package)
        builtins[package] = [
            (name, member) for name, member in members if tl.core.is_builtin(member)
        ]

    def patch_builtin(package, builder, scope):
        for name, member in builtins[package]:
            if getattr(package, name) is member:  # not yet patched by the calling kernel
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


if backend.INTERPRETED:
    patch_builtins_quickly()
