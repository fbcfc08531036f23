"""A power cut at any moment: what was saved is found again."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paw.checkpoint import files as checkpoint
from paw.checkpoint import restore
from paw.io.cache import ensure_cached
from paw.io.files import write_file


def held(path: Path) -> Any:
    return {entry.name for entry in path.iterdir()} if path.is_dir() else path.read_bytes()


def test_the_newest_checkpoint_survives_a_cut_at_any_moment(tmp_path, monkeypatch):
    """What gets a name is on the disk by then as it is, and its name before the next one is given
    or taken away: so what would be left is what is there, and the last checkpoint saved is among
    it.

    Held for checkpoints, files that are replaced, and the cache.
    """
    synced, owed, real = (
        {},
        set[int](),
        {name: getattr(os, name) for name in ("fsync", "rename", "replace")},
    )
    checkpoints, saved, moments = tmp_path / "run" / "checkpoints", list[int](), 0

    def cut() -> None:
        nonlocal moments
        if saved == [1] and not (checkpoints / "step_000002").exists():
            found = restore.read_newest(checkpoints, restore.load, warn=pytest.fail)
            assert found and found[1][0]["model"]["weight"].tolist() == [1.0] * 8
            moments += 1

    def fsync(descriptor: int) -> None:
        cut()
        real["fsync"](descriptor)
        synced[os.fstat(descriptor).st_ino] = held(Path(f"/proc/self/fd/{descriptor}"))
        owed.difference_update(synced)

    def move(name: str, source: Path, target: Path) -> None:
        cut()
        assert not owed, f"{source}: the names given before may be lost"
        missing = [
            path
            for path in (source, *source.rglob("*"))
            if synced.get(path.stat().st_ino) != held(path)
        ]
        assert not missing, f"{missing} may hold anything"
        real[name](source, target)
        if not target.name.startswith(".tmp_"):
            synced.pop(inode := target.parent.stat().st_ino, None)
            owed.add(inode)

    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(
            os, name, lambda source, target, name=name: move(name, Path(source), Path(target))
        )
    for step in (1, 2, 2):
        checkpoint.save(checkpoints, step, {"model": {"weight": torch.full((8,), float(step))}}, {})
        # It was made, and is found again.
        assert not owed and checkpoints.parent.stat().st_ino in synced
        checkpoint.prune(checkpoints, 1)
        write_file(tmp_path / "run.json", str(step))
        ensure_cached(f"model{step}", lambda made: (made / "weights").write_text("whole"))
        assert not owed
        saved.append(step)
    assert [path.name for path in checkpoints.iterdir()] == ["step_000002"] and moments == 5
