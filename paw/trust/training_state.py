"""What a run continues from, through a checkpoint: models, optimizers, guards, random states of every rank.

Rank 0 writes and reads the files; the others hand over and are sent their shares, so that machines need no shared disk.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

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
    random_tensors, random_state = checkpoint.rng_tensors()
    for rank, tensors in enumerate(ranks.gather_bytes(to_bytes(random_tensors))):
        files[_rng(rank)] = from_bytes(tensors)
    state |= {_rng(rank): about for rank, about in enumerate(ranks.gather(random_state, dict[str, Any]))}
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

    def read() -> dict[str, Any] | None:
        path = checkpoint.latest(folder, warn=warn)
        if path is None:
            return None
        found, state = checkpoint.load(path, like=names)
        tensors.update(found)
        shapes = {stem: {k: (str(v.dtype), v.shape) for k, v in named.items()} for stem, named in found.items()}
        return {"path": str(path), "state": state, "shapes": shapes}

    sent = ranks.from_first(read, dict[str, Any] | None)
    if sent is None:
        return None
    # What is not sharded goes to all as it is; of the rest the others need dtypes and shapes to be sent theirs.
    small = {f"{stem}/{k}": v for stem, named in tensors.items() for k, v in named.items() if _small(stem, v.ndim)}
    small = from_bytes(ranks.gather_bytes(to_bytes(small))[0])
    state = sent["state"]
    if not ranks.first:
        for stem, named in sent["shapes"].items():
            tensors[stem] = {
                name: small[f"{stem}/{name}"]
                if _small(stem, len(shape))
                else torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                for name, (dtype, shape) in named.items()
            }
    for prefix, model, optimizer, guard in learners:
        model.load(tensors[f"{prefix}model"])
        moments, about = tensors[f"{prefix}optimizer"], state[f"{prefix}optimizer"]
        checkpoint.load_optimizer(optimizer, names[f"{prefix}model"].items(), moments, about)
        guard.load_state(state[f"{prefix}guard"])
    mine = _rng(ranks.rank) if _rng(ranks.rank) in state else _rng(0)  # fewer ranks saved it
    checkpoint.load_rng(tensors[mine], state[mine])
    return state["step"], sent["path"]


def _small(stem: str, dimensions: int) -> bool:
    return dimensions == 0 or stem.startswith(_rng(0))


def _rng(rank: int) -> str:
    return f"rng_{rank}" if rank else "rng"
