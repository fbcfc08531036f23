"""What a command plays that has a model, and maybe no recipe."""

from pathlib import Path
from typing import Any

from paw.config import Config
from paw.errors import UserError, to_stderr
from paw.keys import keys_of
from paw.recipe import layered, load, named, override, read_recipe, recipe_names

Overrides = dict[str, Any]


def load_played(recipe: str | Path | Config | None, overrides: Overrides, defaults: Overrides | None = None) -> Config:
    """`load` for a command that plays: without a recipe env.name says what, as the recipe <env.name>-grpo has it.

    `defaults` are overrides of keys that the environment has.
    """
    if isinstance(recipe, Config):
        return load(recipe, overrides)
    name = named(overrides.get("env.name"))
    if recipe is None and name is None:
        raise UserError("say what is played with --recipe NAME or --env NAME")
    if recipe is None and f"{name}-grpo" in recipe_names():
        recipe = f"{name}-grpo"
        to_stderr(f"settings of the recipe {recipe}; --recipe names another")
    flat, origins = read_recipe(str(recipe)) if recipe is not None else ({"model.path": "-"}, {})
    keys = keys_of(Config, layered(flat, {"env.name": name} if name else {}))
    given = {key: text for key, text in (defaults or {}).items() if key in keys} | overrides
    if name == "search" and str(given.get("env.data", "")).lower() == "none":
        given = {"env.retriever": "bm25"} | given  # the recipe's E5 is a download
    return override(flat, given, origin=str(recipe or "command line"), origins=origins)
