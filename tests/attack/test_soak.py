"""A run under all faults at once: killed, stopped and starved of disk at seeded random moments,
again and again, on an environment that crashes on some tasks. Its end must equal, bit for bit, the
run that nobody disturbed; the latter's memory, descriptors and threads must not grow.

PAW_SOAK="200 60" pytest tests/attack/test_soak.py    200 updates under 60 faults: `make soak`
"""

import os
import random
import resource
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

UPDATES, FAULTS = map(int, os.environ.get("PAW_SOAK", "12 6").split())
ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments.py"
KINDS = ("kill", "kill", "term", "interrupt", "disk")


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def held(pid: int) -> Any:
    """(Resident KiB, descriptors, threads) of a process; None where it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        return (
            int(values["VmRSS"].split()[0]),
            len([*Path(f"/proc/{pid}/fd").iterdir()]),
            int(values["Threads"]),
        )
    except (OSError, KeyError):
        return None


def disturb(child: Any, run: Path, fault: str, rng: random.Random) -> None:
    """Let it write a few lines, then strike, and see how it ends."""
    # Metrics and model files are larger by then: it is full wherever the next write happens to be.
    if fault == "disk":
        limit = rng.choice([1 << 10, 64 << 10, 256 << 10])
        resource.prlimit(child.trainer, resource.RLIMIT_FSIZE, (limit, limit))
    stride = max(1, min(UPDATES // 6, UPDATES // FAULTS))  # all of them fit
    # Ctrl-C while Python itself starts is Python's to answer.
    target = lines(run) + rng.randint(int(fault == "interrupt"), stride)
    deadline = time.monotonic() + 300
    while child.poll() is None and lines(run) < target and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(rng.random() * 0.5)
    child.send_signal(
        {"term": signal.SIGTERM, "interrupt": signal.SIGINT}.get(fault, signal.SIGKILL)
    )
    ended = child.wait(300)
    said = child.stderr.read()
    assert ended in (0, 2, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130), said
    assert "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.timeout(0 if "PAW_SOAK" in os.environ else 600)
def test_faults_at_random_moments_change_nothing(paw, paw_start, tiny_llm, read_metrics, tmp_path):
    settings = {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.name": "run", "run.updates": UPDATES,
        "run.threads": 1, "run.save_every": 1, "run.keep": 3, "rollout.tasks": 4, "rollout.group_size": 2,
        "eval.games": 4, "eval.every": 3, "engine.type": "transformers", "rollout.max_prompt_tokens": 512,
        "rollout.max_response_tokens": 8, "optim.lr": 1e-3, "env.name": f"{ENVIRONMENTS}:Crashing",
    }  # fmt: skip
    calm, other = (tmp_path / name / "run" for name in ("calm", "other"))
    child = paw_start("train", "quickstart", settings, {"run.dir": calm.parent})
    seen = []
    while child.poll() is None:
        if lines(calm) > len(seen) + 1 and (now := held(child.trainer)):
            seen.append(now)
        time.sleep(0.005)
    assert child.returncode == 0, child.stderr.read()
    early = seen[max(1, len(seen) // 4)]
    late = seen[-1]
    assert late[0] < 1.1 * early[0]
    assert late[1] <= early[1] + 2
    assert late[2] <= early[2] + 2

    command = ["train", "quickstart", settings, {"run.dir": other.parent}]
    rng = random.Random(7)
    struck = Counter[str]()
    while sum(struck.values()) < FAULTS and lines(other) <= UPDATES:
        fault = rng.choice(KINDS)
        child = paw_start(*command, *(["--resume"] if (other / "metrics.jsonl").exists() else []))
        disturb(child, other, fault, rng)
        struck[fault] += 1
    assert sum(struck.values()) >= 4
    assert struck["kill"]
    assert len(struck) > 1
    paw(*command, "--resume")
    print(f"{dict(struck)}; undisturbed: {early} -> {late} (resident KiB, descriptors, threads)")

    assert read_metrics(calm) == read_metrics(other)
    last = sorted((calm / "checkpoints").iterdir())[-1]
    for file in (
        *sorted(last.glob("*.safetensors")),
        calm / "hf" / "model.safetensors",
        calm / "samples.jsonl",
    ):
        assert file.read_bytes() == (other / file.relative_to(calm)).read_bytes(), file
