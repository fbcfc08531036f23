"""Loads the configuration of a command that plays games, with or without a recipe."""

from pathlib import Path
from typing import Any

from paw.config.keys import Flat, flatten, keys_of
from paw.config.recipe import layered, load, named, override, read_recipe, recipe_names
from paw.config.sections import Config, EnvEntry
from paw.errors import UserError, clean, to_stderr

Overrides = dict[str, Any]


def load_played(
    recipe: str | Path | Config | None, overrides: Overrides, defaults: Overrides | None = None
) -> Config:
    """Return the configuration of a recipe. If none is given, use the recipe <env.name>-grpo if it
    exists. If the recipe has several [[envs]], env.name chooses one by its label.

    `overrides` take precedence over `defaults`. A default is used only if the environment has its
    key. Raises UserError if neither a recipe nor env.name is given.
    """
    if isinstance(recipe, Config):
        return load(recipe, overrides)

    name = named(overrides.get("env.name"))
    if recipe is None and name is None:
        raise UserError("say what to play with --recipe NAME or --env NAME")
    if recipe is None and f"{name}-grpo" in recipe_names():
        recipe = f"{name}-grpo"
        to_stderr(f"settings of the recipe {recipe}; --recipe names another")

    recipe_values: dict[str, Any] = {"model.path": "-"}
    origins: dict[str, str] = {}
    if recipe is not None:
        recipe_values, origins = read_recipe(str(recipe))
    if recipe_values.get("envs") and name is not None:
        recipe_values = _with_one_env(recipe_values, str(name))
        name = recipe_values["env.name"]
        overrides = overrides | {"env.name": name}
    known_keys = keys_of(Config, layered(recipe_values, {"env.name": name} if name else {}))
    values = {key: value for key, value in (defaults or {}).items() if key in known_keys}
    values |= overrides
    if name == "search" and str(values.get("env.data", "")).lower() == "none":
        # The recipe's retriever, E5, would be downloaded.
        values = {"env.retriever": "bm25"} | values
    origin = str(recipe or "command line")
    return override(recipe_values, values, origin=origin, origins=origins)


def _with_one_env(recipe_values: Flat, label: str) -> Flat:
    """Return the keys of a recipe with one of its [[envs]] as its only environment.

    If it has its own agent or rewards, they become those of the recipe. Raises UserError if there
    is no environment with this label.
    """
    labels = [EnvEntry.label_of(table) for table in recipe_values["envs"]]
    if label not in labels:
        raise UserError(
            f"--env {clean(label)}: the recipe has several environments, {', '.join(labels)}; "
            "name one of these"
        )
    table = recipe_values["envs"][labels.index(label)]
    env = {key: value for key, value in table.items() if key not in EnvEntry.own_keys()}
    own_parts = {key: table[key] for key in ("agent", "rewards") if key in table}
    replaced = {"envs", *own_parts}
    if "rewards" in own_parts:
        replaced.add("reward")
    others = {
        key: value for key, value in recipe_values.items() if key.partition(".")[0] not in replaced
    }
    return others | flatten(own_parts) | flatten(env, "env.")
