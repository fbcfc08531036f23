"""run.json: what a run is, when it was resumed and with which changes, and how it ended."""

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

    A context manager: an exception that leaves it is recorded as the end of the run. A process that
    is killed records no end. If the run's directory was renamed, the end is written to its new
    place; if it was deleted, nothing is written.
    """

    def __init__(self, about: dict[str, Any], directory: OpenDirectory) -> None:
        self.about = dict(about)
        self._directory = directory
        self._path = directory.path / "run.json"
        self._started = time.monotonic()
        self._earlier_s = 0.0
        """Wall time before the run was resumed."""

    def resume(self, earlier: dict[str, Any], *, update: int, notes: Sequence[str]) -> None:
        """Keep what `earlier`, the content of run.json before, says about the earlier time.

        The run continues from `update`; `notes` say what has changed since.
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
    """The content of run.json; empty if it is missing or damaged."""
    return json_object(text_of(run_dir / "run.json")) or {}


def code_commit() -> str:
    """The commit of this checkout, with "-dirty" if there are changes; "" if it is no checkout."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
