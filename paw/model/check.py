"""Checks that the trainer computes a model's own log-probs.

The checks run packed rows through the model's hidden states and head, and compare the result with
the model's output for each row alone. They find layers that let packed rows see each other, heads
that transform their logits in an unknown way, and attention with terms that our kernels leave out.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paw.algo.prefixes import prefix_tree
from paw.config.sections import Config
from paw.distributed.ranks import lost_peer, out_of_memory
from paw.errors import UserError, clean, describe
from paw.model.attention import decoder_layers, record_attention, token_mixers
from paw.model.policy import Policy
from paw.model.precision import running_in
from paw_kernels import best_backend, token_stats

LENGTHS = (13, 19)
"""Number of tokens in each of the two rows."""
EXACT = 1e-3
"""Largest difference of log-probs allowed in float32, in nats (small models reach 1e-6)."""
ROUNDED = 0.25
"""Mean difference of log-probs allowed in bfloat16, in nats. In bfloat16, a model's own logits
around 32 are rounded to multiples of 0.25."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
TEMPLATE_TOKENS = 64
"""Tokens that a chat template may put before an observation."""


def check_model(policy: Policy, path: str, longest: int = 0) -> float:
    """Check a policy in float32, whatever the dtype of its weights, before it is sharded.

    Returns the largest difference between log-probs, in nats. `longest` is the number of tokens of
    the longest row, 0 if it is not known. Raises UserError if the model cannot be trained as it is.
    The message gives the model's type and the difference.
    """
    exact = copy.copy(policy)
    exact.dtype = torch.float32
    exact.attention = "sdpa"
    exact.offload_activations = False
    exact.device = exact.lm.device  # `policy.device` is where it will compute later
    exact.head_backend = best_backend(exact.device, torch.float32)
    with _failures_refused(policy.lm, path):
        check_layers(policy.lm, path)
        with running_in(torch.float32, policy.lm):
            with record_attention() as attention_calls:
                largest = check_path(exact, path)
            if policy.shares_prefixes:
                policy.shares_prefixes = takes_prefix_trees(exact)
            check_windows(policy.lm, path, attention_calls.windows, longest)
    return largest


@contextmanager
def _failures_refused(lm: PreTrainedModel, path: str) -> Iterator[None]:
    """Turn any exception of the model's own code into a UserError that refuses the model.

    Errors for running out of memory or losing another rank pass through unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if out_of_memory(error) or lost_peer(error):
            raise
        reason = f"packed rows do not go through it ({clean(describe(error), 200)})"
        raise refused(lm, path, f"cannot be trained here: {reason}") from error


def check_path(policy: Policy, path: str) -> float:
    """Check a policy with its own kernels and dtype. All ranks must call it.

    Returns and raises as `check_model` does.
    """
    with _failures_refused(policy.lm, path):
        difference = logp_difference(policy)
    largest = float(difference.max())
    mean = float(difference.mean())
    if policy.dtype == torch.float32:
        off_by = typical_difference(difference, policy.lm)
        bound = EXACT
    else:
        off_by = mean
        bound = ROUNDED

    if not off_by <= bound:  # also true for NaN
        raise refused(
            policy.lm,
            path,
            "cannot be trained here: log-probs of packed rows are off by "
            f"{largest:.2g} nats (mean {mean:.2g}) from the model's own, beyond rounding "
            f"({bound:g}); {_reason(policy, bound)}",
        )
    return largest


def _reason(policy: Policy, bound: float) -> str:
    """Explain why log-probs of packed rows are off by more than `bound`.

    The reason is inferred from how the layers call `packed_attention`, and from whether a single
    row gives the right log-probs.
    """
    with record_attention() as attention_calls:
        logp_difference(policy)
    if attention_calls.without_bounds:
        return "its layers do not tell attention where rows end, so packed rows see each other"
    if not attention_calls.count:
        return "its attention is the model's own code, in which packed rows see each other"
    difference_alone = logp_difference(policy, LENGTHS[:1])
    if typical_difference(difference_alone, policy.lm) <= bound:
        return "it does not restart at each row: positions continue, or rows see each other"
    return "a layer or the head does something that the trainer does not know"


def refused(lm: PreTrainedModel, path: str, reason: str) -> UserError:
    """Return the error for a model that cannot be trained. `reason` follows "model type 'X'"."""
    model_type = lm.config.get_text_config().model_type
    return UserError(f"model.path = '{path}': model type '{model_type}' {reason}")


def number_of_experts(config: Any) -> int:
    """Return the number of experts in each layer, 0 for dense models."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config.get_text_config(), name, None)
        if experts:
            return experts
    return 0


def typical_difference(difference: Tensor, lm: PreTrainedModel) -> float:
    """Return the largest difference, or for a model with experts the median.

    With experts, rounding sends an occasional token to a different expert.
    """
    if number_of_experts(lm.config):
        return float(difference.median())
    return float(difference.max())


def check_layers(lm: PreTrainedModel, path: str) -> None:
    """Raise UserError if a layer mixes tokens in an unknown way or the head is not linear.

    The few tokens of `logp_difference` may not reveal such a layer.
    """
    config: Any = lm.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or []
    unknown_types = set()
    for layer_type, layer in zip(layer_types, decoder_layers(lm), strict=False):
        if layer_type not in ATTENTION_LAYERS and not token_mixers(layer):
            unknown_types.add(layer_type)
    if unknown_types:
        raise refused(
            lm,
            path,
            f"has layers of type {', '.join(sorted(unknown_types))}, "
            "which cannot be trained on packed rows",
        )
    if not isinstance(lm.get_output_embeddings(), nn.Linear):
        raise refused(lm, path, "has no linear head")


