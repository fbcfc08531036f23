"""What a resumed run may change: all but what its past or its checkpoints would have no meaning without."""

import tomllib
from pathlib import Path
from typing import Any

from paw.config import Config
from paw.errors import UserError
from paw.keys import MOVED

FIXED = {
    "run.seed": "its tasks and mini-batches are those of its seed",
    "model.path": "its weights are that model's",
    "lora.rank": "its checkpoints hold these adapters",
    "lora.alpha": "its checkpoints hold these adapters",
    "lora.targets": "its checkpoints hold these adapters",
    "env.name": "what it has learnt is of that environment",
    "optim.name": "its checkpoints hold this optimizer's state",
    "optim.master_bits": "its checkpoints hold this optimizer's state",
}
"""Keys that a resumed run keeps, and why."""
PLACE = {"run.name", "run.dir"}
"""Where it lies says nothing about it."""


def changes(directory: Path, config: Config) -> list[str]:
    """A line for each key in which `config` differs from the directory's config.toml.

    Raises UserError for a key that cannot change: `FIXED`, and advantage.type from or to "ppo", whose critic is in
    the checkpoints. A key that either version of PaW does not know counts as its default.
    """
    path = directory / "config.toml"
    try:
        if not path.is_file():
            raise ValueError("it is missing" if not path.exists() else "it is no file")
        written = _flat(tomllib.loads(path.read_text(encoding="utf-8")))
        before = {MOVED.get(key, key): value for key, value in written.items()}
    except (OSError, ValueError, RecursionError) as error:
        return [f"warning: {path} cannot be read, so nobody can tell what has changed since: {error}"]
    now = _flat(config.model_dump(mode="json", exclude_none=True))
    defaults = _flat(Config.model_validate({"model": {"path": ""}}).model_dump(mode="json"))
    found = []
    for key in sorted((before.keys() | now.keys()) - PLACE):
        old, new = (tree.get(key, defaults.get(key)) for tree in (before, now))
        if old == new or (key not in before and key not in defaults):  # or of a plug-in that it did not have
            continue
        reason = FIXED.get(key)
        if key == "advantage.type" and "ppo" in (old, new):
            reason = "its checkpoints hold a critic" if old == "ppo" else "its checkpoints hold no critic"
        if reason:
            raise UserError(
                f"--resume auto: {directory} was trained with {key} = {old!r}, not {new!r}: {reason}; "
                "keep it, or start a run of another name"
            )
        found.append(f"changed: {key} {_short(old)} -> {_short(new)}")
    return found


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    sections = ((name, table) for name, table in tree.items() if isinstance(table, dict))
    return {f"{name}.{key}": value for name, table in sections for key, value in table.items()}


def _short(value: Any) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
