"""What a run continues from, through a checkpoint: step, models, optimizers, guards, random states of every rank.

Rank 0 writes and reads the files; the others hand over and are sent their shares, so that machines need no shared disk.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from paw.errors import describe
from paw.model.policy import Policy
from paw.model.ranks import Ranks, distribute_like, full_tensor
from paw.state import checkpoint
from paw.state.checkpoint import CheckpointError, Named
from paw.state.guards import UpdateGuard


class Learner(NamedTuple):
    """A model that learns, and what the names of its files begin with."""

    prefix: str
    model: Policy
    optimizer: torch.optim.Optimizer
    guard: UpdateGuard


@runtime_checkable
class Compressed(Protocol):
    """An optimizer whose state is not made of plain tensors: flash-adamw."""

    def state_tensors(self, p: Tensor) -> dict[str, Tensor]: ...
    def load_tensors(self, p: Tensor, tensors: Mapping[str, Tensor]) -> None: ...


class OptimizerState(BaseModel):
    """What state.json says of an optimizer."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    name: str = Field(alias="class")
    lr: list[float]


class GuardState(BaseModel):
    """What state.json says of an update guard."""

    model_config = ConfigDict(strict=True)
    skipped: Annotated[int, Field(ge=0)]
    in_a_row: Annotated[int, Field(ge=0)]


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
        for prefix, model, optimizer, guard in self.learners:
            names = model.named_parameters_once()
            tensors, about = optimizer_tensors(optimizer, names.items(), ranks.gathered)
            files |= {f"{prefix}model": ranks.gathered(names.items()), f"{prefix}optimizer": tensors}
            state |= {f"{prefix}optimizer": about, f"{prefix}guard": guard.state()}
        random_tensors, random_state = rng_tensors()
        for rank, tensors in enumerate(ranks.gather_bytes(to_bytes(random_tensors))):
            files[_rng(rank)] = from_bytes(tensors)
        state |= {_rng(rank): about for rank, about in enumerate(ranks.gather(random_state, dict[str, Any]))}
        if ranks.first:
            checkpoint.save(folder, self.step, files, state)
            checkpoint.prune(folder, keep)
        else:
            for _ in chain(*files.values()):
                pass  # what rank 0 writes takes all ranks to gather
        self.saved = self.step

    def restore(self, folder: Path, ranks: Ranks, *, warn: Callable[[str], None], chosen: str = "") -> str | None:
        """Continue from the newest checkpoint in rank 0's `folder` that verifies: its path, None without any.

        `chosen` is the name of another one; what is saved from then on is newer than what was saved after it.
        Raises CheckpointError where there are only damaged ones, or those of another model; on the other ranks
        PeerLostError then.
        """
        names = {f"{learner.prefix}model": learner.model.named_parameters_once() for learner in self.learners}
        tensors: checkpoint.Tensors = {}

        def read() -> dict[str, Any] | None:
            if chosen:
                newest = folder / chosen, self._read(folder / chosen, names, ranks.world_size)
            else:
                newest = checkpoint.newest(folder, lambda path: self._read(path, names, ranks.world_size), warn)
            if newest is None:
                return None
            path, (found, state) = newest
            tensors.update(found)
            shapes = {stem: {k: (str(v.dtype), v.shape) for k, v in named.items()} for stem, named in found.items()}
            return {"path": str(path), "state": state, "shapes": shapes}

        sent = ranks.broadcast_from_rank0(read, dict[str, Any] | None)
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
        for prefix, model, optimizer, guard in self.learners:
            model.load(tensors[f"{prefix}model"])
            moments, about = tensors[f"{prefix}optimizer"], state[f"{prefix}optimizer"]
            load_optimizer(optimizer, names[f"{prefix}model"].items(), moments, about)
            guard.load_state(state[f"{prefix}guard"])
        mine = _rng(ranks.rank) if _rng(ranks.rank) in state else _rng(0)  # fewer ranks saved it
        load_rng(tensors[mine], state[mine])
        self.step = self.saved = state["step"]
        return sent["path"]

    def _read(self, path: Path, names: Mapping[str, Any], world: int) -> tuple[checkpoint.Tensors, dict[str, Any]]:
        """A checkpoint that fits everything. Raises CheckpointError."""
        found, state = checkpoint.load(path, like=names)
        try:
            for prefix, _, optimizer, _ in self.learners:
                OptimizerState.model_validate(state.get(f"{prefix}optimizer"))
                GuardState.model_validate(state.get(f"{prefix}guard"))
                of, about = names[f"{prefix}model"].items(), state[f"{prefix}optimizer"]
                check_optimizer(optimizer, of, found[f"{prefix}optimizer"], about)
            for rank in filter(lambda rank: not rank or _rng(rank) in state, range(world)):
                check_rng(found[_rng(rank)], state.get(_rng(rank), {}))
        except ValidationError as error:
            what = error.errors()[0]
            raise checkpoint.damaged(path, checkpoint.STATE, f"{error.title}: {what['msg']}") from None
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {path}: {error}") from None
        return found, state


