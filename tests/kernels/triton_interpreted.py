"""The Triton backend, in Triton's interpreter where there is no GPU.

To be imported before anything imports Triton.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

with pytest.MonkeyPatch.context() as patch:
    # Whether kernels are interpreted is settled when they are defined. The variable does not stay:
    # the children that other tests start would inherit it.
    if not torch.cuda.is_available():
        patch.setenv("TRITON_INTERPRET", "1")
    from paw_kernels import _triton as backend

__all__ = ["backend"]
