"""The policy: a Hugging Face causal LM seen as a body that gives hidden states and a head that the kernels read.

Logits are never formed here. Qwen2.5, Qwen3, Llama 3 and any other AutoModelForCausalLM go through the same code.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GradientCheckpointingLayer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paw.errors import UserError
from paw.learner.distributed import sharded_like
from paw_kernels import best_backend, why_not_backend

transformers_logging.disable_progress_bar()  # they would cut through the live view
transformers_logging.set_verbosity_error()  # so would its load report; what matters in it is raised below
T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal LM with fp32 parameters; `dtype` bfloat16 runs the body under autocast, and the head in bfloat16.

    Parameters stay fp32 because bf16 ones lose updates of lr 1e-6 to rounding. Dropout stays off, so that scoring and
    update see the same log-probs.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        dtype: str = "float32",
        checkpointing: str = "none",
        head_backend: str = "auto",
    ):
        super().__init__()
        self.lm = lm
        self.dtype = DTYPES[dtype]
        self.head_backend = head_backend
        lm.config.use_cache = False
        lm.eval()
        self._checkpointed: list[nn.Module] = []
        if checkpointing != "none":
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self._checkpointed = [m for m in lm.modules() if isinstance(m, GradientCheckpointingLayer)]

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def head_weight(self) -> Tensor:
        """[V, D] in `dtype`, tied to the embedding or not."""
        return self._head.weight.to(self.dtype)

    @property
    def head_bias(self) -> Tensor | None:
        bias = self._head.bias
        return None if bias is None else bias.to(self.dtype)

    @property
    def _head(self) -> nn.Linear:
        head = self.lm.get_output_embeddings()
        assert isinstance(head, nn.Linear), "AutoModelForCausalLM has a linear head"
        return head

    def forward(self, compute: Callable[[], T]) -> T:
        """compute(), with whole weights: a sharded model has them only inside calls of itself.

        Results with a gradient must be tensors, or tuples of them: FSDP looks there for where backward will start.
        """
        return compute()

    def autocast(self) -> Any:
        cast = any(parameter.dtype != self.dtype for parameter in self.lm.parameters())
        return torch.autocast(self.device.type, self.dtype) if cast else nullcontext()

    def hidden(self, input_ids: Tensor) -> Tensor:
        """[B, L] right-padded int64 -> [B, L, D] in `dtype`.

        No mask: attention is causal, padding on the right reaches no row.
        """
        for layer in self._checkpointed:
            layer.training = True  # what makes it checkpoint; the modules inside keep their mode, and so no dropout
        with self.autocast():
            return self.lm.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state.to(self.dtype)

    def named_parameters_once(self) -> dict[str, nn.Parameter]:
        """What is trained by name (Hugging Face's, or of LoRA adapters), a tied head under its embedding alone."""
        return {name: parameter for name, parameter in self.lm.named_parameters() if parameter.requires_grad}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights in; `tensors` has exactly the names and shapes of `named_parameters_once`."""
        for name, parameter in self.named_parameters_once().items():
            parameter.copy_(sharded_like(parameter, tensors[name]))


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device = 'cuda', but torch sees no GPU; use --model.device cpu, or see `paw doctor`")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def pick_backend(wanted: str, device: torch.device, dtype: str) -> str:
    """The name of the head's implementation; UserError when the wanted one cannot run there."""
    if wanted == "auto":
        return best_backend(device, DTYPES[dtype])
    if reason := why_not_backend(wanted, device, DTYPES[dtype]):
        raise UserError(f"model.head_backend = '{wanted}': {reason}; or use --model.head_backend auto")
    return wanted


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder or Hugging Face name; UserError when there is none."""
    _check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # broken files raise whatever they meet first
        raise UserError(f"model.path = '{path}': no tokenizer found ({_first_line(error)})") from None


def load_policy(path: str | Path, *, device: torch.device | str = "cpu", **options: Any) -> Policy:
    """Load a causal LM with its weights; UserError when the folder has none or they do not fit its config.

    `options` are those of Policy.
    """
    _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            use_safetensors=True,  # never a pickle
            ignore_mismatched_sizes=True,  # named below
        )
    except Exception as error:  # broken files and settings raise whatever they meet first
        raise UserError(f"model.path = '{path}': cannot be loaded: {_first_line(error)}") from None
    lm, info = loaded
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise UserError(
            f"model.path = '{path}': '{name}' has shape {list(stored)} in its files, {list(wanted)} by its config.json"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(f"model.path = '{path}': {len(missing)} weights are missing in its files, first '{missing[0]}'")
    for name, parameter in lm.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"model.path = '{path}': '{name}' holds values that are not finite")
    return Policy(lm, **options).to(device)


def _check_folder(path: str | Path) -> None:
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise UserError(f"model.path = '{path}': there is no config.json in it, so it is not a Hugging Face model")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
