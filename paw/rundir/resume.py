"""The rules for resuming a run: what may change, what is kept, and how its logs are cut back.

A key may change unless the change would make the run's past or checkpoints meaningless.
"""

import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from paw.config.entries import by_label
from paw.config.keys import Flat, flatten
from paw.config.recipe import get, is_replaced
from paw.config.sections import ENTRIES, Config, estimator_traits
from paw.errors import UserError, masked, short_repr
from paw.io.files import json_object, text_of, update_of, write_file
from paw.rundir.record import read_info

FIXED = {
    "run.seed": "its tasks and mini-batches come from its seed",
    "model.path": "its weights come from that model",
    "env.name": "it has trained on that environment",
    "lora.rank": "its checkpoints hold these adapters",
    "lora.alpha": "its checkpoints hold these adapters",
    "lora.targets": "its checkpoints hold these adapters",
    "optim.name": "its checkpoints hold this optimizer's state",
    "optim.master_bits": "its checkpoints hold this optimizer's state",
}
"""The keys that a resumed run keeps, and why."""


STEP = re.compile(rb'\{"step": ([0-9]{1,18})[,}]')
"""The beginning of a log's line, which has its update."""


def changes(directory: Path, config: Config) -> list[str]:
    """Return a line for each key in which `config` differs from the directory's config.toml.

    It ignores run.name and run.dir, which say where the run is. A key that one of the two versions
    of PaW does not know counts as its default. Raises UserError for a key that cannot change. Those
    are the keys in `FIXED`, and advantage.type if only the old or only the new one needs a critic,
    because checkpoints include the critic.
    """
    path = directory / "config.toml"
    try:
        if not path.exists():
            raise ValueError("it is missing")
        if not path.is_file():
            raise ValueError("it is not a file")
        recorded = _by_entry(flatten(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError) as error:
        return [f"warning: cannot read {path}, so changes since then are unknown: {error}"]

    recorded = masked(recorded)
    current = masked(_by_entry(flatten(config.model_dump(mode="json", exclude_none=True))))
    defaults = flatten(Config.model_validate({"model": {"path": ""}}).model_dump(mode="json"))
    lines = []
    for key in sorted((recorded.keys() | current.keys()) - {"run.name", "run.dir"}):
        old = recorded.get(key, defaults.get(key))
        new = current.get(key, defaults.get(key))
        if key == "env.name":
            old = old if key in recorded else _environments(recorded, old)
            new = new if key in current else _environments(current, new)
        belongs_to_new_plugin = key not in recorded and key not in defaults and not _in_list(key)
        if old == new or belongs_to_new_plugin:
            continue
        if reason := _why_fixed(key, old, new):
            raise UserError(
                f"--resume auto: {directory} was trained with {key} = {old!r}, not {new!r}: "
                f"{reason}; keep it, or start a run with another name"
            )
        lines.append(f"changed: {key} {_value(old)} -> {_value(new)}")
    return lines


def _why_fixed(key: str, old: Any, new: Any) -> str:
    """Return why a key cannot change from `old` to `new`, or "" if it can."""
    if key == "advantage.type":
        had_critic = estimator_traits(old).needs_critic
        if had_critic != estimator_traits(new).needs_critic:
            return f"its checkpoints hold {'a' if had_critic else 'no'} critic"
    if _in_list(key) and old is not None and new is not None and key.endswith(".name"):
        return FIXED["env.name"]
    return FIXED.get(key, "")


def _by_entry(flat: Flat) -> Flat:
    """Return the keys of a configuration, with keys of entries of lists as envs.LABEL.key."""
    single = {key: value for key, value in flat.items() if not is_replaced(key, flat)}
    for name, kind in ENTRIES.items():
        single |= by_label(kind, single.pop(name, []))
    return single


def _environments(flat: Flat, default: Any) -> Any:
    """Return the environments of a configuration without env.name: those of [[envs]], if any."""
    labels = {key.split(".")[1]: None for key in flat if key.startswith("envs.")}
    return f"[[envs]] {', '.join(labels)}" if labels else default


def _in_list(key: str) -> bool:
    return key.partition(".")[0] in ENTRIES


def _value(value: Any) -> str:
    return "none" if value is None else short_repr(value)


def recorded_dtype(directory: Path) -> str:
    """Return the dtype of a run's computations, or "" if it is not recorded.

    It comes from run.json, or from config.toml if the run's version of PaW did not record it there.
    """
    dtype = read_info(directory).get("dtype")
    if dtype is None:
        with suppress(ValueError, RecursionError):
            dtype = get(tomllib.loads(text_of(directory / "config.toml")), "model.dtype")
    if dtype not in ("float32", "bfloat16"):
        return ""
    return dtype


def recorded_start_model(directory: Path) -> str:
    """Return the folder of a run's start model, or "" if it is not recorded or is gone."""
    model = str(read_info(directory).get("start", ""))
    if model and (Path(model) / "config.json").is_file():
        return model
    return ""


def rewind(path: Path, step: int, lost: list[str]) -> list[dict[str, Any]]:
    """Remove a log's lines after update `step`, and a last line that was cut off by a kill.

    Returns the remaining records. Lines that belong to no update are also removed, and a sentence
    about them is added to `lost`.
    """
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
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
                records.append(record)
    write_file(path, b"".join(lines))
    if broken:
        lost.append(
            f"{path}: {len(broken)} lines belong to no update and were removed, "
            f"the first is line {broken[0]}"
        )
    return records


def cut(path: Path, step: int) -> None:
    """Cut a log off at the first line after update `step`, or one that a kill cut off.

    A `step` below 0 leaves nothing. Unlike `rewind`, this does not read the earlier lines into
    memory or write them again, because they may be large.
    """
    if not path.is_file():
        return
    kept_bytes = 0
    with path.open("r+b") as file:
        for line in file:
            match = STEP.match(line)
            is_after = step < 0 or (match is not None and int(match[1]) > step)
            if is_after or not line.endswith(b"\n"):
                break
            kept_bytes += len(line)
        file.truncate(kept_bytes)


def gaps(path: Path, history: list[dict[str, Any]], last: int) -> list[str]:
    """Return a sentence if lines of updates 0 to `last` are missing."""
    logged = {record["step"] for record in history}
    missing = sorted(set(range(last + 1)) - logged)
    if not missing:
        return []
    updates = ", ".join(str(step) for step in missing[:9])
    if len(missing) > 9:
        updates += ", ..."
    return [
        f"{path} lacks {len(missing)} of {last + 1} lines (updates {updates}); "
        "the run continues without them"
    ]
