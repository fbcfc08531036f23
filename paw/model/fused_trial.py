"""The trial of fused decoder layers: a process that compares them with eager ones.

    python -m paw.model.fused_trial REQUEST RESULT

REQUEST is JSON (`Request`). RESULT is the file for the answer, also JSON (`Verdict`). The process
has the first layers of the model, with random weights of realistic size and a small vocabulary. It
takes packed rows and a prefix tree forward and backward through eager and through fused layers,
with the run's checkpointing, offloading, adapters and kernels. `paw.model.fused` starts it in a
separate process because a compiler may hang, crash or take all memory, and Liger may replace
anything.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paw.algo.prefixes import prefix_tree
from paw.config.sections import LoraConfig
from paw.io.files import write_file
from paw.model.lora import adapters_off, add_adapters
from paw.model.patches import apply_liger, compile_layers
from paw.model.policy import DTYPES, Policy
from paw.processes.lifeline import die_with_parent

FLOOR = {"float32": 1e-4, "bfloat16": 1e-3}
"""Error that is always allowed, as a share of a tensor's size. Rounding in float32 reaches about
1e-6. In bfloat16, twice the error of eager layers is allowed too."""
SMALL_GRADIENT = 0.1
"""Gradients count as at least this share of the average size of all gradients, because some, such
as that of a key's bias, are only rounding errors."""
ROWS = ((64, 33, 90), (50, 50))
"""Lengths of the rows of each batch. The second shows if compiled layers take other lengths."""
VOCABULARY = 128


@dataclass(frozen=True)
class Request:
    """What is tried."""

    path: str
    """The model's folder or Hugging Face name. Only its config.json is read."""
    device: str
    dtype: str
    weights: str
    """Dtype in which weights are stored: float32 or bfloat16."""
    attention: str
    """Kernel of attention over packed rows (`attention.pick_attention`)."""
    checkpointing: str
    offload_activations: bool
    lora: dict[str, Any] | None
    """Fields of LoraConfig; None without adapters."""
    compiled: bool
    liger: bool
    parent: int
    """Number of the process that started this one."""


@dataclass(frozen=True)
class Verdict:
    share: float
    """The largest error as a share of the allowed one. At most 1 if right, NaN if a result is."""
    worst: str
    """The result with that error."""


Results = dict[str, Tensor]
"""Hidden states of each batch, and gradients by the parameters' names, in float32."""


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    die_with_parent(request.parent)
    verdict = judge(request)
    write_file(Path(sys.argv[2]), json.dumps(asdict(verdict)))


def judge(request: Request) -> Verdict:
    """Compare fused layers with eager ones on `request.device`."""
    eager = run_passes(make_policy(request))
    exact = eager
    if request.dtype != "float32":
        exact = run_passes(make_policy(request, exact=True))

    policy = make_policy(request)
    if request.liger:
        apply_liger(policy.lm)
    if request.compiled:
        compile_layers(policy.lm)
    fused = run_passes(policy)
    error_share, worst = largest_error(fused, eager, exact, FLOOR[request.dtype])
    return Verdict(share=error_share, worst=worst)


def make_policy(request: Request, *, exact: bool = False) -> Policy:
    """Return the policy with eager layers; with `exact`, the same weights in float32.

    Every call gives the same weights, rounded to the dtype of the forward pass.
    """
    device = torch.device(request.device)
    torch.manual_seed(0)
    with device:
        lm = AutoModelForCausalLM.from_config(
            small_config(request.path), dtype=torch.float32, attn_implementation="sdpa"
        )
    _randomise_vectors(lm)
    policy = Policy(
        lm,
        dtype="float32" if exact else request.dtype,
        checkpointing=request.checkpointing,
        offload_activations=request.offload_activations,
        attention="sdpa" if exact else request.attention,
        head_backend="torch",
    )
    if request.lora:
        add_adapters(lm, LoraConfig(**request.lora), seed=0)
        _randomise_adapters(lm)
    for parameter in lm.parameters():
        rounded = parameter.data.to(DTYPES[request.dtype])
        is_adapter = request.lora is not None and parameter.requires_grad
        stored = torch.float32 if exact or is_adapter else DTYPES[request.weights]
        parameter.data = rounded.to(stored)
    policy.device = device
    return policy


