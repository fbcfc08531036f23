"""The configuration of a command that plays games, perhaps without a recipe."""

from pathlib import Path
from typing import Any

from paw.config.keys import keys_of
from paw.config.recipe import layered, load, named, override, read_recipe, recipe_names
from paw.config.sections import Config
from paw.errors import UserError, to_stderr

Overrides = dict[str, Any]


def load_played(
    recipe: str | Path | Config | None, overrides: Overrides, defaults: Overrides | None = None
) -> Config:
    """Return the configuration of a recipe. Without one, use the recipe <env.name>-grpo if it
    exists.

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
    known_keys = keys_of(Config, layered(recipe_values, {"env.name": name} if name else {}))
    values = {key: value for key, value in (defaults or {}).items() if key in known_keys}
    values |= overrides
    if name == "search" and str(values.get("env.data", "")).lower() == "none":
        # The recipe's retriever, E5, would be downloaded.
        values = {"env.retriever": "bm25"} | values
    origin = str(recipe or "command line")
    return override(recipe_values, values, origin=origin, origins=origins)