def sliding_window(config: Any) -> int | None:
    """Return the window of all layers. None if there is none or config.json has `layer_types`.

    Mistral and Phi-3 have such a window.
    """
    if getattr(config, "layer_types", None) or not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def check_windows(
    lm: PreTrainedModel, path: str, called_windows: set[int | None], longest: int
) -> None:
    """Raise UserError if config.json has sliding windows but attention was called without them.

    Some models apply windows only through a mask, which packed rows do not have. The short rows of
    `logp_difference` do not reveal this. Windows at least as wide as the `longest` row (0 if not
    known) do not matter.
    """
    config: Any = lm.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or []
    has_windows = "sliding_attention" in layer_types or sliding_window(config)
    width = getattr(config, "sliding_window", None) or 0
    covers_rows = 0 < longest <= width
    if has_windows and called_windows <= {None} and not covers_rows:
        raise refused(
            lm,
            path,
            "applies sliding windows only through a mask, which cannot be trained on packed rows",
        )


def longest_row(config: Config, *, update: bool = True) -> int:
    """Return the largest number of tokens in a row.

    In an `update` with the world model, a row ends with an observation.
    """
    tokens = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if config.wm.enabled and update:
        tokens += config.wm.max_tokens + TEMPLATE_TOKENS
    return tokens


def check_rope(lm: PreTrainedModel, path: str, longest: int) -> None:
    """Raise UserError if rows of up to `longest` tokens may have different rotary frequencies.

    With Phi-3's longrope and dynamic NTK, the longest row of a batch sets them for all rows.
    """
    config: Any = lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in (rope, *by_layer_type):
        rope_type = parameters.get("rope_type") or ""
        limit = None
        if "dynamic" in rope_type:
            limit = config.max_position_embeddings
        elif rope_type == "longrope":
            limit = parameters.get("original_max_position_embeddings")
            limit = limit or config.max_position_embeddings
        if limit is not None and longest > limit:
            raise refused(
                lm,
                path,
                f"changes its rotary frequencies ({rope_type}) beyond {limit} tokens, "
                f"and rows may have {longest}; lower rollout.max_prompt_tokens, "
                "rollout.max_response_tokens or wm.max_tokens",
            )


@torch.no_grad()
def logp_difference(policy: Policy, lengths: Sequence[int] = LENGTHS) -> Tensor:
    """Return |our log-prob - the model's own| for all but the first token of random rows.

    The result is [sum(lengths) - rows] float32.
    """
    vocabulary = policy.lm.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(vocabulary, (sum(lengths),), generator=generator).to(policy.device)
    starts = accumulate(lengths, initial=0)
    positions = [torch.arange(row_start, row_end - 1) for row_start, row_end in pairwise(starts)]
    position = torch.cat(positions).to(policy.device)
    targets = token_ids[position + 1]

    def packed_logp() -> Tensor:
        hidden = policy.hidden(token_ids, lengths)[position]
        token_statistics = token_stats(
            hidden, policy.head_weight, targets, **policy.head_options(1.0)
        )
        return token_statistics.logp

    actual = policy(packed_logp)
    token_rows = token_ids.split(list(lengths))
    expected = torch.cat(
        [policy(partial(own_logp, policy.lm, token_row)) for token_row in token_rows]
    )
    return (actual - expected).abs()


@torch.no_grad()
def takes_prefix_trees(policy: Policy) -> bool:
    """Whether the hidden states of a prefix tree are those of its rows, up to rounding.

    A layer may look at positions in a way that packed rows do not show.
    """
    vocabulary = policy.lm.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    first, other = torch.randint(vocabulary, (2, max(LENGTHS)), generator=generator).numpy()
    shared = min(LENGTHS) // 2
    tree = prefix_tree([first, np.concatenate([first[:shared], other[shared:]])])

    def own_rows() -> Tensor:
        row_ids = np.concatenate([tree.input_ids[path] for path in tree.paths])
        token_ids = torch.from_numpy(row_ids).to(policy.device)
        return policy.hidden(token_ids, [len(path) for path in tree.paths])

    def in_tree() -> Tensor:
        token_ids = torch.from_numpy(tree.input_ids).to(policy.device)
        lengths = [len(segment) for segment in tree.segments]
        hidden = policy.hidden(token_ids, lengths, [segment.path for segment in tree.segments])
        path_index = torch.from_numpy(np.concatenate(tree.paths)).to(policy.device)
        return hidden[path_index]

    expected = policy(own_rows)
    difference = (policy(in_tree) - expected).abs() / expected.abs().max()
    return typical_difference(difference, policy.lm) <= EXACT


@torch.no_grad()
def own_logp(lm: PreTrainedModel, row: Tensor) -> Tensor:
    """Return log-probs [n - 1] float32 of a row's tokens after the first, by the model itself."""
    attention: Any = lm.config._attn_implementation
    lm.set_attn_implementation("eager")  # computes everything that the model asks for
    try:
        logits = lm(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    finally:
        lm.set_attn_implementation(attention)
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
