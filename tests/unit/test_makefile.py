"""`make train` says what is in the way before it downloads anything."""

import os
import subprocess
from pathlib import Path

RECORDER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  -c) exit {version} ;;
  -m) [ "$2" != venv ] || {{ mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }} ;;
esac
"""


def test_what_is_in_the_way_of_the_first_run_is_named(tmp_path):
    def make(*words, version=0):
        """`make train` with a Python that only writes down what it is asked to do: (exit code, stderr, that)."""
        fake, log = tmp_path / "python", tmp_path / "log"
        fake.write_text(RECORDER.format(log=log, version=version))
        fake.chmod(0o755)
        path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvidia-smi").exists())
        command = ["make", "-C", Path(__file__).parents[2], "train", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, env={**os.environ, "PATH": path})
        return done.returncode, done.stderr, log.read_text()

    code, said, log = make(version=1)
    assert code and "paw needs Python 3.11 or later" in said and "PYTHON=python3.11" in said
    assert "pip" not in log and not (tmp_path / "venv").exists()
    index = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    code, said, log = make()
    assert code == 0 and index in said and "--index-url" not in log
    code, said, log = make("-B", index)
    assert code == 0 and "TORCH_INDEX" not in said and "--index-url https://download.pytorch.org/whl/cpu torch" in log
