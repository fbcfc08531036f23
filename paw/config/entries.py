"""Lists of plug-ins in a recipe, such as [[envs]]: tables that each name a plug-in, with its keys.

An entry has the keys of the section of one plug-in (`env` for `envs`), and some keys of its own.
Some of these hold a section or a list, such as [envs.agent] and [[envs.rewards]]. Errors and the
command line call its keys `envs.LABEL.key`. This module does not import torch.
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
"""Pattern of a label, which is part of keys and of names of metrics."""
RESERVED = r"all|mean|(low|high)(_.*)?"
"""Labels that would make the name of an existing metric: that of everything together (success/all)
or of the end of an interval (pass_at_4_low_LABEL)."""


class Entry(Section):
    """One table of a list. Subclasses add keys of their own."""

    LIST: ClassVar[str]
    """The key of the list."""
    SECTION: ClassVar[str]
    """The key of the section whose keys an entry has."""
    SECTIONS: ClassVar[dict[str, type[PluginSection]]] = {}
    """Keys of its own that hold a section. Each is also a section of the configuration."""
    LISTS: ClassVar[dict[str, type["Entry"]]] = {}
    """Keys of its own that hold a list of entries. Each is also a list of the configuration."""
    label: Annotated[str, Field(pattern=LABEL)] = ""
    """Name in keys and metrics, unique in the list. If unset, the last part of the plug-in's name:
    "Guess" for "games.py:Guess"."""
    section: PluginSection

    @model_serializer(mode="wrap")
    def _as_one_table(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table = handler(self)
        section = table.pop("section")
        return section | {key: value for key, value in table.items() if value not in (None, [])}

    @classmethod
    def base(cls) -> Any:
        """Return the section of one plug-in of this kind, a subclass of PluginSection."""
        return cls.model_fields["section"].annotation

    @classmethod
    @abstractmethod
    def summary(cls, entries: Sequence[Any]) -> PluginSection:
        """Return the section that a configuration with these entries has in place of one."""

    @classmethod
    def own_keys(cls) -> dict[str, FieldInfo]:
        """Return the keys that an entry has besides those of its plug-in's section."""
        return {key: field for key, field in cls.model_fields.items() if key != "section"}

    @classmethod
    def keys_of(cls, table: Mapping[str, Any]) -> dict[str, FieldInfo]:
        """Return the keys that an entry may have, given the plug-ins that it names.

        Keys of a section or list within it are dotted. Raises UserError if there is no such
        plug-in.
        """
        section = section_type(cls.base(), table.get(cls.base().KEY))
        keys = {key: field for key, field in cls.own_keys().items() if key not in cls.SECTIONS}
        for dotted, field, _ in fields(cls.SECTION, section):
            keys[dotted.removeprefix(f"{cls.SECTION}.")] = field
        for name, section_base in cls.SECTIONS.items():
            inner = table.get(name)
            plugin = inner.get(section_base.KEY) if isinstance(inner, dict) else None
            for dotted, field, _ in fields(name, section_type(section_base, plugin)):
                keys[dotted] = field
        for name, entry_kind in cls.LISTS.items():
            for label, inner in tables_by_label(entry_kind, table.get(name)).items():
                for key, field in entry_kind.keys_of(inner).items():
                    keys[f"{name}.{label}.{key}"] = field
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
        for table_index, table in enumerate(tables):
            read_entry = table if isinstance(table, cls) else cls._read(table, table_index)
            if read_entry.label in labels:
                reason = f"two of [[{cls.LIST}]] are called that; give one another label"
                raise problem(
                    "label", reason, (cls.LIST, read_entry.label, "label"), read_entry.label
                )
            labels.add(read_entry.label)
            entries.append(read_entry)
        return entries

    @classmethod
    def _read(cls, table: Any, place: int) -> Self:
        key = cls.base().KEY
        location = (cls.LIST, str(place))
        if not isinstance(table, dict):
            raise problem("table", f"it must be a table, [[{cls.LIST}]]", location, table)
        if key not in table:
            raise problem("unnamed", f"its {key} is missing", location, table)

        label = cls.label_of(table)
        if not re.fullmatch(LABEL, label) or re.fullmatch(RESERVED, label):
            reason = (
                "give it a label of at most 40 letters, digits, - and _, which is not 'all' or "
                "'mean' and does not begin with the word low or high"
            )
            raise problem("label", reason, (*location, "label"), table.get("label", table.get(key)))
        own_values = {name: value for name, value in table.items() if name in cls.own_keys()}
        other_values = {name: value for name, value in table.items() if name not in own_values}
        location = (cls.LIST, label)
        section = read_section(cls.base(), cls.SECTION, other_values, location)
        for name in own_values:
            if name in cls.SECTIONS:
                own_values[name] = cls._read_inner_section(name, own_values[name], location)
            elif name in cls.LISTS:
                own_values[name] = cls._read_inner_list(name, own_values[name], location)
        try:
            return cls.model_validate({**own_values, "label": label, "section": section})
        except ValidationError as error:
            raise located(error, location) from None

    @classmethod
    def _read_inner_section(cls, name: str, value: Any, where: tuple[str, ...]) -> Any:
        if isinstance(value, PluginSection):
            return value
        if not isinstance(value, dict):
            reason = f"it must be a table, [{cls.LIST}.{name}]"
            raise problem("table", reason, (*where, name), value)
        return read_section(cls.SECTIONS[name], name, value, (*where, name))

    @classmethod
    def _read_inner_list(cls, name: str, value: Any, where: tuple[str, ...]) -> Any:
        try:
            return cls.LISTS[name].read_all(value)
        except ValidationError as error:
            raise located(error, where) from None