def small_config(path: str) -> Any:
    """Return the model's configuration with few layers and a small vocabulary.

    There are enough layers to include each kind. Weights are drawn with a deviation that keeps
    activations near 1, so that attention is not flat and all gradients matter.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text: Any = config.get_text_config()
    layer_count = text.num_hidden_layers
    layers = min(layer_count, _layers_of_each_kind(text))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layer_count:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    text.vocab_size = VOCABULARY
    text.initializer_range = text.hidden_size**-0.5
    for special_token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, special_token, None)
        setattr(config, special_token, None)
    return config


def _layers_of_each_kind(text: Any) -> int:
    """Return how many of the first layers include every kind, at least 2."""
    kinds = getattr(text, "layer_types", None) or []
    firsts = [kinds.index(kind) for kind in set(kinds)]
    dense = getattr(text, "first_k_dense_replace", None) or 0  # before those with experts
    return max([2, dense + 1, *(first + 1 for first in firsts)])


def _randomise_vectors(lm: PreTrainedModel) -> None:
    """Give biases and the weights of norms values that differ from their initial 0 or 1."""
    for parameter in lm.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)


def _randomise_adapters(lm: PreTrainedModel) -> None:
    """Set the zero halves of adapters to random values, or the other halves have no gradient."""
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)


def run_passes(policy: Policy) -> Results:
    """Run each batch without and with gradients, and a prefix tree if the layers take one.

    Adapters are switched off for one more batch.
    """
    vocabulary = policy.lm.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    results: Results = {}

    def run(name: str, ids: Tensor, lengths: Sequence[int], paths: Any = None) -> None:
        ids = ids.to(policy.device)
        with torch.no_grad():
            results[f"{name} without gradients"] = policy.hidden(ids, lengths, paths).float()
        hidden = policy.hidden(ids, lengths, paths).float()
        results[name] = hidden.detach()
        probe = torch.randn(hidden.shape, generator=generator).to(policy.device)
        (hidden * probe).sum().backward()

    for number, lengths in enumerate(ROWS, start=1):
        ids = torch.randint(vocabulary, (sum(lengths),), generator=generator)
        run(f"hidden states of batch {number}", ids, lengths)
    if policy.shares_prefixes:
        first, other = torch.randint(vocabulary, (2, 40), generator=generator).numpy()
        tree = prefix_tree([first, np.concatenate([first[:15], other[15:]])])
        run(
            "hidden states of a prefix tree",
            torch.from_numpy(tree.input_ids),
            [len(segment) for segment in tree.segments],
            [segment.path for segment in tree.segments],
        )

    with adapters_off(policy.lm), torch.no_grad():  # how the reference is scored
        ids = torch.randint(vocabulary, (sum(ROWS[0]),), generator=generator).to(policy.device)
        hidden = policy.hidden(ids, ROWS[0])
        results["hidden states of the reference"] = hidden.float()

    for name, parameter in policy.lm.named_parameters():
        if parameter.grad is not None:
            results[f"the gradient of {name}"] = parameter.grad.float()
            parameter.grad = None
    return results


def largest_error(
    fused: Results, eager: Results, exact: Results, floor: float
) -> tuple[float, str]:
    """Return the largest error as a share of the allowed one, and the result that has it.

    Errors are root mean squares of the difference from `exact`. Allowed are twice the eager layers'
    own error and `floor` times the size of the result. NaN counts as the largest error.
    """
    gradients = [value for name, value in exact.items() if "gradient of" in name]
    elements = sum(value.numel() for value in gradients)
    average = (sum(_square(value) for value in gradients) / max(1, elements)) ** 0.5

    largest, worst = 0.0, "nothing"
    if fused.keys() != exact.keys():
        return float("nan"), f"{len(fused)} results instead of {len(exact)}"
    for name, value in exact.items():
        typical_size = _rms(value)
        if "gradient of" in name:
            typical_size = max(typical_size, SMALL_GRADIENT * average)
        allowed = 2 * _rms(eager[name] - value) + floor * typical_size
        error_share = _rms(fused[name] - value) / max(allowed, 1e-30)
        if not error_share <= largest:
            largest, worst = error_share, name
        if error_share != error_share:
            break
    return largest, worst


def _square(value: Tensor) -> float:
    return float(value.square().sum(dtype=torch.float64))


def _rms(value: Tensor) -> float:
    return (_square(value) / max(1, value.numel())) ** 0.5


if __name__ == "__main__":
    main()
