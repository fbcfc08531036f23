"""Trackers, each a callback named in run.trackers: TensorBoard, Weights & Biases, Trackio, MLflow.

Each is told tracking.project, name and tags. A resumed run goes on as the same run in it, its id from the run
directory, and what the tracker has of updates that are repeated stays as it is, once.
"""

import importlib.util
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paw.errors import UserError, masked
from paw.files import write_file
from paw.keys import flatten

if TYPE_CHECKING:
    from paw.run import Run


Opened = tuple[str, Callable[[int, dict[str, float]], None], Callable[[], object]]
"""The id of the run there, or "" where repeated updates take the place of what is there; what takes the numbers of an
update; what ends it."""


class Tracker(ABC):
    """Sends the configuration and each update's numbers, on the first rank. UserError where its package is missing."""

    package = ""
    _log: Callable[[int, dict[str, float]], None] | None = None

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UserError(f"run.trackers names '{self.package}', which is not installed: pip install {self.package}")

    @abstractmethod
    def open(self, run: "Run", config: dict[str, Any], known: str) -> Opened:
        """Begin, or go on with the run of the id `known`."""

    def on_start(self, run: "Run") -> None:
        if run.ranks.first:
            self._file: Path = run.directory / f"{self.package}_id.txt"
            known, *step = (self._file.read_text().split() if self._file.exists() else []) or [""]
            self._id, self._log, self._close = self.open(run, masked(run.config.model_dump(mode="json")), known)
            self._last = int(step[0]) if step and self._id == known else -1
            self._remember()

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        if self._log and run.step > self._last:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self._log(run.step, {name: value for name, value in numbers.items() if math.isfinite(value)})
            self._last = run.step
            self._remember()

    def _remember(self) -> None:
        """Which run it is, and the last update that it has."""
        if self._id:
            write_file(self._file, f"{self._id} {self._last}")

    def on_end(self, run: "Run") -> None:
        if self._log:
            self._close()


def named(run: "Run") -> dict[str, str]:
    """Project and name, as the trackers take them."""
    return {"project": run.config.tracking.project, "name": run.config.tracking.name or run.directory.name}


class TensorBoard(Tracker):
    """Event files in the run's own folder. Those of updates that a resumed run repeats are purged."""

    package = "tensorboard"

    def open(self, run: "Run", config: dict[str, Any], known: str) -> Opened:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.step + 1 if run.step else 0)
        about = named(run) | {"tags": ", ".join(run.config.tracking.tags)}
        writer.add_text("run", "\n\n".join(f"{key}: {text}" for key, text in about.items()), run.step)
        writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", run.step)

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return "", log, writer.close


class Wandb(Tracker):
    package = "wandb"

    def open(self, run: "Run", config: dict[str, Any], known: str) -> Opened:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports]

        off: dict[str, Any] = dict.fromkeys(("disable_git", "disable_code", "x_disable_stats", "x_disable_meta"), True)
        about: dict[str, Any] = {**named(run), "tags": run.config.tracking.tags, "dir": str(run.directory)}
        settings = wandb.Settings(console="off", **off)
        opened = wandb.init(**about, config=config, id=known or None, resume="allow", settings=settings)
        return opened.id, lambda step, numbers: opened.log(numbers, step=step), opened.finish


class Trackio(Tracker):
    """Runs go by their names there; tags are part of the configuration."""

    package = "trackio"

    def open(self, run: "Run", config: dict[str, Any], known: str) -> Opened:
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import trackio  # pyright: ignore[reportMissingImports]

        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        resume = "allow" if known or run.step else "never"
        opened = trackio.init(**named(run), config=config, resume=resume, **quiet)
        return opened.id, lambda step, numbers: opened.log(numbers, step=step), opened.finish


class Mlflow(Tracker):
    """At MLFLOW_TRACKING_URI; where that is not set, files in the run's own folder."""

    package = "mlflow"

    def open(self, run: "Run", config: dict[str, Any], known: str) -> Opened:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its data base needs more than mlflow-skinny
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (run.directory / "mlruns").as_uri())
        try:
            client.update_run(known, status="RUNNING")
            opened = known
        except MlflowException:  # a new one, or it was deleted there
            about = named(run)
            project = client.get_experiment_by_name(about["project"])
            project_id = project.experiment_id if project else client.create_experiment(about["project"])
            tags = dict.fromkeys(run.config.tracking.tags, "true")
            opened = client.create_run(project_id, run_name=about["name"], tags=tags).info.run_id
            params = [Param(key, str(value)) for key, value in flatten(config).items()]
            for start in range(0, len(params), 100):  # as many as MLflow takes at a time
                client.log_batch(opened, params=params[start : start + 100])

        def log(step: int, numbers: dict[str, float]) -> None:
            now = int(time.time() * 1000)
            client.log_batch(opened, [Metric(name, value, now, step) for name, value in numbers.items()])

        return opened, log, lambda: client.set_terminated(opened, "FAILED" if run.failed else "FINISHED")
