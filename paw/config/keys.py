"""The keys of a configuration: dotted keys for tables, which keys exist and which of them apply."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from paw.config import plugins
from paw.config.values import Only, PluginSection, Section
from paw.errors import UserError

DEPTH = 3
"""Maximum number of parts of a key. A table at a deeper level is a value."""
LISTS = {"envs": "env", "rewards": "reward"}
"""Keys whose value is a list of tables (`paw.config.entries`) -> the section that it replaces."""
LISTED = {section: name for name, section in LISTS.items()}
Flat = dict[str, Any]
"""{"optim.lr": 1e-6}"""
Row = tuple[str, FieldInfo, list[Only]]
"""(dotted key, field, its conditions)."""


@dataclass(frozen=True)
class OnlyPlugins(Only):
    """Metadata of a key that applies only if the plug-in that `key` names has an ability.

    The ability is a class attribute that is true. Your own plug-ins can have it too.
    """

    kind: str = ""
    ability: str = ""

    def __str__(self) -> str:
        """Name the built-in plug-ins that have the ability."""
        able = [name for name in plugins.BUILT_IN[self.kind] if self.holds(name)]
        return str(Only(self.key, tuple(able)))

    def holds(self, value: Any) -> bool:
        if not isinstance(value, str):
            return False
        with suppress(UserError):  # reported when the section itself is validated
            return bool(getattr(plugins.load(self.kind, value), self.ability, False))
        return False


@dataclass(frozen=True)
class Unlisted(Only):
    """Need of every key of a section that a list of several such sections (`key`) replaces."""

    def __str__(self) -> str:
        return f"a recipe without [[{self.key}]]"

    def holds(self, value: Any) -> bool:
        return not value


class Key(NamedTuple):
    field: FieldInfo
    needs: Only | None
    """The first unmet need, because of which the key does not apply; None if it applies."""


def flatten(tree: Mapping[str, Any] | Section, prefix: str = "") -> Flat:
    """Turn nested tables into dotted keys. An empty table is a value."""
    flat_values: Flat = {}
    for name, value in dict(tree).items():
        key = f"{prefix}{name}"
        inner_values: Flat = {}
        if isinstance(value, dict | Section) and key.count(".") < DEPTH - 1:
            inner_values = flatten(value, f"{key}.")
        flat_values |= inner_values or {key: value}
    return flat_values


def nested(flat: Flat) -> dict[str, Any]:
    """Turn dotted keys into nested tables. Drops keys below a value that is not a table."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, leaf = key.split(".", DEPTH - 1)
        inner_table: Any = tree
        for part in tables:
            if isinstance(inner_table, dict):
                inner_table = inner_table.setdefault(part, {})
        if isinstance(inner_table, dict):
            inner_table[leaf] = value
    return tree


def section_type(base: type[Section], name: Any) -> type[Section]:
    """Return `base` with the keys of the named plug-in; None stands for the default one.

    Raises UserError if there is no such plug-in.
    """
    if not issubclass(base, PluginSection):
        return base
    if name is None:
        name = base.model_fields[base.KEY].default
    if not isinstance(name, str) or name in (base.NONE, *base.WITHIN):
        return base
    target = plugins.SETTINGS.get(f"{base.KIND}.{name}")
    if target:
        return plugins.load(base.KIND, target)
    return plugins.settings(plugins.load(base.KIND, name), name, base)


def keys_of(config: type[Section] | Section, flat: Flat) -> dict[str, Key]:
    """Return every dotted key of the sections that the values choose, in order.

    `config` is a configuration, whose sections are used as they are, or its class. If it is the
    class, `flat` chooses the plug-ins. An unknown plug-in has no keys.
    """
    config_type = config if isinstance(config, type) else type(config)
    lists = {name: config_type.model_fields[name] for name in LISTS}
    return key_states(_sections(config, flat), flat, lists)


def key_states(
    sections: Mapping[str, type[Section]], flat: Flat, lists: Mapping[str, FieldInfo] | None = None
) -> dict[str, Key]:
    """Return every dotted key of these sections and lists of tables, each by name."""
    key_fields: dict[str, FieldInfo] = dict(lists or {})
    key_needs: dict[str, list[Only]] = {name: [] for name in key_fields}
    for name, section in sections.items():
        without_list: list[Only] = [Unlisted(LISTED[name])] if name in LISTED else []
        for key, field, needs in fields(name, section):
            key_fields[key] = field
            key_needs[key] = without_list + needs

    keys: dict[str, Key] = {}
    for key, field in key_fields.items():
        unmet = None
        for need in key_needs[key]:
            if need.key not in key_fields:
                continue
            value = flat.get(need.key, key_fields[need.key].default)
            if not need.holds(value):
                unmet = need
                break
        keys[key] = Key(field, unmet)
    return keys


def _sections(config: type[Section] | Section, flat: Flat) -> dict[str, type[Section]]:
    """Return the class of each section, with the keys of its plug-in."""
    sections: dict[str, type[Section]] = {}
    if not isinstance(config, type):
        for name in type(config).model_fields:
            if name not in LISTS:
                sections[name] = type(getattr(config, name))
        return sections
    for name, field in config.model_fields.items():
        if name in LISTS:
            continue
        base: Any = field.annotation
        sections[name] = base
        with suppress(UserError):  # reported when the section itself is validated
            plugin = flat.get(f"{name}.{getattr(base, 'KEY', '')}")
            sections[name] = section_type(base, plugin)
    return sections


@lru_cache  # a plan calls it thousands of times
def fields(prefix: str, section: type[Section]) -> Sequence[Row]:
    """Return the rows of a section and of the sections within it."""
    section_needs = [section.ONLY] if section.ONLY else []
    field_rows: list[Row] = []
    for name, field in section.model_fields.items():
        own_needs = [part for part in field.metadata if isinstance(part, Only)]
        needs = section_needs + own_needs
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            for key, inner_field, inner_needs in fields(f"{prefix}.{name}", inner):
                field_rows.append((key, inner_field, needs + inner_needs))
        else:
            field_rows.append((f"{prefix}.{name}", field, needs))
    return field_rows


def built_in(base: Any) -> Iterable[str]:
    """Return the built-in plug-ins of a section that may add keys or change defaults of its keys.

    Those of `WITHIN` do neither.
    """
    if not issubclass(base, PluginSection):
        return ()
    names = plugins.BUILT_IN[base.KIND] if base.CHOICES is None else base.CHOICES
    return [name for name in names if name not in base.WITHIN]


def own_defaults(section: str, base: Any, name: str) -> list[Row]:
    """Return the keys whose defaults a built-in plug-in changes, except that of its name."""
    defaults = {key: field.default for key, field, _ in fields(section, base)}
    del defaults[f"{section}.{base.KEY}"]
    return [
        field_row
        for field_row in fields(section, section_type(base, name))
        if field_row[0] in defaults and field_row[1].default != defaults[field_row[0]]
    ]


def own_fields(section: str, base: Any, name: str) -> list[Row]:
    """Return the keys that a built-in plug-in adds to its section."""
    common = {key for key, _, _ in fields(section, base)}
    return [
        field_row
        for field_row in fields(section, section_type(base, name))
        if field_row[0] not in common
    ]
