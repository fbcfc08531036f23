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


def make_tensors_quickly():
    """Give the interpreter's tensors and types what those of the same shape already have.

    Each number of a kernel is a tensor of its own. Its shape, its type and numpy's type are made
    anew each time: nearly half of the time of the tests.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    make_tensor = tl.tensor.__init__
    make_block_type = tl.block_type.__init__
    np_dtype = interpreter._get_np_dtype
    shapes = {}
    block_types = {}
    np_dtypes = {}

    def init_tensor(self, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = shapes[shape]

    def init_block_type(self, element_ty, shape):
        lengths = tuple(getattr(length, "value", length) for length in shape)
        key = element_ty.name, lengths
        if key not in block_types or element_ty.is_ptr():
            make_block_type(self, element_ty, shape)
            block_types[key] = dict(vars(self))
        vars(self).update(block_types[key])

    def get_np_dtype(type):
        name = type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(type)
        return np_dtypes[name]

    tl.tensor.__init__ = init_tensor
    tl.block_type.__init__ = init_block_type
    interpreter._get_np_dtype = get_np_dtype


if backend.INTERPRETED:
    patch_builtins_quickly()
    make_tensors_quickly()
