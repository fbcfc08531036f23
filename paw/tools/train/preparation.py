"""Prepares a run before it loads a model: finds the start model and checks the memory plan."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from paw.build import Preparation
from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.errors import to_stderr
from paw.rundir.resume import recorded_start_model
from paw.tools.plan.fit import check_machine
from paw.tools.warmup.warmup import ensure_warm_model

PLANNED = 64
"""On a CPU a run is planned only if the host has fewer bytes than this per byte of the model."""


def start_model(
    resumed: Path | None,
    config: Config,
    message: Callable[[str], None] = to_stderr,
    ranks: Ranks | None = None,
) -> str:
    """Return the model that a run starts from: config.model.path, or a warm-up model.

    All `ranks` must call it. The warm-up model is made now if it is not cached. A run resumed from
    its directory `resumed` keeps its original warm-up model if that still exists, because later
    code may make one with another tokenizer.
    """
    ranks = ranks or Ranks()

    def known_model() -> str:
        if config.model.path != "quickstart":
            return config.model.path
        return recorded_start_model(resumed) if resumed else ""

    known = ranks.broadcast_from_rank0(known_model)
    if known:
        return known
    factory = ranks.run_on_all(lambda: make_factory(config))
    folder = ensure_warm_model(config, factory, message, ranks)
    return ranks.broadcast_from_rank0(lambda: str(folder.resolve()))


def check_memory(config: Config, device: torch.device, ranks: Ranks) -> None:
    """Raise UserError if, by `paw plan`, model and optimizer cannot fit this machine.

    On a CPU, a model whose files are small relative to memory is not planned for.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = Path(config.model.path).glob("*.safetensors")
    file_bytes = sum(file.stat().st_size for file in files)
    if device.type == "cpu" and 0 < file_bytes * PLANNED < memory:
        return
    gpu_gib = None
    if device.type == "cuda":
        gpu_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    check_machine(config, gpus=ranks.world_size, gpu_gib=gpu_gib, on_host=ranks.on_host)


PREPARATION = Preparation(start_model=start_model, check_memory=check_memory)
