"""`make train` says what is in the way before it downloads anything."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  -c) exit {version} ;;
  -m) [ "$2" != venv ] || {{ mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }} ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """Runs `make train` with a Python that only writes down what it is asked to do: (exit code, stderr, that)."""

    def run(*words, version=0):
        fake, log = tmp_path / "python", tmp_path / "log"
        fake.write_text(RECORDER.format(log=log, version=version))
        fake.chmod(0o755)
        path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvidia-smi").exists())
        command = ["make", "train", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": path})
        return done.returncode, done.stderr, log.read_text()

    return run


def test_a_python_that_is_too_old_is_named_before_anything_is_made(make, tmp_path):
    code, said, log = make(version=1)
    assert code and "paw needs Python 3.11 or later" in said and "PYTHON=python3.11" in said
    assert "pip" not in log and not (tmp_path / "venv").exists()


def test_without_a_gpu_the_small_torch_is_offered(make):
    index = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    code, said, log = make()
    assert code == 0 and index in said and "--index-url" not in log
    code, said, log = make("-B", index)
    assert code == 0 and "TORCH_INDEX" not in said and "--index-url https://download.pytorch.org/whl/cpu torch" in log
