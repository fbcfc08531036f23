"""A power cut at any moment of a save: what was not fsynced is gone, and the newest checkpoint that was saved loads."""

import os
from pathlib import Path

import pytest
import torch

from paw.state import checkpoint, restore


class PowerCut(BaseException):
    pass


class Disk:
    """Keeps what has reached the disk of a folder, and cuts the power at the `cut`-th call of fsync or rename.

    `names`: what a file system may also do, write the names of a folder down before the bytes of its files.
    """

    def __init__(self, root: Path, monkeypatch, *, names: bool):
        self.root, self.names, self.calls, self.cut = root, names, 0, 0
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, tuple[int, bool]]] = {}
        self.target = root
        self.open: list[int] = []  # so that no inode is used twice
        self.real = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)
        for name in ("rename", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *paths, real=real, **options: (self.call(), real(*paths, **options)))
        self.keep(os.open(root, os.O_RDONLY))

    def fsync(self, descriptor: int) -> None:
        self.call()
        self.real(descriptor)
        self.keep(descriptor)

    def keep(self, descriptor: int) -> None:
        path, own = Path(f"/proc/self/fd/{descriptor}"), os.dup(descriptor)
        self.open.append(own)
        inode = os.fstat(own).st_ino
        if path.is_dir():
            self.folders[inode] = now(path)
            self.open += [os.open(path / name, os.O_RDONLY) for name in self.folders[inode]]
        else:
            self.files[inode] = path.read_bytes()

    def call(self) -> None:
        self.calls += 1
        if self.calls == self.cut:
            self.survivors(self.target)  # before anything is cleared away
            raise PowerCut

    def survivors(self, target: Path) -> None:
        """What is there after the cut, copied to `target`."""
        self.copy(self.root, self.root.stat().st_ino, target)

    def copy(self, live: Path, inode: int, target: Path) -> None:
        target.mkdir()
        kept = now(live) if self.names and live.is_dir() else self.folders.get(inode, {})
        for name, (its, folder) in kept.items():
            if folder:
                self.copy(live / name, its, target / name)
            else:
                (target / name).write_bytes(self.files.get(its, b""))


def now(folder: Path) -> dict[str, tuple[int, bool]]:
    return {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(folder)}


def save(folder: Path, step: int) -> None:
    checkpoint.save(folder, step, {"model": {"weight": torch.full((8,), float(step))}}, {"expected": step})
    checkpoint.prune(folder, 1)


@pytest.mark.parametrize("names", [False, True])
def test_the_newest_checkpoint_survives_a_cut_at_any_moment(tmp_path, monkeypatch, names):
    cuts = 0
    while True:
        cuts += 1
        run = tmp_path / f"run{cuts}"
        run.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(run, patch, names=names)
            disk.target = tmp_path / f"left{cuts}"
            save(run / "checkpoints", 1)
            disk.calls, disk.cut = 0, cuts
            cut = False
            try:
                save(run / "checkpoints", 2)
                disk.survivors(disk.target)
            except PowerCut:
                cut = True
            for descriptor in disk.open:
                os.close(descriptor)
        newest, _ = restore.newest(disk.target / "checkpoints", warn=lambda _: None)
        tensors, state = restore.load(newest)
        assert state["step"] in ((1, 2) if cut else (2,))
        assert tensors["model"]["weight"].tolist() == [float(state["step"])] * 8
        if not cut:
            break
    assert cuts > 7
