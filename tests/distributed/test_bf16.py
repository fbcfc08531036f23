"""bf16 means the same in one rank and in two: log-probs, and gradients of all weights or of LoRA's adapters."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("bf16_worker.py")


@pytest.mark.slow
def test_two_ranks_give_what_one_gives_in_bf16():
    pytest.importorskip("peft")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = [line.rsplit(" ", 2)[0] for line in done.stdout.splitlines()]
    assert kinds == ["tied none", "tied selective", "untied full", "lora full"]
