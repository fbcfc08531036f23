"""Token losses, and the joint objective of PaW Eq. (11), computed through the fused head.

    Eq. (11):  mean over groups of
                   L_RL(g) + lambda_g * mean over the selected samples of g of CMAE
    computed:  mean over the mini-batch's response tokens of L_RL
               + mean over groups of lambda_g * mean over the selected samples of g of CMAE

The world-model term follows the equation. The policy term follows the reference code: every token
has the same weight, so a group's weight grows with its tokens. `norm = "group"` follows the
equation exactly, with L_RL(g) the mean over g's response tokens. "sample" and "verl" are other
means. World-model weights and the weights of "group" are fixed for the whole update. They are
scaled here by (samples in the update / samples in the mini-batch). All normalisers are part of the
token weights, so a mini-batch's gradient is the same however it is cut into micro-batches.

A token loss is a function (logp [n], entropy [n], batch) -> [n] of each token's log-probability and
entropy under the policy and a `TokenBatch`. It does not apply the token weights. Its keyword-only
parameters are its settings. A built-in loss is a function here, with what the trainer may rely on
in `TRAITS` and its name in `paw.config.plugins`. A user's own loss is given by name
(docs/algorithm.md).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean
from types import FunctionType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from paw.algo.batches import Batch, micro_batches
from paw.algo.device import to_device
from paw.algo.packing import Packing
from paw.algo.shared_samples import column
from paw.config.values import NonNegative, Share
from paw.errors import UserError, short_repr
from paw.types import Sample, Values, no_values
from paw_kernels import Loss, TokenLoss, TokenStats, token_loss, token_stats

T = TypeVar("T")

KL_CLAMP = 10.0
"""Bound of the k3 estimate, as in verl."""
LOG_RATIO_MAX = 20.0
"""Bound of a log-ratio. It is larger than any clip, and exp(20) is finite."""


@dataclass(frozen=True)
class TokenBatch:
    """The data of N target tokens that a loss may read.

    Each field is [N] float32 unless noted, on the policy's device.

    Example: response tokens 7 2 with advantage 0.7, then an observation token 8: weight [.5, .5,
    .1], observation [False, False, True], advantage [.7, .7, 0], old_logp [-1.2, -.3, 0].
    """

    weight: Tensor
    """The token's weight in the objective, including normalisers and lambda_g.

    The trainer multiplies the loss by it.
    """
    observation: Tensor
    """bool: whether the token belongs to an observation, not to a response.

    All fields below are 0 on observation tokens.
    """
    advantage: Tensor
    old_logp: Tensor
    """log pi_old, from the log-prob pass or the engine."""
    sampled_logp: Tensor
    """Log-probability under the sampler, as the engine reported it."""
    ref_logp: Tensor | None = None
    """log pi_ref, if kl_coef > 0."""
    sampler_gap: Tensor | None = None
    """Mean of log pi_old - log pi_sampler over the response, if policy.importance_level is
    "response"."""
    sample: Tensor | None = None
    """int64: the index of the token's sample in the batch."""
    response_gap: Tensor | None = None
    """Mean of log pi - log pi_old over the response, detached. Only set if a loss needs it."""


TokenLossFunction = Callable[[Tensor, Tensor, TokenBatch], Tensor]


