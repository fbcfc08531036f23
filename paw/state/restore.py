"""Reading checkpoints: checked against their manifest and against the run, put back bit for bit.

Rank 0 reads the files; the others are sent their shares.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from paw.errors import UserError, describe, shown, to_stderr
from paw.files import cause, json_object
from paw.model.ranks import distribute_like
from paw.state.checkpoint import (
    MANIFEST,
    STATE,
    VERSION,
    CheckpointError,
    Named,
    Tensors,
    damaged,
    digest,
    read_manifest,
    rng_name,
    saved,
)
from paw.state.guards import UpdateGuard

if TYPE_CHECKING:
    from paw.run import Run
    from paw.state.train_state import Learner

T = TypeVar("T")


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest, which reads all bytes once; returns what state.json holds.

    Raises CheckpointError naming the first file that is missing, unexpected, truncated or altered, or another version.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}")
    files, _ = read_manifest(path)
    found = {file.name for file in path.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() | found):
        if name not in found:
            raise damaged(path, name, "the file is missing")
        if name not in files:
            raise damaged(path, name, "not a file of this checkpoint")
        try:
            now = digest(path / name)
        except OSError as error:
            raise damaged(path, name, cause(error)) from None
        for what in ("bytes", "sha256"):
            if now[what] != files[name][what]:
                raise damaged(path, name, f"{what} {now[what]}, not {files[name][what]} as in the manifest")
    state = json_object((path / STATE).read_bytes()) if STATE in files else None
    if state is None:
        raise damaged(path, STATE, "not a JSON object")
    if state.get("version") != VERSION:
        raise CheckpointError(f"checkpoint {path}: {STATE} has version {shown(state.get('version'))}, not {VERSION}")
    if type(state.get("step")) is not int or not 0 <= state["step"] < 2**53:
        raise damaged(path, STATE, f"step = {shown(state.get('step'))} counts no updates")
    return state


def load(path: Path, *, like: Mapping[str, Mapping[str, Tensor]] | None = None) -> tuple[Tensors, dict[str, Any]]:
    """Verify a checkpoint and read it: (file stem -> name -> CPU tensor, mapped from disk; state).

    Raises CheckpointError for damage, another version, or, of the stems in `like`, other names, shapes or dtypes.
    """
    state = verify(path)
    tensors: Tensors = defaultdict(dict)
    for file in sorted(path.glob("*.safetensors")):
        try:
            tensors[file.stem.partition("-")[0]].update(load_file(file))
        except Exception as error:  # of whatever kind: the manifest says nothing about the sense of the bytes
            raise damaged(path, file.name, cause(error)) from None
    for stem, expected in (like or {}).items():
        _check_fit(tensors.get(stem, {}), expected, origin=f"{path / stem}.safetensors")
    return tensors, state


def newest(
    folder: Path, read: Callable[[Path], T] = verify, warn: Callable[[str], None] = to_stderr
) -> tuple[Path, T] | None:
    """The checkpoint saved last that `read` takes, and what it makes of it; None where there is none at all.

    `read` refuses with CheckpointError; `warn` hears of each one passed over. Saved last, not highest step: after a
    rewind the new branch counts. Raises CheckpointError where there are only damaged ones, rather than starting over.
    """
    refused: list[CheckpointError] = []
    for path in saved(folder):
        try:
            made = read(path)
        except CheckpointError as error:
            refused.append(error)
            continue
        for error in refused:
            warn(f"{error}: using {path.name}")
        return path, made
    if refused:
        raise CheckpointError(f"{refused[0]}; no other checkpoint in {folder} can be used: take another --run.name")
    return None


def _check_fit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, origin: str) -> None:
    for name in sorted(found.keys() | expected.keys()):
        has, wants = (
            f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "missing"
            for tensors in (found, expected)
        )
        if has != wants:
            raise CheckpointError(f"{origin}: '{name}' is {has}, in this model {wants}; was it saved with another one?")


def export_run(run: Path, *, checkpoint_name: str | None = None, out: Path | None = None) -> Path:
    """Export a checkpoint of a run directory (default: the newest that verifies); returns the folder written."""
    # what only verifies does without
    from paw.model.policy import full_parameters, load_policy, load_tokenizer, weights_dtype
    from paw.recipe import load as load_config
    from paw.state.export import export, start_model

    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: no run directory (config.toml is missing)")
    config, folder = load_config(run / "config.toml"), run / "checkpoints"
    chosen = folder / checkpoint_name if checkpoint_name else None
    if not (chosen.is_dir() if chosen else any(folder.glob("step_*"))):
        raise UserError(f"{run}: no checkpoint {checkpoint_name or ''} to export; see {folder}")
    base = start_model(run, config)
    policy = load_policy(base, weights=weights_dtype(config), dtype=config.model.dtype)
    if config.lora.rank:
        from paw.model.lora import add_adapters

        add_adapters(policy.lm, config.lora, seed=config.run.seed)

    read = partial(load, like={"model": policy.named_parameters_once()})
    found = (chosen, read(chosen)) if chosen else newest(folder, read)
    assert found, "a checkpoint was there"
    _, (tensors, state) = found
    policy.load(tensors["model"])
    weights = dict(full_parameters(policy.lm, once=True))
    return export(policy, load_tokenizer(base), out or run / "hf", weights, config=config, step=state["step"])


# --- into a run ------------------------------------------------------------------------------------------------------


def restore(run: "Run", folder: Path, *, warn: Callable[[str], None], chosen: str = "") -> str | None:
    """Continue from the newest checkpoint in rank 0's `folder` that verifies, or from `chosen`, the name of another
    one: its path, None without any. Raises CheckpointError where none fits; on the other ranks PeerLostError then.
    """
    tensors: Tensors = {}
    ranks, learners = run.ranks, run.learners

    def check(path: Path) -> tuple[Tensors, dict[str, Any]]:
        return _read(learners, path, ranks.world_size)

    def read() -> dict[str, Any] | None:
        found = (folder / chosen, check(folder / chosen)) if chosen else newest(folder, check, warn)
        if found is None:
            return None
        path, (files, state) = found
        tensors.update(files)
        shapes = {stem: {k: (str(v.dtype), v.shape) for k, v in named.items()} for stem, named in files.items()}
        return {"path": str(path), "state": state, "shapes": shapes}

    sent = ranks.broadcast_from_rank0(read, dict[str, Any] | None)
    if sent is None:
        return None
    # What is not sharded goes to all as it is; of the rest the others need dtypes and shapes to be sent theirs.
    small = {f"{stem}/{k}": v for stem, named in tensors.items() for k, v in named.items() if _small(stem, v.ndim)}
    small = from_bytes(ranks.gather_bytes(to_bytes(small))[0])
    if not ranks.first:
        for stem, named in sent["shapes"].items():
            tensors[stem] = {
                name: small[f"{stem}/{name}"]
                if _small(stem, len(shape))
                else torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                for name, (dtype, shape) in named.items()
            }
    state = sent["state"]
    for learner in learners:
        learner.model.load(tensors[f"{learner.prefix}model"])
        load_optimizer(learner.optimizer, learner.parameters.items(), tensors[f"{learner.prefix}optimizer"])
        learner.guard.load_state(state[f"{learner.prefix}guard"])
    mine = rng_name(ranks.rank) if rng_name(ranks.rank) in state else rng_name(0)  # fewer ranks saved it
    load_rng(tensors[mine], state[mine])
    run.step = run.saved = state["step"]
    return sent["path"]


def _read(learners: Sequence["Learner"], path: Path, world: int) -> tuple[Tensors, dict[str, Any]]:
    """What a checkpoint holds. Raises CheckpointError where the run could not be put back from it."""
    found, state = load(path, like={f"{of.prefix}model": of.parameters for of in learners})
    try:
        for of in learners:
            name = f"{of.prefix}optimizer"
            if not hasattr(of.optimizer, "load_tensors"):  # what does not fit a compressed state is seen there
                _check_fit(found[name], _moments(of, found[name]), origin=f"{path / name}.safetensors")
            UpdateGuard(1).load_state(state[f"{of.prefix}guard"])
        for rank in filter(lambda rank: not rank or rng_name(rank) in state, range(world)):
            load_rng(found[rng_name(rank)], state[rng_name(rank)], trial=True)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, STATE, describe(error)) from None
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"checkpoint {path}: {error}") from None
    return found, state


def _moments(learner: "Learner", found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state of the parameters of which any is there."""
    begun = {name.rpartition("/")[0] for name in found}
    named = {name: parameter for name, parameter in learner.parameters.items() if name in begun}
    like = {f"{name}/{key}": parameter for name, parameter in named.items() for key in ("exp_avg", "exp_avg_sq")}
    return like | {f"{name}/step": torch.zeros(()) for name in named}


