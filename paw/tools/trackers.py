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


class Tracker(ABC):
    """Sends the configuration and each update's numbers, on the first rank. UserError where its package is missing."""

    package = ""
    log: Callable[[int, dict[str, float]], None] | None = None

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UserError(f"run.trackers names '{self.package}', which is not installed: pip install {self.package}")

    @abstractmethod
    def open(self, run: "Run", config: dict[str, Any]) -> None:
        """Begin: set `log`, which gets the numbers of an update, and `close`."""

    def on_start(self, run: "Run") -> None:
        if run.ranks.first:
            self.open(run, run.config.model_dump(mode="json"))

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        if self.log:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self.log(run.step, {name: value for name, value in numbers.items() if math.isfinite(value)})

    def on_end(self, run: "Run") -> None:
        if self.log:
            self.close()

    close: Callable[[], None]


class TensorBoard(Tracker):
    """Event files in the run's own folder. Those of updates that a resumed run repeats are purged."""

    package = "tensorboard"

    def open(self, run: "Run", config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.step + 1 if run.step else 0)
        writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", 0)

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        self.log, self.close = log, writer.close


class Wandb(Tracker):
    """A resumed run goes on in the same W&B run, whose id lies in the run directory."""

    package = "wandb"

    def open(self, run: "Run", config: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports]

        id_file, folder = run.directory / "wandb_id.txt", run.directory
        off = dict.fromkeys(("disable_git", "disable_code", "x_disable_stats", "x_disable_meta"), True)
        known = id_file.read_text().strip() if id_file.exists() else None
        options = {"id": known, "resume": "allow", "config": config, "settings": wandb.Settings(console="off", **off)}
        opened = wandb.init(project="paw", name=folder.name, dir=str(folder), **options)
        write_file(id_file, opened.id)
        self.log, self.close = lambda step, numbers: opened.log(numbers, step=step), opened.finish


class Trackio(Tracker):
    package = "trackio"

    def open(self, run: "Run", config: dict[str, Any]) -> None:
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import trackio  # pyright: ignore[reportMissingImports]

        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        resume = "allow" if run.step else "never"
        opened = trackio.init(project="paw", name=run.directory.name, config=config, resume=resume, **quiet)
        self.log, self.close = lambda step, numbers: opened.log(numbers, step=step), opened.finish
