"""Rollout engines by name: built-in ones, and those of your own (docs/bring-your-own.md)."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paw.config import plugins
from paw.errors import UserError, others_code
from paw.rollouts.engines.base import Closable, Engine, EngineParts, EnginePlan, PlannedRun

if TYPE_CHECKING:
    import torch

    from paw.config.sections import Config, LoraConfig
    from paw.distributed.ranks import Ranks
    from paw.model.policy import Policy
    from paw.rollouts.text.chat import Chat


def find_engine(name: str) -> type[Engine]:
    """Return the class that `engine.type = name` means. Built-in classes load no torch.

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


def make_engine(
    config: "Config",
    *,
    policy: "Policy",
    chat: "Chat",
    model_path: str | Path,
    ranks: "Ranks | None" = None,
    started: Any = None,
    lora: "LoraConfig | None" = None,
    own_weights: bool = False,
    check: bool = True,
) -> Engine:
    """Make the engine that `config.engine.type` names.

    Push the policy's weights before any request.

    Responses end at the chat template's end token or at any end token in the model's generation
    config. The other arguments are those of `EngineParts`. Raises UserError for any error in a
    user's code.
    """
    from paw.distributed.ranks import Ranks  # loads torch

    limits = config.rollout
    parts = EngineParts(
        config=config,
        policy=policy,
        chat=chat,
        model_path=model_path,
        end_ids=frozenset(chat.end_ids | _end_ids_of_model(policy)),
        context=limits.max_prompt_tokens + limits.max_response_tokens,
        ranks=ranks or Ranks(),
        own_weights=own_weights,
        check=check,
        lora=lora,
        started=started,
    )
    name = config.engine.type
    engine_type = find_engine(name)
    with _naming(name):
        engine = engine_type.make(parts)
    _check_engine(engine, name)
    if not _is_built_in(name):
        _name_failures(engine, name)
    return engine


def start_engine(
    config: "Config",
    model_path: str,
    *,
    device: "torch.device",
    ranks: "Ranks",
    lora: "LoraConfig | None",
) -> Closable | None:
    """Call `Engine.start` on rank 0, before the models are loaded, and return what it started.

    Raises UserError for any error in a user's code.
    """
    name = config.engine.type
    with _naming(name):
        return find_engine(name).start(config, model_path, device=device, ranks=ranks, lora=lora)


def _naming(name: str) -> AbstractContextManager[None]:
    """Turn errors in a user's code into a one-line UserError that names the engine."""
    from paw.distributed.ranks import lost_peer, out_of_memory  # loads torch

    return others_code(
        f"engine.type = '{name}'",
        is_exempt=lambda error: out_of_memory(error) or lost_peer(error),
        all_theirs=not _is_built_in(name),
    )


def _check_engine(engine: Any, name: str) -> None:
    """Raise UserError if this is not an engine or was not initialised as one."""
    problem = ""
    if not isinstance(engine, Engine):
        problem = f"it makes a {type(engine).__name__}, not an Engine"
    elif not hasattr(engine, "positions"):
        problem = f"{type(engine).__name__}.__init__ must call super().__init__(positions)"
    if problem:
        raise UserError(f"engine.type = '{name}': {problem}")


def _name_failures(engine: Engine, name: str) -> None:
    """Make the methods of a user's engine raise UserError for any error inside them."""

    def in_context(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _naming(name):
                return method(*args, **kwargs)

        return call

    for method_name, member in vars(Engine).items():
        if inspect.isfunction(member) and not method_name.startswith("_"):
            setattr(engine, method_name, in_context(getattr(engine, method_name)))


def plan_engine(run: PlannedRun) -> EnginePlan:
    """Return what the engines of a planned run will need. Loads no torch.

    Raises UserError for any error in a user's code.
    """
    name = run.config.engine.type
    engine_type = find_engine(name)
    with others_code(f"engine.type = '{name}'", all_theirs=not _is_built_in(name)):
        plan = engine_type.plan(run)
    if not isinstance(plan, EnginePlan):
        raise UserError(
            f"engine.type = '{name}': plan returns a {type(plan).__name__}, not an EnginePlan"
        )
    return plan


def _is_built_in(name: str) -> bool:
    return name in plugins.BUILT_IN["engines"]


def _end_ids_of_model(policy: "Policy") -> set[int]:
    settings = policy.lm.generation_config
    end_ids = settings.eos_token_id if settings else None
    if isinstance(end_ids, int):
        return {end_ids}
    return set(end_ids or [])
