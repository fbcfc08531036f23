"""run.json: what a run is, how often it was resumed and with what changed, how it ended."""

import json
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paw import __version__
from paw.errors import UserError, masked
from paw.files import json_object, text_of, write_file, writing
from paw.state.held import HeldDirectory

if TYPE_CHECKING:
    from paw.run import Run


class RunRecord:
    """A context manager: without `end`, an exception is what ended the run; a process that is killed leaves no end.

    `resumed_at` is the update a run goes on from, `notes` what has changed; None is a new run. The end of a run whose
    directory was renamed is written where it is now; nothing is, if it was deleted.
    """

    def __init__(
        self,
        directory: Path,
        about: dict[str, Any],
        *,
        resumed_at: int | None = None,
        notes: Sequence[str] = (),
        held: HeldDirectory | None = None,
    ) -> None:
        self._path = directory / "run.json"
        self._held = held
        self._began = time.monotonic()
        self._before_s, self.about = 0.0, dict(about)
        if resumed_at is not None:
            past = read_info(directory)
            self.about |= {key: past[key] for key in ("started", "warmup_s") if key in past}
            wall_s, resumed = past.get("wall_s"), past.get("resumed")
            self._before_s = float(wall_s) if isinstance(wall_s, float) else 0.0
            self.about["resumed"] = resumed if isinstance(resumed, list) else []
            self.about["resumed"].append({"update": resumed_at, "at": now(), "notes": list(notes)})

    def write(self) -> None:
        """Raises UserError where it cannot be written."""
        wall_s = round(self._before_s + time.monotonic() - self._began, 1)
        with writing(self._path):
            write_file(self._path, json.dumps(masked(self.about | {"wall_s": wall_s}), indent=1))

    def end(self, how: str, why: str = "") -> None:
        """`how`: finished, stopped or failed."""
        self.about["ended"] = {"how": how, "why": why, "at": now()}
        self.write()

    def __enter__(self) -> Self:
        self.write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error and kind:
            directory = self._held.where() if self._held else self._path.parent
            if directory is None:
                return
            self._path = directory / self._path.name
            with suppress(UserError):  # the disk may be what failed
                self.end("failed", str(error) if isinstance(error, UserError) else f"{kind.__name__}: {error}")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_info(run_dir: Path) -> dict[str, Any]:
    """What run.json holds; nothing where it is missing or damaged."""
    return json_object(text_of(run_dir / "run.json")) or {}


def code_commit() -> str:
    """Of this checkout, "-dirty" with changes; empty where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""


def about(run: "Run") -> dict[str, Any]:
    """Of run.json: versions, machine, model, games."""
    import torch  # what only reads a record does without

    device, threads, ranks = run.policy.device, torch.get_num_threads(), run.ranks.world_size
    each = f"{threads} thread{'s' * (threads > 1)}"
    cpu = f"CPU ({platform.machine()}, {f'{ranks} processes of {each}' if ranks > 1 else each})"
    return {
        "paw": __version__,
        "commit": code_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "ranks": ranks,
        "threads": threads,
        "engine": run.config.engine.type,
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
        f"{info['device']}, {info['dtype']}, engine {info['engine']}, head backend {info['backend']}, "
        f"games {info['games']}",
        f"{config.advantage.type}, {world}, {config.rollout.tasks} x {config.rollout.group_size} episodes a step",
    ]
