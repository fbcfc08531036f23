"""Sums over the tokens of an update's micro-batches, and the metrics computed from them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from paw.algo.batches import Batch
from paw.algo.loss import (
    TokenBatch,
    TokenLossFunction,
    k3,
    outside_bounds,
    settings_of,
    traits_of,
    with_response_gap,
)
from paw.metric_list import METRICS
from paw_kernels import TokenLoss


def token_sums(
    out: TokenLoss,
    tokens: TokenBatch,
    batch: Batch,
    *,
    policy: TokenLossFunction,
    wm: TokenLossFunction,
    tis_cap: float | None = None,
    ratio_bounds: tuple[float, float] | None = None,
) -> dict[str, Tensor]:
    """Return sums over a batch's tokens, by name. `policy` and `wm` are the two token losses.

    A sum that the settings do not need is absent. "clipped" counts the response tokens with an
    advantage that `policy` clips. Unless its traits say otherwise, those are the tokens to which it
    gives no gradient. "masked" counts observation tokens without a gradient of `wm`.

    Sums are float64 scalars on the device, from which nothing is read.
    """
    if traits_of(policy).needs_response_gap:
        tokens = with_response_gap(tokens, out.logp)
    is_observation = tokens.observation
    is_response = ~is_observation
    # An index from the host. With a mask, the host would have to read how many tokens it has.
    response_index = batch.response_index
    observation_index = batch.observation_index
    wm_loss, wm_slope = _loss_and_slope(wm, out, tokens)

    sums = {
        "response_tokens": is_response.sum(),
        "observation_tokens": is_observation.sum(),
        "tokens": is_response.sum() + is_observation.sum(),
        "with_gradient": out.has_gradient.sum(),
        "policy_loss": out.token_loss[response_index].sum(),
        "wm_loss": out.token_loss[observation_index].sum(),
        "wm_token_loss": wm_loss[observation_index].sum(),
        "entropy": out.entropy[response_index].sum(),
        "clipped": (is_response & (tokens.advantage != 0) & _clipped(policy, out, tokens)).sum(),
    }
    if traits_of(wm).masks:
        sums["masked"] = (is_observation & (wm_slope == 0)).sum()
    if tokens.ref_logp is not None:
        sums["kl"] = k3(out.logp, tokens)[response_index].sum()
    if ratio_bounds is not None:
        sums["importance_masked"] = (is_response & outside_bounds(tokens, ratio_bounds)).sum()
    if tis_cap is not None:
        sums["tis_capped"] = (is_response & outside_bounds(tokens, (0.0, tis_cap))).sum()

    return {name: value.double() for name, value in sums.items()}


class RunningSums:
    """Sums of several micro-batches, by name. They stay on the device until they are read."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._totals: Tensor | None = None
        """[K] float64."""

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of one more micro-batch, which has the same names as those before."""
        values = torch.stack(list(sums.values()))
        if self._totals is None:
            self._names = list(sums)
            self._totals = values
            return
        if self._names != list(sums):
            raise ValueError(f"sums of {list(sums)} after those of {self._names}")
        self._totals += values

    def read(self) -> dict[str, float]:
        """Read the sums, in one transfer."""
        if self._totals is None:
            return {}
        return dict(zip(self._names, self._totals.tolist(), strict=True))


def _clipped(policy: TokenLossFunction, out: TokenLoss, tokens: TokenBatch) -> Tensor:
    """Return [N] bool: which tokens the policy loss clips. Only valid with an advantage."""
    clipped = traits_of(policy).clipped
    if clipped is None:
        _, slope = _loss_and_slope(policy, out, tokens)
        return slope == 0
    return clipped(out.logp, tokens, **settings_of(policy))


def _loss_and_slope(
    loss: TokenLossFunction, out: TokenLoss, tokens: TokenBatch
) -> tuple[Tensor, Tensor]:
    """Return (the loss of each token, its derivative with respect to log p), both [N]."""
    logp = out.logp.clone().requires_grad_()
    with torch.enable_grad():
        values = loss(logp, out.entropy, tokens)
        slope = None
        if values.requires_grad:
            (slope,) = torch.autograd.grad(values.sum(), logp, allow_unused=True)
    if slope is None:
        slope = torch.zeros_like(logp)
    return values.detach(), slope


def add(totals: dict[str, float], sums: Mapping[str, float]) -> None:
    """Add the sums of one more rank to `totals`."""
    for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + value


def token_metrics(totals: Mapping[str, float], *, steps: int) -> dict[str, float]:
    """Return the metrics of an update of `steps` optimizer steps, from its sums over all ranks.

    Losses are means over the steps. All others are means over tokens (`Metric.mean_of`). A mean
    over no tokens is absent. Samples without any gradient had no forward pass, so no mean includes
    them.
    """
    steps = max(1, steps)
    metrics = {"policy/loss": totals.get("policy_loss", 0.0) / steps}
    if totals.get("observation_tokens"):
        metrics["wm/loss"] = totals["wm_loss"] / steps

    for metric in METRICS:
        if metric.mean_of is None:
            continue
        numerator, denominator = metric.mean_of
        if numerator in totals and totals[denominator]:
            metrics[metric.name] = totals[numerator] / totals[denominator]
    return metrics
