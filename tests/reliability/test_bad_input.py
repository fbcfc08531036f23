"""What users get wrong: one line that says so, exit code 2, and nothing left behind that blocks
the next try."""

import os
import re
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from command_line import as_words
from forked import Child
from jsonl import read_jsonl

from paw.checkpoint import restore


def assert_refused(finished, message):
    assert finished.returncode == 2
    assert finished.stderr.startswith("paw: "), finished.stderr
    assert finished.stderr.endswith("\n"), finished.stderr
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert re.search(message, finished.stderr), finished.stderr
    assert "Traceback" not in finished.stdout


@pytest.mark.slow
def test_a_model_that_cannot_be_used_leaves_the_name_free(paw_here, quick, tiny_llm, tmp_path):
    command = ["train", "quickstart", quick, {"model.path": "model", "run.name": "x"}]
    directory = tmp_path / "runs" / "x"
    template = tiny_llm(tmp_path / "model", positions=64) / "chat_template.jinja"
    # At the last moment, the engine and the optimizer being there.
    refusal = paw_here(*command, code=None, cwd=tmp_path)
    assert_refused(refusal, "exceed the model's 64 positions; lower rollout.max_prompt_tokens")
    assert (directory / "config.toml").exists()
    assert not (directory / "checkpoints").exists()
    assert not (directory / "hf").exists()
    tiny_llm(tmp_path / "model")
    text = template.read_text()
    template.unlink()
    assert_refused(paw_here(*command, code=None, cwd=tmp_path), "has no chat template")
    template.write_text(text)
    paw_here(*command, {"run.updates": 1, "eval.games": 1, "env.max_turns": 2}, cwd=tmp_path)


ENDS_AS_AN_INTERPRETER = """
import atexit, os, sys
def flush():
    try:
        sys.stdout.flush()
    except OSError:
        os._exit(120)
atexit.register(flush)
"""
CLOSED = """
import os, sys
os.close(1)
sys.stdout = None  # as in an interpreter that is started without one
"""


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["full", "none", "gone"])
def test_a_stdout_that_takes_nothing_ends_no_run(paw_env, quick, tmp_path, reader):
    """Nor does what the interpreter cannot flush at its end change the exit code."""
    (tmp_path / "patch.py").write_text(CLOSED if reader == "none" else ENDS_AS_AN_INTERPRETER)
    settings = quick | {"run.dir": tmp_path, "run.name": "x", "run.updates": 1}
    reading, writing = os.pipe()
    os.close(reading)
    with tempfile.TemporaryFile("w+") as errors, Path("/dev/full").open("w") as full:
        child = Child(
            ["train", "quickstart", *as_words(settings)],
            env=paw_env | {"FORKED_PATCH": str(tmp_path / "patch.py")},
            cwd=str(tmp_path),
            out=full.fileno() if reader == "full" else writing,
            err=errors.fileno(),
        )
        os.close(writing)
        code = child.wait()
        errors.seek(0)
        assert (code, "Traceback" in errors.read()) == (0, False)
    assert len(read_jsonl(tmp_path / "x" / "metrics.jsonl")) == 2


@pytest.mark.slow
def test_extras_that_are_not_installed(paw_here, quick, quick_model, tmp_path, monkeypatch):
    command = ["train", "quickstart", quick, {"model.path": quick_model, "run.dir": tmp_path}]
    for package, overrides in (
        ("vllm", {"engine.type": "vllm"}),
        ("textworld", {"env.backend": "textworld"}),
        ("wandb", {"run.trackers": "wandb"}),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)  # as if it had never been installed
            finished = paw_here(*command, overrides, code=None)
        assert_refused(finished, rf"{package}.*pip install ('paw-trainer\[\w+\]'|wandb)")


@pytest.mark.slow
def test_run_directories_in_the_way(paw_here, quick, tmp_path):
    def refused(folder, name, message, *options):
        place = {"run.dir": folder, "run.name": name}
        assert_refused(paw_here("train", "quickstart", quick, place, *options, code=None), message)

    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "x", "cannot create the run directory .*run.dir")
    (tmp_path / "odd" / "config.toml").mkdir(parents=True)
    refused(tmp_path, "odd", "cannot write .*config.toml: Is a directory")
    refused(
        tmp_path, "gone", "there is no run in .*gone; start without --resume", "--resume", "auto"
    )


@pytest.mark.slow
def test_a_full_disk(paw_here, quick, quick_run, tmp_path):
    """A file size limit stands in for the disk: writing beyond it fails as ENOSPC does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    directory = tmp_path / "run"
    shutil.copytree(quick_run, directory)
    command = [
        "train",
        "quickstart",
        quick,
        {"run.dir": tmp_path, "run.name": "run", "run.updates": 3},
    ]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))  # room for every log
        finished = paw_here(*command, "--resume", "auto", code=None)
        assert_refused(
            finished,
            "cannot write checkpoint .*step_000003: File too large; earlier checkpoints are intact",
        )
        first = paw_here(
            "train", "quickstart", quick, {"run.dir": tmp_path, "run.name": "first"}, code=None
        )
        assert_refused(
            first, "cannot write checkpoint .*: File too large; there is no earlier checkpoint"
        )
        shutil.rmtree(tmp_path / "first")
        finished = paw_here("export", directory, "--out", tmp_path / "hf", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000002"]
    restore.verify(directory / "checkpoints" / "step_000002")
    assert finished.stderr.splitlines()[-1].startswith(
        f"paw: cannot write the exported model to {tmp_path / 'hf'}: "
    )
    assert "Traceback" not in finished.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    paw_here(*command, "--resume", "auto")
    assert "step_000003" in [path.name for path in (directory / "checkpoints").iterdir()]
