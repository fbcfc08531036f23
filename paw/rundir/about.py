"""The description of a run for run.json and its first lines: versions, machine, model, games."""

import platform
from pathlib import Path
from typing import Any

import torch

from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs.base import EnvFactory
from paw.model.policy import Policy
from paw.rundir.record import code_commit
from paw.version import __version__


def describe_run(
    config: Config, policy: Policy, factory: EnvFactory, ranks: Ranks
) -> dict[str, Any]:
    """Return the content of run.json, except how the run's parts were built."""
    device = policy.device
    threads = torch.get_num_threads()
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        processes = _processes(ranks.world_size, threads)
        device_name = f"CPU ({platform.machine()}, {processes})"
    return {
        "paw": __version__,
        "commit": code_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name,
        "ranks": ranks.world_size,
        "threads": threads,
        "engine": config.engine.type,
        "model": config.model.path,
        "parameters": policy.lm.num_parameters(),
        "vocabulary": policy.head_weight.shape[0],
        "games": factory.fingerprint(),
    }


def _processes(ranks: int, threads: int) -> str:
    """Return "8 threads", "2 processes of 1 thread", ..."""
    threads_text = "1 thread" if threads == 1 else f"{threads} threads"
    if ranks == 1:
        return threads_text
    return f"{ranks} processes of {threads_text}"


def header_lines(directory: Path, info: dict[str, Any], config: Config) -> list[str]:
    """Return the first lines that a run prints. `info` is the content of run.json."""
    world_model = "no world model"
    if config.wm.enabled:
        world_model = f"PaW: {config.wm.loss}, alpha {config.wm.alpha:g}"
    episodes = f"{config.rollout.tasks} x {config.rollout.group_size} episodes an update"
    return [
        f"run {directory}",
        f"model {info['model']}: {info['parameters']:,} parameters, "
        f"vocabulary {info['vocabulary']:,}",
        f"{info['device']}, {info['dtype']}, engine {info['engine']}, "
        f"head backend {info['backend']}, games {info['games']}",
        f"{config.advantage.type}, {world_model}, {episodes}",
    ]
