"""The file of `paw rollout`, of a JSON object for each turn."""

import json
from dataclasses import asdict
from typing import TextIO

import numpy as np

from paw.types import Group


def write_turns(groups: list[Group], file: TextIO) -> None:
    """Write a JSON object for each turn, one per line."""
    for group in groups:
        for trajectory in group.trajectories:
            episode = {
                "task": trajectory.task.id,
                "kind": trajectory.task.kind,
                "member": trajectory.member,
            }
            for step, turn in enumerate(trajectory.turns):
                record = {**episode, "step": step, **asdict(turn)}
                file.write(json.dumps(record, default=np.ndarray.tolist) + "\n")
