"""Bytes of elementwise traffic per token: what decoder layers move besides matrix products and attention.

    python bench/trainer/elementwise.py     # writes bench/results/elementwise.csv

An eager layer runs forward and backward on tensors without data. The bytes that each operation
reads and writes are counted, except those of matrix products, attention and views. Fused layers are
an estimate (`paw.tools.plan.elementwise`). Nothing is timed, and no GPU is needed.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.common import RESULTS, write
from paw.tools.plan.elementwise import Traffic, eager_traffic, fused_traffic
from paw.tools.plan.shapes import SHAPES, Shape

CSV = RESULTS / "elementwise.csv"
TOKENS = 67
"""Tokens of a pass. No other size is equal to it, so tensors without this size, such as gradients
of weights, are not counted."""
MODELS = ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen3-4B", "Llama-3.1-8B")
UNCOUNTED = {"mm", "addmm", "bmm", "detach", "_unsafe_view", "empty", "empty_like", "new_empty"}
"""Matrix products, and operations that move no data."""


class _NoAttention(torch.autograd.Function):
    """Replaces attention, whose bytes are not counted."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context.save_for_backward(query, key, value)
        return query.transpose(1, 2).new_empty(query.transpose(1, 2).shape)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        # Attention kernels write them as [T, heads, size].
        return tuple(
            tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)
            for tensor in context.saved_tensors
        )


class _Bytes(TorchDispatchMode):
    """Adds up the bytes of token tensors that elementwise operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket.__name__ in UNCOUNTED or operation.is_view:
            return result
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and TOKENS in tensor.shape:
                self.total += _stored_bytes(tensor)
        return result


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements in memory, not counting those that a broadcast repeats."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def counted_traffic(shape: Shape) -> Traffic:
    """Bytes per token that an eager layer of transformers moves, by counting them."""
    AttentionInterface.register(
        "uncounted", lambda module, q, k, v, mask, **_: (_NoAttention.apply(q, k, v), None)
    )
    with torch.device("meta"):
        layer = _model(shape).to(torch.bfloat16).get_decoder().layers[0]  # type: ignore[union-attr]
        hidden = torch.empty(1, TOKENS, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        angles = torch.empty(1, TOKENS, shape.head_size, dtype=torch.bfloat16)
        with _Bytes() as moved:
            layer_output = layer(hidden, attention_mask=None, position_embeddings=(angles, angles))
            forward = moved.total
            layer_output.backward(torch.empty_like(layer_output))
    return Traffic(forward / TOKENS, (moved.total - forward) / TOKENS)


def _model(shape: Shape) -> Any:
    config_class: Any = LlamaConfig
    model_class: Any = LlamaForCausalLM
    if shape.qkv_bias:
        config_class = Qwen2Config
        model_class = Qwen2ForCausalLM
    elif shape.qk_norm:
        config_class = Qwen3Config
        model_class = Qwen3ForCausalLM
    config = config_class(
        vocab_size=10,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        attn_implementation="uncounted",
    )
    return model_class(config)


def rows() -> list[dict[str, Any]]:
    """MB a token of all layers, for each model."""
    records = []
    for model in MODELS:
        shape = SHAPES[model]
        traffics = {
            "eager, counted": counted_traffic(shape),
            "eager, as planned": eager_traffic(shape),
            "fused, as planned": fused_traffic(shape),
        }
        for layers, traffic in traffics.items():
            record = {"model": model, "layers": layers}
            record["forward_mb"] = f"{shape.layers * traffic.forward / 1e6:.2f}"
            record["backward_mb"] = f"{shape.layers * traffic.backward / 1e6:.2f}"
            records.append(record)
    return records


if __name__ == "__main__":
    write(CSV, rows())
    print(CSV)
