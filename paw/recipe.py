"""From a recipe and the command line to a Config.

A recipe is a TOML file whose tables are the sections of `Config`; `--a.b value` on the command line overrides one key.
`base = ["alfworld", "gigpo", "paw"]` above the first table takes over other recipes (names, or paths relative to the
file) in that order; each overrides single keys of those before it, and the file those of all. A layer that chooses
another plug-in, or another value that keys depend on (`paw.values.Only`), drops the keys that no longer apply. An
unknown key is an error that says what was meant. No torch here.
"""

import tomllib
from collections.abc import Container
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from paw import plugins
from paw.config import Config
from paw.errors import UserError, clean, nearest, shown
from paw.keys import Key, keys_of
from paw.values import LONGEST_NAME

RECIPES = Path(__file__).parent / "recipes"
GENERATIONS, MOST_LAYERS, LARGEST = 50, 500, 1_000_000
"""Bases one on another below a recipe, in all, and bytes of one."""
HIGH_LR = 1e-4


@cache
def index() -> dict[str, dict[str, dict[str, Any]]]:
    """recipes/index.toml: `bases`, which others build on, and `recipes`, by name."""
    return _tables(RECIPES / "index.toml")


def recipe_names() -> list[str]:
    """The packaged recipes that can be trained."""
    return sorted({*(path.stem for path in RECIPES.glob("*.toml")), *index()["recipes"]} - {"index"})


def base_names() -> list[str]:
    """The packaged recipes that others build on: algorithms, benchmarks, models."""
    return sorted({*(path.stem for path in (RECIPES / "bases").glob("*.toml")), *index()["bases"]})


def load(recipe: str | Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a recipe by name or path, apply `{"a.b": value}` overrides (texts as on the command line), validate.

    Raises UserError for whatever is unknown, malformed or out of range.
    """
    tree, origins = read_recipe(str(recipe))
    return override(tree, overrides or {}, origin=str(recipe), origins=origins)


def load_named(recipe: str | Path, overrides: dict[str, Any]) -> Config:
    """`load`, with the recipe's name as run.name where nothing else is said."""
    config = load(recipe, overrides)
    if "name" in config.run.model_fields_set:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"name": Path(recipe).stem})})


def override(tree: dict[str, Any], overrides: dict[str, Any], *, origin: str, origins: dict[str, str]) -> Config:
    """The Config of a recipe's tables under `{"a.b": value}` overrides; a plug-in's value may be the plug-in itself."""
    given: dict[str, dict[str, Any]] = {}
    for key, value in overrides.items():
        section, _, leaf = key.partition(".")
        given.setdefault(section, {})[leaf] = _named(value)
        if not isinstance(tree.get(section, {}), dict):
            found = f"{section} = {shown(tree[section])}"
            raise UserError(f"command line: --{key} does not fit the recipe's {found}, which is no table")
    chosen = _merge(tree, given, leaves=())  # what plug-ins are chosen decides which keys there are
    keys, layer = keys_of(Config, chosen), dict[str, Any]()
    for section, table in given.items():
        for leaf, value in table.items():
            _set(layer, f"{section}.{leaf}", value, keys, chosen)
    return validate(layered(tree, layer), origin=origin, origins=origins | dict.fromkeys(overrides, "command line"))


def _named(value: Any) -> Any:
    """The value, plug-ins in it replaced by their names."""
    if isinstance(value, list):
        return [_named(item) for item in value]
    return value if isinstance(value, str | int | float | tuple | dict | Path | None) else plugins.give(value)


def _set(layer: dict[str, Any], key: str, value: Any, keys: dict[str, Key], tree: dict[str, Any]) -> None:
    """Put an override into the layer: a TOML value, or a bare word; `none` where a key may be left unset."""
    tables = (known for known, found in keys.items() if get_origin(found.field.annotation) is dict)
    inside = next((known for known in tables if key.startswith(f"{known}.")), None)
    if key not in keys and inside is None:
        from paw.hints import unknown_key

        raise unknown_key(key.rstrip("."), value, tree, origin="command line", dashes="--")
    kind = keys[inside or key].field.annotation
    if isinstance(value, str):
        text = value
        value = {"true": True, "false": False}.get(text.lower(), text)  # a bare word is a string
        with suppress(ValueError, RecursionError):
            parsed = tomllib.loads(f"value = {text}")
            value = parsed["value"] if len(parsed) == 1 else text
        if text.lower() == "none" and type(None) in get_args(kind):
            value = None
        elif kind in (str, Path) and not isinstance(value, str):
            value = text  # a name that looks like a number or a date
    if inside:  # --model.chat_template_kwargs.enable_thinking false
        before = get(layer, inside) or get(tree, inside)
        value = {**(before if isinstance(before, dict) else {}), key.removeprefix(f"{inside}."): value}
    put(layer, inside or key, value)


def validate(tree: dict[str, Any], *, origin: str, origins: dict[str, str] | None = None) -> Config:
    """Build a Config from nested dicts; the first problem becomes a one-line UserError, which names where the key comes
    from by `origins`, or `origin`; of several keys at once, the command line's.
    """

    def where(key: str, message: str = "") -> str:
        found = [by for known, by in (origins or {}).items() if f"{key}.".startswith(f"{known}.") or known in message]
        return "command line" if "command line" in found else (found or [origin])[-1]

    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = error.errors()
    kind, value, key = problems[0]["type"], problems[0]["input"], _dotted(problems[0]["loc"])
    if kind in ("extra_forbidden", "only"):
        from paw.hints import unknown_key

        raise unknown_key(key, value, tree, origin=where(key))
    if kind == "missing" and isinstance(problems[0]["loc"][-1], str):
        key = next((known for known in keys_of(Config, tree) if known.startswith(f"{key}.")), key)
        raise UserError(f"{origin}: '{key}' is missing; set it in the recipe or with --{key} VALUE")
    reasons = [p["msg"].removeprefix("Value error, ") for p in problems if _dotted(p["loc"]) == key]
    message = ", or ".join(dict.fromkeys(reasons))  # one reason for each alternative of a union
    found = f"{clean(key, LONGEST_NAME)} = {shown(value)}: " if key else ""
    raise UserError(f"{where(key, message)}: {found}{message}")


