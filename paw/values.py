"""What configurations are made of: sections, ranges, and text that a file can hold."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

LONGEST_TEXT, LONGEST_NAME = 4096, 255
"""Characters of a value, bytes of a file's name."""
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
    """`value` itself. ValueError for text that config.toml, a terminal or a file system could not hold."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for text in (str(part) for part in parts if isinstance(part, str | Path)):  # deeper ones fit no key
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"{len(text):,} characters are too many, at most {LONGEST_TEXT:,}")
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("it is no text: it holds NUL, or bytes that are not UTF-8")
        if " " not in text and any(len(part.encode()) > LONGEST_NAME for part in text.split("/")):  # no sentence
            raise ValueError(f"a name in it has more than {LONGEST_NAME} bytes")
    return value


@dataclass(frozen=True)
class Only:
    """Metadata of a key that applies where `key` has one of `values`, or has none of those `excluded`; without either,
    where it is neither 0 nor unset."""

    key: str
    values: tuple[Any, ...] = ()
    excluded: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.excluded:
            return f"{self.key} other than {' or '.join(map(repr, self.excluded))}"
        return self.key + (f" = {' or '.join(map(repr, self.values))}" if self.values else "")

    def holds(self, value: Any) -> bool:
        """Whether it applies where `key` has that value."""
        if self.excluded:
            return value not in self.excluded
        return value in self.values if self.values else bool(value)


class Section(BaseModel):
    """A table of a recipe. The string below a key is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    ONLY: ClassVar[Only | None] = None
    """Beside what the whole section applies."""

    _check_texts = field_validator("*", mode="before")(check_texts)


class PluginSection(Section):
    """A section whose `KEY` names a plug-in of a kind."""

    KIND: ClassVar[str]
    KEY: ClassVar[str]
    NONE: ClassVar[str | None] = None
    """The name that means no plug-in."""
    WITHIN: ClassVar[tuple[str, ...]] = ()
    """Names of built-in plug-ins whose keys are the section's own: nothing is imported to check them."""

    def settings(self) -> dict[str, Any]:
        """The plug-in's own keys: what its function takes."""
        base = next(made for made in type(self).__mro__ if PluginSection in made.__bases__)
        return {key: getattr(self, key) for key in type(self).model_fields if key not in base.model_fields}
