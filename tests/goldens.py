"""Numbers that a change of structure must not move: two updates each of nine runs, metrics and a hash of the weights.

    python tests/goldens.py           compare with goldens.json, bit for bit
    python tests/goldens.py --write   renew it (say why in the commit)
    python tests/goldens.py grpo ppo  these alone

Bits hold on the kind of CPU they were taken on; `--within 1e-6` compares metrics alone, where the
order of float operations changed.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
LEFT_OUT = ("time/", "perf/", "health/threads_lost", "health/texts_cut")
SMALL = {
    "run.threads": 1, "run.updates": 2, "warmup.max_steps": 40, "rollout.tasks": 4, "rollout.group_size": 4,
    "eval.games": 8, "env.invalid_penalty": 0.1, "advantage.penalty_only": "keep", "run.save_every": 1,
    "policy.old_logp": "trainer", "policy.entropy_coef": 0.001, "model.head_backend": "torch",
}  # fmt: skip
RUNS: dict[str, dict[str, object]] = {
    "grpo": {"policy.kl_coef": 0.01},
    "gigpo": {"advantage.type": "gigpo", "wm.loss": "gce"},
    "ppo": {"advantage.type": "ppo"},
    "lora": {"lora.rank": 4},
    "ranks": {"--gpus": 2, "model.device": "cpu", "model.shard": "world"},
    "resume": {},
    "vllm": {"engine.type": "vllm"},
    "search": {
        "env.name": "search",
        "env.entities": 20,
        "env.eval_split": "test",
        "agent.type": "search-r1",
        "policy.loss": "gspo",
    },
    "server": {"engine.type": "server", "engine.servers": 1, "rollout.ahead": 1},
}
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def train(folder: Path, name: str, cache: Path, settings: dict[str, object], *words: str) -> None:
    overrides = {**SMALL, **settings, "run.dir": folder, "run.name": name}
    command = [sys.executable, "-m", "paw", "train", "quickstart-long", *words]
    for key, value in overrides.items():
        command += [key if key.startswith("--") else f"--{key}", str(value)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = {
        **os.environ,
        **VLLM,
        "PYTHONPATH": path,
        "PAW_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{name}: exit {done.returncode}\n{done.stderr[-3000:]}")


def found(run: Path) -> dict[str, object]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {key: value for key, value in line.items() if not key.startswith(LEFT_OUT)}
        for line in lines
    ]
    return {
        "metrics": kept,
        "weights": hashlib.sha256((run / "hf" / "model.safetensors").read_bytes()).hexdigest(),
    }


def differences(name: str, old: dict, new: dict, within: float | None) -> list[str]:
    faults = (
        []
        if within is not None or old["weights"] == new["weights"]
        else [f"{name}: weights differ"]
    )
    if len(old["metrics"]) != len(new["metrics"]):
        return [*faults, f"{name}: {len(new['metrics'])} lines instead of {len(old['metrics'])}"]
    for before, after in zip(old["metrics"], new["metrics"], strict=True):
        for key in sorted({*before, *after}):
            a, b = before.get(key), after.get(key)
            same = (
                a == b
                if within is None or None in (a, b)
                else math.isclose(a, b, rel_tol=within, abs_tol=within)
            )
            if not same:
                faults.append(f"{name}, step {after['step']}: {key} was {a}, is {b}")
    return faults


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=form)
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], help="default: all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--within", type=float)
    options = parser.parse_args()
    goldens, faults = json.loads(FILE.read_text()) if FILE.exists() else {}, []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in options.runs or RUNS:
            if name == "resume":  # stopped by the end after one update, then continues
                train(folder, name, folder / "cache", RUNS[name] | {"run.updates": 1})
                train(folder, name, folder / "cache", RUNS[name], "--resume", "auto")
            else:
                train(folder, name, folder / "cache", RUNS[name])
            new = found(folder / name)
            if options.write:
                goldens[name] = new
                FILE.write_text(json.dumps(goldens, indent=1) + "\n")
            else:
                faults += differences(name, goldens[name], new, options.within)
            print(f"{name}: {new['weights'][:12]}", flush=True)
    print(*faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
