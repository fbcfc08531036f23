"""The policy: a Hugging Face causal LM seen as a body that gives hidden states and a head that the kernels read.

Logits are never formed here. Qwen2.5, Qwen3, Llama 3 and any other AutoModelForCausalLM go through
the same code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from paw.config import Config
from paw.errors import UserError, clean
from paw.hub import check_hub
from paw.model.attention import ATTENTION, decoder_layers, pack_rows, token_mixers
from paw.model.check import check_model, check_rope, refused
from paw.model.logits import LogitTransform
from paw.model.precision import run_in
from paw.model.ranks import full_tensor, local_tensor, rows_like
from paw_kernels import best_backend, fault_of_backend, why_not_backend

transformers_logging.disable_progress_bar()  # they would cut through lines of progress
transformers_logging.set_verbosity_error()  # so would its load report; what matters in it is raised below
T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal LM whose body runs in `dtype`: its parameters have that dtype, or are seen so (`precision`).

    bf16 parameters lose updates of lr 1e-6 to rounding unless the optimizer keeps more bits
    (flash-adamw). Dropout stays off, so that scoring and update see the same log-probs. `attention`
    is a kernel of `attention.pick_attention`.
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
        self.lm = lm
        self.dtype = DTYPES[dtype]
        self.offload_activations = offload_activations
        self.attention = attention
        self.head_backend = head_backend
        self.device = lm.device
        """Where it computes; parameters may lie elsewhere."""
        lm.config.use_cache = False
        lm.set_attn_implementation(ATTENTION)
        lm.eval()
        self.transform = LogitTransform.of(lm.config)
        layers = decoder_layers(lm)
        self._padded = any(map(token_mixers, layers))
        if self._padded:
            from paw.model.mixers import separate_rows

            separate_rows(layers)
        shape: Any = lm.config.get_text_config()
        head_size = (
            getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        )
        body = sum(p.numel() for layer in layers for p in layer.parameters())
        width = shape.num_hidden_layers * shape.num_attention_heads * head_size
        self.quadratic = None if attention == "sdpa" or self._padded else width / body
        """What attention costs for a sequence of n tokens over n^2, in units of what the rest costs
        a token (2 n^2 width FLOPs, 2 n body). None: attention pads the sequences of a batch to the
        longest."""
        if self.dtype != torch.float32:
            run_in(self.dtype, lm, layers)
        self._checkpointed: list[nn.Module] = []
        if checkpointing != "none":
            options: dict[str, Any] = {"use_reentrant": False}
            if checkpointing == "selective":
                from paw.model.selective import selective_contexts

                options["context_fn"] = selective_contexts
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            self._checkpointed = layers
            for layer in (
                layers
            ):  # which are in training mode, see `hidden`: some apply dropout themselves (OPT)
                for name, value in list(vars(layer).items()):
                    if "dropout" in name and isinstance(value, float):
                        setattr(layer, name, 0.0)

    @property
    def head_weight(self) -> Tensor:
        """[V, D] in `dtype`, tied to the embedding or not."""
        return self._head.weight.to(self.dtype)

    @property
    def head_bias(self) -> Tensor | None:
        bias = self._head.bias
        return None if bias is None else bias.to(self.dtype)

    def head_options(self, temperature: float) -> dict[str, Any]:
        """Keywords of the kernels beside hidden states, weight and targets: the model's own logits at a temperature."""
        return {
            "bias": self.head_bias,
            "backend": self.head_backend,
            **self.transform.options(temperature),
        }

    @property
    def _head(self) -> nn.Linear:
        return self.lm.get_output_embeddings()  # type: ignore[return-value]

    def forward(self, compute: Callable[[], T]) -> T:
        """compute(), with whole weights: a sharded model has them only inside calls of itself.

        Results with a gradient must be tensors, or tuples of them: FSDP looks there for where
        backward will start.
        """
        return compute()

    def hidden(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T] int64, rows of the given lengths one after another -> [T, D] in `dtype`; no row sees another."""
        packed = pack_rows(
            lengths, kernel=self.attention, device=input_ids.device, padded=self._padded
        )
        for layer in self._checkpointed:
            layer.training = True  # what makes it checkpoint; the modules inside keep their mode, and so no dropout
        with (
            save_on_cpu(pin_memory=self.device.type == "cuda")
            if self.offload_activations
            else nullcontext()
        ):
            out = self.lm.get_decoder()(
                input_ids=input_ids[None],
                position_ids=packed.position_ids[None],
                packed=packed,
                use_cache=False,
            )
        return out.last_hidden_state[0].to(self.dtype)

    def named_parameters_once(self) -> dict[str, nn.Parameter]:
        """What is trained by name (Hugging Face's, or of LoRA adapters), a tied head under its embedding alone."""
        return {
            name: parameter
            for name, parameter in self.lm.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights in; `tensors` has exactly the names and whole shapes of `named_parameters_once`."""
        for name, parameter in self.named_parameters_once().items():
            local_tensor(parameter).copy_(rows_like(parameter, tensors, name))


def full_parameters(
    model: nn.Module, *, once: bool = False, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor), one gathered at a time, LoRA adapters merged, or without them.

    A tied head comes under its own name as well, unless `once`: vLLM on CPU keeps a repacked copy
    of it, which the embedding's name does not reach.
    """
    for name, parameter in model.named_parameters(remove_duplicate=once):
        if ".lora_" in name:
            continue
        weight = full_tensor(parameter.detach())
        if ".base_layer." in name:
            from paw.model.lora import merged

            weight = merged(model, name, weight) if merge else weight
            name = name.replace(".base_layer.", ".")
        yield name, weight


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a model's files hold beside parameters, by name (biases of some routers)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: tensor.cpu() for name, tensor in model.state_dict().items() if name not in parameters
    }


def weights_dtype(config: Config) -> torch.dtype:
    """What parameters are stored in: fp32, or bf16 where the optimizer keeps further bits or LoRA freezes them."""
    return (
        DTYPES[config.model.dtype]
        if config.optim.name == "flash-adamw" or config.lora.rank
        else torch.float32
    )


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "model.device = 'cuda', but torch sees no GPU; use --model.device cpu, or see `paw doctor`"
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def pick_backend(wanted: str, device: torch.device, dtype: str, path: str = "quickstart") -> str:
    """The name of the head's implementation for the model of that path; UserError when the wanted one does not work."""
    shape = head_shape(path)
    where = device, DTYPES[dtype]
    if wanted == "auto":
        return best_backend(*where, shape)
    if reason := why_not_backend(wanted, *where) or fault_of_backend(wanted, *where, shape):
        raise UserError(
            f"model.head_backend = '{wanted}': {reason}; or use --model.head_backend auto"
        )
    return wanted


def head_shape(path: str) -> tuple[int, int] | None:
    """(V, D) of a model folder or Hugging Face name by its config.json; None without one, as yet or at all."""
    if path == "quickstart":
        return None
    try:
        check_hub(path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        return config.vocab_size, config.hidden_size
    except Exception:  # whatever is wrong with it is said where the model is loaded
        return None


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder or Hugging Face name; UserError when there is none."""
    check_hub(str(path))
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # broken files raise whatever they meet first
        raise _broken(path, f"no tokenizer found ({_reason(error)})") from None


def load_policy(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    weights: torch.dtype = torch.float32,
    place: bool = True,
    empty: bool = False,
    check: bool = True,
    longest: int = 0,
    **options: Any,
) -> Policy:
    """Load a causal LM, its parameters as `weights`; UserError when the folder has none, they do
    not fit its config, or the trainer does not compute its log-probs (`model.check`; not without
    `check`).

    `device` is where it will compute; without `place` its parameters stay in host memory. `empty`:
    with parameters and buffers of any value, for a rank that will be sent its own. `longest`:
    tokens that a row may have (`check_rope`). `options` are those of Policy.
    """
    check_hub(str(path))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_architecture(config, str(path))
        if empty:
            with no_init_weights():
                loaded: Any = (
                    AutoModelForCausalLM.from_config(
                        config, dtype=weights, attn_implementation="sdpa"
                    ),
                    {},
                )
        else:
            loaded = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                trust_remote_code=False,  # unless it is said, transformers asks on standard input
                dtype=weights,
                attn_implementation="sdpa",
                output_loading_info=True,
                use_safetensors=True,  # never a pickle
                ignore_mismatched_sizes=True,  # named below
            )
    except UserError:
        raise
    except Exception as error:  # broken files and settings raise whatever they meet first
        raise _broken(path, f"cannot be loaded: {_reason(error)}") from None
    lm, info = loaded
    check_rope(lm, str(path), longest)
    if empty:
        lm.tie_weights()  # left out along with the values
        return _placed(lm, path, device, place, options)
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise _broken(
            path,
            f"'{name}' has shape {list(stored)} in its files, {list(wanted)} by its config.json",
        )
    if missing := sorted(info["missing_keys"]):
        raise _broken(
            path, f"{len(missing)} weights are missing in its files, first '{missing[0]}'"
        )
    for name, parameter in lm.named_parameters():
        if not parameter.isfinite().all():
            raise _broken(path, f"'{name}' holds values that are not finite")
    policy = _placed(lm, path, device, place, options)
    if check:
        check_model(policy, str(path), longest)
    return policy


def check_architecture(config: Any, path: str) -> None:
    """UserError for a config.json of no causal LM, or of one whose attention cannot be replaced by ours."""
    kinds: Any = AutoModelForCausalLM._model_mapping
    kind = kinds.get(type(config), None)
    named = f"model.path = '{path}': model type '{config.model_type}'"
    if kind is None:
        raise UserError(f"{named} is no causal language model of transformers")
    if not getattr(kind, "_supports_sdpa", True):
        why = "it mixes tokens by code of its own (attention sinks, ALiBi, recurrence, ...), not by torch's attention"
        raise UserError(
            f"{named} cannot be trained here: {why}, which PaW replaces to keep packed rows apart"
        )


def _placed(
    lm: Any, path: str | Path, device: torch.device | str, place: bool, options: dict[str, Any]
) -> Policy:
    try:
        policy = Policy(lm, **options)
    except UserError:
        raise
    except Exception as error:  # of Hugging Face: no checkpointing, layers of several shapes
        raise refused(
            lm, str(path), f"cannot be trained here: {clean(_reason(error), 200)}"
        ) from None
    policy.device = torch.device(device)
    return policy.to(device) if place else policy


def _broken(path: str | Path, why: str) -> UserError:
    return UserError(f"model.path = '{path}': {why}")


def _reason(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return "its files name code of their own (auto_map), which is never run"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
