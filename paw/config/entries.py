"""Lists of plug-ins in a recipe, such as [[envs]]: tables that each name a plug-in, with its keys.

An entry has the keys of the section of one plug-in (`env` for `envs`), and some of its own. Errors
and the command line call its keys `envs.LABEL.key`. This module imports no torch.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from paw.config.keys import fields, flatten, key_states, section_type
from paw.config.values import PluginSection, Section
from paw.errors import UserError, clean

LABEL = r"^[A-Za-z0-9_-]{1,40}$"
"""A label is a part of keys and of the names of metrics."""
RESERVED = ("all", "mean")
"""Labels that metrics use for everything together."""


class Entry(Section):
    """One table of a list. Subclasses add keys of their own."""

    LIST: ClassVar[str]
    """The key of the list."""
    SECTION: ClassVar[str]
    """The key of the section whose keys an entry has."""
    label: Annotated[str, Field(pattern=LABEL)] = ""
    """Its name in keys and metrics, unique in the list. If unset, the last part of the plug-in's
    name: "Guess" for "games.py:Guess"."""
    section: PluginSection

    @model_serializer(mode="wrap")
    def _as_one_table(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table = handler(self)
        return table.pop("section") | table

    @classmethod
    def base(cls) -> Any:
        """Return the section of one plug-in of this kind, a subclass of PluginSection."""
        return cls.model_fields["section"].annotation

    @classmethod
    @abstractmethod
    def summary(cls, entries: Sequence[Any]) -> PluginSection:
        """Return what a configuration with these entries has in place of the single section."""

    @classmethod
    def own_keys(cls) -> dict[str, FieldInfo]:
        """The keys that an entry has besides those of its plug-in's section."""
        return {key: field for key, field in cls.model_fields.items() if key != "section"}

    @classmethod
    def keys_of(cls, table: Mapping[str, Any]) -> dict[str, FieldInfo]:
        """Return the keys that an entry may have, with the plug-in that it names.

        Raises UserError if there is no such plug-in.
        """
        section = section_type(cls.base(), table.get(cls.base().KEY))
        keys = cls.own_keys()
        for dotted, field, _ in fields(cls.SECTION, section):
            keys[dotted.removeprefix(f"{cls.SECTION}.")] = field
        return keys

    @classmethod
    def label_of(cls, table: Any) -> str:
        """Return the label of an entry: its own, or the last part of its plug-in's name."""
        if isinstance(table, Entry):
            return table.label
        if not isinstance(table, dict):
            return ""
        name = table.get("label", table.get(cls.base().KEY, ""))
        if not isinstance(name, str):
            return ""
        return name if "label" in table else name.rpartition(":")[2]

    @classmethod
    def read_all(cls, tables: Any) -> list[Self]:
        """Return the entries of a list of tables. Raises ValidationError for the first problem."""
        if not isinstance(tables, Sequence) or isinstance(tables, str):
            raise problem("list", f"it must be tables, [[{cls.LIST}]]", (cls.LIST,), tables)
        entries: list[Self] = []
        labels: set[str] = set()
        for place, table in enumerate(tables):
            entry = table if isinstance(table, cls) else cls._read(table, place)
            if entry.label in labels:
                reason = f"two of [[{cls.LIST}]] are called that; give one another label"
                raise problem("label", reason, (cls.LIST, entry.label, "label"), entry.label)
            labels.add(entry.label)
            entries.append(entry)
        return entries

    @classmethod
    def _read(cls, table: Any, place: int) -> Self:
        key = cls.base().KEY
        where = (cls.LIST, str(place))
        if not isinstance(table, dict):
            raise problem("table", f"it must be a table, [[{cls.LIST}]]", where, table)
        if key not in table:
            raise problem("unnamed", f"its {key} is missing", where, table)

        label = cls.label_of(table)
        if not re.fullmatch(LABEL, label) or label in RESERVED:
            reason = (
                "give it a label of at most 40 letters, digits, - and _, "
                f"which is not {' or '.join(map(repr, RESERVED))}"
            )
            raise problem("label", reason, (*where, "label"), label or table.get(key))
        own = {name: value for name, value in table.items() if name in cls.own_keys()}
        rest = {name: value for name, value in table.items() if name not in own}
        section = cls._read_section(rest, label)
        try:
            return cls.model_validate({**own, "label": label, "section": section})
        except ValidationError as error:
            raise located(error, (cls.LIST, label)) from None

    @classmethod
    def _read_section(cls, table: dict[str, Any], label: str) -> PluginSection:
        base = cls.base()
        where = (cls.LIST, label)
        try:
            kind: Any = section_type(base, table[base.KEY])
        except UserError as error:
            name = table[base.KEY]
            reason = str(error).removeprefix(f"'{name}': ")
            raise problem("plugin", reason, (*where, base.KEY), name) from None

        flat = flatten(table, f"{cls.SECTION}.")
        for dotted, state in key_states({cls.SECTION: kind}, flat).items():
            if state.needs and flat.get(dotted, state.field.default) != state.field.default:
                leaf = tuple(dotted.split(".")[1:])
                raise problem("only", f"it needs {state.needs}", (*where, *leaf), flat[dotted])
        try:
            return kind.model_validate(table)
        except ValidationError as error:
            raise located(error, where) from None


