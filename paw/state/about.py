"""What a run says of itself when it begins: in run.json, and in its first lines on the terminal."""

import platform
from typing import TYPE_CHECKING, Any

import torch

from paw import __version__
from paw.state.rundir import code_commit

if TYPE_CHECKING:
    from paw.run import Run


def about(run: "Run") -> dict[str, Any]:
    """Of run.json: versions, machine, model, games."""
    device = run.policy.device
    cpu = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    return {
        "paw": __version__,
        "commit": code_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "ranks": run.ranks.world,
        "threads": torch.get_num_threads(),
        "engine": run.config.rollout.engine,
        "model": run.config.model.path,
        "parameters": run.policy.lm.num_parameters(),
        "vocabulary": run.policy.head_weight.shape[0],
        "games": run.factory.fingerprint(),
        **run.info,
    }


def header_lines(run: "Run") -> list[str]:
    info, config = run.info, run.config
    world = f"PaW: {config.wm.loss}, alpha {config.wm.alpha:g}" if config.wm.enabled else "no world model"
    return [
        f"run {run.directory}",
        f"model {info['model']}: {info['parameters']:,} parameters, vocabulary {info['vocabulary']:,}",
        f"{info['device']}, engine {info['engine']}, head backend {info['backend']}, games {info['games']}",
        f"{config.advantage.estimator}, {world}, {config.rollout.tasks} x {config.rollout.group_size} episodes a step",
    ]
