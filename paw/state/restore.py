"""Reading checkpoints: checked against their manifest and against the run, put back bit for bit.

Each rank reads its rows of the files that its machine has, and is sent what only another one has. Whether a checkpoint
can be used is one verdict of all ranks; one process is a single rank.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from paw.errors import UserError, describe, shown, to_stderr
from paw.files import cause, json_object
from paw.model.ranks import Ranks, rows_like, shard_like
from paw.state.checkpoint import (
    MANIFEST,
    SHARDED,
    STATE,
    VERSION,
    CheckpointError,
    ElsewhereError,
    Files,
    Named,
    Tensors,
    damaged,
    digest,
    read_manifest,
    rng_name,
    saved,
)
from paw.state.guards import UpdateGuard
from paw.state.stored import Stored

if TYPE_CHECKING:
    from paw.run import Run
    from paw.state.train_state import Learner

T = TypeVar("T")
Shapes = Mapping[str, Mapping[str, Tensor]]
ALONE = Ranks()


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest, which reads all bytes once; returns what state.json holds.

    Raises CheckpointError naming the first file that is missing, unexpected, truncated or altered, or another version.
    """
    return _survey(path, ALONE, [0])[0]


def _survey(path: Path, ranks: Ranks, places: Sequence[int]) -> tuple[dict[str, Any], list[set[str]]]:
    """(What state.json holds, the files that each rank sees), see `verify`; who see the same files share them out."""
    here = [rank for rank, place in enumerate(places) if place == places[ranks.rank]]

    def check() -> list[str]:
        found = {file.name for file in path.iterdir()} - {MANIFEST} if path.is_dir() else set()
        if ranks.first and (surplus := sorted(found - files.keys())):
            raise damaged(path, surplus[0], "not a file of this checkpoint")
        ours = sorted(found & files.keys())
        for name in ours[here.index(ranks.rank) :: len(here)]:
            try:
                now = digest(path / name)
            except OSError as error:
                raise damaged(path, name, cause(error)) from None
            for what in ("bytes", "sha256"):
                if now[what] != files[name][what]:
                    raise damaged(path, name, f"{what} {now[what]}, not {files[name][what]} as in the manifest")
        return ours

    files = ranks.broadcast_from_rank0(lambda: read_manifest(path)[0], Files, CheckpointError)
    seen = [set(names) for names in ranks.together(check, list[str], CheckpointError)]
    for name in sorted(files.keys() - set().union(*seen)):
        writer = re.search(r"\.rank_(\d+)", name)
        where = f": rank {writer[1]} wrote it, to the run directory of its machine" if writer else ""
        missing = damaged(path, name, f"the file is missing{where}")
        raise ElsewhereError(str(missing)) if writer else missing
    return ranks.broadcast_from_rank0(lambda: _read_state(path, files), dict[str, Any], CheckpointError), seen


def _read_state(path: Path, files: Files) -> dict[str, Any]:
    state = json_object((path / STATE).read_bytes()) if STATE in files else None
    if state is None:
        raise damaged(path, STATE, "not a JSON object")
    if state.get("version") not in (VERSION, SHARDED):
        has, known = shown(state.get("version")), f"{VERSION} or {SHARDED}"
        raise CheckpointError(f"checkpoint {path}: {STATE} has version {has}, not {known}")
    if type(state.get("step")) is not int or not 0 <= state["step"] < 2**53:
        raise damaged(path, STATE, f"step = {shown(state.get('step'))} counts no updates")
    return state


