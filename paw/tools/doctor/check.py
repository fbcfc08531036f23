"""The result of one check of `paw doctor`."""

from typing import Literal, NamedTuple

MARKS = {"ok": "ok", "absent": "-", "missing": "MISSING"}


class Check(NamedTuple):
    state: Literal["ok", "absent", "missing"]
    """"absent" if only some runs need it, "missing" if all do."""
    text: str
    """What it is, with its version or what to do about it, in one line."""

    def line(self) -> str:
        return f"  {MARKS[self.state]:8} {self.text}"
