"""What a run continues from, through a checkpoint: models, optimizers, guards, random states of every rank.

Rank 0 writes and reads the files; the others hand over and are sent their shares, so that machines need no shared disk.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from paw.model.policy import Policy
from paw.model.ranks import Ranks
from paw.state import checkpoint
from paw.state.checkpoint import Named, rng_name
from paw.state.guards import UpdateGuard


class Learner(NamedTuple):
    """A model that learns, and what the names of its files begin with."""

    prefix: str
    model: Policy
    optimizer: torch.optim.Optimizer
    guard: UpdateGuard

    @property
    def parameters(self) -> dict[str, Any]:
        return self.model.named_parameters_once()


def save(learners: Sequence[Learner], step: int, folder: Path, ranks: Ranks, *, keep: int) -> None:
    """Write the checkpoint of `step` updates and drop the oldest beyond `keep`; takes all ranks."""
    files: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for prefix, model, optimizer, guard in learners:
        named = model.named_parameters_once().items()
        files[f"{prefix}model"] = ranks.gathered(named)
        files[f"{prefix}optimizer"] = ranks.gathered(optimizer_tensors(optimizer, named))
        state[f"{prefix}guard"] = guard.state()
    random_tensors, random_state = rng_tensors()
    for rank, tensors in enumerate(ranks.gather_bytes(to_bytes(random_tensors))):
        files[rng_name(rank)] = from_bytes(tensors)
    state |= {rng_name(rank): about for rank, about in enumerate(ranks.gather(random_state, dict[str, Any]))}
    if ranks.first:
        checkpoint.save(folder, step, files, state)
        checkpoint.prune(folder, keep)
    else:
        for _ in chain(*files.values()):
            pass  # what rank 0 writes takes all ranks to gather


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Named) -> Iterator[tuple[str, Tensor]]:
    """An optimizer's state as ("<parameter>/<key>", tensor); for torch's AdamW: step, exp_avg, exp_avg_sq.

    Parameters without state are left out; sharded tensors are shards, see `Ranks.gathered`.
    """
    names = {parameter: name for name, parameter in parameters}
    for parameter, values in optimizer.state.items():
        if hasattr(optimizer, "state_tensors"):  # flash-adamw's are compressed
            values = optimizer.state_tensors(parameter)  # type: ignore[attr-defined]
        for key, value in values.items():
            yield f"{names[parameter]}/{key}", torch.as_tensor(value)


def rng_tensors() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This process's random states of torch (CPU, and the current CUDA device), python and numpy: (tensors, JSON)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors, {"python": [version, gauss], "numpy": [kind, int(position), int(has_gauss), float(cached)]}
