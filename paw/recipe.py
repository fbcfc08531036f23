"""From a recipe and the command line to a Config.

A recipe is a TOML file whose tables are the sections of `Config`; `--a.b value` on the command line overrides one key.
`base = ["alfworld", "gigpo", "paw"]` above the first table takes over other recipes (names, or paths relative to the
file) in that order; each overrides single keys of those before it, and the file those of all. A layer that chooses
another plug-in, or another value that keys depend on (`paw.values.Only`), drops the keys that no longer apply. An
unknown key is an error that says what was meant. No torch here.
"""

import re
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from paw import plugins
from paw.config import Config
from paw.errors import HIDDEN, UserError, clean, masked, nearest, shown
from paw.keys import Flat, Key, flatten, keys_of, nested
from paw.values import LONGEST_NAME

RECIPES = Path(__file__).parent / "recipes"
GENERATIONS, MOST_LAYERS, LARGEST = 50, 500, 1_000_000
"""Bases one on another below a recipe, in all, and bytes of one."""
HIGH_LR = 1e-4
NO_PASSWORD = re.compile(rf"://[^\s/?#@:]*:{re.escape(HIDDEN)}@")


@cache
def packaged() -> dict[str, dict[str, dict[str, Any]]]:
    """The `recipes` that can be trained, and the `bases` that others build on (algorithms, benchmarks, models), by
    name: those of index.toml, and files of their own."""
    found = _tables(RECIPES / "index.toml")
    for kind, folder in (("recipes", RECIPES), ("bases", RECIPES / "bases")):
        found[kind] |= {path.stem: _tables(path) for path in folder.glob("*.toml")}
    del found["recipes"]["index"]
    return found


def recipe_names() -> list[str]:
    return sorted(packaged()["recipes"])


def base_names() -> list[str]:
    return sorted(packaged()["bases"])


def load(recipe: str | Path | Config, overrides: dict[str, Any] | None = None) -> Config:
    """Read a recipe by name or path, apply `{"a.b": value}` overrides (texts as on the command line), validate.

    A configuration in place of a recipe is taken as it is, under the overrides. Raises UserError for whatever is
    unknown, malformed or out of range.
    """
    if isinstance(recipe, Config):
        if not overrides:
            return recipe
        flat = flatten(recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True))
        return override(flat, overrides, origin="the configuration", origins={})
    flat, origins = read_recipe(str(recipe))
    return override(flat, overrides or {}, origin=str(recipe), origins=origins)


def load_named(recipe: str | Path, overrides: dict[str, Any]) -> Config:
    """`load`, with the recipe's name as run.name where nothing else is said."""
    config = load(recipe, overrides)
    if "name" in config.run.model_fields_set:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"name": Path(recipe).stem})})


def override(flat: Flat, overrides: dict[str, Any], *, origin: str, origins: dict[str, str]) -> Config:
    """The Config of a recipe's keys under `{"a.b": value}` overrides; a plug-in's value may be the plug-in itself."""
    given = {key: named(value) for key, value in overrides.items()}
    keys, layer = keys_of(Config, flat | given), Flat()  # what plug-ins are chosen decides which keys there are
    for key, value in given.items():
        table = key.rpartition(".")[0]
        if key not in keys and not (table in keys and get_origin(keys[table].field.annotation) is dict):
            from paw.hints import unknown_key

            raise unknown_key(key.rstrip("."), flat | given, origin="command line", dashes="--")
        if isinstance(value, str):
            value = _parsed(value, keys[key].field.annotation if key in keys else None)
        flat = {old: kept for old, kept in flat.items() if not old.startswith(f"{key}.")}  # a table as a whole
        layer |= flatten({key: value})
    return validate(layered(flat, layer), origin=origin, origins=origins | dict.fromkeys(overrides, "command line"))


def named(value: Any) -> Any:
    """The value, plug-ins in it replaced by their names."""
    if isinstance(value, list):
        return [named(item) for item in value]
    return value if isinstance(value, str | int | float | tuple | dict | Path | None) else plugins.give(value)


def _parsed(text: str, kind: Any) -> Any:
    """A TOML value, or a bare word; `none` where a key may be left unset."""
    if text.lower() == "none" and type(None) in get_args(kind):
        return None
    value: Any = {"true": True, "false": False}.get(text.lower(), text)  # a bare word is a string
    with suppress(ValueError, RecursionError):
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    # a name that looks like a number or a date
    return text if kind in (str, Path) and not isinstance(value, str) else value


