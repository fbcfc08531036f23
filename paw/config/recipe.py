"""Makes a Config from a recipe and the command line.

A recipe is a TOML file whose tables are the sections of `Config`. `--a.b value` on the command line
overrides one key. `base = ["alfworld", "gigpo", "paw"]` above the first table builds on other
recipes (names, or paths relative to the file) in that order. Each overrides single keys of those
before it, and the file overrides all of them. A layer may choose another plug-in, or another value
that keys depend on (`paw.config.values.Only`). It then drops keys of earlier layers that no longer
apply or have another default now (`layered`). An unknown key is an error that suggests the nearest
key. This module imports no torch.
"""

import re
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import ValidationError

from paw.config import plugins
from paw.config.entries import by_label, entry_of, with_key
from paw.config.hints import unknown_key
from paw.config.keys import LISTED, LISTS, Flat, Key, flatten, keys_of, nested
from paw.config.sections import ENTRIES, Config
from paw.config.values import LONGEST_NAME
from paw.errors import HIDDEN, UserError, clean, masked, nearest, short_repr

RECIPES = Path(__file__).parents[1] / "recipes"
GENERATIONS = 50
"""Maximum length of a chain of recipes in which each is built on the next."""
MOST_LAYERS = 500
"""Maximum total number of bases of a recipe, including repeats."""
LARGEST = 1_000_000
"""Maximum number of bytes of a recipe."""
HIGH_LR = 1e-4
"""Higher learning rates cause a warning, unless the model is the quickstart's or has adapters."""
WARMUP = "warmup.json"
"""File in the folder of a model that the warm-up has made."""
FAR = 100.0
"""If a clip and its default differ by more than this factor, it seems meant for another loss."""
NO_PASSWORD = re.compile(rf"://[^\s/?#@:]*:{re.escape(HIDDEN)}@")
"""A URL whose password was masked."""


@cache
def packaged() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the `recipes` that can be trained and the `bases` that they build on, by name.

    Bases are algorithms, benchmarks and models. Both come from index.toml and from their own files.
    """
    by_kind = _tables(RECIPES / "index.toml")
    for kind, folder in (("recipes", RECIPES), ("bases", RECIPES / "bases")):
        for path in folder.glob("*.toml"):
            by_kind[kind][path.stem] = _tables(path)
    del by_kind["recipes"]["index"]
    return by_kind


def recipe_names() -> list[str]:
    return sorted(packaged()["recipes"])


def base_names() -> list[str]:
    return sorted(packaged()["bases"])


def load(recipe: str | Path | Config, overrides: dict[str, Any] | None = None) -> Config:
    """Load a recipe, given by name or path, as a Config, with `{"a.b": value}` overrides.

    Texts are parsed as on the command line. `recipe` may also be a Config. Raises UserError if
    anything is unknown, malformed or out of range.
    """
    if isinstance(recipe, Config):
        if not overrides:
            return recipe
        return override(as_set(recipe), overrides, origin="the configuration", origins={})
    flat_values, origins = read_recipe(str(recipe))
    return override(flat_values, overrides or {}, origin=str(recipe), origins=origins)


def as_set(config: Config) -> Flat:
    """Return the keys that were set in a configuration, with their values."""
    flat_values = flatten(config.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    return {key: value for key, value in flat_values.items() if not is_replaced(key, flat_values)}


def is_replaced(key: str, flat: Flat) -> bool:
    """Whether a key belongs to a section that a list of several such sections replaces."""
    list_name = LISTED.get(key.partition(".")[0])
    return list_name is not None and bool(flat.get(list_name))


def load_named(recipe: str | Path | Config, overrides: dict[str, Any]) -> Config:
    """Do what `load` does, with the recipe's name as run.name if that is not set."""
    config = load(recipe, overrides)
    if isinstance(recipe, Config) or "name" in config.run.model_fields_set:
        return config
    run = config.run.model_copy(update={"name": Path(recipe).stem})
    return config.model_copy(update={"run": run})


def check_config(config: object, function: str) -> None:
    """Raise UserError if the argument of a function of `paw` is not a configuration."""
    if isinstance(config, Config):
        return
    recipe = short_repr(config) if isinstance(config, str | Path) else "RECIPE"
    raise UserError(
        f"{function}: {short_repr(config)} is not a configuration; "
        f"write {function}(paw.load({recipe}))"
    )


