"""PaW: a lean trainer for language agents that learn to act and to predict their world together.

arXiv 2606.02388. The functions of this module do what the commands of the same names do;
docs/python.md shows each.
"""

import importlib
from typing import TYPE_CHECKING, Any

from paw.version import __version__ as __version__

if TYPE_CHECKING:
    from paw.config.sections import Config
    from paw.envs.conversation import Conversation
    from paw.errors import UserError
    from paw.scripts import load, script
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
    "load": "paw.scripts",
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


# Hidden from type checkers: they read the imports above, and so report names that do not exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'paw' has no attribute '{name}'")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
