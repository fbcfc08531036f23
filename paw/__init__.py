"""PaW: a lean trainer for language agents that learn to act and to predict their world together.

arXiv 2606.02388. The functions of this module do what the commands of the same names do;
docs/python.md shows each.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paw.version import __version__ as __version__

if TYPE_CHECKING:
    from paw.config.sections import Config
    from paw.envs.conversation import Conversation
    from paw.errors import UserError
    from paw.scripts import script
    from paw.tools.evaluate.evaluate import evaluate
    from paw.tools.evaluate.player import rollout
    from paw.tools.export import export
    from paw.tools.plan.planning import plan
    from paw.tools.report.live_plot import LivePlot
    from paw.tools.report.rundir import metric, metrics
    from paw.tools.sft.sft import sft
    from paw.tools.smollm2 import smollm2
    from paw.tools.train.train import train
    from paw.tools.warmup.warmup import warmup
    from paw.types import Outcome, Reply, Task, ToolCall

__all__ = [
    "Config",
    "Conversation",
    "LivePlot",
    "Outcome",
    "Reply",
    "Task",
    "ToolCall",
    "UserError",
    "evaluate",
    "export",
    "load",
    "metric",
    "metrics",
    "plan",
    "rollout",
    "script",
    "sft",
    "smollm2",
    "train",
    "warmup",
]

_HOMES = {
    "Config": "paw.config.sections",
    "Conversation": "paw.envs.conversation",
    "LivePlot": "paw.tools.report.live_plot",
    "Outcome": "paw.types",
    "Reply": "paw.types",
    "Task": "paw.types",
    "ToolCall": "paw.types",
    "UserError": "paw.errors",
    "evaluate": "paw.tools.evaluate.evaluate",
    "export": "paw.tools.export",
    "metric": "paw.tools.report.rundir",
    "metrics": "paw.tools.report.rundir",
    "plan": "paw.tools.plan.planning",
    "rollout": "paw.tools.evaluate.player",
    "script": "paw.scripts",
    "sft": "paw.tools.sft.sft",
    "smollm2": "paw.tools.smollm2",
    "train": "paw.tools.train.train",
    "warmup": "paw.tools.warmup.warmup",
}
"""Public name -> the module that defines it, imported when the name is used.

So `import paw` loads no torch.
"""


def load(recipe: "str | Path | Config", words: Sequence[str] = (), **changes: Any) -> "Config":
    """The configuration of a recipe, given by name or path, with keys changed.

    For example `load("quickstart", **{"optim.lr": 1e-4})`. The first argument may also be a
    configuration, whose keys are then changed. `words` are those of a command line (`--optim.lr
    1e-4` or `optim.lr=1e-4`), and come after `changes`. A function as `model.path`, such as
    `paw.smollm2`, is called unless words name a model. Raises UserError if the recipe or a key is
    unknown, or a value is wrong.
    """
    from paw.config.recipe import load_named

    if words:
        from paw.scripts import overrides_of

        changes |= overrides_of(words)
    if callable(make_model := changes.get("model.path")):
        changes["model.path"] = make_model()
    return load_named(recipe, changes)


# Hidden from type checkers: they read the imports above, and so report names that do not exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'paw' has no attribute '{name}'")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
