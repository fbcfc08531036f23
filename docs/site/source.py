"""A hook of MkDocs: lines of the source on a page, so that the page cannot differ from it.

A line `{source FILE FUNCTION "FIRST" "LAST"}` becomes the lines of that function from the one that
begins with FIRST to the next one that begins with LAST, after a comment that names both. The build
fails if there are none.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r'^\{source (\S+) (\w+) "(.+)" "(.+)"\}$', re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What MkDocs calls with the text of each page."""
    return with_source(markdown)


def with_source(markdown: str) -> str:
    """The page with lines of the source in place of each directive."""
    return DIRECTIVE.sub(lambda match: excerpt(*match.groups()), markdown)


def excerpt(file: str, function: str, first: str, last: str) -> str:
    """Lines of a function, not indented, after a comment that says where they are from."""
    path = ROOT / file
    if not path.is_file():
        raise PluginError(f"{{source {file} ...}}: there is no such file")
    lines = function_lines(path, function)
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith(first)]
    if not begins:
        raise PluginError(f"{file}: no line of {function}() begins with {first!r}")
    for number, line in enumerate(lines[begins[0] :], begins[0]):
        if line.lstrip().startswith(last):
            text = textwrap.dedent("\n".join(lines[begins[0] : number + 1]))
            return f"# {file}: {function}()\n{text}"
    raise PluginError(f"{file}: no line of {function}() after {first!r} begins with {last!r}")


def function_lines(path: Path, function: str) -> list[str]:
    """The lines of a function of a module, from its `def`."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return text.splitlines()[node.lineno - 1 : node.end_lineno]
    raise PluginError(f"{path.name} has no function {function}()")
