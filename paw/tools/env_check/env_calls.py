"""Makes calls to the tools that an environment offers, with arguments from their schemas."""

import random
from typing import Any

from paw.envs.limited import CannotApply, arguments_problem
from paw.types import ToolCall

TRIES = 40
"""Maximum tries to make the arguments of a call."""
DEPTH = 6
"""Maximum depth of nested arguments, because a schema may refer to itself."""
PARTS = 500
"""Maximum values in the arguments of a call, characters of a text and elements of an array."""
TEXTS = {
    "date": "2024-05-17",
    "date-time": "2024-05-17T12:30:00Z",
    "time": "12:30:00Z",
    "email": "ada@example.com",
    "uri": "https://example.com/a",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "192.0.2.1",
}
"""An example for each `format` of JSON schemas."""
PLAIN_WORDS = ("a", "A1", "word", "two words", "7")
"""Texts for a schema without format and pattern."""
WORDS = (*PLAIN_WORDS, "2024-05-17", "12:30", "ada@example.com", "https://example.com/a")
"""Texts for a schema with a pattern. One of them may fit."""


def valid_call(tool: dict[str, Any], number: int) -> ToolCall | None:
    """Make call `number` of an episode, with arguments that fit the tool's schema.

    The arguments depend only on the tool and `number`. Returns None if no arguments that fit are
    found.
    """
    name = tool["function"]["name"]
    schema = tool["function"]["parameters"]
    for attempt in range(TRIES):
        maker = _Maker(schema, random.Random(f"{name} {number} {attempt}"))
        try:
            arguments = maker.value({"type": "object", **schema}, DEPTH)
            too_large = maker.parts > PARTS
            fits = (
                isinstance(arguments, dict)
                and not too_large
                and not arguments_problem(schema, arguments)
            )
        except (CannotApply, ArithmeticError, TypeError, ValueError):
            return None  # the schema has bounds such as 1e308, or follows an older draft
        if fits:
            return ToolCall(name, arguments, f"call{number:05}")
        if too_large:
            return None
    return None


class _Maker:
    """Makes values for parts of the schema `root`. The caller must check whether they fit."""

    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self.parts = 0
        """Number of values made, including nested ones."""

    def value(self, schema: Any, depth: int) -> Any:
        """Make a value for `schema`, with at most `depth` levels; None if that is not enough."""
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
                choice = self._rng.choice(schema[key])
                return self.value(self._merged(rest, [choice]), depth - 1)
        match self._type(schema):
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

    def _type(self, schema: dict[str, Any]) -> str:
        """Return the type of the value to make. It is a guess if the schema does not say."""
        types = schema.get("type")
        if isinstance(types, list):
            not_null = [name for name in types if name != "null"]
            return self._rng.choice(not_null or types)
        if types:
            return types
        if "properties" in schema:
            return "object"
        return "array" if "items" in schema else "string"

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Make an object with all required properties, and some of the others."""
        properties = schema.get("properties", {})
        names = list(schema.get("required", []))
        required = set(names)
        for name in properties:
            if name not in required and self._rng.random() < 0.5:
                names.append(name)
        return {name: self.value(properties.get(name, {}), depth - 1) for name in names}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first_schemas = schema.get("prefixItems", [])
        item_count = max(schema.get("minItems", 1), len(first_schemas))
        item_count = int(min(item_count, schema.get("maxItems", item_count), PARTS))
        schemas = [*first_schemas, *[schema.get("items", {})] * item_count]
        return [self.value(element, depth - 1) for element in schemas[:item_count]]

    def _number(self, schema: dict[str, Any]) -> int | float:
        """Make a multiple of `multipleOf`, one of the first ten within the bounds."""
        step = schema.get("multipleOf", 1)
        low = schema.get("minimum")
        high = schema.get("maximum")
        if "exclusiveMinimum" in schema:
            low = schema["exclusiveMinimum"] + step
        if "exclusiveMaximum" in schema:
            high = schema["exclusiveMaximum"] - step
        if low is None:
            low = step
            if high is not None and high < step:
                low = high - 9 * step
        if high is None:
            high = low + 9 * step
        if high < low:  # exclusive bounds that are closer than a step
            return (low + high) / 2

        first = -(-low // step)  # rounded up
        last = high // step
        if last < first:
            return low
        return (first + self._rng.randint(0, min(9, int(last - first)))) * step

    def _text(self, schema: dict[str, Any]) -> str:
        words = WORDS if "pattern" in schema else PLAIN_WORDS
        text = TEXTS.get(str(schema.get("format"))) or self._rng.choice(words)
        shortest = min(int(schema.get("minLength", 0)), PARTS)
        text = text.ljust(shortest, text[-1])
        return text[: int(schema.get("maxLength", len(text)))]

    def _referred(self, reference: str) -> Any:
        """Return the part of the root schema that "#/a/b" refers to; None if there is none."""
        subschema: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            subschema = subschema.get(name) if isinstance(subschema, dict) else None
        return subschema

    def _merged(self, schema: dict[str, Any], parts: list[Any]) -> dict[str, Any]:
        """Merge `parts` into `schema`. Of keys other than properties, the last one counts."""
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
