"""The meaning of every key.

`paw train RECIPE --dry-run` prints it with a recipe's values. `paw keys` prints docs/keys.md.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic.fields import FieldInfo

from paw.config.entries import Entry
from paw.config.keys import LISTS, Row, built_in, fields, own_defaults, own_fields
from paw.config.recipe import as_tree, get, known_keys
from paw.config.sections import ENTRIES, Config
from paw.config.values import Only, Section

HEADING = """# Keys

<!-- written by `paw keys > docs/keys.md` -->
On this page you can look up every key of a recipe: what it takes, its default and what it means.
In a file it is `lr = 5e-4` in `[optim]`, on the command line `--optim.lr 5e-4`.
`paw train RECIPE --dry-run` prints all of them with the recipe's values."""


def run(options: argparse.Namespace, _: object) -> int:
    """Print the page. Returns 0."""
    print(page())
    return 0


def explain(config: Config) -> str:
    """Return the full configuration as TOML, with meaning and default of all keys, even unset."""
    lines: list[str] = []
    section = ""
    tree = as_tree(config)
    for dotted, key in known_keys(config).items():
        if key.needs or dotted in LISTS:
            continue
        table, _, leaf = dotted.rpartition(".")
        if table != section:
            if lines:
                lines.append("")
            lines.append(f"[{table}]")
            section = table

        lines.append(f"# {meaning(key.field)}")
        value = get(tree, dotted)
        if value is None:
            lines.append(f"# {leaf} is not set")
        else:
            lines.append(f"{leaf} = {_inline(value)}")
    for name in LISTS:
        lines += ["", f"# {meaning(Config.model_fields[name])}"]
        if not tree.get(name):
            lines.append(f"# [[{name}]] is not set")
        for table in tree.get(name, []):
            lines += ["", f"[[{name}]]"]
            lines += _entry_lines(ENTRIES[name], table)
    return "\n".join(lines) + "\n"


def _entry_lines(kind: type[Entry], table: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one table of a list."""
    for key, field in kind.keys_of(table).items():
        value = get(table, key)
        if value is not None:
            yield f"# {meaning(field)}"
            yield f"{key} = {_inline(value)}"


def _inline(value: Any) -> str:
    """Write a value as TOML on one line, with tables as inline tables."""
    if isinstance(value, dict):
        entries = []
        for key, entry in value.items():
            quoted_key = tomli_w.dumps({key: 0}).partition(" = 0")[0]
            entries.append(f"{quoted_key} = {_inline(entry)}")
        return f"{{ {', '.join(entries)} }}"
    if isinstance(value, list) and any(isinstance(element, dict) for element in value):
        return f"[{', '.join(_inline(element) for element in value)}]"
    return tomli_w.dumps({"": value}).removeprefix('"" = ').rstrip()


def page() -> str:
    """Return docs/keys.md, with every key of every section, including built-in plug-ins' keys."""
    lines = [HEADING]
    for section, field in Config.model_fields.items():
        base: Any = field.annotation
        lines += ["", f"## {section}"]
        if section in LISTS:
            lines += _list_text(ENTRIES[section])
            continue
        text = _section_text(base)
        if text:
            lines += ["", text]
        lines += _table(fields(section, base), base.ONLY)

        for name in built_in(base):
            rows = own_defaults(section, base, name) + own_fields(section, base, name)
            if rows:
                lines += ["", f'With `{section}.{base.KEY} = "{name}"`:']
                lines += _table(rows, base.ONLY)
    return "\n".join(lines)


def _list_text(kind: type[Entry]) -> list[str]:
    """Return what the entries of a list are, and the table of the keys of their own."""
    rows = [(f"{kind.LIST}.LABEL.{key}", field, []) for key, field in kind.own_keys().items()]
    return ["", " ".join((kind.__doc__ or "").split()), *_table(rows, None)]


def _section_text(base: Any) -> str:
    """Return the docstring of a section on one line, and what the section needs."""
    text = ""
    if base.__doc__ != Section.__doc__:
        text = " ".join((base.__doc__ or "").split())
    if base.ONLY:
        text = f"{text} Only with `{base.ONLY}`.".strip()
    return text


def meaning(field: FieldInfo) -> str:
    """Return a key's description and default, on one line."""
    return f"{_description(field)} (default: {_default(field)})".lstrip()


def _table(rows: Iterable[Row], section_need: Only | None) -> list[str]:
    """Return the keys' table in Markdown. A key's need is left out if the whole section has it."""
    lines = ["", "| key | takes | default | meaning |", "|---|---|---|---|"]
    for dotted, field, needs in rows:
        takes = " or ".join(dict.fromkeys(_takes(field.annotation)))
        description = _description(field)
        for need in needs:
            if need != section_need:
                description += f" Only with `{need}`."
        cells = (f"`{dotted}`", takes, f"`{_default(field)}`", description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _description(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _toml(field.get_default(call_default_factory=True))


def _takes(kind: Any) -> Iterator[str]:
    """Yield in words what a key takes, one text for each alternative."""
    if get_origin(kind) is Literal:
        for value in get_args(kind):
            yield f"`{_toml(value)}`"
    elif get_origin(kind) in (list, tuple, dict):
        yield "table" if get_origin(kind) is dict else "list"
    elif isinstance(kind, type) and issubclass(kind, Section):
        yield "table"
    elif hasattr(kind, "__metadata__"):  # Annotated
        yield from _takes(get_args(kind)[0])
    elif get_args(kind):  # a union
        for part in get_args(kind):
            yield from _takes(part)
    else:
        names = {
            str: "text",
            Path: "path",
            int: "integer",
            float: "number",
            bool: "`true` or `false`",
        }
        yield names.get(kind, "none")


def _toml(value: Any) -> str:
    return "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)
