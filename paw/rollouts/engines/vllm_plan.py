"""How much GPU memory vLLM takes, for plans of engines that use it (docs/memory.md). No torch.

Constants are assumptions, unless a source is named.
"""

from paw.rollouts.engines.base import PlannedRun

GIB = 2**30
WORK = 2.0 * GIB
"""Bytes of vLLM's share for activations and CUDA graphs. The rest is weights and KV cache."""
ASLEEP = 1.0 * GIB
"""Bytes that a sleeping vLLM leaves on the card."""
STEP_S = 5e-3
"""Shortest time of a vLLM decoding step, in seconds.

Two reports give 4 ms and 5 to 6 ms between steps (vllm issues 6854, 10634).
"""


def card_bytes(run: PlannedRun, *, cards: int, share: float) -> tuple[float, float]:
    """Return (weights with buffers, KV cache) in bytes on each of the `cards` of one vLLM.

    vLLM has a `share` of each card's memory. Tensor parallelism divides all weights and embeddings.
    """
    weights = run.weight_bytes / cards + WORK
    return weights, max(0.0, share * run.gpu_bytes - weights)


def sends_adapters(run: PlannedRun) -> bool:
    """Whether updates send only LoRA adapters, without the base weights."""
    lora = run.config.lora
    return bool(lora.rank) and lora.send == "adapters"
