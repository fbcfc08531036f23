"""Reads checkpoints, checks them against their manifest and the run, and restores them bit for bit.

All ranks see the same files. They share the work of checking them and agree on whether a checkpoint
can be used. Each rank reads its own rows.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from paw.checkpoint.files import (
    MANIFEST,
    SHARDED,
    STATE,
    VERSION,
    CheckpointError,
    Files,
    Named,
    Tensors,
    damaged,
    digest,
    read_manifest,
    rng_name,
    saved,
)
from paw.checkpoint.stored_tensors import StoredTensors
from paw.checkpoint.train_state import TASKS, Learner
from paw.distributed.ranks import Ranks, rows_like, shard_like
from paw.errors import describe, short_repr, to_stderr
from paw.guards import UpdateGuard
from paw.io.files import cause, json_object

T = TypeVar("T")
Shapes = Mapping[str, Mapping[str, Tensor]]
ALONE = Ranks()


def verify(path: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest. Returns the content of state.json.

    All ranks must call it. They divide the files among themselves and read all bytes once. Raises
    CheckpointError on all ranks if a file is missing, unexpected, truncated or altered, with its
    name, or if the checkpoint has a different version.
    """
    files = ranks.broadcast_from_rank0(lambda: read_manifest(path)[0], Files, CheckpointError)
    ranks.gather_results(lambda: _check_files(path, files, ranks), refusal=CheckpointError)
    return ranks.broadcast_from_rank0(
        lambda: _read_state(path, files), dict[str, Any], CheckpointError
    )


def _check_files(path: Path, files: Files, ranks: Ranks) -> None:
    """Check that exactly the manifest's files exist, and check the bytes of this rank's share."""
    present: set[str] = set()
    if path.is_dir():
        present = {file.name for file in path.iterdir()} - {MANIFEST}
    for name in sorted(present - files.keys()):
        raise damaged(path, name, "not a file of this checkpoint")
    for name in sorted(files.keys() - present):
        raise damaged(path, name, "the file is missing")

    for name in sorted(files)[ranks.rank :: ranks.world_size]:
        try:
            actual = digest(path / name)
        except OSError as error:
            raise damaged(path, name, cause(error)) from None
        for field in ("bytes", "sha256"):
            if actual[field] != files[name][field]:
                raise damaged(
                    path,
                    name,
                    f"{field} {actual[field]}, not {files[name][field]} as in the manifest",
                )


def _read_state(path: Path, files: Files) -> dict[str, Any]:
    state = None
    if STATE in files:
        state = json_object((path / STATE).read_bytes())
    if state is None:
        raise damaged(path, STATE, "not a JSON object")
    if state.get("version") not in (VERSION, SHARDED):
        version = short_repr(state.get("version"))
        raise CheckpointError(
            f"checkpoint {path}: {STATE} has version {version}, not {VERSION} or {SHARDED}"
        )
    if type(state.get("step")) is not int or not 0 <= state["step"] < 2**53:
        raise damaged(
            path, STATE, f"step = {short_repr(state.get('step'))} is not a number of updates"
        )
    return state


def load(
    path: Path, ranks: Ranks = ALONE, *, like: Shapes | None = None
) -> tuple[dict[str, StoredTensors], dict[str, Any]]:
    """Verify and read a checkpoint. Returns (file stem -> name -> CPU tensor from disk, state).

    The tensors are mapped from disk. All ranks must call it. Raises the same CheckpointError on all
    ranks if the checkpoint is damaged or has a different version, or if names, shapes or dtypes
    differ from those in `like`, which has the expected tensors of some stems.
    """
    state = verify(path, ranks)
    tensors: dict[str, StoredTensors] = defaultdict(StoredTensors)
    ranks.gather_results(lambda: _map_files(path, tensors), refusal=CheckpointError)
    for stem, expected in (like or {}).items():
        _check_fit(tensors[stem].meta, expected, origin=f"{path / stem}.safetensors")
    return tensors, state


def _map_files(path: Path, tensors: dict[str, StoredTensors]) -> None:
    """Map the tensors of all files into `tensors`, by file stem.

    Raises CheckpointError if a file cannot be read.
    """
    names = [file.name for file in path.glob("*.safetensors")]
    for name in sorted(names, key=_row_order):
        stem = re.split(r"[.-]", name)[0]
        try:
            # Any error may occur: the bytes may not be a tensor file, or the rows may not fit.
            for tensor_name, tensor_rows in load_file(path / name).items():
                tensors[stem].add(tensor_name, tensor_rows)
        except Exception as error:
            raise damaged(path, name, cause(error)) from None


