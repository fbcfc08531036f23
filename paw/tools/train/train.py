"""`paw train`, and `paw.train()`: training with what the tools prepare."""

from pathlib import Path

from paw import trainer
from paw.config.sections import Config
from paw.tools.train.preparation import PREPARATION


def train(config: Config, *, resume: str = "", numbered: bool = False) -> Path:
    """Train to config.run.updates and write the run directory; returns the path of the report.

    `resume` continues a run: "auto" from the newest checkpoint that verifies, or from one by its
    name, "step_000100". `numbered` takes run.name as a stem: a new run is NAME-2 if there is a
    NAME, and so on, and `resume` means the one of the highest number. Raises UserError for a
    mistake of the user; checkpoints stay.
    """
    return trainer.train(config, resume=resume, numbered=numbered, preparation=PREPARATION)
