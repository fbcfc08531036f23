"""The configuration of a command that plays games, perhaps without a recipe."""

from pathlib import Path
from typing import Any

from paw.config import Config
from paw.errors import UserError, to_stderr
from paw.keys import keys_of
from paw.recipe import layered, load, named, override, read_recipe, recipe_names

Overrides = dict[str, Any]


def load_played(
    recipe: str | Path | Config | None, overrides: Overrides, defaults: Overrides | None = None
) -> Config:
    """As `load`, for a command that plays: without a recipe, the recipe <env.name>-grpo if there is one.

    `defaults` are overrides too, each used only if the environment has its key. Raises UserError if
    neither a recipe nor env.name is given.
    """
    if isinstance(recipe, Config):
        return load(recipe, overrides)

    name = named(overrides.get("env.name"))
    if recipe is None and name is None:
        raise UserError("say what is played with --recipe NAME or --env NAME")
    if recipe is None and f"{name}-grpo" in recipe_names():
        recipe = f"{name}-grpo"
        to_stderr(f"settings of the recipe {recipe}; --recipe names another")

    if recipe is None:
        flat, origins = {"model.path": "-"}, {}
    else:
        flat, origins = read_recipe(str(recipe))
    known_keys = keys_of(Config, layered(flat, {"env.name": name} if name else {}))
    values = {key: text for key, text in (defaults or {}).items() if key in known_keys}
    values |= overrides
    if name == "search" and str(values.get("env.data", "")).lower() == "none":
        values = {
            "env.retriever": "bm25"
        } | values  # the recipe's retriever, E5, would be downloaded
    return override(flat, values, origin=str(recipe or "command line"), origins=origins)