def _row_order(file: str) -> tuple[int, str]:
    """Return a key that sorts files by their rows, in the order of the ranks that wrote them."""
    match = re.search(r"\.rank_(\d+)", file)
    writer = int(match[1]) if match else 0
    return writer, file


def read_newest(
    folder: Path,
    read: Callable[[Path], T] = verify,
    warn: Callable[[str], None] = to_stderr,
    ranks: Ranks = ALONE,
) -> tuple[Path, T] | None:
    """Return the last saved checkpoint that `read` accepts, and the result of `read`.

    Returns None if the folder has no checkpoint at all. `read` refuses a checkpoint by raising
    CheckpointError on all ranks, and `warn` is called for each one that is skipped. The order is
    that of saving rather than of steps, because after a rewind the new branch is the right one.
    Raises CheckpointError if all are damaged, so that the run does not silently start over.
    """
    refused: list[CheckpointError] = []
    names = ranks.broadcast_from_rank0(lambda: [path.name for path in saved(folder)], list[str])
    for name in names:
        path = folder / name
        try:
            content = read(path)
        except CheckpointError as error:
            refused.append(error)
            continue
        for error in refused:
            warn(f"{error}: using {name}")
        return path, content
    if refused:
        raise CheckpointError(
            f"{refused[0]}; no other checkpoint in {folder} can be used: set another --run.name"
        )
    return None


def _check_fit(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, origin: str
) -> None:
    """Raise CheckpointError for the first name that differs in dtype or shape or is missing."""
    for name in sorted(actual.keys() | expected.keys()):
        actual_type = _dtype_and_shape(actual, name)
        expected_type = _dtype_and_shape(expected, name)
        if actual_type != expected_type:
            raise CheckpointError(
                f"{origin}: '{name}' is {actual_type}, but {expected_type} in this model; "
                "was it saved with a different model?"
            )


def _dtype_and_shape(tensors: Mapping[str, Tensor], name: str) -> str:
    if name not in tensors:
        return "missing"
    return f"{tensors[name].dtype} {list(tensors[name].shape)}"


def restore(
    learners: Sequence[Learner],
    ranks: Ranks,
    folder: Path,
    *,
    warn: Callable[[str], None],
    chosen: str = "",
) -> tuple[Path, int, dict[str, Any] | None] | None:
    """Continue from the newest checkpoint in `folder` that verifies, or from the `chosen` one.

    Sets models, optimizers, guards and this process's random states. Returns the checkpoint's path,
    its step and, if it has one, the state of the choice of tasks. Returns None if there is no
    checkpoint. All ranks must call it. Raises CheckpointError on all of them if no checkpoint fits.
    """
    read = partial(_read, learners, ranks)
    try:
        if chosen:
            path = folder / chosen
            checkpoint = path, read(path)
        else:
            checkpoint = read_newest(folder, read, warn, ranks)
    except CheckpointError as error:  # on all ranks, each with its own path
        raise CheckpointError(ranks.gather(str(error))[0]) from None
    if checkpoint is None:
        return None

    path, (tensors, state_values, random_tensors) = checkpoint
    for learner in learners:
        learner.model.load(tensors[f"{learner.prefix}model"])
        load_optimizer(
            learner.optimizer, learner.parameters.items(), tensors[f"{learner.prefix}optimizer"]
        )
        learner.guard.load_state(state_values[f"{learner.prefix}guard"])

    stem = rng_name(ranks.rank)
    if stem not in random_tensors:  # fewer ranks saved it
        stem = rng_name(0)
    restore_random_states(random_tensors[stem], state_values[stem])
    return path, state_values["step"], state_values.get(TASKS)


