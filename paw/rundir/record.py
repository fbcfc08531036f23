"""run.json: a description of a run, when and with what changes it was resumed, and how it ended."""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from paw.errors import UserError, masked
from paw.io.files import json_object, text_of, write_file, writing
from paw.rundir.directory import OpenDirectory


class RunRecord:
    """Writes run.json.

    It is a context manager. An exception that leaves it is recorded as the end of the run. A killed
    process records no end. If the run's directory was renamed, the end is written to its new place.
    If it was deleted, nothing is written.
    """

    def __init__(self, about: dict[str, Any], directory: OpenDirectory) -> None:
        self.about = dict(about)
        self._directory = directory
        self._path = directory.path / "run.json"
        self._started = time.monotonic()
        self._earlier_s = 0.0
        """Wall time of the run before it was resumed."""

    def resume(self, earlier: dict[str, Any], *, update: int, notes: Sequence[str]) -> None:
        """Carry over the history in `earlier`, the previous content of run.json.

        The run continues from `update`. `notes` say what has changed since.
        """
        for key in ("started", "warmup_s"):
            if key in earlier:
                self.about[key] = earlier[key]
        wall_s = earlier.get("wall_s")
        if isinstance(wall_s, float):
            self._earlier_s = wall_s
        resumed = earlier.get("resumed")
        if not isinstance(resumed, list):
            resumed = []
        resumed.append({"update": update, "at": now(), "notes": list(notes)})
        self.about["resumed"] = resumed

    def write(self) -> None:
        """Write the file. Raises UserError if it cannot be written."""
        wall_s = round(self._earlier_s + time.monotonic() - self._started, 1)
        with writing(self._path):
            write_file(self._path, json.dumps(masked(self.about | {"wall_s": wall_s}), indent=1))

    def end(self, how: str, why: str = "") -> None:
        """Write how the run ended: `how` is finished, stopped or failed."""
        self.about["ended"] = {"how": how, "why": why, "at": now()}
        self.write()

    def __enter__(self) -> Self:
        self.write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if not error or not kind:
            return
        directory = self._directory.where()
        if directory is None:
            return
        self._path = directory / self._path.name
        reason = f"{kind.__name__}: {error}"
        if isinstance(error, UserError):
            reason = str(error)
        with suppress(UserError):  # the disk may be what failed
            self.end("failed", reason)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_info(run_dir: Path) -> dict[str, Any]:
    """Return the content of run.json, empty if it is missing or damaged."""
    return json_object(text_of(run_dir / "run.json")) or {}


def code_commit() -> str:
    """Return this checkout's commit, with "-dirty" if changed, or "" outside a checkout."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
