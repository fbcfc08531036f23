"""The engine that samples with the trainer's own weights. It needs no installation or transfer.

`step` answers everything queued, see `paw.rollouts.engines.generation`. Importing this module loads
no torch.
"""

import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self, cast

from paw.rollouts.engines.base import Completion, Engine, EngineParts, EnginePlan, PlannedRun
from paw.rollouts.engines.settings import TransformersConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class TransformersEngine(Engine):
    """Samples from `model`, a Hugging Face causal LM.

    It is the trainer's model, or with `own_weights` a copy that `sync` fills. A run's engine has a
    copy if several GPUs shard the trainer's model. The other arguments are those of `Generator`,
    which says which models it refuses.
    """

    Config = TransformersConfig
    runs_policy = True
    gives_entropy = True
    memory_keys = ("max_batch_tokens",)
    replaceable = True

    @classmethod
    def make(cls, parts: EngineParts) -> Self:
        """Make and check a run's engine, on the policy's weights or a copy of them."""
        from paw.rollouts.engines.generation import (  # loads torch
            check_sampling,
            model_for_sampling,
        )

        settings = cast(TransformersConfig, parts.config.engine)
        origin = f"engine.type = '{settings.type}'"
        model, in_dtype = model_for_sampling(parts.policy, own_weights=parts.own_weights)
        engine = cls(
            model,
            end_ids=parts.end_ids,
            max_batch_tokens=settings.max_batch_tokens,
            in_dtype=in_dtype,
            own_weights=parts.own_weights,
            longest=parts.context,
            origin=origin,
        )
        if parts.check:
            check_sampling(model, origin)
        return engine

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        limits = run.config.rollout
        settings = cast(TransformersConfig, run.config.engine)
        growth = 1 + limits.max_response_tokens / limits.max_prompt_tokens
        kv_bytes = run.kv_bytes * run.element_bytes / 2
        cache = kv_bytes * settings.max_batch_tokens * growth
        has_copy = run.ranks > 1 or run.copies_weights
        weights = run.weight_bytes if has_copy else 0
        return EnginePlan(
            engines=run.ranks,
            weights=weights,
            cache=cache,
            asleep=weights if run.ranks > 1 else 0,  # on one GPU the copies are freed after play
            cache_tokens=cache / run.kv_bytes,
        )

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        end_ids: Collection[int],
        max_batch_tokens: int = 65536,
        in_dtype: Callable[[], AbstractContextManager[Any]] = nullcontext,
        own_weights: bool = False,
        longest: float = math.inf,
        origin: str = "engine.type = 'transformers'",
    ) -> None:
        from paw.rollouts.engines.generation import Generator  # loads torch

        super().__init__(getattr(model.config, "max_position_embeddings", None))
        self._own_weights = own_weights
        self._generator = Generator(
            model,
            end_ids=end_ids,
            max_batch_tokens=max_batch_tokens,
            in_dtype=in_dtype,
            longest=longest,
            origin=origin,
        )

    def step(self) -> list[Completion]:
        """Answer everything queued, in the order of submission."""
        requests = list(self.requests.values())
        self.requests = {}
        return self._generator.answer(requests)

    def sync(self, parameters: Iterable[tuple[str, "Tensor"]], version: int) -> None:
        super().sync(parameters, version)
        if self._own_weights:
            self._generator.load(parameters)
