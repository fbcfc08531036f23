"""Trackers, each a callback named in run.trackers: TensorBoard, Weights & Biases, Trackio."""

import importlib.util
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paw.errors import UserError
from paw.files import write_file

if TYPE_CHECKING:
    from paw.run import Run


Opened = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]


class Tracker(ABC):
    """Sends the configuration, and the numbers of each update, of the first rank.

    Raises UserError with the install command where its package is not installed.
    """

    package = ""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UserError(f"run.trackers names '{self.package}', which is not installed: pip install {self.package}")
        self._opened: Opened | None = None

    @abstractmethod
    def open(self, run: "Run", config: dict[str, Any]) -> Opened:
        """Begin; what logs the numbers of an update, and what ends it."""

    def on_start(self, run: "Run") -> None:
        if run.ranks.first:
            self._opened = self.open(run, run.config.model_dump(mode="json"))

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        if self._opened:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self._opened[0](run.step, {name: value for name, value in numbers.items() if math.isfinite(value)})

    def on_end(self, run: "Run") -> None:
        if self._opened:
            self._opened[1]()


class TensorBoard(Tracker):
    """Event files in the run's own folder. Those of updates that a resumed run repeats are purged."""

    package = "tensorboard"

    def open(self, run: "Run", config: dict[str, Any]) -> Opened:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.step + 1 if run.step else 0
        writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge)
        writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", 0)

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return log, writer.close


class Wandb(Tracker):
    """A resumed run goes on in the same W&B run, whose id lies in the run directory."""

    package = "wandb"

    def open(self, run: "Run", config: dict[str, Any]) -> Opened:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports]

        id_file, folder = run.directory / "wandb_id.txt", run.directory
        quiet = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
        )
        known = id_file.read_text().strip() if id_file.exists() else None
        options = {"id": known, "resume": "allow", "config": config, "settings": quiet}
        opened = wandb.init(project="paw", name=folder.name, dir=str(folder), **options)
        write_file(id_file, opened.id)
        return lambda step, numbers: opened.log(numbers, step=step), opened.finish


class Trackio(Tracker):
    package = "trackio"

    def open(self, run: "Run", config: dict[str, Any]) -> Opened:
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import trackio  # pyright: ignore[reportMissingImports]

        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        resume = "allow" if run.step else "never"
        opened = trackio.init(project="paw", name=run.directory.name, config=config, resume=resume, **quiet)
        return lambda step, numbers: opened.log(numbers, step=step), opened.finish
