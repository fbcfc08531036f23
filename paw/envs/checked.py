"""What files and requests hold, checked by pydantic; one line says what is wrong."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from paw.errors import UserError

T = TypeVar("T")
FIRST_ERROR = Field(fail_fast=True)
"""For a list, as `Annotated[list[int], FIRST_ERROR]`: a million wrong items are one error, not a million."""
_adapter = functools.cache(TypeAdapter)


class Strict(BaseModel):
    """A text is a text, a number a number; keys that it does not have are ignored."""

    model_config = ConfigDict(strict=True)


def checked(kind: type[T], value: Any, where: str) -> T:
    """`value` as a `kind`; of bytes the JSON. UserError, beginning with `where`, if it is none."""
    try:
        if isinstance(value, bytes):
            return _adapter(kind).validate_json(value, strict=True)
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: {problem(error)}") from None


def problem(error: ValidationError) -> str:
    """The first one: where, what it should be, and what it is."""
    first = error.errors()[0]
    place = "".join(f"{part}: " for part in first["loc"])
    value = "" if first["type"] in ("missing", "json_invalid") else f", not {first['input']!r:.60}"
    return f"{place}{first['msg'].removeprefix('Value error, ')}{value}"


def json_lines(path: Path, kind: type[T], origin: str) -> Iterator[tuple[int, T]]:
    """(offset, what it is) of each line of a file but empty ones.

    UserError, naming the line; OSError.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                cut = "" if line.endswith(b"\n") else " (the last line: is the file cut off?)"
                try:
                    yield offset, checked(kind, line, f"{origin}, line {number}")
                except UserError as error:
                    raise UserError(f"{error}{cut}") from None
            offset += len(line)
