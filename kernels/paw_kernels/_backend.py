"""Choice of the implementation behind `token_stats` and `paw_loss`.

A backend is one function with the signature of `paw_kernels._torch.head_pass`: statistics of the chosen rows, and in
the same pass their gradients, if a callback that turns statistics into row coefficients is given.
"""

from collections.abc import Callable

from paw_kernels import _torch

_BACKENDS: dict[str, Callable[..., _torch.HeadPass]] = {"torch": _torch.head_pass}


def resolve(backend: str) -> Callable[..., _torch.HeadPass]:
    """The implementation called `backend`; "auto" is the fastest one that runs here.

    Raises ValueError for an unknown name.
    """
    name = "torch" if backend == "auto" else backend
    if name not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; known backends: {', '.join(['auto', *_BACKENDS])}")
    return _BACKENDS[name]
