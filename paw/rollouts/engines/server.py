"""The engine that samples on vLLM servers: those of engine.urls, or some that the run starts.

Requests go to a pool of servers (`paw.rollouts.engines.pool`). Finished ones come back through a
queue. Importing this module loads no torch.
"""

import queue
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, cast

from paw.config import sections
from paw.rollouts.engines import vllm_plan
from paw.rollouts.engines.base import (
    Closable,
    Completion,
    Engine,
    EngineParts,
    EnginePlan,
    PlannedRun,
    Request,
)
from paw.rollouts.engines.settings import ServerConfig
from paw.rollouts.engines.vllm_library import REQUIRES

if TYPE_CHECKING:
    import torch

    from paw.distributed.ranks import Ranks
    from paw.rollouts.engines.pool import ServerPool

STEP_S = 0.02
"""Seconds that `step` waits for a response before agents and environments may run."""
MOST_POWERS = 7
"""Powers of two tried as the number of a server's cards."""


class ServerEngine(Engine):
    """The servers of a pool as an engine; several engines may share a pool."""

    Config = ServerConfig
    requires = REQUIRES
    shares_card = False
    gives_entropy = True
    gives_versions = True
    has_pool = True
    takes_adapters = True
    starts_servers = True
    continuous = True
    checkpoint_names = True

    @classmethod
    def start(
        cls,
        config: sections.Config,
        model_path: str,
        *,
        device: "torch.device",
        ranks: "Ranks",
        lora: sections.LoraConfig | None,
    ) -> Closable | None:
        from paw.rollouts.engines.servers import start_servers  # loads torch

        if not config.engine.gpus:
            return None
        return start_servers(config, model_path, device=device, ranks=ranks, lora=lora)

    @classmethod
    def make(cls, parts: EngineParts) -> Self:
        from paw.rollouts.engines.pool import open_pool  # loads torch

        return cls(open_pool(parts), parts.context)

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        settings = cast(ServerConfig, run.config.engine)
        least_cards = cls._least_cards(run)
        # The size of the servers at engine.urls is not known. This assumes the fewest cards that
        # hold the model.
        cards = settings.tensor_parallel if settings.servers else max(1, least_cards)
        sends_adapters = vllm_plan.sends_adapters(run)
        return EnginePlan(
            engines=settings.servers or len(settings.urls),
            cards=cards,
            least_cards=least_cards,
            own_card=cls._card_bytes(run, cards),
            cache_tokens=cls._cache_tokens(run, cards),
            cache_is_fixed=True,
            sequences=settings.max_num_seqs,
            least_step_s=vllm_plan.STEP_S,
            sent_bytes=run.adapter_bytes if sends_adapters else None,
            sent_by="files" if sends_adapters or settings.transfer == "files" else "nccl",
        )

    @classmethod
    def _card_bytes(cls, run: PlannedRun, cards: int) -> tuple[float, float]:
        """(weights with buffers, KV cache) in bytes on each of the `cards` of a server."""
        settings = cast(ServerConfig, run.config.engine)
        return vllm_plan.card_bytes(run, cards=cards, share=settings.gpu_memory_utilization)

    @classmethod
    def _cache_tokens(cls, run: PlannedRun, cards: int) -> float:
        """Tokens in a server's KV cache.

        Each card has its share of the heads, but at least one (vLLM repeats them).
        """
        _, cache = cls._card_bytes(run, cards)
        return cache / run.kv_bytes * min(cards, run.kv_heads)

    @classmethod
    def _least_cards(cls, run: PlannedRun) -> int:
        for power in range(MOST_POWERS):
            cards = 2**power
            divides_heads = run.heads % cards == 0
            if divides_heads and cls._cache_tokens(run, cards) >= run.cache_wanted:
                return cards
        return 0

    def __init__(self, pool: "ServerPool", max_model_len: int) -> None:
        super().__init__(max_model_len)
        self.pool = pool
        self._completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()

    @property
    def version(self) -> int:  # type: ignore[override]
        """-1 until the first `sync`."""
        return self.pool.version

    @property
    def faults(self) -> dict[str, str]:
        return self.pool.faults

    def submit(self, request: Request) -> None:
        if self.version < 0:
            raise RuntimeError("the engine has no weights: call sync first")
        super().submit(request)
        self.pool.submit(request, self._completions.put)

    def step(self) -> list[Completion]:
        """Return the requests that have finished. Waits a moment for the first."""
        completions: list[Completion] = []
        with suppress(queue.Empty):
            completions.append(self._completions.get(timeout=STEP_S))
            while True:
                completions.append(self._completions.get_nowait())
        return [completion for completion in completions if self.requests.pop(completion.key, None)]

    def sync(self, parameters: Any, version: int) -> None:
        """Send the weights. Pending requests continue with the new weights."""
        self.pool.sync(parameters, version)

    def exclude(self, servers: Collection[str]) -> bool:
        others = [server for server in self.pool.servers if server.name not in servers]
        if others:
            self.pool.servers = others
        return bool(others)

    def sleep(self) -> None:
        """Do nothing, because the servers have their own devices."""

    def close(self) -> None:
        super().close()
        self.pool.close()