def read_section(
    base: Any, name: str, table: dict[str, Any], where: tuple[str, ...]
) -> PluginSection:
    """Return the section of a plug-in from its table, which is at `where`.

    `name` is the section's name in the needs of keys, such as "env". Raises ValidationError.
    """
    try:
        kind: Any = section_type(base, table.get(base.KEY))
    except UserError as error:
        plugin = table[base.KEY]
        reason = str(error).removeprefix(f"'{plugin}': ")
        raise problem("plugin", reason, (*where, base.KEY), plugin) from None

    dotted_values = flatten(table, f"{name}.")
    for dotted, state in key_states({name: kind}, dotted_values).items():
        if state.needs and dotted_values.get(dotted, state.field.default) != state.field.default:
            leaf = tuple(dotted.split(".")[1:])
            raise problem("only", f"it needs {state.needs}", (*where, *leaf), dotted_values[dotted])
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


def tables_by_label(kind: type[Entry], tables: Any) -> dict[str, dict[str, Any]]:
    """Return the tables of a list by label. Anything else in it is left out."""
    tables = tables if isinstance(tables, list) else []
    return {kind.label_of(table): table for table in tables if isinstance(table, dict)}


def entry_of(kind: type[Entry], tables: Any, label: str, prefix: str = "") -> Any:
    """Return the table with this label. Raises UserError if there is none.

    `prefix` is what precedes the key of the list, such as "envs.LABEL.".
    """
    tables = tables if isinstance(tables, list) else []
    for table in tables:
        if kind.label_of(table) == label:
            return table
    name = f"{prefix.partition('.')[0]}.{kind.LIST}" if prefix else kind.LIST
    labels = ", ".join(clean(kind.label_of(table)) for table in tables)
    has = f"its [[{name}]] are {labels}" if tables else f"it has no [[{name}]]"
    key = f"{prefix}{kind.LIST}"
    raise UserError(
        f"command line: '--{clean(key)}.{clean(label)}' names no entry of the recipe: {has} "
        f"(--{clean(key)}.LABEL.KEY VALUE)"
    )


def with_key(
    kind: type[Entry], tables: Any, key: str, value: Any, *, prefix: str = ""
) -> list[Any]:
    """Return the tables of a list with one key of one entry changed.

    `key` is "LABEL.key", "LABEL.table.key" or "LABEL.list.LABEL.key", and `prefix` as for
    `entry_of`. Raises UserError if there is no such entry.
    """
    label, _, leaf = key.partition(".")
    old_table = entry_of(kind, tables, label, prefix)
    if not leaf or not isinstance(old_table, dict):
        name = f"{prefix}{kind.LIST}"
        raise UserError(
            f"command line: '--{clean(f'{name}.{key}')}' is not a key; "
            f"write --{name}.LABEL.KEY VALUE"
        )
    new_table = dict(old_table)
    list_name, _, inner_key = leaf.partition(".")
    if list_name in kind.LISTS and inner_key:
        new_table[list_name] = with_key(
            kind.LISTS[list_name],
            new_table.get(list_name),
            inner_key,
            value,
            prefix=f"{prefix}{kind.LIST}.{label}.",
        )
    else:
        _set(new_table, leaf, value)
    return [new_table if table is old_table else table for table in tables]


def _set(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key of a table, in copies of the tables within it."""
    *names, last_name = dotted.split(".")
    for name in names:
        inner_table = table.get(name)
        table[name] = dict(inner_table) if isinstance(inner_table, dict) else {}
        table = table[name]
    table[last_name] = value


def by_label(kind: type[Entry], tables: Any, prefix: str = "") -> dict[str, Any]:
    """Return the keys of a list's tables as {"envs.LABEL.key": value}, after `prefix`."""
    flat: dict[str, Any] = {}
    for label, table in tables_by_label(kind, tables).items():
        key_prefix = f"{prefix}{kind.LIST}.{label}."
        keys = {key: value for key, value in table.items() if key != "label"}
        for name in kind.SECTIONS:
            inner_table = keys.pop(name, None)
            if isinstance(inner_table, dict):
                flat |= {
                    f"{key_prefix}{name}.{key}": value
                    for key, value in flatten(inner_table).items()
                }
        for name, inner_kind in kind.LISTS.items():
            flat |= by_label(inner_kind, keys.pop(name, None), key_prefix)
        flat |= {f"{key_prefix}{key}": value for key, value in flatten(keys).items()}
    return flat
