"""Keys of a configuration: tables as dotted keys, which keys there are, and which of them apply."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from paw import plugins
from paw.errors import UserError
from paw.values import Only, PluginSection, Section

DEPTH = 3
"""Parts of a key at most: what lies deeper is a value."""
Flat = dict[str, Any]
"""{"optim.lr": 1e-6}"""
Row = tuple[str, FieldInfo, list[Only]]
"""(dotted key, field, what it needs to apply)."""


class Key(NamedTuple):
    field: FieldInfo
    needs: Only | None
    """What is lacking for it to apply."""


def flatten(tree: Mapping[str, Any] | Section, prefix: str = "") -> Flat:
    """Tables within one another as dotted keys; an empty table is a value."""
    flat: Flat = {}
    for name, value in dict(tree).items():
        key = f"{prefix}{name}"
        deeper = value if isinstance(value, dict | Section) and key.count(".") < DEPTH - 1 else {}
        flat |= flatten(deeper, f"{key}.") or {key: value}
    return flat


def nested(flat: Flat) -> dict[str, Any]:
    """Dotted keys as tables within one another; below a value that is no table there are none."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, leaf = key.split(".", DEPTH - 1)
        table: Any = tree
        for part in tables:
            table = table.setdefault(part, {}) if isinstance(table, dict) else table
        if isinstance(table, dict):
            table[leaf] = value
    return tree


def section_type(base: type[Section], name: Any) -> type[Section]:
    """`base`, with the keys of the plug-in of that name, None the default. UserError where there is no such plug-in."""
    if not issubclass(base, PluginSection):
        return base
    name = base.model_fields[base.KEY].default if name is None else name
    if not isinstance(name, str) or name in (base.NONE, *base.WITHIN):
        return base
    if target := plugins.SETTINGS.get(f"{base.KIND}.{name}"):
        return plugins.load(base.KIND, target)
    return plugins.settings(plugins.load(base.KIND, name), name, base)


def keys_of(config: type[Section] | Section, flat: Flat) -> dict[str, Key]:
    """Every dotted key of the sections that the values choose, in order; a plug-in that is not there has none."""
    rows: dict[str, tuple[FieldInfo, list[Only]]] = {}
    for section, field in (config if isinstance(config, type) else type(config)).model_fields.items():
        base: Any = field.annotation
        made = base
        with suppress(UserError):  # said when the section itself is validated
            chosen = flat.get(f"{section}.{getattr(base, 'KEY', '')}")
            made = section_type(base, chosen) if isinstance(config, type) else type(getattr(config, section))
        rows |= {dotted: (leaf, needs) for dotted, leaf, needs in fields(section, made)}

    def holds(need: Only) -> bool:
        if need.key not in rows:
            return True
        return need.holds(flat.get(need.key, rows[need.key][0].default))

    return {
        dotted: Key(field, next((need for need in needs if not holds(need)), None))
        for dotted, (field, needs) in rows.items()
    }


@lru_cache  # a plan asks thousands of times
def fields(prefix: str, section: type[Section]) -> Sequence[Row]:
    """Of a section and of sections within it."""
    common, rows = [section.ONLY] if section.ONLY else [], list[Row]()
    for name, field in section.model_fields.items():
        needs = [*common, *(part for part in field.metadata if isinstance(part, Only))]
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            rows += [(dotted, leaf, needs + more) for dotted, leaf, more in fields(f"{prefix}.{name}", inner)]
        else:
            rows.append((f"{prefix}.{name}", field, needs))
    return rows


def built_in(base: Any) -> Iterable[str]:
    """The built-in plug-ins of a section that have keys beside its own."""
    return plugins.BUILT_IN[base.KIND] if issubclass(base, PluginSection) and not base.WITHIN else ()


def own_fields(section: str, base: Any, name: str) -> list[Row]:
    """The keys that a built-in plug-in adds to its section."""
    common = {dotted for dotted, _, _ in fields(section, base)}
    return [row for row in fields(section, section_type(base, name)) if row[0] not in common]
