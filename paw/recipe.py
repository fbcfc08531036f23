"""From a recipe and the command line to a Config.

A recipe is a TOML file whose tables are the sections of `Config`; `--a.b value` on the command line overrides one key.
`base = "alfworld-grpo"` above the first table (a packaged recipe, or a path relative to the file) takes over that
recipe; the tables below override single keys of it. An unknown key is an error that names the nearest known one;
`paw.ignored` finds settings without effect. No torch here.
"""

import difflib
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from paw.config import Config
from paw.errors import UserError, clean, shown, to_stderr
from paw.values import LONGEST_NAME

RECIPES = Path(__file__).parent / "recipes"
GENERATIONS, LARGEST = 50, 1_000_000
"""Bases below a recipe, and bytes of one."""


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load(recipe: str | Path, overrides: dict[str, str] | None = None) -> Config:
    """Read a recipe by name or path, apply `{"a.b": "value"}` overrides, validate.

    Raises UserError for an unknown or circular recipe, malformed TOML, an unknown key or a value out of range.
    """
    tree, origins = read_recipe(str(recipe))
    for key, text in (overrides or {}).items():
        _set(tree, key, text)
        origins[key] = "command line"
    return validate(tree, origin=str(recipe), origins=origins)


def load_played(recipe: str | None, overrides: dict[str, str]) -> Config:
    """`load` for a command that plays: without a recipe env.name says what, as the recipe <env.name>-grpo has it.

    An environment without such a recipe gets the defaults. Raises UserError as `load` does, or if nothing is named.
    """
    name = overrides.get("env.name")
    if recipe is None and name == "search" and overrides.get("env.data", "").lower() == "none":
        overrides = {"search.retriever": "bm25"} | overrides  # the recipe's E5 is a download
    if recipe is None and name is None:
        raise UserError("say what is played with --recipe NAME or --env NAME")
    if recipe is None and f"{name}-grpo" in recipe_names():
        recipe = f"{name}-grpo"
        to_stderr(f"settings of the recipe {recipe}; --recipe names another")
    if recipe is not None:
        return load(recipe, overrides)
    tree: dict[str, Any] = {"model": {"path": "-"}}
    for key, text in overrides.items():
        _set(tree, key, text)
    return validate(tree, origin="command line")


def validate(tree: dict[str, Any], *, origin: str, origins: dict[str, str] | None = None) -> Config:
    """Build a Config from nested dicts; the first problem becomes a one-line UserError.

    It names where the key comes from by `origins`, or `origin`; of several keys at once, the command line's.
    """

    def where(key: str, message: str = "") -> str:
        found = [by for known, by in (origins or {}).items() if f"{key}.".startswith(f"{known}.") or known in message]
        return "command line" if "command line" in found else (found or [origin])[-1]

    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = error.errors()
        key = _dotted(problems[0]["loc"])
        if problems[0]["type"] == "extra_forbidden":
            raise UserError(f"{where(key)}: unknown key '{clean(key)}'{nearest(key)}") from None
        if problems[0]["type"] == "missing" and isinstance(problems[0]["loc"][-1], str):
            key = next((known for known in known_keys() if known.startswith(f"{key}.")), key)
            raise UserError(f"{origin}: '{key}' is missing; set it in the recipe or with --{key} VALUE") from None
        reasons = [p["msg"].removeprefix("Value error, ") for p in problems if _dotted(p["loc"]) == key]
        message = ", or ".join(dict.fromkeys(reasons))  # one reason for each alternative of a union
        value = f"{clean(key, LONGEST_NAME)} = {shown(problems[0]['input'])}: " if key else ""
        raise UserError(f"{where(key, message)}: {value}{message}") from None


