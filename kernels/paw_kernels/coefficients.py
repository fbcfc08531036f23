"""The losses, once: what each row contributes and the two numbers its gradient needs. Serves every backend.

With logits z, p = softmax(z), l = log p_y and entropy H = -sum_j p_j log p_j, every loss is a function of (l, H), so

    dL/dz_j = a (1[j = y] - p_j) - c p_j (log p_j + H),    a = dL/dl, c = dL/dH.

Rows with a = c = 0 need no backward pass at all. `LossRows` says what to learn, `Slopes` is the same as a function
a(l) with constants per row, so that a kernel can evaluate it without knowing any loss.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from paw_kernels._checks import check_tensor

SKIP, ACTION, OBSERVATION = 0, 1, 2
"""Values of `LossRows.kind`."""

_KL_CLAMP = 10.0
_LOG_RATIO_MAX = 20.0
_FLOOR = -1e30  # finite, because 0 * inf = NaN; its exponential is 0
_OBSERVATION_LOSSES = ("cmae", "mae", "ce", "gce")


@dataclass(frozen=True)
class LossRows:
    """What to learn at each of T positions. Per-row tensors are [T], on the device of `hidden`, float32 unless noted.

    Example: a sequence of one prompt token, two response tokens with advantage 0.7, one observation token:
    kind [0, 1, 1, 2], weight [0, 0.5, 0.5, 0.1], advantage [0, 0.7, 0.7, 0], old_logp [0, -1.2, -0.3, 0].
    """

    kind: Tensor
    """uint8: 0 skip (no loss, no statistics), 1 action, 2 observation."""
    weight: Tensor
    """Factor of the row in the loss; normalisers and lambda_g are inside. Rows of weight 0 still report statistics."""
    advantage: Tensor
    """Read on action rows only, as are old_logp and ref_logp."""
    old_logp: Tensor
    """log pi_old of the target."""
    ref_logp: Tensor | None = None
    """log pi_ref of the target; needed when kl_coef is not 0."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    """Bound on the ratio for negative advantages (arXiv 1912.09729), above 1."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    rho: float = 0.2
    """CMAE: targets with p > rho carry no loss."""
    observation_loss: str = "cmae"
    """cmae: [p <= rho] (1 - p), the mask detached; mae: 1 - p; ce: -log p; gce: (1 - p^q) / q (arXiv 1805.07836)."""
    q: float = 0.7
    """GCE: from CE (towards 0) to MAE (1)."""

    def check(self, T: int, device: torch.device) -> None:
        """Raises ValueError for options out of range and tensors of a wrong shape, dtype or device."""
        if self.observation_loss not in _OBSERVATION_LOSSES:
            known = ", ".join(_OBSERVATION_LOSSES)
            raise ValueError(f"rows.observation_loss={self.observation_loss!r} is unknown; known losses: {known}")
        if not 0 < self.q <= 1:
            raise ValueError(f"rows.q must be in (0, 1], got {self.q}")
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0 and self.dual_clip > 1):
            raise ValueError(
                "rows: clip_low must be in [0, 1], clip_high >= 0 and dual_clip > 1, "
                f"got {self.clip_low}, {self.clip_high}, {self.dual_clip}"
            )
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rows.rho must be in [0, 1], got {self.rho}")
        for name in ("kl_coef", "entropy_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"rows.{name} must be finite and at least 0, got {getattr(self, name)}")
        if self.kl_coef != 0 and self.ref_logp is None:
            raise ValueError(f"rows.ref_logp is needed when kl_coef is not 0 (kl_coef={self.kl_coef})")
        check_tensor("rows.kind", self.kind, [T], torch.uint8, device)
        for name, tensor in _tensors(self).items():
            if name != "kind":
                check_tensor(f"rows.{name}", tensor, [T], torch.float32, device)

    def problems(self) -> dict[str, Tensor]:
        """Message -> scalar bool tensor, for values that no loss can be computed from."""
        action = self.kind == ACTION
        found = {"rows.kind must be 0 (skip), 1 (action) or 2 (observation)": (self.kind > OBSERVATION).any()}
        for name, tensor in _tensors(self).items():
            if name == "weight":
                found["rows.weight must be finite on rows with kind != 0"] = ~tensor.isfinite().all()
            elif name != "kind":
                found[f"rows.{name} must be finite on action rows"] = (action & ~tensor.isfinite()).any()
        return found

    def take(self, index: Tensor | slice) -> "LossRows":
        """The chosen rows, in the order of `index`."""
        return replace(self, **{name: tensor[index] for name, tensor in _tensors(self).items()})


@dataclass(frozen=True)
class Slopes:
    """a and c of N rows as functions of l; every tensor [N] float32.

        a(l) = scale * exp(power * (l - base)) * [low <= l <= high] + pull * (1 - exp(g)) * [k3(g) <= 10],  g = ref - l

    with k3(g) = exp(g) - g - 1; c does not depend on l. Every interval is open to NaN, which must reach the gradient.
    With power 0, a is scale at l = -inf too.
    """

    scale: Tensor
    base: Tensor
    low: Tensor
    high: Tensor
    power: Tensor
    pull: Tensor | None = None
    ref: Tensor | None = None
    c: Tensor | None = None

    def take(self, index: slice) -> "Slopes":
        return replace(self, **{name: tensor[index] for name, tensor in _tensors(self).items()})

    def at(self, logp: Tensor) -> tuple[Tensor, Tensor | None]:
        """(a, c) at l = logp."""
        powers = (logp - self.base).clamp_(min=_FLOOR).mul_(self.power).exp_()
        a = (self.scale * powers).masked_fill_(self.outside(logp), 0.0)
        if self.pull is not None and self.ref is not None:
            gap = (self.ref - logp).clamp_(max=_LOG_RATIO_MAX)  # beyond the clamp of k3, and finite where logp is -inf
            gap_exp = gap.exp()
            a += (self.pull * (1 - gap_exp)).masked_fill_(gap_exp - gap - 1 > _KL_CLAMP, 0.0)
        return a, self.c

    def outside(self, logp: Tensor) -> Tensor:
        """bool: rows stopped by a clip or left out by the mask."""
        return (logp < self.low) | (logp > self.high)


def constant_slopes(a: Tensor, c: Tensor | None) -> Slopes:
    """Slopes whose a is known before the pass."""
    zero = torch.zeros_like(a)
    return Slopes(scale=a, base=zero, low=zero - torch.inf, high=zero + torch.inf, power=zero, c=c)


def slopes(rows: LossRows) -> Slopes:
    """The coefficients of rows of kind 1 or 2.

    Action: l_PPO = max(-A r, -A clip(r)), at most -A dual_clip where A < 0, r = exp(l - l_old), flows in one interval
    of l. Sources: PaW Eq. (7) for CMAE; clipped surrogate with dual clip and k3 as in verl's core_algos.
    """
    action, unbounded = rows.kind == ACTION, torch.full_like(rows.weight, torch.inf)
    gain, loses = action & (rows.advantage > 0), action & (rows.advantage < 0)
    neutral = action & (rows.advantage == 0)  # its constants must be finite: 0 * inf
    scale = torch.where(action, -rows.weight * rows.advantage, -rows.weight).masked_fill(neutral, 0.0)
    base = torch.where(gain | loses, rows.old_logp, 0.0)
    least = math.log1p(-rows.clip_low) if rows.clip_low < 1 else -math.inf
    low = torch.where(loses, rows.old_logp + least, -unbounded)
    high = torch.where(gain, rows.old_logp + math.log1p(rows.clip_high), unbounded)
    high = torch.where(loses, rows.old_logp + math.log(rows.dual_clip), high)
    power = torch.ones_like(scale).masked_fill_(~action, {"ce": 0.0, "gce": rows.q}.get(rows.observation_loss, 1.0))
    if rows.observation_loss == "cmae":
        limit = math.log(rows.rho) if rows.rho > 0 else -math.inf
        high = torch.where(action, high, limit)
    pull = ref = c = None
    if rows.kl_coef != 0 and rows.ref_logp is not None:
        pull = torch.where(action, rows.kl_coef * rows.weight, 0.0)
        ref = torch.where(action, rows.ref_logp, 0.0)
    if rows.entropy_coef != 0:
        c = torch.where(action, -rows.entropy_coef * rows.weight, 0.0)
    return Slopes(scale, base, low, high, power, pull, ref, c)


@dataclass(frozen=True)
class RowTerms:
    """Losses of n rows, float32 [n] unless noted."""

    loss: Tensor
    """Before the row weight."""
    kl: Tensor
    """k3 estimate of KL(pi || ref) on action rows, clamped to 10; 0 elsewhere and without ref_logp."""
    clipped: Tensor
    """bool: action rows where the clip, or the dual clip, stops the policy gradient."""
    masked: Tensor
    """bool: observation rows that the CMAE mask leaves out, p > rho."""


def row_terms(logp: Tensor, entropy: Tensor, rows: LossRows, of: Slopes) -> RowTerms:
    """Losses of n rows of kind 1 or 2 from their statistics (float32 [n], no autograd) and slopes `of` theirs."""
    action, outside = rows.kind == ACTION, of.outside(logp)

    advantage = torch.where(action, rows.advantage, 0.0)
    # The cap leaves every clipped value as it is and keeps 0 * inf out of rows without advantage.
    ratio = (logp - torch.where(action, rows.old_logp, logp)).clamp_(max=_LOG_RATIO_MAX).exp_()
    surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - rows.clip_low, 1 + rows.clip_high))
    ceiling = torch.where(advantage < 0, -advantage * rows.dual_clip, torch.inf)
    action_loss = torch.minimum(surrogate, ceiling)

    kl = torch.zeros_like(logp)
    if rows.ref_logp is not None:
        gap = torch.where(action, rows.ref_logp - logp, 0.0).clamp_(max=_LOG_RATIO_MAX)
        kl = (gap.exp() - gap - 1).clamp(-_KL_CLAMP, _KL_CLAMP)
        action_loss = action_loss + rows.kl_coef * kl
    if rows.entropy_coef != 0:
        action_loss = action_loss - rows.entropy_coef * entropy

    masked = ~action & outside
    q = rows.q if rows.observation_loss == "gce" else 1.0
    observation_loss = -logp if rows.observation_loss == "ce" else (q * logp).expm1() / -q
    loss = torch.where(action, action_loss, observation_loss.masked_fill(masked, 0.0))
    return RowTerms(loss=loss, kl=kl, clipped=action & outside, masked=masked)


def _tensors(of: LossRows | Slopes) -> dict[str, Tensor]:
    values = {f.name: getattr(of, f.name) for f in fields(of)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