def ppo(
    logp: Tensor,
    entropy: Tensor,
    batch: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Tensor:
    """Clipped surrogate (arXiv 1707.06347), at most -A dual_clip where A < 0 (arXiv 1912.09729)."""
    ratio = (logp - batch.old_logp).clamp(max=LOG_RATIO_MAX).exp()
    unclipped = -batch.advantage * ratio
    clipped = -batch.advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.maximum(unclipped, clipped)
    bounded = torch.minimum(surrogate, -batch.advantage * dual_clip)
    return torch.where(batch.advantage < 0, bounded, surrogate)


def cispo(
    logp: Tensor,
    entropy: Tensor,
    batch: TokenBatch,
    *,
    clip_low: Share = 1.0,
    clip_high: NonNegative = 0.28,
) -> Tensor:
    """-A r log p, where r is the clipped ratio, detached so that every token keeps its gradient.

    CISPO, arXiv 2506.13585, Eq. (4).

    clip_low: Ratios below 1 - clip_low count as 1 - clip_low.
    clip_high: Ratios above 1 + clip_high count as 1 + clip_high.
    """
    ratio = (logp.detach() - batch.old_logp).clamp(max=LOG_RATIO_MAX).exp()
    return -batch.advantage * ratio.clamp(1 - clip_low, 1 + clip_high) * logp


def cispo_clipped(logp: Tensor, batch: TokenBatch, *, clip_low: float, clip_high: float) -> Tensor:
    """[N] bool: whether the token's ratio is outside the range of `cispo`."""
    ratio = (logp - batch.old_logp).clamp(max=LOG_RATIO_MAX).exp()
    return (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


def gspo(
    logp: Tensor,
    entropy: Tensor,
    batch: TokenBatch,
    *,
    clip_low: Share = 3e-4,
    clip_high: NonNegative = 4e-4,
) -> Tensor:
    """Clipped surrogate of the response's ratio, which is the geometric mean of its tokens' ratios.

    GSPO, arXiv 2507.18071, Eq. (5). Each token has the loss of its response and its own share of
    the gradient, as in the paper's GSPO-token (Section 4.3). `policy.loss_norm = "sample"` gives
    the paper's mean over responses.

    clip_low: Ratios of responses below 1 - clip_low are clipped.
    clip_high: Ratios of responses above 1 + clip_high are clipped.
    """
    assert batch.response_gap is not None
    ratio = (batch.response_gap + logp - logp.detach()).clamp(max=LOG_RATIO_MAX).exp()
    unclipped = -batch.advantage * ratio
    clipped = -batch.advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped)


def tis(logp: Tensor, entropy: Tensor, batch: TokenBatch, *, tis_cap: float) -> Tensor:
    """Truncated importance sampling in place of the clip: -A min(pi / pi_old, cap), for any A."""
    return -batch.advantage * (logp - batch.old_logp).clamp(max=math.log(tis_cap)).exp()


def cmae(logp: Tensor, entropy: Tensor, batch: TokenBatch, *, rho: float = 0.2) -> Tensor:
    """Clipped mean absolute error [p <= rho] (1 - p), with the mask detached (PaW Eq. (7))."""
    probability = logp.exp()
    return torch.where(probability.detach() > rho, 0.0, 1 - probability)  # NaN is not masked


def mae(logp: Tensor, entropy: Tensor, batch: TokenBatch) -> Tensor:
    """Mean absolute error 1 - p."""
    return 1 - logp.exp()


def ce(logp: Tensor, entropy: Tensor, batch: TokenBatch) -> Tensor:
    """Cross-entropy -log p."""
    return -logp


def gce(logp: Tensor, entropy: Tensor, batch: TokenBatch, *, q: float = 0.7) -> Tensor:
    """(1 - p^q) / q (arXiv 1805.07836), between CE (q towards 0) and MAE (q = 1)."""
    return (1 - (q * logp).exp()) / q


@dataclass(frozen=True)
class Traits:
    """Properties of a token loss that the trainer relies on.

    The defaults are safe for any loss and are used for a user's loss.
    """

    zero_without_advantage: bool = False
    """Tokens with advantage 0 have no gradient, so the trainer may skip samples made of them."""
    needs_response_gap: bool = False
    """The loss reads `TokenBatch.response_gap`, which costs the head one more matmul."""
    masks: bool = False
    """The loss leaves some tokens out. Their share is a metric."""
    clipped: Callable[..., Tensor] | None = None
    """(logp, batch, **settings) -> [N] bool: which tokens the loss clips. None if it clips exactly
    the tokens that have an advantage but no gradient."""


TRAITS: dict[Callable[..., Tensor], Traits] = {
    ppo: Traits(zero_without_advantage=True),
    cispo: Traits(zero_without_advantage=True, clipped=cispo_clipped),
    gspo: Traits(zero_without_advantage=True, needs_response_gap=True),
    tis: Traits(zero_without_advantage=True),
    cmae: Traits(masks=True),
}
"""Traits of the built-in losses that differ from the defaults."""


def traits_of(loss: TokenLossFunction) -> Traits:
    """Return the traits of a token loss, or of the function inside a partial."""
    function = loss.func if isinstance(loss, partial) else loss
    if isinstance(function, FunctionType):
        return TRAITS.get(function, Traits())
    return Traits()


def settings_of(loss: TokenLossFunction) -> dict[str, Any]:
    """Return the values of a token loss's keyword-only parameters."""
    settings: dict[str, Any] = {}
    for parameter in inspect.signature(loss).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings[parameter.name] = parameter.default
    return settings


def k3(logp: Tensor, batch: TokenBatch) -> Tensor:
    """Estimate KL(pi || ref) as e^g - g - 1 with g = log ref - log pi.

    The estimate is clamped to 10. Its gradient is 0 there.
    """
    assert batch.ref_logp is not None, "kl_coef > 0 needs reference log-probs"
    gap = (batch.ref_logp - logp).clamp(max=LOG_RATIO_MAX)
    return (gap.exp() - gap - 1).clamp(-KL_CLAMP, KL_CLAMP)


class JointLoss(Loss):
    """The joint objective as one loss for the fused head, see `joint`."""

    def __init__(
        self, function: Callable[[Tensor, Tensor, Any], Tensor], *, needs_response_gap: bool
    ) -> None:
        super().__init__(function)
        self.needs_response_gap = needs_response_gap


def joint(
    policy: TokenLossFunction,
    wm: TokenLossFunction,
    *,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    tis_cap: float | None = None,
    ratio_bounds: tuple[float, float] | None = None,
) -> JointLoss:
    """Return the objective: `policy` + kl_coef KL - entropy_coef H on responses, `wm` on the rest.

    Both are multiplied by the token weights. The policy loss is also multiplied by min(pi_old /
    pi_sampler, tis_cap), and is 0 if that ratio is outside `ratio_bounds` (IcePop, arXiv
    2510.18855; with ratios of responses, masked importance sampling). When called, the objective
    raises UserError if a loss does not return one number for each token.
    """

    def loss(logp: Tensor, entropy: Tensor, batch: TokenBatch) -> Tensor:
        policy_loss = policy(logp, entropy, batch)
        _check_is_per_token(policy_loss, logp, batch, "policy.loss")
        if tis_cap is not None:
            policy_loss = policy_loss * sampler_gap(batch).clamp(max=math.log(tis_cap)).exp()
        if ratio_bounds is not None:
            policy_loss = torch.where(outside_bounds(batch, ratio_bounds), 0.0, policy_loss)
        if kl_coef:
            policy_loss = policy_loss + kl_coef * k3(logp, batch)
        if entropy_coef:
            policy_loss = policy_loss - entropy_coef * entropy

        wm_loss = wm(logp, entropy, batch)
        _check_is_per_token(wm_loss, logp, batch, "wm.loss")
        return batch.weight * torch.where(batch.observation, wm_loss, policy_loss)

    return JointLoss(loss, needs_response_gap=traits_of(policy).needs_response_gap)


def _check_is_per_token(values: Any, logp: Tensor, batch: TokenBatch, key: str) -> None:
    """Raise UserError unless a loss returned one number per token, since torch would broadcast."""
    # Both are float32, except in a check of another precision.
    dtypes = (logp.dtype, batch.weight.dtype)
    if isinstance(values, Tensor):
        if values.shape == logp.shape and values.dtype in dtypes:
            return
        returned = f"{values.dtype} of shape {list(values.shape)}"
    else:
        returned = short_repr(values)
    raise UserError(
        f"{key} must return one number for each token, {logp.dtype} of shape {list(logp.shape)}, "
        f"not {returned}"
    )


def sampler_gap(batch: TokenBatch) -> Tensor:
    """Return [N]: log pi_old - log pi_sampler of each token, or the mean over its response."""
    if batch.sampler_gap is None:
        return batch.old_logp - batch.sampled_logp
    return batch.sampler_gap


def outside_bounds(batch: TokenBatch, bounds: tuple[float, float]) -> Tensor:
    """[N] bool: whether pi_old / pi_sampler is outside the bounds."""
    low, high = bounds
    ratio = sampler_gap(batch).clamp(max=LOG_RATIO_MAX).exp()
    return (ratio < low) | (ratio > high)


def with_response_gap(tokens: TokenBatch, logp: Tensor) -> TokenBatch:
    """Return the batch with `response_gap`, given the tokens' log-probs [N] under the policy."""
    assert tokens.sample is not None
    is_response = (~tokens.observation).float()
    gap = ((logp - tokens.old_logp) * is_response).nan_to_num(0.0)
    gap = gap.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    sums = torch.zeros_like(logp).index_add(0, tokens.sample, gap)
    counts = torch.zeros_like(logp).index_add(0, tokens.sample, is_response)
    means = sums / counts.clamp(min=1.0)
    return replace(tokens, response_gap=means[tokens.sample])


def token_batch(
    batch: Batch,
    minibatch: Sequence[Sample],
    *,
    update_samples: int,
    norm: str = "token",
    verl_samples: int = 32,
    wm_scale: float = 1.0,
    reference: bool = False,
    ratio_level: str = "token",
) -> TokenBatch:
    """Return the data that the losses read, for a batch that was cut from `minibatch`.

    The update has `update_samples` samples. `reference` adds ref_logp, and `ratio_level` =
    "response" adds sampler_gap. For `norm` see `_token_weights`.
    """
    samples = [minibatch[i] for i in batch.indices]
    target_counts = [target_count(sample, batch.with_observation) for sample in samples]
    response_weights = _token_weights(
        minibatch, batch.indices, norm, verl_samples=verl_samples, update_samples=update_samples
    )
    wm_scale *= update_samples / len(minibatch)
    span_weights: list[float] = []
    span_lengths: list[int] = []
    for response_weight, sample, target_tokens in zip(
        response_weights, samples, target_counts, strict=True
    ):
        span_weights += [response_weight, sample.wm_weight * wm_scale / max(target_tokens, 1)]
        span_lengths += [len(sample.response_ids), target_tokens]
    token_counts = np.asarray(span_lengths, np.int64)
    tokens_of_sample = token_counts.reshape(-1, 2).sum(1)
    is_response = np.repeat(np.arange(len(token_counts)) % 2 == 0, token_counts)
    of_responses = partial(_on_responses, is_response)

    columns = {
        "weight": np.repeat(np.asarray(span_weights), token_counts).astype(np.float32),
        "advantage": of_responses(sample.advantages for sample in samples),
        "old_logp": of_responses(sample.old_logp for sample in samples),
        "sampled_logp": of_responses(sample.sampled_logp for sample in samples),
        "sample": np.repeat(np.arange(len(samples)), tokens_of_sample),
    }
    if reference:
        columns["ref_logp"] = of_responses(map(_ref_logp, samples))
    if ratio_level == "response":
        columns["sampler_gap"] = of_responses(map(_gaps, samples))
    tensors = to_device(list(columns.values()), batch.target.device)
    return TokenBatch(observation=batch.observation, **dict(zip(columns, tensors, strict=True)))


def _on_responses(is_response: np.ndarray, rows: Iterable[Values]) -> np.ndarray:
    """Return [N]: each sample's row of values on response tokens, 0 on observation tokens."""
    values = np.zeros(len(is_response), np.float32)
    values[is_response] = np.concatenate([no_values(), *rows])
    return values


def target_count(sample: Sample, with_observation: bool) -> int:
    """Return the number of observation tokens of a sample that are targets."""
    if with_observation and sample.wm_weight > 0.0:
        return sum(len(target_ids) for _, target_ids in sample.targets)
    return 0


def _ref_logp(sample: Sample) -> Values:
    assert sample.ref_logp is not None, "kl_coef > 0 needs reference log-probs"
    return sample.ref_logp


def _gaps(sample: Sample) -> Values:
    """Return the mean of log pi_old - log pi_sampler over the response, once per token."""
    gap = fmean(sample.old_logp.tolist()) - fmean(sample.sampled_logp.tolist())
    return np.full(len(sample.response_ids), gap)


def _token_weights(
    minibatch: Sequence[Sample],
    indices: Sequence[int],
    norm: str,
    *,
    verl_samples: int,
    update_samples: int,
) -> list[float]:
    """Return the weight of a response token of each of the samples with these indices.

    `norm` says what the mean is taken over: all response tokens ("token"), the samples' means
    ("sample"), the groups' means ("group"), or the means of micro-batches of `verl_samples` samples
    ("verl").
    """
    if norm == "group":
        return [minibatch[i].token_weight * update_samples / len(minibatch) for i in indices]

    lengths = column(minibatch, "response_length").astype(np.int64)
    if norm == "sample":
        return [1.0 / (len(lengths) * int(lengths[i])) for i in indices]

    part_size = verl_samples if norm == "verl" else len(lengths)
    part_tokens = np.add.reduceat(lengths, np.arange(0, len(lengths), part_size)).tolist()
    return [1.0 / (len(part_tokens) * part_tokens[i // part_size]) for i in indices]


class ScoredModel(Protocol):
    """The members of a model that the losses need; `paw.model.policy.Policy` documents them."""

    @property
    def device(self) -> torch.device: ...

    @property
    def head_weight(self) -> Tensor: ...

    def head_options(self, temperature: float) -> dict[str, Any]: ...

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Sequence[int],
        paths: Sequence[np.ndarray] | None = None,
    ) -> Tensor: ...

    def __call__(self, compute: Callable[[], T]) -> T: ...


def joint_loss(
    model: ScoredModel, batch: Batch, tokens: TokenBatch, loss: JointLoss, *, temperature: float
) -> TokenLoss:
    """Compute the objective on one batch, in one forward pass that also forms the gradients."""

    def forward() -> TokenLoss:
        hidden = model.hidden(batch.input_ids, batch.lengths, batch.paths)[batch.position]
        head_options = model.head_options(temperature)
        loss_tokens = tokens
        if loss.needs_response_gap:
            with torch.no_grad():
                token_statistics = token_stats(
                    hidden, model.head_weight, batch.target, **head_options
                )
            loss_tokens = with_response_gap(tokens, token_statistics.logp)
        return token_loss(
            hidden, model.head_weight, batch.target, loss, loss_tokens, **head_options
        )

    return model(forward)


@torch.no_grad()
def log_probs(
    model: ScoredModel,
    samples: Sequence[Sample],
    packing: Packing,
    *,
    temperature: float,
) -> dict[int, tuple[Values, float]]:
    """Return, by sample index, (log-prob of each response token, their mean entropy), in nats.

    The entropy is over the full vocabulary. The result covers the samples in this rank's batches,
    in sample order. It is read from the device once, after the last batch.
    """
    indices: list[int] = []
    logps: list[Tensor] = []
    entropies: list[Tensor] = []
    for batch in micro_batches(samples, packing, with_observation=False, device=model.device):
        head_statistics = model(partial(_head_stats, model, batch, temperature))
        lengths = [len(samples[i].response_ids) for i in batch.indices]
        indices += batch.indices
        logps.append(head_statistics.logp)
        entropies.append(_means(head_statistics.entropy, lengths))

    if not indices:
        return {}
    all_logps = torch.cat(logps).numpy(force=True)
    all_entropies = torch.cat(entropies).tolist()
    ends = accumulate((len(samples[i].response_ids) for i in indices), initial=0)
    scored: dict[int, tuple[Values, float]] = {}
    for i, (response_start, response_end), entropy in zip(
        indices, pairwise(ends), all_entropies, strict=True
    ):
        scored[i] = (all_logps[response_start:response_end], entropy)
    return dict(sorted(scored.items()))


def _means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean of each segment of `values`, float32; 0 for an empty segment."""
    ends = np.array([0, *accumulate(lengths)])
    offsets: Any = to_device([ends], values.device)[0]
    means = torch.segment_reduce(values.double(), "mean", offsets=offsets, initial=0, unsafe=True)
    return means.float()


def _head_stats(model: ScoredModel, batch: Batch, temperature: float) -> TokenStats:
    """Log-probs and entropies of a batch's targets. To be called inside a call of the model."""
    hidden = model.hidden(batch.input_ids, batch.lengths, batch.paths)[batch.position]
    return token_stats(hidden, model.head_weight, batch.target, **model.head_options(temperature))