def _small(stem: str, dimensions: int) -> bool:
    return dimensions == 0 or stem.startswith(_rng(0))


def _rng(rank: int) -> str:
    return f"rng_{rank}" if rank else "rng"


# --- as tensors ------------------------------------------------------------------------------------------------------


def optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Named,
    gathered: Callable[[Named], Any] = lambda named: {
        name: full_tensor(tensor).detach().cpu() for name, tensor in named
    },
) -> tuple[Any, dict[str, Any]]:
    """An optimizer's state as ("<parameter>/<key>" -> tensor, JSON); for torch's AdamW: step, exp_avg, exp_avg_sq.

    Sharded tensors (DTensor) are made whole by `gathered`, in which every rank must take part; what it gives is the
    first part of the answer. Those in host memory are not copied. Parameters without state are left out.
    """
    names = {parameter: name for name, parameter in parameters}

    def named() -> Iterator[tuple[str, Tensor]]:
        for parameter, values in optimizer.state.items():
            if isinstance(optimizer, Compressed):
                values = optimizer.state_tensors(parameter)
            for key, value in values.items():
                yield f"{names[parameter]}/{key}", torch.as_tensor(value)

    return gathered(named()), {
        "class": type(optimizer).__name__,
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Named, tensors: Mapping[str, Tensor], info: Mapping[str, Any]
) -> None:
    """Put `optimizer_tensors` back, bit for bit, onto each parameter's device and sharding.

    Learning rates are restored too; betas, weight decay and the like stay as the optimizer was built. Raises
    CheckpointError where class, names, shapes or dtypes do not fit.
    """
    by_name = dict(parameters)
    check_optimizer(optimizer, by_name.items(), tensors, info)
    restored: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit("/", 1)
        parameter = by_name[name]
        if isinstance(optimizer, Compressed):
            restored[parameter][key] = tensor
        elif key == "step":
            group = group_of[parameter]
            on_device = group.get("fused") or group.get("capturable")
            restored[parameter][key] = tensor.to(parameter.device if on_device else "cpu", copy=True)
        else:
            restored[parameter][key] = distribute_like(parameter, tensor)
    optimizer.state.clear()
    for parameter, values in restored.items():
        if not isinstance(optimizer, Compressed):
            optimizer.state[parameter] = values  # Optimizer.load_state_dict casts to the parameter's dtype
            continue
        try:
            optimizer.load_tensors(parameter, values)
        except (KeyError, RuntimeError) as error:
            cause = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise CheckpointError(f"optimizer.safetensors: {cause}; was optim.master_bits another?") from None
    for group, lr in zip(optimizer.param_groups, info["lr"], strict=True):
        group["lr"] = lr


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Named, tensors: Mapping[str, Tensor], info: Mapping[str, Any]
) -> None:
    """Raise CheckpointError where `load_optimizer` could not put these back; a compressed state's are seen there."""
    if info["class"] != type(optimizer).__name__ or len(info["lr"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer.safetensors: written by {info['class']} with {len(info['lr'])} parameter groups, "
            f"this run has {type(optimizer).__name__} with {len(optimizer.param_groups)}"
        )
    by_name = dict(parameters)
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    keys: dict[str, set[str]] = defaultdict(set)
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        parameter = by_name.get(name)
        if parameter is None or parameter not in trained:
            raise CheckpointError(f"optimizer.safetensors: '{full_name}' belongs to no parameter of this run")
        keys[name].add(key)
        if isinstance(optimizer, Compressed):
            continue
        shape = [] if key == "step" else list(parameter.shape)
        if list(tensor.shape) != shape or tensor.dtype not in (torch.float32, parameter.dtype):
            has = f"is {tensor.dtype} {list(tensor.shape)}, the parameter {parameter.dtype} {list(parameter.shape)}"
            raise CheckpointError(f"optimizer.safetensors: '{full_name}' {has}")
    for name, found in keys.items() if isinstance(optimizer, torch.optim.AdamW) else ():
        if missing := {"step", "exp_avg", "exp_avg_sq"} - found:
            raise CheckpointError(f"optimizer.safetensors: '{name}' lacks {', '.join(sorted(missing))}")


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


def load_rng(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Put `rng_tensors` back. A CUDA state is left aside on a machine without CUDA."""
    _set_rng(torch.default_generator, random, np.random, tensors, info)
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"].clone())


def check_rng(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Raise CheckpointError where `load_rng` could not put these back; on no generator that is in use."""
    try:
        _set_rng(torch.Generator(), random.Random(), np.random.RandomState(), tensors, info)
        if "cuda" in tensors and torch.cuda.is_available():
            torch.Generator("cuda").set_state(tensors["cuda"].clone())
    except Exception as error:  # each library has its own for a state that is none
        raise CheckpointError(f"no random state: {describe(error)}") from None


def _set_rng(generator: torch.Generator, python: Any, numpy: Any, tensors: Any, info: Any) -> None:
    version, gauss = info["python"]
    kind, position, has_gauss, cached = info["numpy"]
    generator.set_state(tensors["torch"].clone())
    python.setstate((version, tuple(tensors["python"].tolist()), gauss))
    numpy.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