def override(
    flat: Flat, overrides: dict[str, Any], *, origin: str, origins: dict[str, str]
) -> Config:
    """Return the Config of a recipe's keys with `{"a.b": value}` overrides.

    The value of a plug-in's key may be the plug-in itself.
    """
    named_overrides = {key: named(value) for key, value in overrides.items()}
    # The chosen plug-ins decide which keys exist.
    keys = keys_of(Config, flat | named_overrides)
    layer: Flat = {}
    for key, value in named_overrides.items():
        list_name, _, entry_key = key.partition(".")
        if list_name in ENTRIES and entry_key:
            tables = layer.get(list_name, flat.get(list_name, []))
            layer[list_name] = _with_override(list_name, tables, entry_key, value)
            continue

        table_name = key.rpartition(".")[0]
        is_entry_of_dict = (
            table_name in keys and get_origin(keys[table_name].field.annotation) is dict
        )
        if key not in keys and not is_entry_of_dict:
            raise unknown_key(
                key.rstrip("."), flat | named_overrides, origin="command line", dashes="--"
            )

        if isinstance(value, str):
            annotation = keys[key].field.annotation if key in keys else None
            value = _parsed(value, annotation)
        # An override of a table replaces all its keys.
        flat = {
            old_key: old_value
            for old_key, old_value in flat.items()
            if not old_key.startswith(f"{key}.")
        }
        layer |= flatten({key: value})

    origins = origins | dict.fromkeys(overrides, "command line")
    return validate(layered(flat, layer), origin=origin, origins=origins)


def _with_override(list_name: str, tables: Any, key: str, value: Any) -> list[Any]:
    """Return a list's tables with a key of one entry changed, see `entries.with_key`."""
    entry_kind = ENTRIES[list_name]
    if isinstance(value, str):
        entry_table = entry_of(entry_kind, tables, key.partition(".")[0])
        with suppress(UserError):  # reported when the entry is validated
            field = entry_kind.keys_of(entry_table).get(key.partition(".")[2])
            value = _parsed(value, field.annotation if field else None)
    return with_key(entry_kind, tables, key, value)


def named(value: Any) -> Any:
    """Replace a plug-in with its name, and a Path with its text, also in lists and tables."""
    if isinstance(value, list):
        return [named(item) for item in value]
    if isinstance(value, dict):
        return {key: named(inner_value) for key, inner_value in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str | int | float | tuple | None):
        return value
    return plugins.give(value)


def _parsed(text: str, kind: Any) -> Any:
    """Return what `text` means in a key of type `kind`: None, a TOML value or the text itself."""
    if text.lower() == "none" and type(None) in get_args(kind):
        return None

    value: Any = {"true": True, "false": False}.get(text.lower(), text)
    with suppress(ValueError, RecursionError):
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text

    looks_like_number_or_date = not isinstance(value, str)
    if kind in (str, Path) and looks_like_number_or_date:
        return text
    return value


def validate(tree: dict[str, Any], *, origin: str, origins: dict[str, str] | None = None) -> Config:
    """Build a Config from tables or dotted keys.

    Raises UserError, in one line, for the first problem. The line begins with the origin of the key
    (from `origins`, otherwise `origin`). If the problem concerns several keys, the line names the
    command line rather than a recipe.
    """
    origins = origins or {}
    flat_values = flatten(tree)
    for key in flat_values:
        if is_replaced(key, flat_values):
            section = key.partition(".")[0]
            raise UserError(
                f"{_origin_of(key, '', origins, default=origin)}: '{clean(key)}' is a key of "
                f"[{section}], and the recipe has [[{LISTED[section]}]]: give it to one of them, "
                f"or leave [[{LISTED[section]}]] out"
            )
    try:
        return Config.model_validate(nested(flat_values))
    except ValidationError as error:
        problems = error.errors()

    kind = problems[0]["type"]
    location = problems[0]["loc"]
    key = _dotted(location)
    if kind in ("extra_forbidden", "only"):
        raise unknown_key(key, flatten(tree), origin=_origin_of(key, "", origins, default=origin))
    if kind == "missing" and isinstance(location[-1], str):
        keys_below = (
            other_key
            for other_key in keys_of(Config, flatten(tree))
            if other_key.startswith(f"{key}.")
        )
        key = next(keys_below, key)
        raise UserError(f"{origin}: '{key}' is missing; set it in the recipe or with --{key} VALUE")

    reasons = []
    for problem in problems:
        if _dotted(problem["loc"]) == key:
            reasons.append(problem["msg"].removeprefix("Value error, "))
    message = ", or ".join(dict.fromkeys(reasons))  # one reason for each alternative of a union
    setting = f"{clean(key, LONGEST_NAME)} = {short_repr(problems[0]['input'])}: " if key else ""
    raise UserError(f"{_origin_of(key, message, origins, default=origin)}: {setting}{message}")


