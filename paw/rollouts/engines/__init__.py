"""Rollout engines: `transformers` on the trainer's own weights, `vllm` beside them, or vLLM's servers."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paw.rollouts.engines.base import Engine

if TYPE_CHECKING:
    from paw.config import Config, LoraConfig
    from paw.model.policy import Policy
    from paw.model.ranks import Ranks
    from paw.rollouts.chat import Chat
    from paw.rollouts.engines.servers import Servers


def wants_entropy(config: "Config") -> bool:
    """Whether the engine's entropy saves the log-prob pass: selection needs it, and nothing else needs the pass."""
    return config.wm.enabled and config.wm.entropy == "full" and config.policy.old_logp == "engine"


def make_engine(
    config: "Config",
    *,
    policy: "Policy",
    chat: "Chat",
    model_path: str | Path,
    ranks: "Ranks | None" = None,
    servers: "Servers | None" = None,
    lora: "LoraConfig | None" = None,
    own_weights: bool = False,
    check: bool = True,
) -> Engine:
    """The engine that `config.engine.type` names; push the policy's weights before the first request.

    `model_path` gives vLLM the architecture. Responses end at the chat template's end token or at
    any that the model's generation config names. `own_weights` keeps the transformers engine apart
    from the policy, whose weights are about to be sharded; `check` holds what it samples against
    the model. `servers`: those that rank 0 has started. `lora`: of adapters that the model will
    have, which vLLM is sent apart from the other weights.
    """
    named, limits = (
        policy.lm.generation_config and policy.lm.generation_config.eos_token_id,
        config.rollout,
    )
    context = limits.max_prompt_tokens + limits.max_response_tokens
    end_ids = chat.end_ids | set([named] if isinstance(named, int) else named or [])
    if config.engine.type == "server":
        from paw.model.ranks import Ranks
        from paw.rollouts.engines.server import ServerEngine, open_fleet

        fleet = open_fleet(
            config,
            end_ids,
            policy.device,
            ranks or Ranks(),
            servers,
            vocabulary=len(policy.head_weight),
            entropy=wants_entropy(config),
            lora=lora,
        )
        return ServerEngine(fleet, context)
    if config.engine.type == "vllm":
        from paw.rollouts.engines.vllm import VllmEngine

        return VllmEngine(
            model_path,
            end_ids=end_ids,
            max_model_len=context,
            dtype=config.model.dtype,
            gpu_memory_utilization=config.engine.memory_share,
            sleep_level=config.engine.sleep_level,
            entropy=wants_entropy(config),
            lora=lora,
        )
    from paw.model.precision import parameters_as
    from paw.rollouts.engines.transformers import TransformersEngine, check_sampling

    model: Any = policy.lm
    if own_weights:
        model = copy.deepcopy(model).requires_grad_(False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(policy.device, policy.dtype)
        model = model.to(policy.device)  # its buffers
    engine = TransformersEngine(
        model,
        end_ids=end_ids,
        max_batch_tokens=config.engine.max_batch_tokens,
        in_dtype=lambda: parameters_as(policy.dtype, model.modules()),
        own_weights=own_weights,
        longest=context,
    )
    if check:
        check_sampling(model)
    return engine
