"""Files of a run are whole or as they were: a disk that fills up, a kill between two system
calls, a power cut."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from paw.errors import UserError
from paw.io.cache import ensure_cached
from paw.io.files import write_file
from paw.rundir.log import open_log


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 40 KiB; skipped if mounting one is not allowed."""
    mounting = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("mounting a disk takes root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], capture_output=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    for content in ("ä", b"bytes", lambda file: file.write(b"from a function")):
        write_file(path, content)
    assert path.read_bytes() == b"from a function"
    assert names(tmp_path) == ["run.json"]

    def fail(*_):
        raise OSError(28, "No space left on device")

    for owner, function in ((os, "fsync"), (Path, "replace"), (None, "fill")):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            if owner:
                patch.setattr(owner, function, fail)
            write_file(path, "after" if owner else fail)
        assert path.read_bytes() == b"from a function"
        assert names(tmp_path) == ["run.json"]


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    write_file(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "after"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):  # nobody reads
        write_file(pipe, "x")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "through")
    assert os.read(reader, 99) == b"through"
    assert pipe.is_fifo()
    os.close(reader)
    write_file(Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device()


def test_lines_that_a_power_cut_took_are_told(tmp_path):
    for steps, missing in (
        (range(6), None),
        ([0, 2, 4, 5], "2 of 6 lines (updates 1, 3)"),
        ([], "6 of 6 lines (updates 0, 1, 2, 3, 4, 5)"),
    ):
        text = "".join(json.dumps({"step": step, "eval/success": 0.5}) + "\n" for step in steps)
        (tmp_path / "metrics.jsonl").write_text(text)
        with open_log(tmp_path, resume_step=5) as log:
            lacks = f"{tmp_path}/metrics.jsonl lacks {missing}; the run continues without them"
            assert log.lost == ([lacks] if missing else [])
            assert [record["step"] for record in log.history] == list(steps)


def test_lines_that_are_no_metrics_are_told_and_go(tmp_path):
    good_lines = '{"step": 0, "eval/success": 0.5}\n', '{"step": 1, "eval/success": 0.5}\n'
    bad_lines = [
        "[1]",
        '{"reward/mean": 1}',
        '{"step": "1"}',
        "[" * 100_000,
        '{"step": ' + "9" * 5000 + "}",
        "x",
        "",
    ]
    (tmp_path / "metrics.jsonl").write_text(
        good_lines[0] + "\n".join(bad_lines) + good_lines[1] + '{"step": 2, "rew'
    )
    with open_log(tmp_path, resume_step=1) as log:
        assert log.lost == [
            f"{tmp_path}/metrics.jsonl: 6 lines belong to no update and were removed, the first is line 2"
        ]
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(good_lines)


def test_a_disk_that_is_full_until_something_goes(small_disk):
    filler = small_disk / "filler"
    config = small_disk / "config.toml"
    filler.write_bytes(bytes(20_000))
    write_file(config, "before")
    with open_log(small_disk) as log, pytest.raises(UserError) as caught:
        for step in range(10_000):
            log.log(step, {"reward/mean": 0.5})
    assert str(caught.value).endswith("metrics.jsonl: No space left on device: free some space")
    with pytest.raises(UserError, match="No space left"):
        open_log(small_disk, resume_step=step - 1)
    with pytest.raises(OSError, match="No space left"):
        write_file(config, "after" * 1000)
    assert config.read_text() == "before"
    assert ".tmp" not in " ".join(names(small_disk))
    filler.unlink()
    with open_log(small_disk, resume_step=step - 1) as log:
        assert [record["step"] for record in log.history] == list(range(step))
        assert not log.lost


def test_what_a_killed_process_left_in_the_cache_goes_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path))
    for name, days in (("model.abcd", 15), ("model.efgh", 1), ("models.abcd", 15)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
        then = time.time() - days * 86400
        os.utime(tmp_path / name, (then, then))
    ensure_cached("model", lambda folder: (folder / "weights").write_text("whole"))
    assert names(tmp_path) == ["model", "model.efgh", "models.abcd"]