def _origin_of(key: str, message: str, origins: dict[str, str], *, default: str) -> str:
    """Return where the key, or a key that the message names, was set.

    If `key` is a section, its keys count too. This is the command line if any of them was set
    there, otherwise the origin of the last one.
    """
    candidates = []
    for known_key, origin in origins.items():
        is_above = f"{key}.".startswith(f"{known_key}.")
        is_below = known_key.startswith(f"{key}.")
        if is_above or is_below or known_key in message:
            candidates.append(origin)
    if "command line" in candidates:
        return "command line"
    return candidates[-1] if candidates else default


def _dotted(location: tuple[int | str, ...]) -> str:
    """Return the key of an error, without the tags that pydantic adds for members of a union."""
    return ".".join(
        str(part) for part in location if not str(part).startswith(("literal[", "constrained-"))
    )


def dump(config: Config) -> str:
    """Return the resolved configuration as TOML, with all keys that apply.

    Calling `load` on it gives the same Config, except for passwords in URLs, which are ***
    (`check_passwords`).
    """
    return tomli_w.dumps(as_tree(config))


def as_tree(config: Config) -> dict[str, Any]:
    """Return the keys that apply and are set, as nested dicts, without passwords in URLs."""
    plain = masked(config.model_dump(mode="json", exclude_none=True))
    flat_values: Flat = {}
    for key, key_state in known_keys(config).items():
        value = get(plain, key)
        is_empty_list = key in LISTS and not value
        if value is not None and not key_state.needs and not is_empty_list:
            flat_values[key] = value
    return nested(flat_values)


def check_passwords(config: Config) -> None:
    """Raise UserError if a URL has the password ***, which a run's files contain instead."""
    plain = config.model_dump(mode="json", exclude_none=True)
    values = {
        key: get(plain, key) for key, key_state in known_keys(config).items() if not key_state.needs
    }
    for name, kind in ENTRIES.items():
        values.pop(name, None)
        values |= by_label(kind, plain[name])
    for key, value in values.items():
        if not NO_PASSWORD.search(str(value)):
            continue
        raise UserError(
            f"{key} = {short_repr(value)}: files of a run do not keep passwords; "
            f"give the whole value again, in a recipe or with --{key} VALUE"
        )


def warnings(config: Config) -> list[str]:
    """Return a line for each setting that is probably a mistake."""
    lines = _clip_warnings(config)
    path = config.model.path
    is_pretrained = path != "quickstart" and not (Path(path).expanduser() / WARMUP).is_file()
    if is_pretrained and not config.lora.rank and config.optim.lr > HIGH_LR:
        lines.append(
            f"warning: optim.lr = {config.optim.lr:g} is high for a pretrained model, which it may "
            "ruin; 1e-6 is usual (see the recipe own-environment)"
        )
    return lines


def _clip_warnings(config: Config) -> list[str]:
    """Return a line for each clip that seems to be meant for another loss. Clips of ppo and gspo
    differ by a factor of 500."""
    lines: list[str] = []
    for key in ("clip_low", "clip_high"):
        state = known_keys(config)[f"policy.{key}"]
        value = getattr(config.policy, key)
        default = state.field.default
        if state.needs or not isinstance(default, float) or not (value and default):
            continue
        if not 1 / FAR <= value / default <= FAR:
            lines.append(
                f"warning: policy.{key} = {value:g} seems to be written for another loss: the "
                f"default of policy.loss = '{config.policy.loss}' is {default:g}"
            )
    return lines


