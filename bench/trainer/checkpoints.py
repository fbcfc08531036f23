"""How long training waits for a checkpoint of two ranks (gloo, random weights, float32 AdamW), in three ways.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/trainer/checkpoints.py

`gathered`: rank 0 gathers and writes everything, as the trainer once did. `shards`: each rank
writes what it holds. `background`: the same in a thread, from copies. The ways take turns. waits_s:
seconds in which rank 0 cannot train. there_s: seconds until the checkpoint has its final name.
Neither includes what the thread costs training. Writes bench/results/checkpoints_cpu.csv.
"""

import datetime
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, commit, cpu_name, write
from paw.checkpoint import files as checkpoint
from paw.checkpoint.train_state import (
    Learner,
    capture_random_states,
    optimizer_tensors,
    start_saving,
)
from paw.distributed.parallel import DistributedRanks, read_variables
from paw.distributed.ranks import Ranks, full_tensor
from paw.guards import UpdateGuard
from paw.model.attention import decoder_layers
from paw.model.policy import Policy

WAYS = ("gathered", "shards", "background")
REPEATS = 3
SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_000,
}


def main() -> None:
    rank, world_size, on_host = read_variables()
    ranks = DistributedRanks.join(rank, world_size, on_host, torch.device("cpu"))
    learner = make_learner(ranks)
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit("paw/checkpoint"),
        "device": cpu_name(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "ranks": 2,
        "load": f"{os.getloadavg()[0]:.1f}",
        "parameters": learner.policy.lm.num_parameters(),
    }
    folder = Path(ranks.broadcast_from_rank0(tempfile.mkdtemp, str))
    records = []
    for repeat in range(REPEATS):
        for way in WAYS:
            ranks.gather(0)  # a common start
            if way == "gathered":
                seconds = save_gathered(learner, ranks, folder)
            else:
                seconds = save_shards(learner, ranks, folder, background=way == "background")
            checkpoint_bytes = sum(path.stat().st_size for path in folder.glob("step_000001/*"))
            columns = {"way": way, "repeat": repeat, "gib": round(checkpoint_bytes / 2**30, 2)}
            records.append(common | columns | seconds)
            ranks.gather(0)
            shutil.rmtree(folder, ignore_errors=True)
    if ranks.first:
        write(RESULTS / "checkpoints_cpu.csv", records)
    os._exit(0)


def make_learner(ranks: DistributedRanks) -> Learner:
    """A sharded policy with an optimizer that has made a step."""
    policy = Policy(Qwen2ForCausalLM(Qwen2Config(**SHAPE)))
    ranks.shard(policy, torch.float32, layers=decoder_layers(policy))
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return Learner("", policy, optimizer, UpdateGuard(1))


def save_gathered(learner: Learner, ranks: Ranks, folder: Path) -> dict[str, float]:
    started = time.perf_counter()
    parameters = learner.parameters.items()
    files = {
        "model": full_tensors(parameters),
        "optimizer": full_tensors(optimizer_tensors(learner.optimizer, parameters)),
    }
    if ranks.first:
        checkpoint.save(folder, 1, files, {})
    else:
        for tensors in files.values():
            for _ in tensors:
                pass  # reading takes part in gathering the tensor
    ranks.gather(0)
    seconds = round(time.perf_counter() - started, 3)
    return {"waits_s": seconds, "there_s": seconds}


def full_tensors(shards: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gathers one tensor at a time, when it is read."""
    for name, tensor in shards:
        yield name, full_tensor(tensor.detach())


def save_shards(
    learner: Learner, ranks: Ranks, folder: Path, *, background: bool
) -> dict[str, float]:
    started = time.perf_counter()
    saving = start_saving(
        [learner],
        ranks,
        step=1,
        folder=folder,
        random_states=capture_random_states(),
        background=background,
    )
    trains_again = time.perf_counter()
    while not all(ranks.gather(saving.done)):
        time.sleep(0.1)
    written = time.perf_counter()
    saving.publish(1)
    published = time.perf_counter()
    return {
        "waits_s": round(trains_again - started + published - written, 3),
        "there_s": round(published - started, 3),
    }


if __name__ == "__main__":
    main()
