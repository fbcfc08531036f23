"""`paw train`, and `paw.train()`: trains with what the tools prepare."""

import threading
from pathlib import Path

from paw import trainer
from paw.config.recipe import check_config
from paw.config.sections import Config
from paw.errors import UserError, short_repr
from paw.tools.train.preparation import PREPARATION

_training = threading.Lock()
"""Held during a run: runs of one process have its random states and torch's settings in common."""


def train(config: Config, *, resume: str = "", numbered: bool = False) -> Path:
    """Train to config.run.updates and write the run directory. Returns the report's path.

    `resume` continues a run: with "auto" from the newest checkpoint that verifies, or from one
    given by name, "step_000100". `numbered` treats run.name as a stem: a new run is NAME-2 if NAME
    exists, and so on, and `resume` means the run with the highest number. Raises UserError for a
    mistake of the user. Checkpoints stay.

    In a thread other than the main one, Ctrl-C and SIGTERM do not stop it between updates.
    """
    check_config(config, "paw.train")
    if not isinstance(resume, str):
        raise UserError(
            f"paw.train: resume = {short_repr(resume)}: it must be 'auto', or the name of a "
            "checkpoint, such as 'step_000100'"
        )
    if not _training.acquire(blocking=False):
        raise UserError(
            "paw.train: this process trains already; begin this run after that one, "
            "or in another process"
        )
    try:
        return trainer.train(config, resume=resume, numbered=numbered, preparation=PREPARATION)
    finally:
        _training.release()
