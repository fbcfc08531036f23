"""Files of a run are whole or as they were: a disk that fills up, a kill between two system calls, a power cut."""

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from paw.cache import cached
from paw.files import write_file
from paw.recipe import load
from paw.state.log import MetricsLog


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(kib)` mounts a disk of that size; skipped where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kib: int) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a disk takes root")
        return folder

    yield mount
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    for content in ("ä", b"bytes", lambda file: file.write(b"from a function")):
        write_file(path, content)
    assert path.read_bytes() == b"from a function" and names(tmp_path) == ["run.json"]

    def fail(*_):
        raise OSError(28, "No space left on device")

    for owner, call in ((os, "fsync"), (Path, "replace"), (None, "fill")):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            if owner:
                patch.setattr(owner, call, fail)
            write_file(path, "after" if owner else fail)
        assert path.read_bytes() == b"from a function" and names(tmp_path) == ["run.json"]


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """A power cut keeps what was fsynced, in whatever order the rest would have been written."""
    order = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor):
        order.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def note_replace(self, target):
        order.append(("replace", Path(target).name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_file(tmp_path / "run.json", "x")
    temp = f".tmp_{os.getpid()}_run.json"
    assert order == [("fsync", temp), ("replace", "run.json"), ("fsync", tmp_path.name)]
    order.clear()
    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "cache"))
    cached("model", lambda folder: (folder / "weights").write_bytes(b"x"))
    assert order[0] == ("fsync", "weights")  # before the folder gets its name


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    write_file(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):  # nobody reads
        write_file(tmp_path / "pipe", "x")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    while not read:
        try:
            write_file(tmp_path / "pipe", "through")
            reader.join()
        except OSError:  # not open yet
            pass
    assert read == ["through"] and (tmp_path / "pipe").is_fifo()
    write_file(Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device()


def test_lines_that_a_power_cut_took_are_told(tmp_path):
    for lines, missing in (
        (range(6), None),
        ([0, 2, 4, 5], "2 of 6 lines (updates 1, 3)"),
        ([], "6 of 6 lines (updates 0-5)"),
    ):
        text = "".join(json.dumps({"step": step, "eval/success": 0.5}) + "\n" for step in lines)
        (tmp_path / "metrics.jsonl").write_text(text)
        with MetricsLog(tmp_path, resume_step=5) as log:
            told = [f"{tmp_path}/metrics.jsonl lacks {missing}; the run goes on without them"] if missing else []
            assert log.lost == told and [record["step"] for record in log.history] == list(lines)


def test_lines_that_are_no_metrics_are_told_and_go(tmp_path):
    good = '{"step": 0, "eval/success": 0.5}\n', '{"step": 1, "eval/success": 0.5}\n'
    bad = ["[1]", '{"reward/mean": 1}', '{"step": "1"}', "[" * 100_000, '{"step": ' + "9" * 5000 + "}", "x", ""]
    (tmp_path / "metrics.jsonl").write_text(good[0] + "\n".join(bad) + good[1] + '{"step": 2, "rew')
    with MetricsLog(tmp_path, resume_step=1) as log:
        assert log.lost == [f"{tmp_path}/metrics.jsonl: 6 lines are no update's and go, the first is line 2"]
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(good)


@pytest.mark.slow
def test_a_disk_that_fills_up_during_an_update(paw_here, quick, quick_model, small_disk):
    """The line of the update finds no room, nor does anything else until there is some."""
    disk = small_disk(40)
    where = {"run.dir": disk, "run.name": "run", "model.path": quick_model, "eval.games": 1}
    words = ["train", "quickstart", quick, where, {"run.updates": 40, "run.save_every": 50}]
    done = paw_here(*words, code=2)
    assert done.stderr.startswith("paw: cannot write ") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("l: No space left on device: free some space\n")
    before = (disk / "run" / "config.toml").read_bytes()
    assert load(disk / "run" / "config.toml").run.updates == 40
    done = paw_here(*words, "--resume", "auto", code=2)
    assert done.stderr.startswith("paw: cannot write ") and done.stderr.count("\n") == 1
    assert (disk / "run" / "config.toml").read_bytes() == before
    assert not list((disk / "run").glob(".tmp_*"))
