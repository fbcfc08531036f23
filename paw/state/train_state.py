"""What a run continues from, through a checkpoint: step, models, optimizers, guards, random states of every rank.

Rank 0 writes and reads the files; the others hand over and are sent their shares, so that machines need no shared disk.
"""

import random
from collections.abc import Callable, Iterator, Sequence
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


class TrainState:
    """The part of a run that checkpoints hold."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = list(learners)
        self.step = 0
        """Updates done; the weight version."""
        self.saved = 0
        """The step of the newest checkpoint."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.learners[0].optimizer

    @property
    def guard(self) -> UpdateGuard:
        return self.learners[0].guard

    def save(self, folder: Path, ranks: Ranks, *, keep: int) -> None:
        """Write a checkpoint and drop the oldest beyond `keep`; takes all ranks."""
        files: dict[str, Any] = {}
        state: dict[str, Any] = {}
        for learner in self.learners:
            prefix, named = learner.prefix, learner.parameters.items()
            moments, about = optimizer_tensors(learner.optimizer, named, ranks.gathered)
            files |= {f"{prefix}model": ranks.gathered(named), f"{prefix}optimizer": moments}
            state |= {f"{prefix}optimizer": about, f"{prefix}guard": learner.guard.state()}
        random_tensors, random_state = rng_tensors()
        for rank, tensors in enumerate(ranks.gather_bytes(to_bytes(random_tensors))):
            files[rng_name(rank)] = from_bytes(tensors)
        state |= {rng_name(rank): about for rank, about in enumerate(ranks.gather(random_state, dict[str, Any]))}
        if ranks.first:
            checkpoint.save(folder, self.step, files, state)
            checkpoint.prune(folder, keep)
        else:
            for _ in chain(*files.values()):
                pass  # what rank 0 writes takes all ranks to gather
        self.saved = self.step


# --- as tensors ------------------------------------------------------------------------------------------------------


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Named, gathered: Callable[[Named], Any] = dict
) -> tuple[Any, dict[str, Any]]:
    """An optimizer's state as ("<parameter>/<key>" -> tensor, JSON); for torch's AdamW: step, exp_avg, exp_avg_sq.

    Sharded tensors are made whole by `gathered` (`Ranks.gathered`), in which every rank must take part; what it gives
    is the first part of the answer. Parameters without state are left out.
    """
    names = {parameter: name for name, parameter in parameters}

    def named() -> Iterator[tuple[str, Tensor]]:
        for parameter, values in optimizer.state.items():
            if hasattr(optimizer, "state_tensors"):  # flash-adamw's are compressed
                values = optimizer.state_tensors(parameter)  # type: ignore[attr-defined]
            for key, value in values.items():
                yield f"{names[parameter]}/{key}", torch.as_tensor(value)

    lr = [group["lr"] for group in optimizer.param_groups]
    return gathered(named()), {"class": type(optimizer).__name__, "lr": lr}


def rng_tensors() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Global random states of torch (CPU, and the current CUDA device), python and numpy: (tensors, JSON).

    Each process has its own: with several ranks save one pair a rank.
    """
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
