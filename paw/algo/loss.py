"""Token losses, and the joint objective of PaW Eq. (11) through the fused head.

    Eq. (11):  mean over groups of [ L_RL(g) + lambda_g * mean over the selected samples of g of CMAE ]
    computed:  mean over the mini-batch's response tokens of L_RL
               + mean over groups of lambda_g * mean over the selected samples of g of CMAE

The world-model term is the equation's. The policy term is that of the reference code: every token
weighs the same, so a group weighs by its tokens. `norm = "group"` is the equation to the letter,
L_RL(g) the mean over g's response tokens; "sample" and "verl" are further means. World-model
weights, and those of "group", were fixed for the whole update and are scaled by (samples in the
update / samples in the mini-batch). All normalisers live in the token weights, so a mini-batch's
gradient is the same however it is cut into micro-batches.

A loss is a function of each token's log-probability and entropy under the policy, (logp [n],
entropy [n], batch) -> [n] with a `TokenBatch`, weights left out. A function of one's own plugs in
by name (docs/algorithm.md).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paw.algo.samples import Batch, micro_batches
from paw.errors import UserError, shown
from paw.types import Sample
from paw_kernels import Loss, TokenLoss, TokenStats, token_loss, token_stats

if TYPE_CHECKING:
    from paw.model.policy import Policy

KL_CLAMP, LOG_RATIO_MAX = 10.0, 20.0
"""Bounds of the k3 estimate, as in verl, and of a log-ratio, beyond every clip: exp(20) is finite."""


@dataclass(frozen=True)
class TokenBatch:
    """What a loss may read of N target tokens; each [N] float32 unless noted, on the policy's device.

    Example: response tokens 7 2 with advantage 0.7, then an observation token 8: weight [.5, .5,
    .1], observation [False, False, True], advantage [.7, .7, 0], old_logp [-1.2, -.3, 0].
    """

    weight: Tensor
    """Of the token in the objective; normalisers and lambda_g are inside.

    The trainer multiplies it to the loss.
    """
    observation: Tensor
    """bool: a token of an observation, else of a response.

    All that follows is 0 on observation tokens.
    """
    advantage: Tensor
    old_logp: Tensor
    """log pi_old, from the log-prob pass or the engine."""
    sampled_logp: Tensor
    """Under the sampler, as the engine reported it."""
    ref_logp: Tensor | None = None
    """log pi_ref, when kl_coef > 0."""
    sampler_gap: Tensor | None = None
    """Mean of log pi_old - log pi_sampler over the response, with policy.is_level = "response"."""
    sample: Tensor | None = None
    """int64: the index of the token's sample in the batch, ..."""
    response_gap: Tensor | None = None
    """... and the mean of log pi - log pi_old over its response, detached: for a loss that has `of_response`."""


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
    """Clipped surrogate (arXiv 1707.06347), at most -A dual_clip where A < 0 (dual clip, arXiv 1912.09729)."""
    ratio = (logp - batch.old_logp).clamp(max=LOG_RATIO_MAX).exp()
    plain, clipped = (
        -batch.advantage * ratio,
        -batch.advantage * ratio.clamp(1 - clip_low, 1 + clip_high),
    )
    surrogate = torch.maximum(plain, clipped)
    return torch.where(
        batch.advantage < 0, torch.minimum(surrogate, -batch.advantage * dual_clip), surrogate
    )


