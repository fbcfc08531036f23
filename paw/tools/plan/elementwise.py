"""Bytes per token that a decoder layer, eager or fused, moves between its matrix products.

Loads no torch. `bench/trainer/elementwise.py` counts the eager ones, and a test compares.
"""

from dataclasses import dataclass

from paw.config.sections import ModelConfig
from paw.tools.plan.shapes import Shape


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written per token and layer, in 16-bit precision."""

    forward: float
    backward: float


def eager_traffic(shape: Shape) -> Traffic:
    """Return what an eager layer of transformers moves.

    The operations counted are norms in float32, rotary embedding, silu and product, residual
    additions, and sums of gradients. Matrix products and attention are not included.
    """
    D = shape.hidden
    heads = shape.queries + shape.keys
    F = shape.active * shape.intermediate
    forward = 84 * D + 10 * F + 20 * heads
    backward = 214 * D + 18 * F + 34 * heads
    if shape.qk_norm:
        forward += 36 * heads
        backward += 92 * heads
    return Traffic(forward, backward)


def fused_traffic(shape: Shape) -> Traffic:
    """Return what is left if each group of operations is one kernel.

    A kernel reads its inputs and writes its results once, at two bytes per element. The forward
    pass has two residual additions with the norm after each (two inputs, the sum, the norm), the
    rotary embedding and the gated product. The backward pass has the gradients of these kernels
    (with 3 more inputs of D, which are the gradients of the projections after a norm).
    """
    D = shape.hidden
    heads = shape.queries + shape.keys
    F = shape.active * shape.intermediate
    return Traffic(
        forward=2 * (2 * 4 * D + 2 * heads + 3 * F),
        backward=2 * ((2 * 4 + 3) * D + 2 * heads + 5 * F),
    )


def saved_traffic(shape: Shape) -> Traffic:
    """Return the traffic that fused layers save, the difference of the two."""
    eager = eager_traffic(shape)
    fused = fused_traffic(shape)
    return Traffic(eager.forward - fused.forward, eager.backward - fused.backward)


def assumed_layers(config: ModelConfig) -> str:
    """Return how a GPU's decoder layers are assumed to be computed: "eager", or how they are fused.

    With "auto", the first choice is assumed to pass its trial (`paw.model.fused`).
    """
    if config.compile is True:
        return "compiled"
    if config.liger is True:
        return "Liger's kernels"
    if config.compile is False:
        return "eager"
    if config.checkpointing != "selective":
        return "compiled"
    return "eager" if config.liger is False else "Liger's kernels"