def known_keys(config: Config) -> dict[str, Key]:
    """Return every dotted key of a configuration's sections, even those that do not apply."""
    return keys_of(config, flatten(config))


def get(tree: Any, dotted: str) -> Any:
    """Return the value of a dotted key in nested dicts, or None."""
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def layered(flat: Flat, layer: Flat) -> Flat:
    """Override `flat` with `layer`.

    Drops keys of `flat` that no longer apply. Also drops keys for which the newly chosen plug-in
    has another default than the former one, because it gives them another meaning.
    """
    merged = flat | layer
    keys_before = keys_of(Config, flat)
    keys_after = keys_of(Config, merged)
    dropped = set()
    for key, before in keys_before.items():
        if before.needs:
            continue
        after = keys_after.get(key)
        if after is None or after.needs or after.field.default != before.field.default:
            dropped.add(key)

    remaining: Flat = {}
    for key, value in merged.items():
        table_name = key.rpartition(".")[0]  # the key itself, if its value is a dict
        if key in layer or not dropped & {key, table_name}:
            remaining[key] = value
    return remaining


def read_recipe(recipe: str) -> tuple[Flat, dict[str, str]]:
    """Return (keys, origins) of a recipe, given by name or path.

    Its keys override those of its bases. `origins` maps each key to the recipe it comes from.
    """
    flat_values: Flat = {}
    origins: dict[str, str] = {}
    for origin, layer in _lineage(recipe):
        flat_values = layered(flat_values, layer)
        origins |= dict.fromkeys(layer, origin)
    return flat_values, origins


def _lineage(recipe: str) -> list[tuple[str, Flat]]:
    """Return (origin, keys) of each base of a recipe, and last of the recipe itself.

    Later entries override earlier ones.
    """
    layers: list[tuple[str, Flat]] = []

    def add(name: str, *, context: str, folder: Path, heirs: tuple[str, ...]) -> None:
        """Append the layers of one recipe.

        `heirs` identify the recipes that are built on it. Errors begin with `context`.
        """
        if name.endswith(".toml"):
            path = folder / name
            tables = _tables(path, context)
            origin = str(path)
            identity = str(path.resolve())
            folder = path.parent
        else:
            tables = (packaged()["bases"] | packaged()["recipes"]).get(name)
            origin = name
            identity = name

        if tables is None:
            hint = (
                nearest(name, [*recipe_names(), *base_names()])
                or f"there are: {', '.join(recipe_names())}"
            )
            raise UserError(
                f"{context}unknown recipe '{clean(name)}': {hint} "
                "(or give the path of a .toml file)"
            )
        if identity in heirs:
            raise UserError(f"{context}'{name}' is itself built on this recipe")
        if len(heirs) == GENERATIONS:
            raise UserError(f"{recipe}: its chain of bases has more than {GENERATIONS} recipes")
        if len(layers) >= MOST_LAYERS:
            raise UserError(f"{recipe}: it is built on more than {MOST_LAYERS} recipes in total")

        for base in _bases(tables, origin):
            add(base, context=f"{origin}: base: ", folder=folder, heirs=(*heirs, identity))
        sections = {section: table for section, table in tables.items() if section != "base"}
        layers.append((origin, flatten(sections)))

    add(recipe, context="", folder=Path(), heirs=())
    return layers


def _bases(tables: dict[str, Any], origin: str) -> list[str]:
    """Return the recipes that a recipe is built on.

    Raises UserError if `base` is neither a text nor a list of texts.
    """
    bases = tables.get("base", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(
            f"{origin}: base = {short_repr(tables['base'])}; it must be the name of a recipe, "
            "the path of a .toml file, or a list of these"
        )
    return bases


def _tables(path: Path, context: str = "") -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises UserError, which begins with `context`, if the file cannot be read, is not TOML or is too
    long.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(
                f"{context}{clean(path)}: more than {LARGEST:,} bytes, too long for a recipe"
            )
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{context}{clean(path)}: not valid TOML: {clean(error)}") from None
    except OSError as error:
        raise UserError(f"{context}{clean(path)}: {error.strerror}") from None
