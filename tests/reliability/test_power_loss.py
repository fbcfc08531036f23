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
    """A file is synced before it gets its name, and its folder before the next name is given or
    taken away: so a cut leaves what is there, the last checkpoint saved included.

    Checked for checkpoints, files that are replaced, and the cache."""
    synced = {}
    unsynced_folders = set[int]()
    system_calls = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}
    checkpoints = tmp_path / "run" / "checkpoints"
    saved = list[int]()
    moments = 0

    def cut() -> None:
        nonlocal moments
        if saved == [1] and not (checkpoints / "step_000002").exists():
            newest = restore.read_newest(checkpoints, restore.load, warn=pytest.fail)
            assert newest
            assert newest[1][0]["model"]["weight"].tolist() == [1.0] * 8
            moments += 1

    def fsync(descriptor: int) -> None:
        cut()
        system_calls["fsync"](descriptor)
        synced[os.fstat(descriptor).st_ino] = held(Path(f"/proc/self/fd/{descriptor}"))
        unsynced_folders.difference_update(synced)

    def move(name: str, source: Path, target: Path) -> None:
        cut()
        assert not unsynced_folders, f"{source}: the names given before may be lost"
        missing = [
            path
            for path in (source, *source.rglob("*"))
            if synced.get(path.stat().st_ino) != held(path)
        ]
        assert not missing, f"{missing} may hold anything"
        system_calls[name](source, target)
        if not target.name.startswith(".tmp_"):
            folder = target.parent.stat().st_ino
            synced.pop(folder, None)
            unsynced_folders.add(folder)

    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(
            os, name, lambda source, target, name=name: move(name, Path(source), Path(target))
        )
    for step in (1, 2, 2):
        checkpoint.save(checkpoints, step, {"model": {"weight": torch.full((8,), float(step))}}, {})
        # It was made, and is found again.
        assert not unsynced_folders
        assert checkpoints.parent.stat().st_ino in synced
        checkpoint.prune(checkpoints, 1)
        write_file(tmp_path / "run.json", str(step))
        ensure_cached(
            f"model{step}",
            lambda folder_of_model: (folder_of_model / "weights").write_text("whole"),
        )
        assert not unsynced_folders
        saved.append(step)
    assert [path.name for path in checkpoints.iterdir()] == ["step_000002"]
    assert moments == 5
