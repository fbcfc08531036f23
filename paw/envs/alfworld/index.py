"""Which official games there are: found by scanning a split's folder, then remembered in the cache until it changes."""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from paw.cache import cached
from paw.envs.alfworld.problem import TASK_TYPES
from paw.errors import UserError
from paw.files import reading

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
    """The folder with the splits: `data` itself or its json_2.1.1.

    UserError, naming `origin`, if it is neither.
    """
    data = data.expanduser()
    for root in (data, data / FOLDER):
        if any((root / split).is_dir() for split in SPLITS):
            return root
    problem = "holds no ALFWorld games" if data.is_dir() else "is no folder"
    raise UserError(
        f"{origin}: {data} {problem} (looked for {FOLDER}/{{{','.join(SPLITS)}}}); {FIX}"
    )


def load_split(root: Path, split: str) -> Split:
    """The games of one split, from the index or by a scan; what alfworld's own loader leaves out is left out."""
    if split not in SPLITS:
        raise UserError(f"unknown ALFWorld split '{split}'; there are: {', '.join(SPLITS)}")
    folder = root / split
    if not folder.is_dir():
        there = ", ".join(name for name in SPLITS if (root / name).is_dir())
        raise UserError(f"{root} has no split '{split}' (it has: {there}); {FIX}")
    tasks = sorted(
        (entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder) if entry.is_dir()
    )
    stamp = hashlib.sha256(json.dumps([str(folder.resolve()), tasks]).encode()).hexdigest()[:16]
    try:
        kept = cached(
            f"alfworld-{stamp}",
            lambda at: (at / "index.json").write_text(json.dumps(_scan(root, split))),
        )
        games, digest = json.loads((kept / "index.json").read_text())
    except UserError:  # no games, or no room for an index: the scan says which
        games, digest = _scan(root, split)
    return Split([(name, kind) for name, kind in games], digest)


def _scan(root: Path, split: str) -> Split:
    games, digest = [], hashlib.sha256()
    kinds = {
        type_: kind for kind, type_ in TASK_TYPES.items()
    }  # the only ones that alfworld's own environment plays
    for path in sorted((root / split).glob(f"*/*/{GAME_FILE}")):
        name = path.parent.relative_to(root).as_posix()
        kind = kinds.get(name.split("/")[1].split("-")[0])
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
