"""A run under all faults at once: killed, stopped and starved of disk at seeded random moments, again and again, on an
environment that crashes on some tasks. Its end must equal, bit for bit, the run that nobody disturbed; the latter's
memory, descriptors and threads must not grow.

    make soak            # 200 updates, 60 faults; the test suite runs 12 updates and 6 faults
"""

import argparse
import json
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from environments import Game, Honest  # noqa: E402

from paw.types import Outcome  # noqa: E402

FAULTS = ("kill", "kill", "term", "interrupt", "disk")
NAME = "run"


class Crashing(Honest):
    """Every fifth task, all attempts at it, raises in its second turn; which ones depends on their names alone. The
    first of an update never does: an update in which all fail ends the run."""

    name = "soak"

    def make(self) -> Game:
        return _Game({})


class _Game(Game):
    turns = 0

    def reset(self, task: Any) -> str:
        self.turns, first = 0, task.id.endswith("/0")
        self.crashes = not first and zlib.crc32(task.id.encode()) % 5 == 0
        return super().reset(task)

    def step(self, response: str) -> Any:
        self.turns += 1
        if self.crashes and self.turns == 2:
            raise OSError("the simulator is gone")
        done, reward = self.turns == 3, float(zlib.crc32(response.encode()) % 2)
        return Outcome(f"now {self.turns}", done * reward, done, done and reward > 0, response, valid=True)


def arguments(folder: Path, model: Path, updates: int) -> list[str]:
    settings = {
        "model.path": model, "model.dtype": "float32", "run.dir": folder, "run.name": NAME, "run.updates": updates,
        "run.threads": 1, "run.save_every": 1, "run.keep": 3, "rollout.tasks": 4, "rollout.group_size": 2,
        "eval.games": 4, "eval.every": 3, "rollout.engine": "transformers", "rollout.max_prompt_tokens": 512,
        "rollout.max_response_tokens": 8, "optim.lr": 1e-3, "env.name": f"{HERE / 'soak.py'}:Crashing",
    }  # fmt: skip
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return [sys.executable, "-m", "paw", "train", "quickstart", *flags]


def start(command: list[str], env: dict[str, str], *, file_limit: int | None = None) -> subprocess.Popen[str]:
    def before() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, preexec_fn=before, **quiet)  # type: ignore[call-overload]


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturbed(folder: Path, model: Path, *, updates: int, faults: int, seed: int, env: dict[str, str]) -> Counter[str]:
    """Play the run with `faults` of them, then to its end; how many of each kind struck."""
    rng, struck, run = random.Random(seed), Counter[str](), folder / NAME
    command = arguments(folder, model, updates)
    while sum(struck.values()) < faults and lines(run) <= updates:
        fault = rng.choice(FAULTS)
        # Metrics and model files are larger than this by then: the disk is full wherever the next write happens to be.
        limit = rng.choice([1 << 10, 64 << 10, 256 << 10]) if fault == "disk" else None
        resume = ["--resume", "auto"] if (run / "metrics.jsonl").exists() else []
        child = start([*command, *resume], env, file_limit=limit)
        # Ctrl-C while Python itself starts is Python's to answer.
        stride = max(1, min(updates // 6, updates // faults))  # all of them fit
        target = lines(run) + rng.randint(int(fault == "interrupt"), stride)
        deadline = time.monotonic() + 300
        while child.poll() is None and lines(run) < target and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.5)
        if child.poll() is None:
            number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}.get(fault)
            child.send_signal(number or signal.SIGKILL)
        words = child.communicate(timeout=300)[1]
        assert child.returncode in (0, 2, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130), words
        assert "Traceback" not in words, words
        struck[fault] += 1
    done = subprocess.run([*command, "--resume", "auto"], env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return struck


def calm(folder: Path, model: Path, *, updates: int, env: dict[str, str]) -> list[tuple[int, int, int]]:
    """The undisturbed run; (resident KiB, descriptors, threads) of its process at each update."""
    child, seen = start(arguments(folder, model, updates), env), []
    while child.poll() is None:
        if lines(folder / NAME) > len(seen) + 1:
            seen.append(_held(child.pid))
        time.sleep(0.005)
    assert child.returncode == 0, child.communicate()[1]
    return [held for held in seen if held]


def _held(pid: int) -> Any:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        return int(values["VmRSS"].split()[0]), len([*Path(f"/proc/{pid}/fd").iterdir()]), int(values["Threads"])
    except (OSError, KeyError):  # it has just ended
        return None


def assert_same(one: Path, other: Path) -> None:
    """Metrics but for clocks, the last checkpoint, the export and the samples of two runs are equal."""

    def metrics(run: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in found]

    assert metrics(one) == metrics(other)
    last = sorted((one / "checkpoints").iterdir())[-1]
    tensors = [f"checkpoints/{last.name}/{file.name}" for file in sorted(last.glob("*.safetensors"))]
    for name in (*tensors, "hf/model.safetensors", "samples.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_tiny_llm = runpy.run_path(str(HERE.parent / "conftest.py"))["write_tiny_llm"]
    with tempfile.TemporaryDirectory() as temp:
        folder, model = Path(temp), write_tiny_llm(Path(temp) / "model")
        paths = [str(HERE.parents[1]), str(HERE.parents[1] / "kernels")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        held = calm(folder / "calm", model, updates=given.updates, env=env)
        early, late = held[len(held) // 4], held[-1]
        print(f"undisturbed: {early} -> {late} (resident KiB, descriptors, threads)", flush=True)
        assert late[0] < 1.1 * early[0] and late[1] <= early[1] + 2 and late[2] <= early[2] + 2
        began = time.monotonic()
        options = {"updates": given.updates, "faults": given.faults, "seed": given.seed, "env": env}
        struck = disturbed(folder / "disturbed", model, **options)
        assert_same(folder / "calm" / NAME, folder / "disturbed" / NAME)
        print(f"{dict(struck)} in {time.monotonic() - began:.0f} s: the end is the undisturbed run's, bit for bit")


if __name__ == "__main__":
    main()
