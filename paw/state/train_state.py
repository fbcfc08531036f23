"""What a run continues from, through a checkpoint: models, optimizers, guards, random states of every rank.

Each rank writes what it holds, in the run directory that it sees, so that machines need no shared disk.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from paw.model.host import available_memory
from paw.model.policy import Policy
from paw.model.ranks import Ranks, held_rows, in_first_replica, local_tensor
from paw.state import checkpoint
from paw.state.checkpoint import Named, rng_name
from paw.state.guards import UpdateGuard

RandomStates = tuple[dict[str, Tensor], dict[str, Any]]
"""What `rng_tensors` returns."""


class Learner(NamedTuple):
    """A model that learns, and what the names of its files begin with."""

    prefix: str
    model: Policy
    optimizer: torch.optim.Optimizer
    guard: UpdateGuard

    @property
    def parameters(self) -> dict[str, Any]:
        return self.model.named_parameters_once()


class Saving:
    """A checkpoint on its way to the disk: what it holds is settled when it is made, `publish` gives it its name.

    A thread writes it meanwhile, from copies in host memory. Where those would take more than half of what is available
    to the rank, and without `background`, it is written before this returns, a part of a file at a time. Takes all
    ranks, as `publish` does; `places` are those of `claim_places`.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        step: int,
        folder: Path,
        ranks: Ranks,
        places: Sequence[int],
        random_states: RandomStates,
        background: bool,
    ) -> None:
        self.step, self._folder, self._ranks = step, folder, ranks
        self._leads, several = places[ranks.rank] == ranks.rank, ranks.world_size > 1
        state: dict[str, Any] = {f"{of.prefix}guard": of.guard.state() for of in learners}
        random_tensors, random_state = random_states
        state |= {rng_name(rank): about for rank, about in enumerate(ranks.gather(random_state, dict[str, Any]))}
        randoms = ranks.gather_bytes(to_bytes(random_tensors))

        def held() -> dict[str, Any]:
            """What this rank writes, by file stem."""
            own, files = f".rank_{ranks.rank}" if several else "", dict[str, Any]()
            for prefix, model, optimizer, _ in learners:
                named = model.named_parameters_once().items()
                files[f"{prefix}model{own}"] = shards(named, ranks.first)
                files[f"{prefix}optimizer{own}"] = shards(optimizer_tensors(optimizer, named), ranks.first)
            return files | {rng_name(rank): from_bytes(data) for rank, data in enumerate(randoms) if ranks.first}

        version = checkpoint.SHARDED if several else checkpoint.VERSION
        self._draft = checkpoint.Draft(folder, step, state, version=version)
        ranks.together(lambda: self._draft.begin() if self._leads else None)
        copies = _copies(held(), available_memory() / 2 / ranks.on_host) if background else None
        writer = ThreadPoolExecutor(1)
        self._written = writer.submit(self._draft.write, copies or held())
        writer.shutdown(wait=copies is None)

    @property
    def done(self) -> bool:
        """Whether this rank has written its files, or failed."""
        return self._written.done()

    def publish(self, keep: int) -> None:
        """Wait for all ranks, rename it into place, drop the oldest beyond `keep`. UserError where a disk refuses."""
        ranks, apart = self._ranks, self._leads and not self._ranks.first
        try:
            written = ranks.together(self._written.result, checkpoint.Files)
            ranks.together(lambda: self._draft.reveal() if apart else None)  # before rank 0's, which makes it count
            kept = ranks.broadcast_from_rank0(lambda: self._name(written, keep), list[str])
        finally:
            if self._leads:
                self._draft.discard()
        if apart:
            checkpoint.prune_shards(self._folder, kept)

    def _name(self, written: Sequence[checkpoint.Files], keep: int) -> list[str]:
        self._draft.publish({name: about for files in written for name, about in files.items()})
        return checkpoint.prune(self._folder, keep)


def shards(named: Named, first: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a rank writes: its rows of sharded ones, unless an earlier rank has the same; the `first` rank
    those that all have."""
    for name, tensor in named:
        rows = held_rows(tensor)
        if first if rows is None else rows[0] < rows[1] and in_first_replica(tensor):
            yield name, local_tensor(tensor.detach())


def _copies(files: Mapping[str, Any], room: float) -> dict[str, Any] | None:
    """Copies in host memory, or None where they take more than `room` bytes."""
    made: dict[str, Any] = {}
    for stem, named in files.items():
        copied = made[stem] = dict[str, Tensor]()
        for name, tensor in named.items() if isinstance(named, Mapping) else named:
            room -= tensor.nbytes
            if room < 0:
                return None
            copied[name] = tensor.to("cpu", copy=True)
    return made


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Named) -> Iterator[tuple[str, Tensor]]:
    """An optimizer's state as ("<parameter>/<key>", tensor); for torch's AdamW: step, exp_avg, exp_avg_sq.

    Parameters without state are left out; sharded ones have sharded tensors.
    """
    names = {parameter: name for name, parameter in parameters}
    for parameter, values in optimizer.state.items():
        if hasattr(optimizer, "state_tensors"):  # flash-adamw's are compressed
            values = optimizer.state_tensors(parameter)  # type: ignore[attr-defined]
        for key, value in values.items():
            yield f"{names[parameter]}/{key}", torch.as_tensor(value)


def rng_tensors() -> RandomStates:
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
