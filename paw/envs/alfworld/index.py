"""Finds the official games by scanning a split's folder. The cache keeps the result until the
folder changes.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from paw.envs.alfworld.problem import TASK_TYPES
from paw.errors import UserError
from paw.io.cache import ensure_cached
from paw.io.files import reading

FOLDER = "json_2.1.1"
GAME_FILE = "game.tw-pddl"
SPLITS = ("train", "valid_train", "valid_seen", "valid_unseen")
FIX = "run `paw data alfworld --download`, or point env.data at the folder that holds json_2.1.1"


class Split(NamedTuple):
    games: list[tuple[str, str]]
    """(id, kind) of every game, sorted by id; the id is `<split>/<task>/<trial>`."""
    digest: str
    """sha256 over ids and file contents, hexadecimal."""


def find_root(data: Path, *, origin: str = "env.data") -> Path:
    """Return the folder with the splits, `data` itself or its subfolder json_2.1.1.

    Raises UserError, which names `origin`, if it is neither.
    """
    data = data.expanduser()
    for root in (data, data / FOLDER):
        if any((root / split).is_dir() for split in SPLITS):
            return root
    problem = "holds no ALFWorld games" if data.is_dir() else "is not a folder"
    raise UserError(
        f"{origin}: {data} {problem} (looked for {FOLDER}/{{{','.join(SPLITS)}}}); {FIX}"
    )


def load_split(root: Path, split: str) -> Split:
    """Return the games of one split, from the cached index or from a scan.

    Raises UserError if the split is unknown, missing or empty.
    """
    if split not in SPLITS:
        raise UserError(f"unknown ALFWorld split '{split}'; there are: {', '.join(SPLITS)}")
    folder = root / split
    if not folder.is_dir():
        existing = ", ".join(name for name in SPLITS if (root / name).is_dir())
        raise UserError(f"{root} has no split '{split}' (it has: {existing}); {FIX}")

    def write_index(index: Path) -> None:
        (index / "index.json").write_text(json.dumps(_scan(root, split)))

    try:
        index = ensure_cached(f"alfworld-{_stamp(folder)}", write_index)
        games, digest = json.loads((index / "index.json").read_text())
    except UserError:
        # Either there are no games, which the scan reports, or no space for an index.
        games, digest = _scan(root, split)
    return Split([(name, kind) for name, kind in games], digest)


def _stamp(folder: Path) -> str:
    """Hash the folder's path, and the names and times of its subfolders."""
    subfolders = []
    for entry in os.scandir(folder):
        if entry.is_dir():
            subfolders.append((entry.name, entry.stat().st_mtime_ns))
    content = json.dumps([str(folder.resolve()), sorted(subfolders)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _scan(root: Path, split: str) -> Split:
    """Read the games of a split from its folder, except those that alfworld's loader skips."""
    games = []
    digest = hashlib.sha256()
    kinds = {task_type: kind for kind, task_type in TASK_TYPES.items()}
    for path in sorted((root / split).glob(f"*/*/{GAME_FILE}")):
        name = path.parent.relative_to(root).as_posix()
        task_type = name.split("/")[1].split("-")[0]
        kind = kinds.get(task_type)
        if kind is None or "movable" in name or "Sliced" in name:
            continue
        with reading(f"game file {path}"):
            content = path.read_bytes()
        if b'"solvable": false' in content:
            continue
        games.append((name, kind))
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    if not games:
        raise UserError(
            f"{root / split} holds no games (no {GAME_FILE} of a known task type); {FIX}"
        )
    return Split(games, digest.hexdigest())
