"""run.json: what a run is, when it was resumed and with what changes, and how it ended."""

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
from paw.files import json_object, text_of, write_file, writing
from paw.state.held import HeldDirectory


class RunRecord:
    """Writes run.json.

    A context manager: an exception that leaves it is recorded as the end of the run.
    A process that is killed leaves no end. If the run's directory was renamed, the end is written
    to where it is now; if it was deleted, nothing is.
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
        """`resumed_at` is the update that a resumed run continues from, None for a new run; `notes`
        say what has changed since."""
        self._path = directory / "run.json"
        self._held = held
        self._started = time.monotonic()
        self._earlier_s = 0.0
        """Wall time before the run was resumed."""
        self.about = dict(about)
        if resumed_at is not None:
            self._take_over(read_info(directory))
            self.about["resumed"].append({"update": resumed_at, "at": now(), "notes": list(notes)})

    def _take_over(self, past: dict[str, Any]) -> None:
        """Keep what the run.json of a resumed run says about the time before."""
        for key in ("started", "warmup_s"):
            if key in past:
                self.about[key] = past[key]
        wall_s = past.get("wall_s")
        if isinstance(wall_s, float):
            self._earlier_s = wall_s
        resumed = past.get("resumed")
        self.about["resumed"] = resumed if isinstance(resumed, list) else []

    def write(self) -> None:
        """Raises UserError if it cannot be written."""
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
        if error and kind:
            directory = self._held.where() if self._held else self._path.parent
            if directory is None:
                return
            self._path = directory / self._path.name
            why = str(error) if isinstance(error, UserError) else f"{kind.__name__}: {error}"
            with suppress(UserError):  # the disk may be what failed
                self.end("failed", why)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_info(run_dir: Path) -> dict[str, Any]:
    """The content of run.json; empty if it is missing or damaged."""
    return json_object(text_of(run_dir / "run.json")) or {}


def code_commit() -> str:
    """The commit of this checkout, "-dirty" if there are changes; empty if it is not a checkout."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
