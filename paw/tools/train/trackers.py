"""Trackers, each a callback named in run.trackers: TensorBoard, Weights & Biases, Trackio, MLflow.

Each uses tracking.project, name and tags. A resumed run continues the same run of the tracker,
whose id is kept in the run directory. Updates that are repeated after a resume are not sent again,
so the tracker keeps its values. TensorBoard gets them again and replaces its own.
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

from paw.config.keys import flatten
from paw.errors import UserError, masked
from paw.io.files import write_file

if TYPE_CHECKING:
    from paw.run import Run


Opened = tuple[str, Callable[[int, dict[str, float]], None], Callable[[], object]]
"""(id of the tracker's run, function that logs an update's numbers, function that ends the run).

The id is "" if repeated updates replace the tracker's values."""


class Tracker(ABC):
    """Sends the configuration and each update's numbers, on the first rank.

    Raises UserError if the tracker's package is missing.
    """

    package = ""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UserError(
                f"run.trackers names '{self.package}', which is not installed: "
                f"pip install {self.package}"
            )
        # Set by `on_start`, on the first rank only.
        self._file: Path | None = None
        self._id = ""
        self._log: Callable[[int, dict[str, float]], None] | None = None
        self._close: Callable[[], object] | None = None
        self._last = -1
        """The last update sent."""

    @abstractmethod
    def open(self, run: "Run", config: dict[str, Any], previous_id: str) -> Opened:
        """Start a run in the tracker, or continue the one with `previous_id`, if that is not ""."""

    def on_start(self, run: "Run") -> None:
        if not run.ranks.first:
            return
        self._file = run.directory / f"{self.package}_id.txt"
        remembered = self._file.read_text().split() if self._file.exists() else []
        previous_id = remembered[0] if remembered else ""
        config = masked(run.config.model_dump(mode="json"))
        self._id, self._log, self._close = self.open(run, config, previous_id)

        continues = self._id == previous_id and len(remembered) > 1
        self._last = int(remembered[1]) if continues else -1
        self._remember()

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        if self._log is None or run.step <= self._last:
            return
        numbers = {}
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                numbers[name] = value
        self._log(run.step, numbers)
        self._last = run.step
        self._remember()

    def on_end(self, run: "Run") -> None:
        if self._close:
            self._close()

    def _remember(self) -> None:
        """Write down the id of the tracker's run, and the last update sent."""
        if self._id and self._file:
            write_file(self._file, f"{self._id} {self._last}")


def run_name(run: "Run") -> str:
    """Return tracking.name, or the name of the run's folder if that is not set."""
    return run.config.tracking.name or run.directory.name


class TensorBoard(Tracker):
    """Event files in the run's own folder.

    The events of updates that a resumed run repeats are purged.
    """

    package = "tensorboard"

    def open(self, run: "Run", config: dict[str, Any], previous_id: str) -> Opened:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = run.step + 1 if run.step else 0
        writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge_step)
        description = [
            f"project: {run.config.tracking.project}",
            f"name: {run_name(run)}",
            f"tags: {', '.join(run.config.tracking.tags)}",
        ]
        config_text = json.dumps(config, indent=1, default=str)
        writer.add_text("run", "\n\n".join(description), run.step)
        writer.add_text("config", f"```json\n{config_text}\n```", run.step)

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return "", log, writer.close


class Wandb(Tracker):
    package = "wandb"

    def open(self, run: "Run", config: dict[str, Any], previous_id: str) -> Opened:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        wandb_run = wandb.init(
            project=run.config.tracking.project,
            name=run_name(run),
            tags=run.config.tracking.tags,
            dir=str(run.directory),
            config=config,
            id=previous_id or None,
            resume="allow",
            settings=settings,
        )

        def log(step: int, numbers: dict[str, float]) -> None:
            wandb_run.log(numbers, step=step)

        return wandb_run.id, log, wandb_run.finish


class Trackio(Tracker):
    """Trackio finds a run by its name. It has no tags, so they go into the configuration."""

    package = "trackio"

    def open(self, run: "Run", config: dict[str, Any], previous_id: str) -> Opened:
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import trackio

        trackio_run = trackio.init(
            project=run.config.tracking.project,
            name=run_name(run),
            config=config,
            resume="allow" if previous_id or run.step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

        def log(step: int, numbers: dict[str, float]) -> None:
            trackio_run.log(numbers, step=step)

        return trackio_run.id, log, trackio_run.finish


class Mlflow(Tracker):
    """Logs to MLFLOW_TRACKING_URI or, if that is not set, to files in the run's own folder."""

    package = "mlflow"

    def open(self, run: "Run", config: dict[str, Any], previous_id: str) -> Opened:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Otherwise it would use a database, which needs more than mlflow-skinny.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow.entities

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.directory / "mlruns").as_uri()
        client = mlflow.MlflowClient(uri)
        try:
            client.update_run(previous_id, status="RUNNING")
            run_id = previous_id
        except mlflow.MlflowException:  # there is no such run yet, or it was deleted in MLflow
            run_id = _create_mlflow_run(client, run, config)

        def log(step: int, numbers: dict[str, float]) -> None:
            now_ms = int(time.time() * 1000)
            make_metric = mlflow.entities.Metric
            metrics = [make_metric(name, value, now_ms, step) for name, value in numbers.items()]
            client.log_batch(run_id, metrics)

        def close() -> None:
            client.set_terminated(run_id, "FAILED" if run.failed else "FINISHED")

        return run_id, log, close


def _create_mlflow_run(client: Any, run: "Run", config: dict[str, Any]) -> str:
    """Create a run with tags and configuration in its project's experiment. Returns its id."""
    from mlflow.entities import Param

    project = run.config.tracking.project
    experiment = client.get_experiment_by_name(project)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(project)
    tags = dict.fromkeys(run.config.tracking.tags, "true")
    run_id = client.create_run(experiment_id, run_name=run_name(run), tags=tags).info.run_id

    params = [Param(key, str(value)) for key, value in flatten(config).items()]
    for start in range(0, len(params), 100):  # MLflow takes at most 100 at a time
        client.log_batch(run_id, params=params[start : start + 100])
    return run_id
