"""The parts of configurations: sections, ranges, and text that a file can hold."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

LONGEST_TEXT = 4096
"""Maximum number of characters of a value."""
LONGEST_NAME = 255
"""Maximum number of bytes of a file's name."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seconds = Annotated[float, Field(gt=0.0, le=1e7)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Url = Annotated[str, Field(pattern=r"^https?://[^/\s]+")]


def check_texts(value: Any) -> Any:
    """Check `value` and return it.

    Checks a text or path, and those directly in a list or dict (no key takes deeper ones). Raises
    ValueError if config.toml, a terminal or a file system cannot hold one of them.
    """
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, list):
        parts = value
    else:
        parts = [value]
    for part in parts:
        if isinstance(part, str | Path):
            _check_text(str(part))
    return value


def _check_text(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{len(text):,} characters are too many, at most {LONGEST_TEXT:,}")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it is not valid text: it contains NUL, or bytes that are not UTF-8")
    if " " in text:  # a sentence, not a path
        return
    if any(len(name.encode()) > LONGEST_NAME for name in text.split("/")):
        raise ValueError(f"a name in it has more than {LONGEST_NAME} bytes")


def listed(value: Any) -> Any:
    """Return a list of one for a single text, and anything else unchanged."""
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Only:
    """Metadata of a key that applies only if `key` has one of `values`, or none of `excluded`.

    Without either, it applies if `key` is neither 0 nor unset.
    """

    key: str
    values: tuple[Any, ...] = ()
    excluded: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.excluded:
            return f"{self.key} != {' or '.join(map(repr, self.excluded))}"
        if self.values:
            return f"{self.key} = {' or '.join(map(repr, self.values))}"
        return self.key

    def holds(self, value: Any) -> bool:
        """Whether it applies if `key` has this value."""
        if self.excluded:
            return value not in self.excluded
        if self.values:
            return value in self.values
        return bool(value)


class Section(BaseModel):
    """A table of a recipe. The string below a key is its description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    ONLY: ClassVar[Only | None] = None
    """Condition for the section to apply."""

    _check_texts = field_validator("*", mode="before")(check_texts)


class PluginSection(Section):
    """A section whose `KEY` names a plug-in of a kind."""

    KIND: ClassVar[str]
    KEY: ClassVar[str]
    NONE: ClassVar[str | None] = None
    """The name that means no plug-in."""
    WITHIN: ClassVar[tuple[str, ...]] = ()
    """Names of built-in plug-ins whose keys are the section's own.

    They are checked without importing anything.
    """
    CHOICES: ClassVar[tuple[str, ...] | None] = None
    """Names of the built-in plug-ins that are meant for this section; None: all of the kind."""

    def settings(self) -> dict[str, Any]:
        """Return the plug-in's own keys with their values, the arguments of its function."""
        base = next(section for section in type(self).__mro__ if PluginSection in section.__bases__)
        return {
            key: getattr(self, key)
            for key in type(self).model_fields
            if key not in base.model_fields
        }