def validate(tree: dict[str, Any], *, origin: str, origins: dict[str, str] | None = None) -> Config:
    """Build a Config from tables or dotted keys; the first problem becomes a one-line UserError. It names where the key
    comes from, by `origins`, or `origin`; of several keys at once, the command line's.
    """

    def where(key: str, message: str = "") -> str:
        found = [by for known, by in (origins or {}).items() if f"{key}.".startswith(f"{known}.") or known in message]
        return "command line" if "command line" in found else (found or [origin])[-1]

    try:
        return Config.model_validate(nested(flatten(tree)))
    except ValidationError as error:
        problems = error.errors()
    kind, value, key = problems[0]["type"], problems[0]["input"], _dotted(problems[0]["loc"])
    if kind in ("extra_forbidden", "only"):
        from paw.hints import unknown_key

        raise unknown_key(key, flatten(tree), origin=where(key))
    if kind == "missing" and isinstance(problems[0]["loc"][-1], str):
        key = next((known for known in keys_of(Config, flatten(tree)) if known.startswith(f"{key}.")), key)
        raise UserError(f"{origin}: '{key}' is missing; set it in the recipe or with --{key} VALUE")
    reasons = [p["msg"].removeprefix("Value error, ") for p in problems if _dotted(p["loc"]) == key]
    message = ", or ".join(dict.fromkeys(reasons))  # one reason for each alternative of a union
    found = f"{clean(key, LONGEST_NAME)} = {shown(value)}: " if key else ""
    raise UserError(f"{where(key, message)}: {found}{message}")


def _dotted(location: tuple[int | str, ...]) -> str:
    """Where an error is, without the tags pydantic adds for the alternatives of a union."""
    return ".".join(str(part) for part in location if not str(part).startswith(("literal[", "constrained-")))


def dump(config: Config) -> str:
    """The whole resolved configuration as TOML, the keys that apply; `load` of it gives the same Config, but for the
    passwords of URLs, which are *** (`check_passwords`)."""
    return tomli_w.dumps(as_tree(config))


def as_tree(config: Config) -> dict[str, Any]:
    """The keys that apply and are set, as nested dicts of plain values, without the passwords of URLs."""
    plain = masked(config.model_dump(mode="json", exclude_none=True))
    values = {key: get(plain, key) for key, known in known_keys(config).items() if not known.needs}
    return nested({key: value for key, value in values.items() if value is not None})


def check_passwords(config: Config) -> None:
    """UserError for a URL whose password is ***, as the files of a run have it."""
    plain = config.model_dump(mode="json", exclude_none=True)
    for key, known in known_keys(config).items():
        value = get(plain, key)
        if known.needs or not NO_PASSWORD.search(str(value)):
            continue
        why = "files of a run do not keep passwords; give the whole value again"
        raise UserError(f"{key} = {shown(value)}: {why}, in a recipe or with --{key} VALUE")


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
    return keys_of(config, flatten(config))


def get(tree: Any, dotted: str) -> Any:
    """What nested dicts hold under a dotted key, or None."""
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def layered(flat: Flat, layer: Flat) -> Flat:
    """The layer over other keys, without those of them that no longer apply."""
    before, merged = keys_of(Config, flat), flat | layer
    after = keys_of(Config, merged)
    gone = {key for key, known in before.items() if not known.needs and (key not in after or after[key].needs)}
    return {key: value for key, value in merged.items() if key in layer or key not in gone}


def read_recipe(recipe: str) -> tuple[Flat, dict[str, str]]:
    """The keys of a recipe, by name or path, over those of its bases; and the recipe each comes from."""
    flat, origins = Flat(), dict[str, str]()
    for origin, layer in _lineage(recipe):
        flat = layered(flat, layer)
        origins |= dict.fromkeys(layer, origin)
    return flat, origins


def _lineage(recipe: str) -> list[tuple[str, Flat]]:
    """(origin, keys) of a recipe after those of its bases, in the order in which they override one another."""
    layers: list[tuple[str, Flat]] = []

    def add(name: str, by: str, folder: Path, heirs: tuple[str, ...]) -> None:
        origin, key, tables = name, name, (packaged()["bases"] | packaged()["recipes"]).get(name)
        if name.endswith(".toml"):
            path = folder / name
            tables = _tables(path, by)
            origin, key, folder = str(path), str(path.resolve()), path.parent
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
        layers.append((origin, flatten({section: table for section, table in tables.items() if section != "base"})))

    add(recipe, "", Path(), ())
    return layers


def _tables(path: Path, by: str = "") -> dict[str, Any]:
    """What a TOML file holds. UserError, beginning with `by`, where it is none, or so long that it is no recipe."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"{by}{clean(path)}: more than {LARGEST:,} bytes, that is no recipe")
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{by}{clean(path)}: not valid TOML: {clean(error)}") from None
    except OSError as error:
        raise UserError(f"{by}{clean(path)}: {error.strerror}") from None
