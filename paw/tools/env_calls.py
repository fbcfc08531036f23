"""Calls of the tools that an environment offers, with arguments made from their schemas."""

import random
from typing import Any

from paw.envs.limited import CannotApply, arguments_problem
from paw.types import ToolCall

TRIES = 40
"""Arguments that are made for a call, until some fit."""
DEPTH = 6
"""Of arguments within arguments; a schema may refer to itself."""
PARTS = 500
"""Of the arguments of a call at most."""
TEXTS = {
    "date": "2024-05-17",
    "date-time": "2024-05-17T12:30:00Z",
    "time": "12:30:00Z",
    "email": "ada@example.com",
    "uri": "https://example.com/a",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "192.0.2.1",
}
"""By the `format` of a text."""
WORDS = (
    "a",
    "A1",
    "word",
    "two words",
    "7",
    "2024-05-17",
    "12:30",
    "ada@example.com",
    "https://example.com/a",
)
"""Texts of which one may fit a pattern."""


def valid_call(tool: dict[str, Any], number: int) -> ToolCall | None:
    """Call `number` of an episode, whose arguments fit the tool's schema and follow from `number`;
    None if none that fit are found."""
    name = tool["function"]["name"]
    schema = tool["function"]["parameters"]
    for attempt in range(TRIES):
        rng = random.Random(f"{name} {number} {attempt}")
        maker = _Maker(schema, rng)
        try:
            arguments = maker.value({"type": "object", **schema}, DEPTH)
            fits = (
                isinstance(arguments, dict)
                and maker.parts <= PARTS
                and not arguments_problem(schema, arguments)
            )
        except (
            CannotApply,
            ArithmeticError,
            TypeError,
            ValueError,
        ):  # of bounds such as 1e308, or of an older draft
            return None
        if fits:
            return ToolCall(name, arguments, f"call{number:05}")
        if maker.parts > PARTS:
            return None
    return None


class _Maker:
    """Makes values that may fit parts of the schema `root`; whether they do is the caller's to check."""

    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self.parts = 0

    def value(self, schema: Any, depth: int) -> Any:
        self.parts += 1
        if not isinstance(schema, dict) or depth == 0 or self.parts > PARTS:
            return None
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._rng.choice(schema["enum"])
        if schema.get("examples") and self._rng.random() < 0.5:
            return self._rng.choice(schema["examples"])
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"]), depth - 1)
        if schema.get("allOf"):
            return self.value(self._merged(schema, schema["allOf"]), depth - 1)
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                rest = {name: value for name, value in schema.items() if name != key}
                return self.value(self._merged(rest, [self._rng.choice(schema[key])]), depth - 1)
        match self._kind(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "integer":
                return int(self._number(schema))
            case "number":
                return self._number(schema)
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
        return self._text(schema)

    def _kind(self, schema: dict[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._rng.choice([one for one in kind if one != "null"] or kind)
        if kind:
            return kind
        if "properties" in schema:
            return "object"
        return "array" if "items" in schema else "string"

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """With all that is required, and some of the rest."""
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        optional = [
            name for name in properties if name not in required and self._rng.random() < 0.5
        ]
        return {
            name: self.value(properties.get(name, {}), depth - 1) for name in [*required, *optional]
        }

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        places = schema.get("prefixItems", [])
        count = max(schema.get("minItems", 1), len(places))
        count = int(min(count, schema.get("maxItems", count), PARTS))
        schemas = [*places, *[schema.get("items", {})] * count]
        return [self.value(one, depth - 1) for one in schemas[:count]]

    def _number(self, schema: dict[str, Any]) -> int | float:
        """A multiple of what it must be one of, near the smaller bound if there is one."""
        step = schema.get("multipleOf", 1)
        low, high = schema.get("minimum"), schema.get("maximum")
        if "exclusiveMinimum" in schema:
            low = schema["exclusiveMinimum"] + step
        if "exclusiveMaximum" in schema:
            high = schema["exclusiveMaximum"] - step
        if low is None:
            low = step if high is None or high >= step else high - 9 * step
        if high is None:
            high = low + 9 * step
        if high < low:  # exclusive bounds that are closer than a step
            return (low + high) / 2
        first, last = -(-low // step), high // step
        return (
            low
            if last < first
            else (first + self._rng.randint(0, min(9, int(last - first)))) * step
        )

    def _text(self, schema: dict[str, Any]) -> str:
        words = WORDS if "pattern" in schema else WORDS[:5]
        text = TEXTS.get(str(schema.get("format"))) or self._rng.choice(words)
        shortest = min(int(schema.get("minLength", 0)), PARTS)
        text = text.ljust(shortest, text[-1])
        return text[: int(schema.get("maxLength", len(text)))]

    def _referred(self, reference: str) -> Any:
        """The part of the schema that "#/a/b" refers to; None if there is none."""
        part: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, dict) else None
        return part

    def _merged(self, schema: dict[str, Any], parts: list[Any]) -> dict[str, Any]:
        """`schema` and its `parts` as one, as far as their keys differ or are properties."""
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for part in parts:
            if isinstance(part, dict) and "$ref" in part:
                part = self._referred(part["$ref"])
            if not isinstance(part, dict):
                continue
            properties = {**merged.get("properties", {}), **part.get("properties", {})}
            required = [*merged.get("required", []), *part.get("required", [])]
            merged = {**merged, **part}
            if properties:
                merged["properties"] = properties
            if required:
                merged["required"] = required
        return merged
