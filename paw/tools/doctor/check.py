"""One thing that `paw doctor` has looked at."""

from typing import Literal, NamedTuple

MARKS = {"ok": "ok", "absent": "-", "missing": "MISSING"}


class Check(NamedTuple):
    state: Literal["ok", "absent", "missing"]
    """Absent is what only some runs need, missing what all need."""
    text: str
    """What it is, with its version or what to do about it, in one line."""

    def line(self) -> str:
        return f"  {MARKS[self.state]:8} {self.text}"
