"""Keys of a configuration: which there are, and which of them apply."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from paw import plugins
from paw.errors import UserError
from paw.values import Only, PluginSection, Section

Row = tuple[str, FieldInfo, list[Only]]
"""(dotted key, field, what it needs to apply)."""


class Key(NamedTuple):
    """A key of a configuration."""

    field: FieldInfo
    needs: Only | None
    """What is lacking for it to apply."""


def section_type(base: type[Section], table: dict[str, Any]) -> type[Section]:
    """`base`, with the keys of the plug-in that the table names. Raises UserError where there is no such plug-in."""
    if not issubclass(base, PluginSection):
        return base
    name = table.get(base.KEY, base.model_fields[base.KEY].default)
    if not isinstance(name, str) or name in (base.NONE, *base.WITHIN):
        return base
    if target := plugins.SETTINGS.get(f"{base.KIND}.{name}"):
        return plugins.load(base.KIND, target)
    return plugins.settings(plugins.load(base.KIND, name), name, base)


def keys_of(config: type[Section], tree: dict[str, Any]) -> dict[str, Key]:
    """Every dotted key of the sections that the tables choose, in order; of a plug-in that is not there, none."""
    types: dict[str, type[Section]] = {}
    for section, field in config.model_fields.items():
        base: Any = field.annotation
        table = tree.get(section, {})
        types[section] = type(table) if isinstance(table, Section) else base
        if isinstance(table, dict):
            try:
                types[section] = section_type(base, table)
            except UserError:
                continue  # said when the section itself is validated
    return {
        dotted: Key(field, next((need for need in needs if not _holds(need, tree, types)), None))
        for section, made in types.items()
        for dotted, field, needs in fields(section, made)
    }


def fields(prefix: str, section: type[Section]) -> Iterator[Row]:
    """Of a section and of sections within it."""
    common = [section.ONLY] if section.ONLY else []
    for name, field in section.model_fields.items():
        needs = [*common, *(part for part in field.metadata if isinstance(part, Only))]
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            for dotted, leaf, more in fields(f"{prefix}.{name}", inner):
                yield dotted, leaf, needs + more
        else:
            yield f"{prefix}.{name}", field, needs


def _holds(need: Only, tree: dict[str, Any], types: dict[str, type[Section]]) -> bool:
    section, leaf = need.key.split(".")
    if leaf not in types[section].model_fields:
        return True
    table, default = tree.get(section), types[section].model_fields[leaf].default
    value = table.get(leaf, default) if isinstance(table, dict) else getattr(table, leaf, default)
    return value in need.values if need.values else bool(value)


def built_in(base: Any) -> Iterable[str]:
    """The built-in plug-ins of a section that have keys beside its own."""
    return plugins.BUILT_IN[base.KIND] if issubclass(base, PluginSection) and not base.WITHIN else ()


def own_fields(section: str, base: Any, name: str) -> list[Row]:
    """The keys that a built-in plug-in adds to its section."""
    common = {dotted for dotted, _, _ in fields(section, base)}
    return [row for row in fields(section, section_type(base, {base.KEY: name})) if row[0] not in common]
