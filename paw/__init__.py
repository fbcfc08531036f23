"""PaW: a lean trainer for language agents that learn to act and to predict their world together.

arXiv 2606.02388. The functions of this module do what the commands of the same names do;
docs/python.md shows each.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paw.version import __version__ as __version__

if TYPE_CHECKING:
    from paw.config.sections import Config
    from paw.tools.evaluate.evaluate import evaluate
    from paw.tools.evaluate.player import rollout
    from paw.tools.export import export
    from paw.tools.plan.planning import plan
    from paw.tools.report.rundir import metrics
    from paw.tools.sft.sft import sft
    from paw.tools.train.train import train

__all__ = [
    "Config",
    "evaluate",
    "export",
    "load",
    "metrics",
    "plan",
    "rollout",
    "sft",
    "train",
]

_HOMES = {
    "Config": "paw.config.sections",
    "evaluate": "paw.tools.evaluate.evaluate",
    "export": "paw.tools.export",
    "metrics": "paw.tools.report.rundir",
    "plan": "paw.tools.plan.planning",
    "rollout": "paw.tools.evaluate.player",
    "sft": "paw.tools.sft.sft",
    "train": "paw.tools.train.train",
}
"""Public name -> the module that defines it, imported when the name is used.

So `import paw` loads no torch.
"""


def load(recipe: str | Path, **changes: Any) -> "Config":
    """The configuration of a recipe, given by name or path, with keys changed.

    For example `load("quickstart", **{"optim.lr": 1e-4})`. Raises UserError if the recipe or a key
    is unknown, or a value is wrong.
    """
    from paw.config.recipe import load_named

    return load_named(recipe, changes)


# Hidden from type checkers: they read the imports above, and so report names that do not exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'paw' has no attribute '{name}'")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
