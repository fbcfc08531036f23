"""What an experiment writes: markdown tables, CSV, JSON, figures."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paw.errors import UserError
from paw.files import cause, write_file
from paw.tools.experiment.stats import Interval


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; None shows as "-"."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def points(shown: Interval | None, *, sign: bool = False) -> str | None:
    """A share as "61.3 [55.0, 67.6]", without brackets where there is no interval."""
    if shown is None:
        return None
    form = f"{{:{'+' if sign else ''}.1f}}"
    low, high = (None if end is None else form.format(100 * end) for end in (shown.low, shown.high))
    return form.format(100 * shown.mean) + ("" if low is None else f" [{low}, {high}]")


def write(out: Path, name: str, *, text: str, records: list[dict[str, Any]], figure: Any, summary: Any = None) -> None:
    """NAME.md, NAME.csv and NAME.png, summary.json where there is one; says so on stdout after the text itself."""
    from paw.tools.overhead import write_csv  # loads matplotlib

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / f"{name}.md", text)
        write_csv(out / f"{name}.csv", records)
        write_file(out / f"{name}.png", partial(figure.savefig, dpi=150))
        if summary is not None:
            write_file(out / "summary.json", json.dumps(summary, indent=1))
    except OSError as error:
        raise UserError(f"--out {out}: {cause(error)}") from None
    print(f"{text}\n{out / name}.md, .csv, .png")
