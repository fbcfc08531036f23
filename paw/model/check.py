"""Whether the trainer computes a model's own log-probs: packed rows through its hidden states and
head, against the model on each row alone.

What this finds: layers that let packed rows see each other, heads that do more to their logits than
we know, attention with terms that our kernels leave out.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paw.config import Config
from paw.errors import UserError, clean, describe
from paw.model.attention import attention_seen, decoder_layers, token_mixers
from paw.model.precision import running_in
from paw.model.ranks import lost_peer, out_of_memory
from paw_kernels import best_backend, token_stats

if TYPE_CHECKING:
    from paw.model.policy import Policy

LENGTHS = (13, 19)
"""Tokens of the two rows."""
EXACT, ROUNDED = 1e-3, 0.25
"""Nats that log-probs may differ by: in float32 the largest (1e-6 on small models), in bfloat16 the
mean (a model's own logits of 32 are rounded to multiples of 0.25 there)."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_model(policy: "Policy", path: str, longest: int = 0) -> float:
    """The largest difference in nats, in float32 whatever the weights are stored in; before `policy` is sharded.

    Raises UserError, naming the model's type and the difference, for a model that cannot be trained
    as it is.
    """
    exact = copy.copy(policy)
    exact.dtype, exact.attention, exact.offload_activations = torch.float32, "sdpa", False
    exact.device = exact.lm.device  # not yet where it will compute
    exact.head_backend = best_backend(exact.device, torch.float32)
    with _one_line(policy.lm, path):
        check_layers(policy.lm, path)
        with running_in(torch.float32, policy.lm):
            with attention_seen() as seen:
                found = check_path(exact, path)
            check_windows(policy.lm, path, seen.windows, longest)
            return found


@contextmanager
def _one_line(lm: PreTrainedModel, path: str) -> Iterator[None]:
    """A refusal for whatever the model's own code raises, but for a lack of memory and another rank's end."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if out_of_memory(error) or lost_peer(error):
            raise
        why = f"packed rows do not go through it ({clean(describe(error), 200)})"
        raise refused(lm, path, f"cannot be trained here: {why}") from error


def check_path(policy: "Policy", path: str) -> float:
    """The same through the policy's own kernels and dtype; with several ranks a call of all of them."""
    with _one_line(policy.lm, path):
        difference = logp_difference(policy)
    largest, mean = float(difference.max()), float(difference.mean())
    exact = policy.dtype == torch.float32
    found, bound = (typical(difference, policy.lm), EXACT) if exact else (mean, ROUNDED)
    if not found <= bound:  # NaN as well
        off = f"log-probs of packed rows are off by {largest:.2g} nats (mean {mean:.2g}) from the model's own"
        why = f"{off}, beyond rounding ({bound:g}); {_reason(policy, bound)}"
        raise refused(policy.lm, path, f"cannot be trained here: {why}")
    return largest


def _reason(policy: "Policy", bound: float) -> str:
    """Why log-probs of packed rows are off by more than `bound`: by what the layers ask of
    `packed_attention`, and by whether those of a row alone are."""
    with attention_seen() as seen:
        logp_difference(policy)
    if seen.without_bounds:
        return "its layers do not tell attention where rows end, so packed rows see each other"
    if not seen.calls:
        return "its attention is code of its own, in which packed rows see each other"
    if typical(logp_difference(policy, LENGTHS[:1]), policy.lm) <= bound:  # a row alone is right
        return "it does not start anew in each row: positions go on, or rows see each other"
    return "a layer or the head does something that the trainer does not know"


def refused(lm: PreTrainedModel, path: str, why: str) -> UserError:
    return UserError(
        f"model.path = '{path}': model type '{lm.config.get_text_config().model_type}' {why}"
    )


def number_of_experts(config: Any) -> int:
    """Of each layer; 0 for dense models."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for name in names if (n := getattr(config.get_text_config(), name, None))), 0)


def typical(difference: Tensor, lm: PreTrainedModel) -> float:
    """The largest; with experts the median, because rounding sends the odd token to another expert."""
    return float(difference.median() if number_of_experts(lm.config) else difference.max())


def check_layers(lm: PreTrainedModel, path: str) -> None:
    """UserError for layers that mix tokens in another way, which so few tokens need not show, and odd heads."""
    config: Any = lm.config.get_text_config()
    kinds = zip(getattr(config, "layer_types", None) or [], decoder_layers(lm), strict=False)
    unknown = sorted(
        {kind for kind, layer in kinds if kind not in ATTENTION_LAYERS and not token_mixers(layer)}
    )
    if unknown:
        raise refused(
            lm,
            path,
            f"has layers of type {', '.join(unknown)}, which cannot be trained on packed rows",
        )
    if not isinstance(lm.get_output_embeddings(), nn.Linear):
        raise refused(lm, path, "has no linear head")


def sliding_window(config: Any) -> int | None:
    """Of layers that `layer_types` does not name: the window of all of them (Mistral, Phi-3), or None."""
    on = getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if on else None


def check_windows(lm: PreTrainedModel, path: str, seen: set[int | None], longest: int) -> None:
    """UserError where config.json has sliding windows and attention was called without (`seen`):
    some models leave them to a mask, which packed rows do not have. Rows as short as those of
    `logp_difference` do not show it, and windows as wide as the `longest` row (0: not known) do not
    matter."""
    config: Any = lm.config.get_text_config()
    wanted = "sliding_attention" in (getattr(config, "layer_types", None) or []) or sliding_window(
        config
    )
    wide = 0 < longest <= (getattr(config, "sliding_window", None) or 0)
    if wanted and seen <= {None} and not wide:
        raise refused(
            lm, path, "has sliding windows by a mask alone, which cannot be trained on packed rows"
        )


def longest_row(config: Config, *, update: bool = True) -> int:
    """Tokens that a row may have; in an `update` with an observation and some that a chat template puts before it."""
    appended = config.wm.max_tokens + 64 if config.wm.enabled and update else 0
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens + appended


def check_rope(lm: PreTrainedModel, path: str, longest: int) -> None:
    """UserError for rotary frequencies that the longest row of a batch would choose for all of them
    (Phi-3's longrope, dynamic NTK), where rows may have `longest` tokens."""
    config: Any = lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for of in (
        rope,
        *(value for value in rope.values() if isinstance(value, dict)),
    ):  # or one of each layer type
        kind = of.get("rope_type") or ""
        if kind != "longrope" and "dynamic" not in kind:
            continue
        first = (
            kind == "longrope" and of.get("original_max_position_embeddings")
        ) or config.max_position_embeddings
        if longest > first:
            why = f"has other rotary frequencies ({kind}) beyond {first} tokens, and rows may have {longest}"
            keys = "rollout.max_prompt_tokens, rollout.max_response_tokens or wm.max_tokens"
            raise refused(lm, path, f"{why}; lower {keys}")


@torch.no_grad()
def logp_difference(policy: "Policy", lengths: Sequence[int] = LENGTHS) -> Tensor:
    """|ours - the model's own| log-prob of each token but the first of each row, [sum(lengths) - rows] float32."""
    vocabulary = policy.lm.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(
        policy.device
    )
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    position = torch.cat([torch.arange(start, end - 1) for start, end in pairwise(starts)]).to(
        policy.device
    )

    def ours() -> Tensor:
        hidden = policy.hidden(ids, lengths)[position]
        return token_stats(
            hidden, policy.head_weight, ids[position + 1], **policy.head_options(1.0)
        ).logp

    found = policy(ours)
    expected = torch.cat(
        [policy(partial(own_logp, policy.lm, row)) for row in ids.split(list(lengths))]
    )
    return (found - expected).abs()


@torch.no_grad()
def own_logp(lm: PreTrainedModel, row: Tensor) -> Tensor:
    """Log-probs of a row's tokens but the first, [n - 1] float32, by the model's own forward pass."""
    attention: Any = lm.config._attn_implementation
    lm.set_attn_implementation("eager")  # computes all that the model asks for
    try:
        logits = lm(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    finally:
        lm.set_attn_implementation(attention)
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
