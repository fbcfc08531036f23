"""Rollout engines: `transformers` on the trainer's own weights, or `vllm`."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paw.rollout.engines.base import Engine

if TYPE_CHECKING:
    from paw.config import Config
    from paw.model.policy import Policy
    from paw.rollout.chat import Chat


def make_engine(
    config: "Config",
    *,
    policy: "Policy",
    chat: "Chat",
    model_path: str | Path,
    own_weights: bool = False,
    check: bool = True,
) -> Engine:
    """The engine that `config.rollout.engine` names; push the policy's weights before the first request.

    `model_path` gives vLLM the architecture. Responses end at the chat template's end token or at any that the model's
    generation config names. `own_weights` keeps the transformers engine apart from the policy, whose weights are about
    to be sharded; `check` holds what it samples against the model.
    """
    named, limits = policy.lm.generation_config and policy.lm.generation_config.eos_token_id, config.rollout
    end_ids = chat.end_ids | set([named] if isinstance(named, int) else named or [])
    if limits.engine == "vllm":
        from paw.rollout.engines.vllm import VllmEngine

        return VllmEngine(
            model_path,
            end_ids=end_ids,
            max_model_len=limits.max_prompt_tokens + limits.max_response_tokens,
            dtype=config.model.dtype,
            gpu_memory_utilization=limits.gpu_memory_utilization,
            sleep_level=limits.sleep_level,
        )
    from paw.model.precision import parameters_as
    from paw.rollout.engines.transformers import TransformersEngine, check_sampling

    model: Any = policy.lm
    if own_weights:
        model = copy.deepcopy(model).requires_grad_(False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(policy.device, policy.dtype)
        model = model.to(policy.device)  # its buffers
    engine = TransformersEngine(
        model,
        end_ids=end_ids,
        max_batch_tokens=limits.max_batch_tokens,
        in_dtype=lambda: parameters_as(policy.dtype, model.modules()),
        own_weights=own_weights,
    )
    if check:
        check_sampling(model)
    return engine
