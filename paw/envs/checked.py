"""Checks data of files and requests with pydantic, and reports problems in one line."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from paw.errors import UserError

T = TypeVar("T")
FIRST_ERROR = Field(fail_fast=True)
"""Stops at the first error in a list: `Annotated[list[int], FIRST_ERROR]`.

Otherwise a million wrong items cause a million errors.
"""
_adapter = functools.cache(TypeAdapter)


class Strict(BaseModel):
    """A model without conversions: a string must be a string, and a number a number. Other keys are
    ignored."""

    model_config = ConfigDict(strict=True)


def checked(kind: type[T], value: Any, origin: str) -> T:
    """Return `value` as a `kind`. Bytes are parsed as JSON.

    Raises UserError, which begins with `origin`, if it is not of this kind.
    """
    try:
        if isinstance(value, bytes):
            return _adapter(kind).validate_json(value, strict=True)
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise UserError(f"{origin}: {problem(error)}") from None


def problem(error: ValidationError) -> str:
    """Describe the first problem: where it is, what was expected, and what is there instead."""
    first_error = error.errors()[0]
    location = "".join(f"{location_part}: " for location_part in first_error["loc"])
    message = first_error["msg"].removeprefix("Value error, ")
    if first_error["type"] in ("missing", "json_invalid"):
        return f"{location}{message}"
    return f"{location}{message}, not {first_error['input']!r:.60}"


def json_lines(path: Path, kind: type[T], origin: str) -> Iterator[tuple[int, T]]:
    """Yield (offset in bytes, content) for each non-empty line of a file.

    Raises UserError, which names the line, if one is not of the `kind`; OSError if reading fails.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                try:
                    yield offset, checked(kind, line, f"{origin}, line {number}")
                except UserError as error:
                    if line.endswith(b"\n"):
                        raise
                    raise UserError(f"{error} (the last line: is the file cut off?)") from None
            offset += len(line)
