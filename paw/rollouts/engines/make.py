"""Makes the engine of a run, and names a user's own engine in the errors that it raises."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from paw.config.sections import Config, LoraConfig
from paw.distributed.ranks import Ranks, lost_peer, out_of_memory
from paw.errors import UserError, others_code
from paw.model.policy import Policy
from paw.rollouts.engines import find_engine, is_built_in
from paw.rollouts.engines.base import Closable, Engine, EngineParts
from paw.rollouts.text.chat import Chat


def make_engine(
    config: Config,
    *,
    policy: Policy,
    chat: Chat,
    model_path: str | Path,
    ranks: Ranks | None = None,
    started: Any = None,
    lora: LoraConfig | None = None,
    own_weights: bool = False,
    check: bool = True,
) -> Engine:
    """Make the engine that `config.engine.type` names.

    Push the policy's weights before any request.

    Responses end at the chat template's end token or at any end token in the model's generation
    config. The other arguments are those of `EngineParts`. Raises UserError for any error in a
    user's code.
    """
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
    if not is_built_in(name):
        _name_failures(engine, name)
    return engine


def start_engine(
    config: Config,
    model_path: str,
    *,
    device: torch.device,
    ranks: Ranks,
    lora: LoraConfig | None,
) -> Closable | None:
    """Call `Engine.start` on rank 0, before the models are loaded, and return what it started.

    Raises UserError for any error in a user's code.
    """
    name = config.engine.type
    with _naming(name):
        return find_engine(name).start(config, model_path, device=device, ranks=ranks, lora=lora)


def _naming(name: str) -> AbstractContextManager[None]:
    """Turn errors in a user's code into a one-line UserError that names the engine."""
    return others_code(
        f"engine.type = '{name}'",
        is_exempt=lambda error: out_of_memory(error) or lost_peer(error),
        all_theirs=not is_built_in(name),
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


def _end_ids_of_model(policy: Policy) -> set[int]:
    settings = policy.lm.generation_config
    end_ids = settings.eos_token_id if settings else None
    if isinstance(end_ids, int):
        return {end_ids}
    return set(end_ids or [])
