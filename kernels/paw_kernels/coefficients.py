"""The losses, once: what each row contributes and the two numbers its gradient needs. Serves every backend.

With logits z, p = softmax(z), l = log p_y and entropy H = -sum_j p_j log p_j, every loss is a function of (l, H), so

    dL/dz_j = a (1[j = y] - p_j) - c p_j (log p_j + H),    a = dL/dl, c = dL/dH.

Rows with a = c = 0 need no backward pass at all.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from paw_kernels._checks import check_tensor

SKIP, ACTION, OBSERVATION = 0, 1, 2
"""Values of `LossRows.kind`."""

_KL_CLAMP = 10.0
_LOG_RATIO_MAX = 20.0
_OBSERVATION_LOSSES = ("cmae", "mae", "ce")


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
    """cmae: [p <= rho] (1 - p), the mask detached; mae: 1 - p; ce: -log p."""

    def check(self, T: int, device: torch.device) -> None:
        """Raises ValueError for options out of range and tensors of a wrong shape, dtype or device."""
        if self.observation_loss not in _OBSERVATION_LOSSES:
            known = ", ".join(_OBSERVATION_LOSSES)
            raise ValueError(f"rows.observation_loss={self.observation_loss!r} is unknown; known losses: {known}")
        if not (0 <= self.clip_low < 1 and self.clip_high >= 0 and self.dual_clip > 1):
            raise ValueError(
                "rows: clip_low must be in [0, 1), clip_high >= 0 and dual_clip > 1, "
                f"got {self.clip_low}, {self.clip_high}, {self.dual_clip}"
            )
        if self.kl_coef != 0 and self.ref_logp is None:
            raise ValueError(f"rows.ref_logp is needed when kl_coef is not 0 (kl_coef={self.kl_coef})")
        check_tensor("rows.kind", self.kind, [T], torch.uint8, device)
        for name, tensor in self._tensors().items():
            if name != "kind":
                check_tensor(f"rows.{name}", tensor, [T], torch.float32, device)

    def problems(self) -> dict[str, Tensor]:
        """Message -> scalar bool tensor, for values that no loss can be computed from."""
        action = self.kind == ACTION
        found = {"rows.kind must be 0 (skip), 1 (action) or 2 (observation)": (self.kind > OBSERVATION).any()}
        for name, tensor in self._tensors().items():
            if name == "weight":
                found["rows.weight must be finite on rows with kind != 0"] = ~tensor.isfinite().all()
            elif name != "kind":
                found[f"rows.{name} must be finite on action rows"] = (action & ~tensor.isfinite()).any()
        return found

    def take(self, index: Tensor | slice) -> "LossRows":
        """The chosen rows, in the order of `index`."""
        return replace(self, **{name: tensor[index] for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class RowTerms:
    """Losses and coefficients of n rows, float32 [n] unless noted."""

    loss: Tensor
    """Before the row weight."""
    a: Tensor
    """weight * d loss / d l."""
    c: Tensor | None
    """weight * d loss / d H; None when no row has one."""
    kl: Tensor
    """k3 estimate of KL(pi || ref) on action rows, clamped to 10; 0 elsewhere and without ref_logp."""
    clipped: Tensor
    """bool: action rows where the clip, or the dual clip, stops the policy gradient."""
    masked: Tensor
    """bool: observation rows that the CMAE mask leaves out, p > rho."""


def row_terms(logp: Tensor, entropy: Tensor, rows: LossRows) -> RowTerms:
    """Loss, a and c of n rows of kind 1 or 2 from their statistics (float32 [n], no autograd).

    Comparisons are written so that NaN in logp reaches the loss and a, never a mask that hides it.
    Sources: PaW Eq. (7) for CMAE; clipped surrogate with dual clip and k3 as in verl's core_algos.
    """
    action = rows.kind == ACTION

    advantage = torch.where(action, rows.advantage, 0.0)
    # The cap leaves every clipped value as it is and keeps 0 * inf out of rows without advantage.
    ratio = (logp - torch.where(action, rows.old_logp, logp)).clamp_(max=_LOG_RATIO_MAX).exp_()
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - rows.clip_low, 1 + rows.clip_high)
    ceiling = torch.where(advantage < 0, -advantage * rows.dual_clip, torch.inf)
    surrogate = torch.maximum(plain, bounded)
    clipped = (bounded > plain) | (surrogate > ceiling)
    action_loss = torch.minimum(surrogate, ceiling)
    action_slope = plain.masked_fill(clipped, 0.0)

    kl = torch.zeros_like(logp)
    if rows.ref_logp is not None:
        gap = torch.where(action, rows.ref_logp - logp, 0.0)
        gap_exp = gap.exp()
        k3 = gap_exp - gap - 1
        kl = k3.clamp(-_KL_CLAMP, _KL_CLAMP)
        if rows.kl_coef != 0:
            action_loss = action_loss + rows.kl_coef * kl
            action_slope = action_slope + rows.kl_coef * (1 - gap_exp).masked_fill_(k3 > _KL_CLAMP, 0.0)
    c = None
    if rows.entropy_coef != 0:
        action_loss = action_loss - rows.entropy_coef * entropy
        c = torch.where(action, -rows.entropy_coef * rows.weight, 0.0)

    masked = torch.zeros_like(action)
    if rows.observation_loss == "ce":
        observation_loss, observation_slope = -logp, -torch.ones_like(logp)
    else:
        observation_loss, observation_slope = -logp.expm1(), -logp.exp()
        if rows.observation_loss == "cmae":
            masked = ~action & (-observation_slope > rows.rho)
            observation_loss = observation_loss.masked_fill(masked, 0.0)
            observation_slope = observation_slope.masked_fill(masked, 0.0)

    loss = torch.where(action, action_loss, observation_loss)
    a = rows.weight * torch.where(action, action_slope, observation_slope)
    return RowTerms(loss=loss, a=a, c=c, kl=kl, clipped=clipped, masked=masked)