def problem(kind: str, reason: str, location: tuple[str, ...], value: Any) -> ValidationError:
    """Return an error of one key, as pydantic would report it."""
    error = PydanticCustomError(kind, "{reason}", {"reason": reason})  # type: ignore[arg-type]
    return ValidationError.from_exception_data(
        kind, [InitErrorDetails(type=error, loc=location, input=value)]
    )


def located(error: ValidationError, location: tuple[str, ...]) -> ValidationError:
    """Return the error with its keys below `location`."""
    details: list[InitErrorDetails] = []
    for each in error.errors():
        kind: Any = each["type"]
        message = each["msg"].removeprefix("Value error, ")
        custom = PydanticCustomError(kind, "{reason}", {"reason": message})
        details.append(
            InitErrorDetails(type=custom, loc=(*location, *each["loc"]), input=each["input"])
        )
    return ValidationError.from_exception_data(error.title, details)


def entry_of(kind: type[Entry], tables: Any, label: str) -> Any:
    """Return the table with this label. Raises UserError if there is none."""
    tables = tables if isinstance(tables, list) else []
    for table in tables:
        if kind.label_of(table) == label:
            return table
    labels = ", ".join(clean(kind.label_of(table)) for table in tables)
    has = f"its [[{kind.LIST}]] are {labels}" if tables else f"it has no [[{kind.LIST}]]"
    raise UserError(
        f"command line: '--{kind.LIST}.{clean(label)}' names no entry of the recipe: {has} "
        f"(--{kind.LIST}.LABEL.KEY VALUE)"
    )


def with_key(kind: type[Entry], tables: Any, key: str, value: Any) -> list[Any]:
    """Return the tables of a list with one key of one entry changed.

    `key` is "LABEL.key" or "LABEL.table.key". Raises UserError if there is no such entry.
    """
    label, _, leaf = key.partition(".")
    old_table = entry_of(kind, tables, label)
    if not leaf or not isinstance(old_table, dict):
        raise UserError(
            f"command line: '--{kind.LIST}.{clean(key)}' is no key: --{kind.LIST}.LABEL.KEY VALUE"
        )
    new_table = dict(old_table)
    parent = new_table
    *names, last = leaf.split(".")
    for name in names:
        inner = parent.get(name)
        parent[name] = dict(inner) if isinstance(inner, dict) else {}
        parent = parent[name]
    parent[last] = value
    return [new_table if table is old_table else table for table in tables]


def by_label(kind: type[Entry], tables: Any) -> dict[str, Any]:
    """Return the keys of a list's tables as {"envs.LABEL.key": value}."""
    flat: dict[str, Any] = {}
    for table in tables if isinstance(tables, list) else []:
        if isinstance(table, dict):
            label = kind.label_of(table)
            keys = {key: value for key, value in table.items() if key != "label"}
            flat |= flatten(keys, f"{kind.LIST}.{label}.")
    return flat
