"""Rollout engines by name: built-in ones, and those of your own (docs/bring-your-own.md).

What a class of engines says about itself is known without torch; `make.py` makes an engine.
"""

from paw.config import plugins
from paw.errors import UserError, others_code
from paw.rollouts.engines.base import Engine, EnginePlan, PlannedRun


def find_engine(name: str) -> type[Engine]:
    """Return the class that `engine.type = name` names. Built-in classes do not load torch.

    Raises UserError if it is not an engine, or lacks a method.
    """
    engine_type = plugins.load("engines", name)
    problem = ""
    if not (isinstance(engine_type, type) and issubclass(engine_type, Engine)):
        problem = "it is not an engine, a class derived from paw.rollouts.engines.base.Engine"
    elif missing := sorted(getattr(engine_type, "__abstractmethods__", ())):
        problem = f"{engine_type.__name__} has no method {', '.join(missing)}"
    if problem:
        raise UserError(f"engine.type = '{name}': {problem}")
    return engine_type


def plan_engine(run: PlannedRun) -> EnginePlan:
    """Return what the engines of a planned run will need. Does not load torch.

    Raises UserError for any error in a user's code.
    """
    name = run.config.engine.type
    engine_type = find_engine(name)
    with others_code(f"engine.type = '{name}'", all_theirs=not is_built_in(name)):
        plan = engine_type.plan(run)
    if not isinstance(plan, EnginePlan):
        raise UserError(
            f"engine.type = '{name}': plan returns a {type(plan).__name__}, not an EnginePlan"
        )
    return plan


def is_built_in(name: str) -> bool:
    """Whether `engine.type = name` means an engine of this package."""
    return name in plugins.BUILT_IN["engines"]
