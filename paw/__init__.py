"""PaW: a lean trainer for language agents that learn to act and to predict their world at once (arXiv 2606.02388).

The functions of this module do what the commands of the same names do; docs/python.md shows each.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paw.config import Config
    from paw.tools.evaluate import evaluate
    from paw.tools.export import export
    from paw.tools.planning import plan
    from paw.tools.player import rollout
    from paw.tools.rundir import metrics
    from paw.tools.sft import sft
    from paw.tools.train import train

__version__ = "0.1.0"
__all__ = ["Config", "evaluate", "export", "load", "metrics", "plan", "rollout", "sft", "train"]

_HOMES = {
    "Config": "paw.config",
    "evaluate": "paw.tools.evaluate",
    "export": "paw.tools.export",
    "metrics": "paw.tools.rundir",
    "plan": "paw.tools.planning",
    "rollout": "paw.tools.player",
    "sft": "paw.tools.sft",
    "train": "paw.tools.train",
}
"""The module that defines each name.

They are imported when the name is used: `import paw` loads no torch.
"""


def load(recipe: str | Path, **changes: Any) -> "Config":
    """The configuration of a recipe, a name or a path, with keys changed: `load("quickstart", **{"optim.lr": 1e-4})`.

    Raises UserError for a recipe, key or value that does not go.
    """
    from paw.recipe import load_named

    return load_named(recipe, changes)


if (
    not TYPE_CHECKING
):  # a type checker reads the imports above, and reports names that are not there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'paw' has no attribute '{name}'")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