def _small(stem: str, dimensions: int) -> bool:
    return dimensions == 0 or stem.startswith(rng_name(0))


def load_optimizer(optimizer: torch.optim.Optimizer, parameters: Named, tensors: Mapping[str, Tensor]) -> None:
    """Put `optimizer_tensors` back, bit for bit, onto each parameter's device and sharding.

    Raises CheckpointError where a compressed state does not fit.
    """
    by_name = dict(parameters)
    restored: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit("/", 1)
        restored[by_name[name]][key] = tensor
    optimizer.state.clear()
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in (each for each in group["params"] if each in restored):
            values = restored[parameter]
            if hasattr(optimizer, "load_tensors"):
                try:
                    optimizer.load_tensors(parameter, values)  # type: ignore[attr-defined]
                except (KeyError, RuntimeError) as error:
                    why = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
                    raise CheckpointError(f"optimizer.safetensors: {why}; was optim.master_bits another?") from None
                continue
            step = {"step": values.pop("step").to(parameter.device if on_device else "cpu", copy=True)}
            placed = {key: distribute_like(parameter, value) for key, value in values.items()}
            optimizer.state[parameter] = step | placed  # Optimizer.load_state_dict casts to the parameter's dtype


def load_rng(tensors: Mapping[str, Tensor], info: Mapping[str, Any], *, trial: bool = False) -> None:
    """Put `rng_tensors` back, on a trial into generators that nobody uses. Raises CheckpointError for what is no state.

    A CUDA state is left aside on a machine without CUDA.
    """
    used = torch.default_generator, random, np.random
    generator, python, numpy = (torch.Generator(), random.Random(), np.random.RandomState()) if trial else used
    try:
        version, gauss = info["python"]
        kind, position, has_gauss, cached = info["numpy"]
        generator.set_state(tensors["torch"].clone())
        python.setstate((version, tuple(tensors["python"].tolist()), gauss))
        numpy.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
        if "cuda" in tensors and torch.cuda.is_available():
            set_state = torch.Generator("cuda").set_state if trial else torch.cuda.set_rng_state
            set_state(tensors["cuda"].clone())
    except Exception as error:  # each library has its own for a state that is none
        raise CheckpointError(f"no random state: {describe(error)}") from None