def load(
    path: Path, ranks: Ranks = ALONE, places: Sequence[int] = (0,), *, like: Shapes | None = None
) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Verify a checkpoint and read it: (file stem -> name -> CPU tensor, mapped from disk; state).

    Raises CheckpointError, the same on all ranks, for damage, another version, or, of the stems in `like`, other names,
    shapes or dtypes.
    """
    state, seen = _survey(path, ranks, places)
    mapped: dict[str, dict[str, Tensor]] = {}

    def read() -> dict[str, dict[str, tuple[str, list[int]]]]:
        for name in (name for name in sorted(seen[ranks.rank]) if name.endswith(".safetensors")):
            try:
                mapped[name] = load_file(path / name)
            except Exception as error:  # of whatever kind: the manifest says nothing about the sense of the bytes
                raise damaged(path, name, cause(error)) from None
        return {
            file: {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in of.items()}
            for file, of in mapped.items()
            if not any(file in of_rank for of_rank in seen[: ranks.rank])
        }

    headers = ranks.together(read, dict[str, dict[str, tuple[str, list[int]]]], CheckpointError)
    tensors: dict[str, Stored] = defaultdict(lambda: Stored(ranks, seen, mapped))
    shapes = {file: of for own in headers for file, of in own.items()}
    for file in sorted(shapes, key=_turn):
        stem = tensors[re.split(r"[.-]", file)[0]]
        for name, (dtype, shape) in shapes[file].items():
            try:
                stem.add(file, name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
            except RuntimeError as error:
                raise damaged(path, file, describe(error)) from None
    for stem, expected in (like or {}).items():
        _check_fit(tensors[stem].whole, expected, origin=f"{path / stem}.safetensors")
    return tensors, state


def _turn(file: str) -> tuple[int, str]:
    """Files in the order of the rows that they hold, which is that of their ranks."""
    writer = re.search(r"\.rank_(\d+)", file)
    return int(writer[1]) if writer else 0, file


def newest(
    folder: Path, read: Callable[[Path], T] = verify, warn: Callable[[str], None] = to_stderr, ranks: Ranks = ALONE
) -> tuple[Path, T] | None:
    """The checkpoint saved last that `read` takes, and what it makes of it; None where rank 0's folder has none at all.

    `read` refuses with CheckpointError, on all ranks; `warn` hears of each one passed over. Saved last, not highest
    step: after a rewind the new branch counts. Raises CheckpointError where there are only damaged ones, rather than
    starting over.
    """
    refused: list[CheckpointError] = []
    names = ranks.broadcast_from_rank0(lambda: [path.name for path in saved(folder)], list[str])
    for path in (folder / name for name in names):
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


def export_run(
    run: Path, *, checkpoint_name: str | None = None, out: Path | None = None, push: str = "", public: bool = False
) -> Path:
    """Export a checkpoint of a run directory (default: the newest that verifies); returns the folder written. `push` is
    the USER/NAME under which it is sent to the hub."""
    # what only verifies does without
    from paw.model.dtype import training_dtype, with_dtype
    from paw.model.policy import full_parameters, load_policy, load_tokenizer, weights_dtype
    from paw.recipe import load as load_config
    from paw.state import push as hub
    from paw.state.export import export, start_model
    from paw.state.resume import recorded_dtype

    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: no run directory (config.toml is missing)")
    if push:
        hub.check_push(push)
    config, folder = load_config(run / "config.toml"), run / "checkpoints"
    chosen = folder / checkpoint_name if checkpoint_name else None
    if not (chosen.is_dir() if chosen else any(folder.glob("step_*"))):
        raise UserError(f"{run}: no checkpoint {checkpoint_name or ''} to export; see {folder}")
    base = start_model(run, config)
    in_dtype = with_dtype(config, recorded_dtype(run) or training_dtype(config, torch.device("cpu")))
    policy = load_policy(base, weights=weights_dtype(in_dtype), dtype=in_dtype.model.dtype)
    if config.lora.rank:
        from paw.model.lora import add_adapters

        add_adapters(policy.lm, config.lora, seed=config.run.seed)

    read = partial(load, like={"model": policy.named_parameters_once()})
    found = (chosen, read(chosen)) if chosen else newest(folder, read)
    assert found, "a checkpoint was there"
    _, (tensors, state) = found
    policy.load(tensors["model"])
    weights = dict(full_parameters(policy.lm, once=True))
    written = export(policy, load_tokenizer(base), out or run / "hf", weights, config=config, step=state["step"])
    if push:
        to_stderr(f"pushed to {hub.push(written, push, public=public)}")
    return written


# --- into a run ------------------------------------------------------------------------------------------------------


def restore(run: "Run", folder: Path, *, warn: Callable[[str], None], chosen: str = "") -> str | None:
    """Continue from the newest checkpoint in rank 0's `folder` that verifies, or from `chosen`, the name of another
    one: its path, None without any. Raises CheckpointError, on all ranks, where none fits.
    """
    ranks, learners = run.ranks, run.learners
    check = partial(_read, learners, ranks, run.places)
    try:
        found = (folder / chosen, check(folder / chosen)) if chosen else newest(folder, check, warn, ranks)
    except CheckpointError as error:  # on all ranks, each with its own path
        raise CheckpointError(ranks.gather(str(error))[0]) from None
    if found is None:
        return None
    path, (tensors, state, randoms) = found
    for learner in learners:
        learner.model.load(tensors[f"{learner.prefix}model"])
        load_optimizer(learner.optimizer, learner.parameters.items(), tensors[f"{learner.prefix}optimizer"])
        learner.guard.load_state(state[f"{learner.prefix}guard"])
    mine = rng_name(ranks.rank) if rng_name(ranks.rank) in randoms else rng_name(0)  # fewer ranks saved it
    load_rng(randoms[mine], state[mine])
    run.step = run.saved = run.logged = state["step"]
    return str(path)


def _read(learners: Sequence["Learner"], ranks: Ranks, places: Sequence[int], path: Path) -> tuple[Any, Any, Tensors]:
    """(Tensors, state, random states by file stem) of a checkpoint. Raises CheckpointError, on all ranks, where the run
    could not be put back from it."""
    found, state = load(path, ranks, places, like={f"{of.prefix}model": of.parameters for of in learners})
    randoms: Tensors = {}
    try:
        for of in learners:
            whole = found[name := f"{of.prefix}optimizer"].whole
            if not hasattr(of.optimizer, "load_tensors"):  # what does not fit a compressed state is seen there
                _check_fit(whole, _moments(of, whole), origin=f"{path / name}.safetensors")
            UpdateGuard(1).load_state(state[f"{of.prefix}guard"])
        for name in (rng_name(rank) for rank in range(ranks.world_size) if not rank or rng_name(rank) in state):
            randoms[name] = dict(found[name])
            load_rng(randoms[name], state[name], trial=True)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, STATE, describe(error)) from None
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"checkpoint {path}: {error}") from None
    return found, state, randoms


def _moments(learner: "Learner", found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state of the parameters of which any is there."""
    begun = {name.rpartition("/")[0] for name in found}
    named = {name: parameter for name, parameter in learner.parameters.items() if name in begun}
    like = {f"{name}/{key}": parameter for name, parameter in named.items() for key in ("exp_avg", "exp_avg_sq")}
    return like | {f"{name}/step": torch.zeros(()) for name in named}


def load_optimizer(optimizer: torch.optim.Optimizer, parameters: Named, tensors: Mapping[str, Tensor]) -> None:
    """Put `optimizer_tensors` back, bit for bit, onto each parameter's device and sharding.

    Raises CheckpointError where a compressed state does not fit.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    for full_name in tensors:
        name, key = full_name.rsplit("/", 1)
        keys[name].append(key)
    names = {parameter: name for name, parameter in parameters if name in keys}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in (each for each in group["params"] if each in names):
            name = names[parameter]
            moments = [key for key in keys[name] if key != "step"]
            values = {key: rows_like(parameter, tensors, f"{name}/{key}") for key in moments}
            if "step" in keys[name]:
                values["step"] = tensors[f"{name}/step"]
            if hasattr(optimizer, "load_tensors"):
                try:
                    optimizer.load_tensors(parameter, values)  # type: ignore[attr-defined]
                except (KeyError, RuntimeError) as error:
                    why = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
                    raise CheckpointError(f"optimizer.safetensors: {why}; was optim.master_bits another?") from None
                continue
            step = {"step": values.pop("step").to(parameter.device if on_device else "cpu", copy=True)}
            placed = {key: shard_like(parameter, value) for key, value in values.items()}
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