def _read(
    learners: Sequence[Learner], ranks: Ranks, path: Path
) -> tuple[dict[str, StoredTensors], dict[str, Any], Tensors]:
    """Return (tensors, state, random states by file stem) of a checkpoint.

    Raises CheckpointError on all ranks if the run could not be restored from it.
    """
    models = {f"{learner.prefix}model": learner.parameters for learner in learners}
    tensors, state = load(path, ranks, like=models)
    random_tensors: Tensors = {}
    try:
        for learner in learners:
            stem = f"{learner.prefix}optimizer"
            # A compressed state is checked when it is loaded.
            if not hasattr(learner.optimizer, "load_tensors"):
                saved_moments = tensors[stem].meta
                expected_moments = _expected_moments(learner, saved_moments)
                _check_fit(saved_moments, expected_moments, origin=f"{path / stem}.safetensors")
            UpdateGuard(1).load_state(state[f"{learner.prefix}guard"])
        for rank in range(ranks.world_size):
            stem = rng_name(rank)
            if rank and stem not in state:
                continue
            random_tensors[stem] = dict(tensors[stem])
            restore_random_states(random_tensors[stem], state[stem], trial=True)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, STATE, describe(error)) from None
    except CheckpointError as error:
        if str(path) in str(error):
            raise error from None
        raise CheckpointError(f"checkpoint {path}: {error}") from None
    return tensors, state, random_tensors


def _expected_moments(learner: Learner, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return AdamW's state as "<parameter>/<key>" for each parameter that has state in `saved`."""
    parameters_with_state = {name.rpartition("/")[0] for name in saved}
    expected = {}
    for name, parameter in learner.parameters.items():
        if name in parameters_with_state:
            expected[f"{name}/exp_avg"] = parameter
            expected[f"{name}/exp_avg_sq"] = parameter
            expected[f"{name}/step"] = torch.zeros(())
    return expected


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Named, tensors: Mapping[str, Tensor]
) -> None:
    """Restore `optimizer_tensors` bit for bit, on each parameter's device and with its sharding.

    Raises CheckpointError if a compressed state does not fit.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    for full_name in tensors:
        name, key = full_name.rsplit("/", 1)
        keys[name].append(key)
    names = {parameter: name for name, parameter in parameters if name in keys}

    optimizer.state.clear()
    for group in optimizer.param_groups:
        step_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            if parameter not in names:
                continue
            name = names[parameter]
            moments = [key for key in keys[name] if key != "step"]
            values = {key: rows_like(parameter, tensors, f"{name}/{key}") for key in moments}
            if "step" in keys[name]:
                values["step"] = tensors[f"{name}/step"]
            if hasattr(optimizer, "load_tensors"):
                _load_compressed(optimizer, parameter, values)
                continue

            # Set it directly, because Optimizer.load_state_dict would cast to the parameter's
            # dtype.
            step_device = parameter.device if step_on_device else torch.device("cpu")
            state = {"step": values.pop("step").to(step_device, copy=True)}
            for key, tensor_rows in values.items():
                state[key] = shard_like(parameter, tensor_rows)
            optimizer.state[parameter] = state


def _load_compressed(optimizer: Any, parameter: Tensor, values: dict[str, Tensor]) -> None:
    try:
        optimizer.load_tensors(parameter, values)
    except (KeyError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, KeyError):
            reason = f"{error} is missing"
        raise CheckpointError(
            f"optimizer.safetensors: {reason}; did optim.master_bits change?"
        ) from None


def restore_random_states(
    tensors: Mapping[str, Tensor], info: Mapping[str, Any], *, trial: bool = False
) -> None:
    """Restore the states of `capture_random_states`.

    With `trial`, restore them into unused generators to check that this works. Raises
    CheckpointError if these are not random states. A CUDA state is ignored on a machine without
    CUDA.
    """
    torch_generator: Any = torch.default_generator
    python_generator: Any = random
    numpy_generator: Any = np.random
    set_cuda_state: Any = torch.cuda.set_rng_state
    has_cuda_state = "cuda" in tensors and torch.cuda.is_available()
    if trial:
        torch_generator = torch.Generator()
        python_generator = random.Random()
        numpy_generator = np.random.RandomState()
        if has_cuda_state:
            set_cuda_state = torch.Generator("cuda").set_state
    try:
        version, next_gauss = info["python"]
        algorithm, position, has_gauss, cached_gauss = info["numpy"]
        torch_generator.set_state(tensors["torch"].clone())
        python_generator.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
        keys = tensors["numpy"].numpy().astype(np.uint32)
        numpy_generator.set_state((algorithm, keys, position, has_gauss, cached_gauss))
        if has_cuda_state:
            set_cuda_state(tensors["cuda"].clone())
    except Exception as error:  # each library raises its own kind
        raise CheckpointError(f"not a random state: {describe(error)}") from None
