"""PaW: a lean trainer for language agents that learn to act and to predict their world at once (arXiv 2606.02388)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paw.config import Config
    from paw.train import train

__version__ = "0.1.0"
__all__ = ["Config", "load", "train"]


def load(recipe: str, **changes: Any) -> "Config":
    """The configuration of a recipe, a name or a path, with keys changed: `load("quickstart", **{"optim.lr": 1e-4})`.

    Raises UserError for a recipe, key or value that does not go.
    """
    from paw.recipe import load_named

    return load_named(recipe, changes)


def __getattr__(name: str) -> Any:
    """`paw.train(config)` and `paw.Config`, imported when they are asked for: `import paw` loads no torch."""
    import importlib

    if name == "train":
        return importlib.import_module("paw.train")  # a module that can be called
    if name == "Config":
        return importlib.import_module("paw.config").Config
    raise AttributeError(f"module 'paw' has no attribute '{name}'")
