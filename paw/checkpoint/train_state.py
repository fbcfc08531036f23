"""The part of a run that a checkpoint holds: models, optimizers, guards and all random states.

Each rank writes its own tensors to the same folder.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from paw.checkpoint import files as checkpoint
from paw.checkpoint.files import Named, name_and_tensor, rng_name
from paw.distributed.ranks import (
    Ranks,
    in_first_replica,
    local_row_range,
    local_tensor,
    lost_peer,
)
from paw.guards import UpdateGuard
from paw.model.host import available_memory
from paw.model.policy import Policy

PATIENCE_S = 60.0
"""Seconds that a rank of a failed run waits for the files of the others."""
TASKS = "tasks"
"""The key of the state of the choice of tasks, which only some runs have."""
RandomStates = tuple[dict[str, Tensor], dict[str, Any]]
"""The type that `capture_random_states` returns."""


class Learner(NamedTuple):
    """A model that is trained, with its optimizer."""

    prefix: str
    """The prefix of its file names."""
    model: Policy
    optimizer: torch.optim.Optimizer
    guard: UpdateGuard

    @property
    def parameters(self) -> dict[str, Any]:
        return self.model.named_parameters_once()


class PendingCheckpoint:
    """A checkpoint that is being written. Its content is fixed; `publish` gives it its name."""

    def __init__(
        self,
        draft: checkpoint.Draft,
        step: int,
        ranks: Ranks,
        written: Future[checkpoint.Files],
    ) -> None:
        """`written` is the result of `draft.write` on this rank."""
        self.step = step
        self._draft = draft
        self._ranks = ranks
        self._written = written

    @property
    def done(self) -> bool:
        """Whether this rank has written its files or failed."""
        return self._written.done()

    def publish(self, keep: int) -> None:
        """Wait for all ranks, rename the checkpoint into place, and keep only the newest `keep`.

        All ranks must call it. Raises UserError if the disk refuses.
        """
        try:
            files_by_rank = self._ranks.gather_results(self._written.result, checkpoint.Files)
            self._ranks.broadcast_from_rank0(lambda: self._publish(files_by_rank, keep))
        except BaseException as error:
            # A rank that ended earlier may be publishing it, see `publish_alone`.
            if self._ranks.first and not lost_peer(error):
                self._draft.discard()
            raise

    def publish_alone(self, keep: int, *, wait: bool) -> bool:
        """Publish the checkpoint if this rank is first to see that all ranks have written theirs.

        This is for the end of a failed run. It makes no collective call, because other ranks may be
        in a different one or have ended. The ranks agree through notes in the folder, which all of
        them see. Returns whether the checkpoint is published. With `wait`, waits for this rank's
        files and then at most PATIENCE_S for those of the others. Raises UserError if the disk
        refuses.
        """
        deadline = time.monotonic()
        if wait:
            self._written.result()
            deadline = time.monotonic() + PATIENCE_S
        while not self._draft.is_published:
            files_by_rank = self._draft.noted(self._ranks.world_size)
            if files_by_rank is not None and self._draft.claim():
                self._publish(files_by_rank, keep)
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _publish(self, files_by_rank: Sequence[checkpoint.Files], keep: int) -> None:
        files: checkpoint.Files = {}
        for files_of_rank in files_by_rank:
            files.update(files_of_rank)
        self._draft.publish(files)
        checkpoint.prune(self._draft.path.parent, keep)


def start_saving(
    learners: Sequence[Learner],
    ranks: Ranks,
    *,
    step: int,
    folder: Path,
    random_states: RandomStates,
    tasks: dict[str, Any] | None = None,
    background: bool,
) -> PendingCheckpoint:
    """Begin to write the checkpoint `folder`/step_NNNNNN. All ranks must call it.

    With `background`, a thread writes it from copies in host memory. Otherwise, or if the copies
    would take more than half of the rank's available memory, it is on disk when this returns, and
    only part of a file is in memory at a time. `tasks` is the state of the choice of tasks, as
    JSON, if the configuration and the step do not determine it. Raises UserError if the disk
    refuses.
    """
    random_tensors, random_info = random_states
    state: dict[str, Any] = {}
    for learner in learners:
        state[f"{learner.prefix}guard"] = learner.guard.state()
    if tasks is not None:
        state[TASKS] = tasks
    for rank, info in enumerate(ranks.gather(random_info, dict[str, Any])):
        state[rng_name(rank)] = info
    random_bytes = ranks.gather_bytes(to_bytes(random_tensors))

    version = checkpoint.VERSION
    if ranks.world_size > 1:
        version = checkpoint.SHARDED
    draft = checkpoint.Draft(folder, step, state, version=version)
    ranks.broadcast_from_rank0(draft.begin)

    copies = None
    if background:
        limit = available_memory() / 2 / ranks.on_host
        copies = _copies(_own_files(learners, ranks, random_bytes), max_bytes=limit)
    writer = ThreadPoolExecutor(1)
    tensors = copies or _own_files(learners, ranks, random_bytes)
    written = writer.submit(_write, draft, tensors, ranks)
    writer.shutdown(wait=copies is None)
    return PendingCheckpoint(draft, step, ranks, written)


def _write(draft: checkpoint.Draft, tensors: Mapping[str, Any], ranks: Ranks) -> checkpoint.Files:
    """Write this rank's files. With several ranks, also note them in the draft."""
    files = draft.write(tensors)
    if ranks.world_size > 1:
        draft.note(ranks.rank, files)
    return files


