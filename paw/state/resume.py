"""Resuming, but for the checkpoint: what may change, and the logs cut back to it.

All may change but what the run's past or its checkpoints would have no meaning without.
"""

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paw.config import Config
from paw.errors import UserError, masked, shown
from paw.files import json_object, text_of, update_of, write_file
from paw.keys import flatten
from paw.recipe import get
from paw.state.record import read_info

FIXED = {
    "run.seed": "its tasks and mini-batches are those of its seed",
    "model.path": "its weights are that model's",
    "env.name": "what it has learnt is of that environment",
    **dict.fromkeys(
        ("lora.rank", "lora.alpha", "lora.targets"), "its checkpoints hold these adapters"
    ),
    **dict.fromkeys(
        ("optim.name", "optim.master_bits"), "its checkpoints hold this optimizer's state"
    ),
}
"""Keys that a resumed run keeps, and why."""


def changes(directory: Path, config: Config) -> list[str]:
    """A line for each key in which `config` differs from the directory's config.toml, but for where the run lies.

    Raises UserError for a key that cannot change: `FIXED`, and advantage.type from or to "ppo",
    whose critic is in the checkpoints. A key that either version of PaW does not know counts as its
    default.
    """
    path = directory / "config.toml"
    try:
        if not path.is_file():
            raise ValueError("it is missing" if not path.exists() else "it is no file")
        before = flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        return [
            f"warning: {path} cannot be read, so nobody can tell what has changed since: {error}"
        ]
    before, now = masked(before), masked(flatten(config.model_dump(mode="json", exclude_none=True)))
    defaults = flatten(Config.model_validate({"model": {"path": ""}}).model_dump(mode="json"))
    found = []
    for key in sorted((before.keys() | now.keys()) - {"run.name", "run.dir"}):
        old, new = (tree.get(key, defaults.get(key)) for tree in (before, now))
        if old == new or (
            key not in before and key not in defaults
        ):  # or of a plug-in that it did not have
            continue
        reason = FIXED.get(key)
        if key == "advantage.type" and "ppo" in (old, new):
            reason = (
                "its checkpoints hold a critic"
                if old == "ppo"
                else "its checkpoints hold no critic"
            )
        if reason:
            raise UserError(
                f"--resume auto: {directory} was trained with {key} = {old!r}, not {new!r}: {reason}; "
                "keep it, or start a run of another name"
            )
        old, new = ("none" if value is None else shown(value) for value in (old, new))
        found.append(f"changed: {key} {old} -> {new}")
    return found


def recorded_dtype(directory: Path) -> str:
    """What a run was computed in, by its run.json, or, if its PaW did not write that yet, by
    config.toml; "" if neither says so."""
    found = read_info(directory).get("dtype")
    if found is None:
        with suppress(ValueError, RecursionError):
            found = get(tomllib.loads(text_of(directory / "config.toml")), "model.dtype")
    return found if found in ("float32", "bfloat16") else ""


def rewind(path: Path, step: int, lost: list[str]) -> list[dict[str, Any]]:
    """Drop a log's lines after `step`, and the torn one a kill may have left; returns what stays, adds to `lost`."""
    if not path.is_file():
        return []
    kept: list[dict[str, Any]] = []
    lines: list[bytes] = []
    broken: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = json_object(line)
            update = update_of(record)
            if not line.endswith(b"\n"):
                continue
            if record is None or update is None:
                broken.append(number)
            elif update <= step:
                lines.append(line)
                kept.append(record)
    write_file(path, b"".join(lines))
    if broken:
        lost.append(
            f"{path}: {len(broken)} lines are no update's and go, the first is line {broken[0]}"
        )
    return kept


def gaps(path: Path, history: list[dict[str, Any]], last: int) -> Iterator[str]:
    """A sentence where lines of the updates 0 to `last` are missing."""
    if missing := sorted(set(range(last + 1)).difference(record["step"] for record in history)):
        which = ", ".join(map(str, missing[:9])) + (", ..." if len(missing) > 9 else "")
        yield f"{path} lacks {len(missing)} of {last + 1} lines (updates {which}); the run goes on without them"
