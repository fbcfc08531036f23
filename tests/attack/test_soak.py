"""A run under all faults at once. It is killed, stopped and starved of disk at seeded random
moments, again and again, on an environment that crashes on some tasks. It must end bit for bit as
an undisturbed run. The undisturbed run's memory, descriptors and threads must not grow.

PAW_SOAK="200 60" pytest tests/attack/test_soak.py runs 200 updates under 60 faults, as `make soak`
does.
"""

import os
import random
import resource
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

UPDATES, FAULTS = map(int, os.environ.get("PAW_SOAK", "8 5").split())
ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments.py"
KINDS = ("kill", "kill", "term", "interrupt", "disk")


class Resources(NamedTuple):
    """The resources that a process uses."""

    resident_kib: int
    descriptors: int
    threads: int


def line_count(run: Path) -> int:
    """Number of metrics lines that a run has written so far."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def resources_of(pid: int) -> Resources | None:
    """The resources that a process uses, or None if it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        return Resources(
            resident_kib=int(values["VmRSS"].split()[0]),
            descriptors=len([*Path(f"/proc/{pid}/fd").iterdir()]),
            threads=int(values["Threads"]),
        )
    except (OSError, KeyError):
        return None


def disturb(child: Any, run: Path, fault: str, rng: random.Random) -> None:
    """Let the run write a few lines, disturb it, and check how it ends."""
    if fault == "disk":
        # Metrics and model files are already larger than this, so the next write finds the disk
        # full.
        file_bytes = rng.choice([1 << 10, 64 << 10, 256 << 10])
        resource.prlimit(child.trainer, resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    longest_stride = max(1, min(UPDATES // 6, UPDATES // FAULTS))  # all faults fit
    # Python itself handles Ctrl-C while it starts.
    shortest_stride = int(fault == "interrupt")
    target = line_count(run) + rng.randint(shortest_stride, longest_stride)
    deadline = time.monotonic() + 300
    while child.poll() is None and line_count(run) < target and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(rng.random() * 0.5)

    signals = {"term": signal.SIGTERM, "interrupt": signal.SIGINT}
    child.send_signal(signals.get(fault, signal.SIGKILL))
    exit_code = child.wait(300)
    errors = child.stderr.read()
    assert exit_code in (0, 2, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130), errors
    assert "Traceback" not in errors, errors


@pytest.mark.slow
@pytest.mark.timeout(0 if "PAW_SOAK" in os.environ else 600)
def test_faults_at_random_moments_change_nothing(paw, paw_start, tiny_llm, read_metrics, tmp_path):
    settings = {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.name": "run", "run.updates": UPDATES,
        "run.threads": 1, "run.save_every": 1, "run.keep": 3, "rollout.tasks": 4, "rollout.group_size": 2,
        "eval.games": 4, "eval.every": 3, "engine.type": "transformers", "rollout.max_prompt_tokens": 512,
        "rollout.max_response_tokens": 8, "optim.lr": 1e-3, "env.name": f"{ENVIRONMENTS}:Crashing",
    }  # fmt: skip
    undisturbed = tmp_path / "calm" / "run"
    disturbed = tmp_path / "disturbed" / "run"
    child = paw_start("train", "quickstart", settings, {"run.dir": undisturbed.parent})
    measured: list[Resources] = []  # once after each update
    while child.poll() is None:
        if line_count(undisturbed) > len(measured) + 1:
            resources = resources_of(child.trainer)
            if resources:
                measured.append(resources)
        time.sleep(0.005)
    assert child.returncode == 0, child.stderr.read()
    early_use = measured[max(1, len(measured) // 4)]
    late_use = measured[-1]
    assert late_use.resident_kib < 1.1 * early_use.resident_kib
    assert late_use.descriptors <= early_use.descriptors + 2
    assert late_use.threads <= early_use.threads + 2

    command = ["train", "quickstart", settings, {"run.dir": disturbed.parent}]
    rng = random.Random(7)
    faults = Counter[str]()
    while faults.total() < FAULTS and line_count(disturbed) <= UPDATES:
        fault = rng.choice(KINDS)
        resume = ["--resume"] if (disturbed / "metrics.jsonl").exists() else []
        child = paw_start(*command, *resume)
        disturb(child, disturbed, fault, rng)
        faults[fault] += 1
    assert faults.total() >= 4
    assert faults["kill"]
    assert len(faults) > 1
    paw(*command, "--resume")
    print(f"{dict(faults)}; undisturbed: {early_use} -> {late_use}")

    assert read_metrics(undisturbed) == read_metrics(disturbed)
    newest = sorted((undisturbed / "checkpoints").iterdir())[-1]
    files = [
        *newest.glob("*.safetensors"),
        undisturbed / "hf" / "model.safetensors",
        undisturbed / "samples.jsonl",
    ]
    for file in files:
        assert file.read_bytes() == (disturbed / file.relative_to(undisturbed)).read_bytes(), file
