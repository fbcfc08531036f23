"""The policy: a Hugging Face causal LM, split into a head and a body that returns hidden states.

The kernels read the hidden states and the head. Logits are never formed here. Qwen2.5, Qwen3, Llama
3 and any other AutoModelForCausalLM go through the same code. `paw.model.loading` loads a policy,
and `paw.model.check` checks that it can be trained.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import AutoConfig, PreTrainedModel

from paw.config.sections import Config
from paw.distributed.gather import Shard, gather_in_buckets
from paw.distributed.ranks import local_tensor, rows_like
from paw.errors import UserError
from paw.io.hub import check_hub
from paw.model.attention import ATTENTION, decoder_layers, pack_rows, pack_tree, token_mixers
from paw.model.logits import LogitTransform
from paw.model.lora import adapter_of, merged
from paw.model.mixers import separate_rows
from paw.model.precision import run_in
from paw.model.selective import selective_contexts
from paw_kernels import best_backend, fault_of_backend, why_not_backend

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal LM whose body runs in `dtype`, whatever the dtype of its parameters (`precision`).

    With lr 1e-6, rounding swallows updates of bf16 parameters unless the optimizer keeps extra bits
    (flash-adamw). Dropout stays off, so that scoring and update see the same log-probs. `attention`
    is the name of a kernel that `attention.pick_attention` returns.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        dtype: str = "float32",
        checkpointing: str = "none",
        offload_activations: bool = False,
        attention: str = "sdpa",
        head_backend: str = "auto",
    ):
        super().__init__()
        layers = decoder_layers(lm)
        self.lm = lm
        self.dtype = DTYPES[dtype]
        self.offload_activations = offload_activations
        self.attention = attention
        self.head_backend = head_backend
        self.transform = LogitTransform.of(lm.config)
        self.device = lm.device
        """The device that computes. Parameters may be elsewhere."""
        self._checkpointed: list[nn.Module] = []
        if checkpointing != "none":
            self._checkpointed = layers
        self._padded = any(token_mixers(layer) for layer in layers)
        """Whether some layers need the rows side by side (`model.mixers`)."""
        width = _attention_width(lm.config.get_text_config())
        layer_parameters = sum(p.numel() for layer in layers for p in layer.parameters())
        self.pads_sequences = attention == "sdpa" or self._padded
        """Whether attention pads the sequences of a batch to the longest."""
        self.shares_prefixes = not self._padded
        """Whether `hidden` takes a prefix tree. Recurrent layers need each sequence by itself."""
        self.quadratic = width / layer_parameters
        """Cost of attention for a sequence of n tokens, divided by n^2. The unit is the cost of all
        other work per token (2 n^2 width FLOPs, 2 n layer_parameters)."""

        lm.config.use_cache = False
        lm.set_attn_implementation(ATTENTION)
        lm.eval()
        if self._padded:
            separate_rows(layers)
        if self.dtype != torch.float32:
            run_in(self.dtype, lm, layers)
        if checkpointing != "none":
            _enable_checkpointing(lm, layers, selective=checkpointing == "selective")

    @property
    def head_weight(self) -> Tensor:
        """[V, D] in `dtype`, whether or not it is tied to the embedding."""
        return self._head.weight.to(self.dtype)

    @property
    def head_bias(self) -> Tensor | None:
        bias = self._head.bias
        if bias is None:
            return None
        return bias.to(self.dtype)

    def head_options(self, temperature: float) -> dict[str, Any]:
        """The kernels' keyword arguments for this head at a temperature.

        The caller adds hidden states, weight and targets.
        """
        return {
            "bias": self.head_bias,
            "backend": self.head_backend,
            **self.transform.options(temperature),
        }

    @property
    def _head(self) -> nn.Linear:
        return self.lm.get_output_embeddings()  # type: ignore[return-value]

    def forward(self, compute: Callable[[], T]) -> T:
        """Return compute(). A sharded model has its full weights only inside such a call.

        Results with a gradient must be tensors or tuples of tensors, because FSDP searches them for
        the point where backward will start.
        """
        return compute()

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Sequence[int],
        paths: Sequence[np.ndarray] | None = None,
    ) -> Tensor:
        """Return hidden states [T, D] in `dtype` of rows of these lengths.

        `input_ids` [T] int64 has one row after another. Rows do not see each other. With `paths`,
        the rows are the segments of a prefix tree and see their paths (`paw.algo.prefixes`). Pass
        them only if `shares_prefixes`.
        """
        device = input_ids.device
        if paths is None:
            packed = pack_rows(lengths, kernel=self.attention, device=device, padded=self._padded)
        else:
            packed = pack_tree(lengths, paths, kernel=self.attention, device=device)
        for layer in self._checkpointed:
            # Training mode makes the layer checkpoint. The modules inside it stay in evaluation
            # mode, so there is no dropout.
            layer.training = True

        saved_activations: AbstractContextManager[Any] = nullcontext()
        if self.offload_activations:
            saved_activations = save_on_cpu(pin_memory=self.device.type == "cuda")
        with saved_activations:
            outputs = self.lm.get_decoder()(
                input_ids=input_ids[None],
                position_ids=packed.position_ids[None],
                packed=packed,
                use_cache=False,
            )
        return outputs.last_hidden_state[0].to(self.dtype)

    def named_parameters_once(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their Hugging Face or LoRA names.

        A tied head is included only as the embedding.
        """
        return {
            name: parameter
            for name, parameter in self.lm.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights in. `tensors` has the names and full shapes of `named_parameters_once`."""
        for name, parameter in self.named_parameters_once().items():
            local_tensor(parameter).copy_(rows_like(parameter, tensors, name))


def _attention_width(config: Any) -> int:
    """Return the sum of the sizes of all attention heads of all layers."""
    head_size = getattr(config, "head_dim", None)
    if not head_size:
        head_size = config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * config.num_attention_heads * head_size


def _enable_checkpointing(
    lm: PreTrainedModel, layers: Sequence[nn.Module], *, selective: bool
) -> None:
    """Make the layers recompute all activations, or some if `selective`, in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = selective_contexts
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # Checkpointed layers are in training mode (see `hidden`), and some apply dropout themselves
    # (OPT).
    for layer in layers:
        for name, value in list(vars(layer).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def full_parameters(
    model: nn.Module, *, once: bool = False, merge: bool = True, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of each parameter, gathered a bucket at a time.

    If the model is sharded, every rank must call this (`paw.distributed.gather`). LoRA
    adapters are merged into the weights, or left out without `merge`. Unless `once`, a tied head is
    also yielded under its own name. vLLM on a CPU needs this, because the embedding's name does not
    reach its repacked copy of the head. With `dtype`, matrices are cast before they are gathered,
    which halves the bytes sent for bfloat16. Vectors are not cast, because engines keep some of
    them in float32. Neither are weights that adapters are merged into.
    """
    shards = _parameter_shards(model, once=once, merge=merge, dtype=dtype)
    for name, tensors in gather_in_buckets(shards):
        weight, *adapter = tensors
        if adapter:
            weight = merged(model, name, weight, *adapter)
        yield name.replace(".base_layer.", "."), weight


def _parameter_shards(
    model: nn.Module, *, once: bool, merge: bool, dtype: torch.dtype | None
) -> Iterator[tuple[str, list[Shard]]]:
    """Yield (name, [weight]) of each parameter but adapters, or [weight, A, B] to be merged."""
    for name, parameter in model.named_parameters(remove_duplicate=once):
        if ".lora_" in name:
            continue
        weight = parameter.detach()
        adapter: list[Tensor] = []
        if merge:
            adapter = adapter_of(model, name)
        sent_dtype = weight.dtype
        if dtype is not None and weight.dim() > 1 and not adapter:
            sent_dtype = dtype
        shards = [Shard(weight, sent_dtype)]
        shards += [Shard(matrix, matrix.dtype) for matrix in adapter]
        yield name, shards


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return tensors in a model's files that are not parameters, by name (some router biases)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: tensor.cpu() for name, tensor in model.state_dict().items() if name not in parameters
    }


def weights_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which parameters are stored.

    It is float32, or model.dtype if the optimizer keeps extra bits or LoRA freezes the weights.
    """
    if config.optim.name == "flash-adamw" or config.lora.rank:
        return DTYPES[config.model.dtype]
    return torch.float32


def pick_device(wanted: str) -> torch.device:
    """Return the device for model.device. Raises UserError if it is "cuda" and there is no GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "model.device = 'cuda', but torch sees no GPU; "
            "use --model.device cpu, or see `paw doctor`"
        )
    if wanted != "auto":
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def pick_backend(wanted: str, device: torch.device, dtype: str, path: str = "quickstart") -> str:
    """Return the name of the head's implementation for the model at `path`.

    Raises UserError if the wanted one does not work.
    """
    shape = head_shape(path)
    if wanted == "auto":
        return best_backend(device, DTYPES[dtype], shape)
    reason = why_not_backend(wanted, device, DTYPES[dtype])
    if not reason:
        reason = fault_of_backend(wanted, device, DTYPES[dtype], shape)
    if reason:
        raise UserError(
            f"model.head_backend = '{wanted}': {reason}; or use --model.head_backend auto"
        )
    return wanted


def head_shape(path: str) -> tuple[int, int] | None:
    """Return (V, D) from the config.json of a model folder or Hugging Face name.

    Returns None if there is no such model (yet).
    """
    if path == "quickstart":
        return None
    try:
        check_hub(path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        return config.vocab_size, config.hidden_size
    except Exception:  # any problem is reported when the model is loaded
        return None
