"""Updates of GRPO + PaW whose episodes a vLLM server plays, with rollout.ahead 0 and 1.

    python bench/gpu/server.py --model Qwen2.5-0.5B --out server.json

A server plays generated ALFWorld games. It runs on a second GPU if there is one; otherwise it takes
SHARE of the memory of the trainer's GPU. The model has random weights, so its responses are as long
as allowed and nothing is downloaded; "quickstart" is a tiny model. Writes the median seconds of an
update and of its phases, leaving out updates in which the pipeline fills or empties. The results
are written after each run, so the first is kept if the second fails.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import flags, paw
from bench.rollout.ahead import phase_seconds
from bench.trainer.update import make_folder
from paw.errors import UserError, to_stderr
from paw.rollouts.engines.servers import Servers, vllm_command

AHEAD = (0, 1)
SHARE = 0.45
"""Share of a GPU's memory for a server that shares the GPU with the trainer."""
UPDATES = 6
OPTIONS = {
    "run.updates": UPDATES,
    "run.save_every": 0,
    "env.data": "none",
    "env.max_turns": 6,
    "eval.every": 0,
    "eval.games": 1,
    "optim.micro_batch_tokens": 8192,
    "model.checkpointing": "none",
    "policy.kl_coef": 0.0,
    "engine.type": "server",
}
LARGE = {
    "rollout.tasks": 8,
    "rollout.group_size": 8,
    "rollout.max_prompt_tokens": 1024,
    "rollout.max_response_tokens": 128,
}
SMALL = {
    "rollout.tasks": 2,
    "rollout.group_size": 2,
    "rollout.max_prompt_tokens": 256,
    "rollout.max_response_tokens": 8,
    "wm.max_tokens": 64,
}
"""Replaces LARGE for the model "quickstart"."""


def settings(
    model_path: str, server_urls: list[str], folder: Path, *, gpus: int, is_small: bool
) -> dict[str, Any]:
    """Keys of a run of the model at `model_path`, with episodes played by the servers."""
    return (
        OPTIONS
        | (SMALL if is_small else LARGE)
        | {
            "model.path": model_path,
            "model.dtype": "bfloat16" if gpus else "float32",
            "engine.urls": json.dumps(server_urls),
            # NCCL does not connect two processes on one GPU.
            "engine.transfer": "nccl" if gpus > 1 else "files",
            "run.dir": folder,
        }
    )


def measure(model: str, folder: Path, results_path: Path) -> None:
    is_small = model == "quickstart"
    size_keys = SMALL if is_small else LARGE
    model_path = make_folder(model, folder / "model")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    context_length = size_keys["rollout.max_prompt_tokens"]
    context_length += size_keys["rollout.max_response_tokens"]
    command = vllm_command(
        model_path,
        max_model_len=context_length,
        dtype="bfloat16" if gpus else "float32",
        on_cpu=not gpus,
        gpu_memory_utilization=0.9 if gpus > 1 else SHARE,
        nccl=gpus > 1,
    )
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    server_gpus = []
    if gpus:
        server_gpus.append(visible[1] if gpus > 1 else visible[0])
    results: dict[str, dict[str, float]] = {}
    with closing(Servers(command, [server_gpus], folder)) as servers:
        servers.wait()
        shared_keys = settings(model_path, servers.urls, folder, gpus=gpus, is_small=is_small)
        for ahead in AHEAD:
            run_keys = {"rollout.ahead": ahead, "run.name": f"ahead-{ahead}"}
            paw("train", "alfworld-grpo-paw", *flags(shared_keys | run_keys))
            seconds = phase_seconds(folder / f"ahead-{ahead}" / "metrics.jsonl")
            results[str(ahead)] = {"update": sum(seconds.values())} | seconds
            print(ahead, results[str(ahead)], flush=True)
            results_path.write_text(json.dumps(results), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", default="Qwen2.5-0.5B")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        measure(options.model, Path(scratch), options.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        to_stderr(f"paw: {error}")
        sys.exit(2)
