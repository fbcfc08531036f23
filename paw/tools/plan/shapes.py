"""The shape of a decoder, from config.json or a table. Memory and time depend on it.

Loads no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paw.errors import UserError
from paw.io.hub import check_hub


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder like Qwen's or Llama's.

    It has RMSNorm, grouped-query attention, SwiGLU, and a tied or separate head. With `experts`,
    each layer has that many MLPs and a router, and a token goes through `active` of them.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    """Width of the MLP, or of each expert."""
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active: int = 1

    @property
    def queries(self) -> int:
        """Columns of the queries of one layer."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Columns of the keys of one layer, and of the values."""
        return self.kv_heads * self.head_size

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of one decoder layer."""
        layers = {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
        }
        if not self.experts:  # a layer's experts are two tensors, which LoRA does not adapt
            layers["gate_proj"] = (self.hidden, self.intermediate)
            layers["up_proj"] = (self.hidden, self.intermediate)
            layers["down_proj"] = (self.intermediate, self.hidden)
        return layers

    @property
    def layer_vectors(self) -> int:
        """Parameters of the norms and biases of one decoder layer."""
        vectors = 2 * self.hidden
        if self.qkv_bias:
            vectors += self.queries + 2 * self.keys
        if self.qk_norm:
            vectors += 2 * self.head_size
        return vectors

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        linears = sum(inputs * outputs for inputs, outputs in self.linears.values())
        router = self.hidden * self.experts
        experts = 3 * self.experts * self.hidden * self.intermediate
        return linears + router + experts + self.layer_vectors

    @property
    def active_layer(self) -> int:
        """Parameters of one decoder layer that a token goes through."""
        idle = max(0, self.experts - self.active)
        return self.layer - 3 * idle * self.hidden * self.intermediate

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def rest(self) -> int:
        """Parameters outside the decoder layers."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def vectors(self) -> int:
        """Parameters of all norms and biases."""
        return self.layers * self.layer_vectors + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.rest

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one token in 16 bits."""
        return 2 * 2 * self.layers * self.keys


KEYS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "tied": "tie_word_embeddings",
}
"""Fields of Shape and their keys in config.json."""
KINDS = {
    "qwen2": False,
    "qwen3": False,
    "llama": False,
    "mistral": False,
    "qwen3_moe": True,
    "mixtral": True,
}
"""Model types, with whether they have experts."""
SHAPES = {
    "SmolLM2-135M": Shape(49152, 576, 1536, 30, 9, 3, 64, tied=True),
    "Qwen2.5-0.5B": Shape(151936, 896, 4864, 24, 14, 2, 64, tied=True, qkv_bias=True),
    "Qwen2.5-1.5B": Shape(151936, 1536, 8960, 28, 12, 2, 128, tied=True, qkv_bias=True),
    "Qwen2.5-3B": Shape(151936, 2048, 11008, 36, 16, 2, 128, tied=True, qkv_bias=True),
    "Qwen2.5-7B": Shape(152064, 3584, 18944, 28, 28, 4, 128, tied=False, qkv_bias=True),
    "Qwen2.5-14B": Shape(152064, 5120, 13824, 48, 40, 8, 128, tied=False, qkv_bias=True),
    "Qwen2.5-32B": Shape(152064, 5120, 27648, 64, 40, 8, 128, tied=False, qkv_bias=True),
    "Qwen2.5-72B": Shape(152064, 8192, 29568, 80, 64, 8, 128, tied=False, qkv_bias=True),
    "Qwen3-0.6B": Shape(151936, 1024, 3072, 28, 16, 8, 128, tied=True, qk_norm=True),
    "Qwen3-1.7B": Shape(151936, 2048, 6144, 28, 16, 8, 128, tied=True, qk_norm=True),
    "Qwen3-4B": Shape(151936, 2560, 9728, 36, 32, 8, 128, tied=True, qk_norm=True),
    "Qwen3-8B": Shape(151936, 4096, 12288, 36, 32, 8, 128, tied=False, qk_norm=True),
    "Qwen3-14B": Shape(151936, 5120, 17408, 40, 40, 8, 128, tied=False, qk_norm=True),
    "Qwen3-32B": Shape(151936, 5120, 25600, 64, 64, 8, 128, tied=False, qk_norm=True),
    "Qwen3-30B-A3B": Shape(
        151936, 2048, 768, 48, 32, 4, 128, tied=False, qk_norm=True, experts=128, active=8
    ),
    "Llama-3.2-3B": Shape(128256, 3072, 8192, 28, 24, 8, 128, tied=True),
    "Llama-3.1-8B": Shape(128256, 4096, 14336, 32, 32, 8, 128, tied=False),
    "Llama-3.1-70B": Shape(128256, 8192, 28672, 80, 64, 8, 128, tied=False),
    "Llama-3.3-70B": Shape(128256, 8192, 28672, 80, 64, 8, 128, tied=False),
}
"""Shapes by the start of the Hugging Face name. These need no download."""


def shape_of(model: str | Path) -> Shape:
    """Return the shape of a model: a folder, a name in the table, or a model on the hub.

    A name is like "Qwen/Qwen2.5-7B-Instruct". Raises UserError if the model is none of these, or
    its shape cannot be read.
    """
    path = Path(model).expanduser() / "config.json"
    if path.is_file():
        try:
            return from_config(json.loads(path.read_text(encoding="utf-8")), origin=str(path))
        except ValueError as error:
            raise UserError(f"{path}: cannot be read ({error})") from None

    name = str(model).rpartition("/")[2] + "-"
    for known_name, shape in SHAPES.items():
        if name.startswith(f"{known_name}-"):
            return shape
    if str(model) == "quickstart":
        raise UserError(
            "model.path = 'quickstart' has 0.2 M parameters and is made on the spot: it fits any "
            "machine"
        )
    check_hub(str(model))
    try:
        from transformers import AutoConfig  # slow, and only a model on the hub needs it

        settings = AutoConfig.from_pretrained(str(model), trust_remote_code=False).to_dict()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model '{model}' is neither a folder, nor known ({', '.join(SHAPES)}): {reason}"
        ) from None
    return from_config(settings, origin=str(model))


def from_config(settings: dict[str, Any], *, origin: str) -> Shape:
    """Return the shape that a Hugging Face config.json describes.

    Raises UserError if the model type is unknown, a key is missing, or only some layers have
    experts.
    """
    model_type = settings.get("model_type", "")
    if model_type not in KINDS:
        raise UserError(f"{origin}: the plan knows {', '.join(KINDS)}; this is '{model_type}'")
    if settings.get("mlp_only_layers") or settings.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            f"{origin}: the plan knows experts in every layer or none; here mlp_only_layers says "
            "otherwise"
        )

    experts = 0
    if KINDS[model_type]:
        experts = settings.get("num_experts") or settings.get("num_local_experts") or 0
    try:
        heads = settings["num_attention_heads"]
        values = {
            "num_key_value_heads": heads,
            "head_dim": settings["hidden_size"] // heads,
            "tie_word_embeddings": False,
        }
        values |= {key: value for key, value in settings.items() if value}
        if model_type == "qwen3_moe":
            values["intermediate_size"] = settings["moe_intermediate_size"]
        fields: dict[str, Any] = {name: values[key] for name, key in KEYS.items()}
        fields["experts"] = experts
        if experts:
            fields["active"] = settings["num_experts_per_tok"]
        fields["qkv_bias"] = model_type == "qwen2"
        fields["qk_norm"] = model_type.startswith("qwen3")
        return Shape(**fields)
    except KeyError as error:
        raise UserError(f"{origin}: {error} is missing") from None
