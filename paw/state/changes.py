"""What a resumed run may change: all but what its past or its checkpoints would have no meaning without."""

import tomllib
from pathlib import Path
from typing import Any

from paw.config import Config
from paw.errors import UserError, shown
from paw.hints import MOVED

FIXED = {
    "run.seed": "its tasks and mini-batches are those of its seed",
    "model.path": "its weights are that model's",
    "env.name": "what it has learnt is of that environment",
    **dict.fromkeys(("lora.rank", "lora.alpha", "lora.targets"), "its checkpoints hold these adapters"),
    **dict.fromkeys(("optim.name", "optim.master_bits"), "its checkpoints hold this optimizer's state"),
}
"""Keys that a resumed run keeps, and why."""


def changes(directory: Path, config: Config) -> list[str]:
    """A line for each key in which `config` differs from the directory's config.toml, but for where the run lies.

    Raises UserError for a key that cannot change: `FIXED`, and advantage.type from or to "ppo", whose critic is in
    the checkpoints. A key that either version of PaW does not know counts as its default.
    """
    path = directory / "config.toml"
    try:
        if not path.is_file():
            raise ValueError("it is missing" if not path.exists() else "it is no file")
        written = flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        return [f"warning: {path} cannot be read, so nobody can tell what has changed since: {error}"]
    before = {MOVED.get(key, key): value for key, value in written.items()}
    now = flat(config.model_dump(mode="json", exclude_none=True))
    defaults = flat(Config.model_validate({"model": {"path": ""}}).model_dump(mode="json"))
    found = []
    for key in sorted((before.keys() | now.keys()) - {"run.name", "run.dir"}):
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
        old, new = ("none" if value is None else shown(value) for value in (old, new))
        found.append(f"changed: {key} {old} -> {new}")
    return found


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Sections as one dict of dotted keys."""
    sections = ((name, table) for name, table in tree.items() if isinstance(table, dict))
    return {f"{name}.{key}": value for name, table in sections for key, value in table.items()}