def _own_files(
    learners: Sequence[Learner], ranks: Ranks, random_bytes: Sequence[bytes]
) -> dict[str, Any]:
    """Return the tensors that this rank writes, by file stem.

    Rank 0 also writes the random states of all ranks.
    """
    suffix = ""
    if ranks.world_size > 1:
        suffix = f".rank_{ranks.rank}"
    files: dict[str, Any] = {}
    for learner in learners:
        parameters = learner.parameters.items()
        moments = optimizer_tensors(learner.optimizer, parameters)
        files[f"{learner.prefix}model{suffix}"] = shards(parameters, ranks.first)
        files[f"{learner.prefix}optimizer{suffix}"] = shards(moments, ranks.first)
    if ranks.first:
        for rank, random_state in enumerate(random_bytes):
            files[rng_name(rank)] = from_bytes(random_state)
    return files


def shards(named: Named, first: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a rank writes.

    For sharded tensors, these are its own rows, unless an earlier rank has the same rows. The
    `first` rank also writes the tensors that are not sharded.
    """
    for name, tensor in named:
        row_range = local_row_range(tensor)
        if row_range is None:
            writes = first
        else:
            first_row, end_row = row_range
            writes = first_row < end_row and in_first_replica(tensor)
        if writes:
            yield name, local_tensor(tensor.detach())


def _copies(files: Mapping[str, Any], *, max_bytes: float) -> dict[str, Any] | None:
    """Copy tensors to host memory. Returns None if that would take more than `max_bytes`."""
    copies: dict[str, Any] = {}
    remaining_bytes = max_bytes
    for stem, named_tensors in files.items():
        copies[stem] = {}
        for name, tensor in name_and_tensor(named_tensors):
            remaining_bytes -= tensor.nbytes
            if remaining_bytes < 0:
                return None
            copies[stem][name] = tensor.to("cpu", copy=True)
    return copies


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Named
) -> Iterator[tuple[str, Tensor]]:
    """Yield an optimizer's state as ("<parameter>/<key>", tensor).

    The keys of torch's AdamW are step, exp_avg and exp_avg_sq. Parameters without state are
    skipped. The tensors of sharded parameters are sharded.
    """
    names = {parameter: name for name, parameter in parameters}
    for parameter, values in optimizer.state.items():
        if hasattr(optimizer, "state_tensors"):  # flash-adamw's state is compressed
            values = optimizer.state_tensors(parameter)  # type: ignore[attr-defined]
        for key, value in values.items():
            yield f"{names[parameter]}/{key}", torch.as_tensor(value)


def capture_random_states() -> RandomStates:
    """Return this process's random states as (tensors, JSON values).

    They cover torch (CPU and the current CUDA device), Python and NumPy.
    """
    version, generator_words, next_gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached_gauss = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(generator_words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    info = {
        "python": [version, next_gauss],
        "numpy": [algorithm, int(position), int(has_gauss), float(cached_gauss)],
    }
    return tensors, info
