"""How long training waits for a checkpoint of two ranks (gloo, random weights, AdamW in float32): three ways in turn.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/trainer/checkpoints.py

`gathered`: rank 0 gathers and writes everything, as it was once; `shards`: each rank writes what it
holds; `background`: the same in a thread, from copies. waits_s: seconds that rank 0 cannot train
for it; there_s: until the checkpoint has its name; what training loses to the thread is in neither.
Writes bench/results/checkpoints_cpu.csv.
"""

import datetime
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors
import torch
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

WAYS, REPEATS = ("gathered", "shards", "background"), 3
SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "vocab_size": 32_000,
}


def main() -> None:
    ranks, rows = DistributedRanks.join(*read_variables(2), torch.device("cpu")), []
    policy = Policy(
        Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_attention_heads=12, num_key_value_heads=12))
    )
    ranks.shard(policy, torch.float32, layers=decoder_layers(policy))
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    learner = Learner("", policy, optimizer, UpdateGuard(1))
    about = {
        "date": datetime.date.today().isoformat(),
        "commit": commit("paw/checkpoint"),
        "device": cpu_name(),
    }
    about |= {"torch": torch.__version__, "safetensors": safetensors.__version__, "ranks": 2}
    about |= {"load": f"{os.getloadavg()[0]:.1f}", "parameters": policy.lm.num_parameters()}
    folder = Path(ranks.broadcast_from_rank0(tempfile.mkdtemp, str))
    for repeat in range(REPEATS):
        for way in WAYS:
            ranks.gather(0)
            found = (
                gathered(learner, ranks, folder)
                if way == "gathered"
                else sharded(learner, ranks, folder, way)
            )
            size = sum(path.stat().st_size for path in folder.glob("step_000001/*")) / 2**30
            rows.append(about | {"way": way, "repeat": repeat, "gib": round(size, 2)} | found)
            ranks.gather(0)
            shutil.rmtree(folder, ignore_errors=True)
    if ranks.first:
        write(RESULTS / "checkpoints_cpu.csv", rows)
    os._exit(0)


def gathered(learner: Learner, ranks: Ranks, folder: Path) -> dict[str, float]:
    began, named = time.perf_counter(), learner.parameters.items()
    parts = {"model": named, "optimizer": optimizer_tensors(learner.optimizer, named)}
    whole = {
        stem: ((name, full_tensor(tensor.detach())) for name, tensor in of)
        for stem, of in parts.items()
    }
    if ranks.first:
        checkpoint.save(folder, 1, whole, {})
    else:
        sum(len(name) for pairs in whole.values() for name, _ in pairs)
    ranks.gather(0)
    return dict.fromkeys(("waits_s", "there_s"), round(time.perf_counter() - began, 3))


def sharded(learner: Learner, ranks: Ranks, folder: Path, way: str) -> dict[str, Any]:
    began = time.perf_counter()
    saving = start_saving(
        [learner],
        ranks,
        step=1,
        folder=folder,
        random_states=capture_random_states(),
        background=way == "background",
    )
    begun = time.perf_counter()
    while not all(ranks.gather(saving.done)):
        time.sleep(0.1)
    through = time.perf_counter()
    saving.publish(1)
    there = time.perf_counter()
    return {
        "waits_s": round(begun - began + there - through, 3),
        "there_s": round(there - began, 3),
    }


if __name__ == "__main__":
    main()
