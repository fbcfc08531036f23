"""Choice of the implementation behind `token_stats` and `paw_loss`."""

from torch import Tensor

from paw_kernels import _torch
from paw_kernels._head import MakeRows

_BACKENDS: dict[str, MakeRows] = {"torch": _torch.make_rows}


def resolve(backend: str, hidden: Tensor) -> MakeRows:
    name = "torch" if backend == "auto" else backend
    if name not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; known backends: {', '.join(['auto', *_BACKENDS])}")
    return _BACKENDS[name]