def dump(config: Config) -> str:
    """The whole resolved configuration as TOML; `load` of it gives the same Config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def known_keys() -> dict[str, Any]:
    """Every dotted key of a configuration, and its type."""
    return {
        f"{section}.{leaf}": field.annotation
        for section, table in Config.model_fields.items()
        for leaf, field in getattr(table.annotation, "model_fields", {}).items()
    }


def _dotted(location: tuple[int | str, ...]) -> str:
    """Where an error is, without the tags pydantic adds for the alternatives of a union."""
    return ".".join(str(part) for part in location if not str(part).startswith(("literal[", "constrained-")))


def nearest(key: str) -> str:
    """Text that suggests the nearest known key, or "". A right name in the wrong section comes before a similar one."""
    keys, key = list(known_keys()), key[:LONGEST_NAME]
    namesakes = [known for known in keys if known.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, namesakes or keys, n=1, cutoff=0.0 if namesakes else 0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    """Put an override into the tree: a TOML value, or a bare word; `none` where a key may be left unset."""
    kinds = known_keys()
    section, _, leaf = key.partition(".")
    leaf, _, inner = leaf.partition(".")
    if (key := f"{section}.{leaf}") not in kinds or (inner and get_origin(kinds[key]) is not dict):
        whole = f"{key}.{inner}" if inner else key.rstrip(".")
        raise UserError(f"command line: unknown key '--{clean(whole)}'{nearest(whole)}")
    value: Any = text  # a bare word is a string
    with suppress(ValueError, RecursionError):
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    if text.lower() == "none" and type(None) in get_args(kinds[key]):
        value = None
    elif kinds[key] in (str, Path) and not isinstance(value, str):
        value = text  # a name that looks like a number or a date
    table = tree.setdefault(section, {})
    if not isinstance(table, dict):
        raise UserError(
            f"command line: --{key} does not fit the recipe's {section} = {shown(table)}, which is no table"
        )
    if inner:  # --model.chat_template_kwargs.enable_thinking false
        before = table.get(leaf, {})
        value = {**(before if isinstance(before, dict) else {}), inner: value}
    table[leaf] = value


def read_recipe(recipe: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables of a recipe, by name or path, over those of its bases; and the recipe each dotted key comes from.

    Raises UserError for a recipe that is unknown, is no TOML, or is built on itself.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, tables in _lineage(recipe):
        for section, table in tables.items():
            old = tree.get(section)
            tree[section] = old | table if isinstance(old, dict) and isinstance(table, dict) else table
            keys = [f"{section}.{leaf}" for leaf in table] if isinstance(table, dict) else [section]
            origins |= dict.fromkeys(keys, origin)
    return tree, origins


def _lineage(recipe: str) -> list[tuple[str, dict[str, Any]]]:
    """(origin, tables) of a recipe after those of its bases."""
    found: list[tuple[str, dict[str, Any]]] = []
    heirs: list[Path] = []  # the files built on the next one, the last directly
    base: str | None = recipe
    while base is not None:
        by = f"{heirs[-1]}: base: " if heirs else ""
        path, origin = RECIPES / f"{base}.toml", base
        if base.endswith(".toml"):
            path = heirs[-1].parent / base if heirs else Path(base)
            origin = str(path)
        if not _is_file(path):
            near = difflib.get_close_matches(base[:LONGEST_NAME], recipe_names(), n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(recipe_names())}"
            raise UserError(f"{by}unknown recipe '{clean(base)}': {hint} (or give the path of a .toml file)")
        if path.resolve() in [heir.resolve() for heir in heirs]:
            raise UserError(f"{by}'{base}' is itself built on this recipe")
        if len(heirs) == GENERATIONS:
            raise UserError(f"{recipe}: it is built on more than {GENERATIONS} recipes, one on another")
        heirs.append(path)
        tables = _tables(path)
        base = tables.pop("base", None)
        if not isinstance(base, str | None):
            takes = "it takes the name of a recipe or the path of a .toml file"
            raise UserError(f"{path}: base = {shown(base)}: {takes}")
        found.append((origin, tables))
    return found[::-1]


def _tables(path: Path) -> dict[str, Any]:
    """What a TOML file holds. UserError where it is none, or so long that it is no recipe."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"{path}: more than {LARGEST:,} bytes, that is no recipe")
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {clean(error)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):  # a name that is too long, or holds NUL
        return path.is_file()
    return False
