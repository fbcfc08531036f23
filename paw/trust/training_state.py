"""What a run continues from, through a checkpoint: models, optimizers, guards, random states of every rank.

Rank 0 writes and reads the files; the others hand over and are sent their shares, so that machines need no shared disk.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paw.learner.distributed import Ranks
from paw.learner.model import Policy
from paw.trust import checkpoint
from paw.trust.guards import UpdateGuard


class Learner(NamedTuple):
    """A model that learns, and what the names of its files begin with."""

    prefix: str
    model: Policy
    optimizer: torch.optim.Optimizer
    guard: UpdateGuard


def save(folder: Path, step: int, learners: Sequence[Learner], ranks: Ranks, *, keep: int) -> None:
    """Write a checkpoint after `step` updates and drop the oldest beyond `keep`; takes all ranks."""
    files: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for prefix, model, optimizer, guard in learners:
        names = model.named_parameters_once()
        tensors, about = checkpoint.optimizer_tensors(optimizer, names.items(), ranks.gathered)
        files |= {f"{prefix}model": ranks.gathered(names.items()), f"{prefix}optimizer": tensors}
        state |= {f"{prefix}optimizer": about, f"{prefix}guard": guard.state()}
    for rank, (random_tensors, random_state) in enumerate(ranks.gather(checkpoint.rng_tensors())):
        files[_rng(rank)], state[_rng(rank)] = random_tensors, random_state
    if ranks.first:
        checkpoint.save(folder, step, files, state)
        checkpoint.prune(folder, keep)
    else:
        for _ in chain(*files.values()):
            pass  # what rank 0 writes takes all ranks to gather


def restore(
    folder: Path, learners: Sequence[Learner], ranks: Ranks, *, warn: Callable[[str], None]
) -> tuple[int, str] | None:
    """Continue from the newest checkpoint in rank 0's `folder` that verifies: (its step, its path), None without any.

    Raises CheckpointError where there are only damaged ones, or those of another model; on the other ranks
    PeerLostError then.
    """
    names = {f"{learner.prefix}model": learner.model.named_parameters_once() for learner in learners}
    tensors: checkpoint.Tensors = {}

    def read() -> tuple[str, dict[str, Any], dict[str, Any]] | None:
        path = checkpoint.latest(folder, warn=warn)
        if path is None:
            return None
        found, state = checkpoint.load(path, like=names)
        tensors.update(found)
        return (
            str(path),
            state,
            {stem: {k: _outline(stem, v) for k, v in named.items()} for stem, named in found.items()},
        )

    sent = ranks.from_first(read)
    if sent is None:
        return None
    path, state, outlines = sent
    if not ranks.first:
        tensors = {stem: {name: _blank(about) for name, about in named.items()} for stem, named in outlines.items()}
    for prefix, model, optimizer, guard in learners:
        model.load(tensors[f"{prefix}model"])
        moments, about = tensors[f"{prefix}optimizer"], state[f"{prefix}optimizer"]
        checkpoint.load_optimizer(optimizer, names[f"{prefix}model"].items(), moments, about)
        guard.load_state(state[f"{prefix}guard"])
    mine = _rng(ranks.rank) if _rng(ranks.rank) in state else _rng(0)  # fewer ranks saved it
    checkpoint.load_rng(tensors[mine], state[mine])
    return state["step"], path


def _outline(stem: str, tensor: Tensor) -> Tensor | tuple[torch.dtype, torch.Size]:
    """What the other ranks need of a tensor that is scattered to them: all of a small one that is not."""
    return tensor if tensor.ndim == 0 or stem.startswith(_rng(0)) else (tensor.dtype, tensor.shape)


def _blank(outline: Tensor | tuple[torch.dtype, torch.Size]) -> Tensor:
    return outline if isinstance(outline, Tensor) else torch.empty(outline[1], dtype=outline[0])


def _rng(rank: int) -> str:
    return f"rng_{rank}" if rank else "rng"