def _dotted(location: tuple[int | str, ...]) -> str:
    """Where an error is, without the tags pydantic adds for the alternatives of a union."""
    return ".".join(str(part) for part in location if not str(part).startswith(("literal[", "constrained-")))


def dump(config: Config) -> str:
    """The whole resolved configuration as TOML, the keys that apply; `load` of it gives the same Config."""
    return tomli_w.dumps(as_tree(config))


def as_tree(config: Config) -> dict[str, Any]:
    """The keys that apply and are set, as nested dicts of plain values."""
    plain, tree = config.model_dump(mode="json", exclude_none=True), {}
    for dotted, key in known_keys(config).items():
        if not key.needs and (value := get(plain, dotted)) is not None:
            put(tree, dotted, value)
    return tree


def warnings(config: Config) -> list[str]:
    """What is likely to be a mistake, one line each."""
    if config.model.path == "quickstart" or config.lora.rank or config.optim.lr <= HIGH_LR:
        return []
    return [
        f"warning: optim.lr = {config.optim.lr:g} is high for a pretrained model, which it may ruin; 1e-6 is usual "
        "(see the recipe own-environment)"
    ]


def known_keys(config: Config) -> dict[str, Key]:
    """Every dotted key of a configuration's sections, those that do not apply too."""
    return keys_of(Config, {section: getattr(config, section) for section in Config.model_fields})


def layered(tree: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """The layer over the tree, without the keys of the tree that no longer apply."""
    before = keys_of(Config, tree)
    merged = _merge(tree, layer, leaves=before)
    after = keys_of(Config, merged)
    for dotted, key in before.items():
        if not key.needs and (dotted not in after or after[dotted].needs) and get(layer, dotted, _ABSENT) is _ABSENT:
            table, _, leaf = dotted.rpartition(".")
            if isinstance(found := get(merged, table), dict):
                found.pop(leaf, None)
    return merged


def _merge(old: dict[str, Any], new: dict[str, Any], *, leaves: Container[str], prefix: str = "") -> dict[str, Any]:
    """A copy of `old` under the values of `new`; a leaf is replaced as a whole, a table or not."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in old.items()}
    for key, value in new.items():
        before, dotted = merged.get(key), f"{prefix}{key}"
        if isinstance(before, dict) and isinstance(value, dict) and dotted not in leaves:
            value = _merge(before, value, leaves=leaves, prefix=f"{dotted}.")
        merged[key] = value
    return merged


_ABSENT: Any = object()


def get(tree: Any, dotted: str, default: Any = None) -> Any:
    """What nested dicts hold under a dotted key."""
    for part in dotted.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree


def put(tree: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """The tree itself, with a value under a dotted key."""
    top = tree
    *tables, leaf = dotted.split(".")
    for part in tables:
        tree = tree.setdefault(part, {})
    tree[leaf] = value
    return top


def read_recipe(recipe: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables of a recipe, by name or path, over those of its bases; and the recipe each dotted key comes from."""
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, tables in _lineage(recipe):
        tree = layered(tree, tables)
        for section, table in tables.items():
            keys = [f"{section}.{leaf}" for leaf in table] if isinstance(table, dict) else [section]
            origins |= dict.fromkeys(keys, origin)
    return tree, origins


def _lineage(recipe: str) -> list[tuple[str, dict[str, Any]]]:
    """(origin, tables) of a recipe after those of its bases, in the order in which they override one another."""
    layers: list[tuple[str, dict[str, Any]]] = []

    def add(name: str, by: str, folder: Path, heirs: tuple[str, ...]) -> None:
        origin, key, tables = name, name, _packaged(name)
        if name.endswith(".toml"):
            path = folder / name
            if not _is_file(path):
                raise UserError(f"{by}{clean(path)}: no such file")
            origin, key, tables, folder = str(path), str(path.resolve()), _tables(path), path.parent
        if tables is None:
            hint = nearest(name, [*recipe_names(), *base_names()]) or f"there are: {', '.join(recipe_names())}"
            raise UserError(f"{by}unknown recipe '{clean(name)}': {hint} (or give the path of a .toml file)")
        if key in heirs:
            raise UserError(f"{by}'{name}' is itself built on this recipe")
        if len(heirs) == GENERATIONS or len(layers) >= MOST_LAYERS:
            raise UserError(f"{recipe}: it is built on more than {GENERATIONS} recipes, one on another")
        bases = tables.get("base", [])
        bases = [bases] if isinstance(bases, str) else bases
        if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
            takes = "it takes the name of a recipe or the path of a .toml file, or a list of them"
            raise UserError(f"{origin}: base = {shown(tables['base'])}: {takes}")
        for base in bases:
            add(base, f"{origin}: base: ", folder, (*heirs, key))
        layers.append((origin, {section: table for section, table in tables.items() if section != "base"}))

    add(recipe, "", Path(), ())
    return layers


def _packaged(name: str) -> dict[str, Any] | None:
    """The tables of a packaged recipe, or base of recipes."""
    for path in (RECIPES / f"{name}.toml", RECIPES / "bases" / f"{name}.toml"):
        if _is_file(path):
            return _tables(path)
    return index()["recipes"].get(name, index()["bases"].get(name))


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
