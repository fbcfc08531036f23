"""The progress of a run, and whether it can be saved after a failure."""

from dataclasses import dataclass

from paw.guards import TrainingStopped


@dataclass(kw_only=True)
class RunProgress:
    """How far a run is.

    An update goes through the phases rollout, score, update, sync and eval; `save` may come after
    any of them. `update` changes the weights; `step` counts it before `sync` begins.
    """

    step: int = 0
    """Updates done; the weight version."""
    logged: int = 0
    """The step of the newest line of metrics. Resuming a checkpoint needs the line of its step."""
    saved: int = 0
    """The step of the newest checkpoint on disk."""
    phase: str = "start"
    """The current or last phase: start, the name of a stage, or save."""

    @property
    def lacks_only_its_metrics(self) -> bool:
        """Whether the newest update is complete except for its line of metrics."""
        return self.logged < self.step and self.phase in ("sync", "eval")

    def can_be_saved(self, error: BaseException) -> bool:
        """Whether the newest update is unsaved and `error` left the run's state intact."""
        if self.phase == "start":  # nothing has been done
            return False
        if self.phase == "update":  # the weights may already have changed
            return False
        if self.phase == "save":  # saving is what failed
            return False
        if self.phase == "score" and isinstance(error, TrainingStopped):  # the weights diverged
            return False
        return self.logged == self.step and self.saved != self.step