def cispo(
    logp: Tensor,
    entropy: Tensor,
    batch: TokenBatch,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> Tensor:
    """-A r log p with r the clipped ratio, detached: no token loses its gradient (CISPO, arXiv 2506.13585, Eq. (4)).

    clip_low: Ratios count as 1 - clip_low at least.
    clip_high: Ratios count as 1 + clip_high at most.
    """
    ratio = (logp.detach() - batch.old_logp).clamp(max=LOG_RATIO_MAX).exp()
    return -batch.advantage * ratio.clamp(1 - clip_low, 1 + clip_high) * logp


def gspo(
    logp: Tensor,
    entropy: Tensor,
    batch: TokenBatch,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The clipped surrogate of a response's ratio, the geometric mean of its tokens' (GSPO, arXiv 2507.18071, Eq. (5)).

    By token: its value is the response's, its gradient the share of the token, which is the paper's
    GSPO-token (Section 4.3). `policy.loss_norm = "sample"` makes the mean over responses that the
    paper has.

    clip_low: Ratios of responses below 1 - clip_low are clipped.
    clip_high: Ratios of responses above 1 + clip_high are clipped.
    """
    assert batch.response_gap is not None
    ratio = (batch.response_gap + logp - logp.detach()).clamp(max=LOG_RATIO_MAX).exp()
    return torch.maximum(
        -batch.advantage * ratio, -batch.advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    )


gspo.of_response = True  # type: ignore[attr-defined]


def tis(logp: Tensor, entropy: Tensor, batch: TokenBatch, *, tis_cap: float) -> Tensor:
    """Truncated importance sampling in place of the clip: -A min(pi / pi_old, cap), for either sign of A."""
    return -batch.advantage * (logp - batch.old_logp).clamp(max=math.log(tis_cap)).exp()


def k3(logp: Tensor, batch: TokenBatch) -> Tensor:
    """Estimate of KL(pi || ref), e^g - g - 1 with g = log ref - log pi, clamped to 10, which stops its gradient."""
    assert batch.ref_logp is not None, "kl_coef > 0 needs reference log-probs"
    gap = (batch.ref_logp - logp).clamp(max=LOG_RATIO_MAX)
    return (gap.exp() - gap - 1).clamp(-KL_CLAMP, KL_CLAMP)


def cmae(logp: Tensor, entropy: Tensor, batch: TokenBatch, *, rho: float = 0.2) -> Tensor:
    """Clipped mean absolute error [p <= rho] (1 - p), the mask detached (PaW Eq. (7))."""
    p = logp.exp()
    return torch.where(p.detach() > rho, 0.0, 1 - p)  # NaN is not masked


def mae(logp: Tensor, entropy: Tensor, batch: TokenBatch) -> Tensor:
    return 1 - logp.exp()


def ce(logp: Tensor, entropy: Tensor, batch: TokenBatch) -> Tensor:
    return -logp


def gce(logp: Tensor, entropy: Tensor, batch: TokenBatch, *, q: float = 0.7) -> Tensor:
    """(1 - p^q) / q (arXiv 1805.07836): from CE (q towards 0) to MAE (q = 1)."""
    return (1 - (q * logp).exp()) / q


def joint(
    policy: TokenLossFunction,
    wm: TokenLossFunction,
    *,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    tis_cap: float | None = None,
    is_mask: tuple[float, float] | None = None,
) -> Loss:
    """The objective: of response tokens `policy` + kl_coef KL - entropy_coef H, of observation tokens `wm`, weighed.

    The policy loss is weighed by min(pi_old / pi_sampler, tis_cap), and left out where that ratio
    is not in `is_mask` (IcePop, arXiv 2510.18855; by response: masked importance sampling).
    """

    def loss(logp: Tensor, entropy: Tensor, batch: TokenBatch) -> Tensor:
        acting = _of_each_token(policy(logp, entropy, batch), logp, batch, "policy.loss")
        if tis_cap is not None:
            acting = acting * sampler_gap(batch).clamp(max=math.log(tis_cap)).exp()
        if is_mask is not None:
            acting = torch.where(outside(batch, is_mask), 0.0, acting)
        if kl_coef:
            acting = acting + kl_coef * k3(logp, batch)
        if entropy_coef:
            acting = acting - entropy_coef * entropy
        watching = _of_each_token(wm(logp, entropy, batch), logp, batch, "wm.loss")
        return batch.weight * torch.where(batch.observation, watching, acting)

    loss.of_response = of_response(policy)  # type: ignore[attr-defined]
    return Loss(loss)


def _of_each_token(found: Any, logp: Tensor, batch: TokenBatch, key: str) -> Tensor:
    """What a loss returned; UserError for what is no number for each token: it would be spread over them."""
    dtypes = logp.dtype, batch.weight.dtype  # float32 both, but for a check in another precision
    if not (isinstance(found, Tensor) and found.shape == logp.shape and found.dtype in dtypes):
        what = (
            f"{found.dtype} of shape {list(found.shape)}"
            if isinstance(found, Tensor)
            else shown(found)
        )
        raise UserError(
            f"{key} must return one number for each token, {logp.dtype} of shape {list(logp.shape)}, not {what}"
        )
    return found


def sampler_gap(batch: TokenBatch) -> Tensor:
    """log pi_old - log pi_sampler of each token, or the mean over its response."""
    return batch.old_logp - batch.sampled_logp if batch.sampler_gap is None else batch.sampler_gap


def outside(batch: TokenBatch, bounds: tuple[float, float]) -> Tensor:
    """Whether pi_old / pi_sampler is not within the bounds."""
    ratio = sampler_gap(batch).clamp(max=LOG_RATIO_MAX).exp()
    return (ratio < bounds[0]) | (ratio > bounds[1])


def of_response(loss: Any) -> bool:
    """Whether a token's loss, or that of a partial of it, needs `TokenBatch.response_gap`."""
    return getattr(getattr(loss, "func", loss), "of_response", False)


def with_response_gap(tokens: TokenBatch, logp: Tensor) -> TokenBatch:
    """The batch with the gap of each response, for tokens of these log-probs [N]."""
    assert tokens.sample is not None
    action = (~tokens.observation).float()
    gap = ((logp - tokens.old_logp) * action).nan_to_num(0.0).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    sums, counts = (
        torch.zeros_like(logp).index_add(0, tokens.sample, values) for values in (gap, action)
    )
    return replace(tokens, response_gap=(sums / counts.clamp(min=1.0))[tokens.sample])


def token_batch(
    batch: Batch,
    minibatch: Sequence[Sample],
    *,
    update_samples: int,
    norm: str = "token",
    verl_samples: int = 32,
    wm_scale: float = 1.0,
    reference: bool = False,
    is_level: str = "token",
) -> TokenBatch:
    """What the loss reads of a batch cut from `minibatch`; the update had `update_samples`."""
    per_token = _token_weights(minibatch, norm, verl_samples, update_samples=update_samples)
    wm_scale *= update_samples / len(minibatch)
    names = ["weight", "advantage", "old_logp", "sampled_logp"]
    names += ["ref_logp"] * reference + ["sampler_gap"] * (is_level == "response")
    columns: dict[str, list[float]] = {name: [] for name in names}
    index: list[int] = []
    for place, i in enumerate(batch.indices):
        sample = minibatch[i]
        observed = batch.with_observation and sample.wm_weight > 0.0
        m = sum(len(ids) for _, ids in sample.targets) if observed else 0
        n = len(sample.response_ids)
        columns["weight"] += [per_token[i]] * n + [sample.wm_weight * wm_scale / max(m, 1)] * m
        index += [place] * (n + m)
        values = {
            "advantage": sample.advantages,
            "old_logp": sample.old_logp,
            "sampled_logp": sample.sampled_logp,
        }
        if is_level == "response":
            values["sampler_gap"] = [fmean(sample.old_logp) - fmean(sample.sampled_logp)] * n
        if reference:
            assert sample.ref_logp is not None, "kl_coef > 0 needs reference log-probs"
            values["ref_logp"] = sample.ref_logp
        for name, of_response in values.items():
            columns[name] += of_response + [0.0] * m
    device = batch.target.device
    tensors = {
        name: torch.tensor(column, dtype=torch.float32, device=device)
        for name, column in columns.items()
    }
    sample_index = torch.tensor(index, dtype=torch.int64, device=device)
    return TokenBatch(observation=batch.observation, sample=sample_index, **tensors)


def _token_weights(
    minibatch: Sequence[Sample], norm: str, verl_samples: int, *, update_samples: int
) -> list[float]:
    """Weight of a response token of each sample in the mean over tokens, samples, groups or verl's micro-batches."""
    lengths = [len(sample.response_ids) for sample in minibatch]
    if norm == "group":
        return [sample.token_weight * update_samples / len(minibatch) for sample in minibatch]
    if norm == "sample":
        return [1.0 / (len(lengths) * n) for n in lengths]
    size = verl_samples if norm == "verl" else len(lengths)
    tokens = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
    return [1.0 / (len(tokens) * tokens[i // size]) for i in range(len(lengths))]


def joint_loss(
    model: "Policy", batch: Batch, tokens: TokenBatch, loss: Loss, *, temperature: float
) -> TokenLoss:
    """One forward pass: the objective restricted to the batch, gradients already formed in the head."""

    def forward() -> TokenLoss:
        hidden = model.hidden(batch.input_ids, batch.lengths)[batch.position]
        head, options, read = model.head_weight, model.head_options(temperature), tokens
        if of_response(loss.function):
            with torch.no_grad():
                read = with_response_gap(
                    tokens, token_stats(hidden, head, batch.target, **options).logp
                )
        return token_loss(hidden, head, batch.target, loss, read, **options)

    return model(forward)


@torch.no_grad()
def log_probs(
    model: "Policy",
    samples: Sequence[Sample],
    *,
    temperature: float,
    budget: int,
    share: tuple[int, int] = (0, 1),
) -> dict[int, tuple[list[float], float]]:
    """(log-prob of each response token, mean full-vocabulary entropy there), nats, by the sample's index.

    Of all samples, or of those in this rank's `share` of the batches; in the order of samples.
    """

    def stats(batch: Batch) -> TokenStats:
        hidden = model.hidden(batch.input_ids, batch.lengths)[batch.position]
        return token_stats(
            hidden, model.head_weight, batch.target, **model.head_options(temperature)
        )

    found: dict[int, tuple[list[float], float]] = {}
    for batch in micro_batches(
        samples,
        budget=budget,
        with_observation=False,
        device=model.device,
        quadratic=model.quadratic,
        share=share,
    ):
        of = model(partial(stats, batch))
        ends = [0, *accumulate(len(samples[i].response_ids) for i in batch.indices)]
        offsets: Any = torch.tensor(ends, device=model.device)
        means = torch.segment_reduce(
            of.entropy.double(), "mean", offsets=offsets, initial=0, unsafe=True
        ).float()
        logp = of.logp.tolist()
        for i, (start, end), mean in zip(
            batch.indices, pairwise(ends), means.tolist(), strict=True
        ):
            found[i] = (logp[start:end], mean)
    return dict(sorted(found.items()))


SUMS = ("actions", "observations", "with_gradient", "masked", "clipped", "policy_loss", "wm_loss", "wm_token_loss",
        "entropy", "kl", "is_masked", "is_capped")  # fmt: skip
"""What `tally` counts and adds up over the tokens of an update's micro-batches."""


def tally(
    out: TokenLoss,
    tokens: TokenBatch,
    policy: TokenLossFunction,
    wm: TokenLossFunction,
    *,
    tis_cap: float | None = None,
    is_mask: tuple[float, float] | None = None,
) -> list[float]:
    """`SUMS` of a batch. Clipped: response tokens with an advantage of which `policy` has no
    gradient; masked: observation tokens of which `wm` has none; the last two: response tokens whose
    pi_old / pi_sampler is not within `is_mask`, or above `tis_cap`."""

    if of_response(policy):
        tokens = with_response_gap(tokens, out.logp)

    def of(loss: TokenLossFunction) -> tuple[Tensor, Tensor]:
        """The loss of each token, and its derivative by log p."""
        logp = out.logp.clone().requires_grad_()
        with torch.enable_grad():
            values = loss(logp, out.entropy, tokens)
            slope = (
                torch.autograd.grad(values.sum(), logp, allow_unused=True)[0]
                if values.requires_grad
                else None
            )
        return values.detach(), torch.zeros_like(logp) if slope is None else slope

    (_, acting_slope), (watching, watching_slope) = of(policy), of(wm)
    observation, action = tokens.observation, ~tokens.observation
    kl = k3(out.logp, tokens)[action] if tokens.ref_logp is not None else out.logp[:0]
    sums = [
        action.sum(),
        observation.sum(),
        out.has_gradient.sum(),
        (observation & (watching_slope == 0)).sum(),
        (action & (tokens.advantage != 0) & (acting_slope == 0)).sum(),
        out.token_loss[action].sum(),
        out.token_loss[observation].sum(),
        watching[observation].sum(),
        out.entropy[action].sum(),
        kl.sum(),
        (action & outside(tokens, is_mask or (0.0, math.inf))).sum(),
        (action & outside(tokens, (0.0, tis_cap or math.inf))).sum(),
    ]
    return torch.stack([value.double() for value in sums]).tolist()  # one transfer


def metrics(
    sums: Sequence[float],
    *,
    steps: int,
    reference: bool,
    masks: bool,
    is_mask: bool = False,
    tis_cap: bool = False,
) -> dict[str, float]:
    """Losses are means over the optimizer `steps`, fractions and means are over tokens.

    What was not measured is absent: a mean over no tokens, KL without a reference, the share masked
    by a loss that masks none. Samples without any gradient made no forward pass and are in no mean.
    """
    of = dict(zip(SUMS, sums, strict=True))
    steps = max(1, steps)
    found = {"policy/loss": of["policy_loss"] / steps}
    if of["actions"]:
        found |= {
            "policy/clip_frac": of["clipped"] / of["actions"],
            "policy/entropy": of["entropy"] / of["actions"],
            "optim/gradient_frac": of["with_gradient"] / (of["actions"] + of["observations"]),
        }
        if is_mask:
            found["policy/is_masked_frac"] = of["is_masked"] / of["actions"]
        if tis_cap:
            found["policy/tis_capped_frac"] = of["is_capped"] / of["actions"]
        if reference:
            found["policy/kl"] = of["kl"] / of["actions"]
    if of["observations"]:
        found |= {
            "wm/loss": of["wm_loss"] / steps,
            "wm/token_loss": of["wm_token_loss"] / of["observations"],
        }
        if masks:
            found["wm/masked_frac"] = of["masked"] / of["observations"]
    return found
