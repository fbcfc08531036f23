"""`paw train`, and `paw.train()`: trains with what the tools prepare."""

from pathlib import Path

from paw import trainer
from paw.config.sections import Config
from paw.tools.train.preparation import PREPARATION


def train(config: Config, *, resume: str = "", numbered: bool = False) -> Path:
    """Train to config.run.updates and write the run directory. Returns the report's path.

    `resume` continues a run: with "auto" from the newest checkpoint that verifies, or from one
    given by name, "step_000100". `numbered` treats run.name as a stem: a new run is NAME-2 if NAME
    exists, and so on, and `resume` means the run with the highest number. Raises UserError for a
    mistake of the user. Checkpoints stay.
    """
    return trainer.train(config, resume=resume, numbered=numbered, preparation=PREPARATION)
