"""Which official games there are: found by scanning the folder once, then remembered.

The index is `paw-index.json` next to the splits, or in the user's cache where the data is read-only. It holds ids
relative to the folder, so it moves with the data; a split whose folders changed is scanned again.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paw.errors import UserError
from paw.files import write_file

FOLDER = "json_2.1.1"
GAME_FILE = "game.tw-pddl"
INDEX = "paw-index.json"
SPLITS = ("train", "valid_train", "valid_seen", "valid_unseen")
FIX = "run `paw data alfworld --download`, or point env.data at the folder that holds json_2.1.1"

KIND_OF_TYPE = {
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}
"""alfworld's TASK_TYPES, the only ones its own environment plays."""


class Split(NamedTuple):
    games: list[tuple[str, str]]
    """(id, kind) of every game, sorted by id; the id is `<split>/<task>/<trial>`."""
    digest: str
    """sha256 over ids and file contents, hexadecimal."""


def find_root(data: Path, *, origin: str = "env.data") -> Path:
    """The folder with the splits: `data` itself or its json_2.1.1. UserError, naming `origin`, if it is neither."""
    data = data.expanduser()
    for root in (data, data / FOLDER):
        if any((root / split).is_dir() for split in SPLITS):
            return root
    problem = "holds no ALFWorld games" if data.is_dir() else "is no folder"
    raise UserError(f"{origin}: {data} {problem} (looked for {FOLDER}/{{{','.join(SPLITS)}}}); {FIX}")


def load_split(root: Path, split: str) -> Split:
    """The games of one split, from the index or by a scan.

    As in alfworld's own loader, movable-receptacle and slicing tasks and unsolvable games are left out.

    Raises:
        UserError: the split is unknown, missing or empty.
    """
    if split not in SPLITS:
        raise UserError(f"unknown ALFWorld split '{split}'; there are: {', '.join(SPLITS)}")
    folder = root / split
    if not folder.is_dir():
        there = ", ".join(name for name in SPLITS if (root / name).is_dir())
        raise UserError(f"{root} has no split '{split}' (it has: {there}); {FIX}")
    stamp = _stamp(folder)
    for place in _places(root):
        known = _read(place).get(split)
        if known is not None and known["stamp"] == stamp:
            return Split([(name, kind) for name, kind in known["games"]], known["digest"])
    found = _scan(root, split)
    if not found.games:
        raise UserError(f"{folder} holds no games (no {GAME_FILE} of a known task type); {FIX}")
    _remember(root, split, {"stamp": stamp, "digest": found.digest, "games": found.games})
    return found


def game_path(root: Path, task_id: str) -> Path:
    return root / task_id / GAME_FILE


def _scan(root: Path, split: str) -> Split:
    games, digest = [], hashlib.sha256()
    for path in sorted((root / split).glob(f"*/*/{GAME_FILE}")):
        name = path.parent.relative_to(root).as_posix()
        kind = KIND_OF_TYPE.get(name.split("/")[1].split("-")[0])
        if kind is None or "movable" in name or "Sliced" in name:
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"game file {path}: cannot be read: {error.strerror or error}") from None
        if b'"solvable": false' in content:
            continue
        games.append((name, kind))
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return Split(games, digest.hexdigest())


def _stamp(folder: Path) -> str:
    """Changes when a task or a trial is added or removed: names and times of the task folders."""
    entries = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder) if entry.is_dir())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _places(root: Path) -> list[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("PAW_CACHE") or Path(home) / "paw")
    return [root / INDEX, cache / f"alfworld-{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]}.json"]


def _read(place: Path) -> dict[str, Any]:
    """The index at `place`; empty if there is none or it is not one, which only costs another scan."""
    try:
        index = json.loads(place.read_text(encoding="utf-8"))
        for split, known in index.items():
            sound = isinstance(known["stamp"], str) and isinstance(known["digest"], str)
            if not sound or not all(_inside(split, name) and kind for name, kind in known["games"]):
                return {}
        return index
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _inside(split: str, name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == split and ".." not in parts


def _remember(root: Path, split: str, known: dict[str, Any]) -> None:
    for place in _places(root):
        with suppress(OSError):  # read-only data, or no room for an index: the next place, or none
            place.parent.mkdir(parents=True, exist_ok=True)
            write_file(place, json.dumps({**_read(place), split: known}))  # ranks may index at the same time
            return
