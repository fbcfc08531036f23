"""Gradients of one mini-batch: both terms in one pass, or apart where something must know how they compare.

Apart (beyond the paper): the policy's gradient first, without a single observation token, then the world model's over
the selected samples. Their sum is the gradient of the joint pass (tested). It costs the forward pass of the selected
samples once more, and memory for a second gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from paw.algo import loss as losses
from paw.config import Config
from paw.model.parallel import Ranks, whole
from paw.model.policy import Policy
from paw.rollout.sync import sampler_mismatch
from paw.types import Sample
from paw_kernels import ACTION, PawLoss


@dataclass
class Gradients:
    """Forms them in `.grad` of the policy's parameters, and keeps the sums for the update's metrics."""

    config: Config
    policy: Policy
    ranks: Ranks
    objective: losses.Objective
    update_samples: int
    """Samples of the whole update."""
    unscored: bool = False
    """No scoring pass has compared the sampler's log-probs: the first micro-batch does."""
    sampler: dict[str, float] = field(default_factory=dict)
    """What that found."""
    totals: losses.Totals = field(default_factory=losses.Totals)
    terms: list[dict[str, float]] = field(default_factory=list)
    """Of each mini-batch whose terms are kept apart: policy/grad_norm, wm/grad_norm and, balanced, wm/factor."""

    def form(self, minibatch: list[Sample]) -> tuple[float, float]:
        """(loss, norm of the gradient before the joint clip) of a mini-batch; the gradient is clipped.

        Raises StaleWeightsError where the first one finds that the sampler had other weights.
        """
        wm, optim = self.config.wm, self.config.optim
        apart = wm.enabled and (wm.grad_norms or wm.balance == "gradient" or optim.clip == "separate")
        if not apart:
            loss = self._accumulate(minibatch, self.objective.dead)
            return loss, self._clip()
        loss = self._accumulate(minibatch, self.objective.idle, with_observation=False)
        policy, policy_norm = self._take()
        loss += self._accumulate(minibatch, lambda sample: sample.wm_weight == 0.0, with_action=False)
        world, world_norm = self._take()
        factor = 1.0
        if wm.balance == "gradient" and policy_norm > 0.0 and world_norm > 0.0:
            factor = wm.ratio * policy_norm / world_norm
        norms = {"policy/grad_norm": policy_norm, "wm/grad_norm": factor * world_norm}
        self.terms.append(norms | ({"wm/factor": factor} if wm.balance == "gradient" else {}))
        scales = (1.0, factor)
        if optim.clip == "separate":
            limits = ((optim.grad_clip / (norm + 1e-6)) for norm in (policy_norm, factor * world_norm))
            scales = tuple(scale * min(1.0, limit) for scale, limit in zip(scales, limits, strict=True))
        for parameter, mine, its in zip(self.policy.parameters(), policy, world, strict=True):
            parts = [g.mul_(scale) for g, scale in zip((mine, its), scales, strict=True) if g is not None]
            parameter.grad = parts[0].add_(parts[1]) if len(parts) == 2 else next(iter(parts), None)
        if optim.clip == "joint":
            return loss, self._clip()
        return loss, _norm([p.grad for p in self.policy.parameters()])

    def metrics(self, *, minibatches: int) -> dict[str, float]:
        """Of the whole update, over all ranks; norms are means over mini-batches."""
        totals = losses.Totals.sum(self.ranks.gather(self.totals))
        found = totals.metrics(self.objective, minibatches=minibatches) | self.sampler
        if self.terms:
            found |= {key: sum(term[key] for term in self.terms) / len(self.terms) for key in self.terms[0]}
        return found

    def _clip(self) -> float:
        return float(whole(nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.optim.grad_clip)))

    def _accumulate(self, minibatch: list[Sample], skip: Callable[[Sample], bool], **terms: bool) -> float:
        """Adds the gradient of the minibatch's samples but those to `skip`; returns this rank's share of the loss."""
        config, policy, ranks, loss = self.config, self.policy, self.ranks, 0.0
        batches = losses.micro_batches(
            minibatch,
            budget=config.optim.micro_batch_tokens,
            **{"with_observation": config.wm.enabled, **terms},
            device=policy.device,
            quadratic=policy.quadratic,
            skip=skip,
            share=(ranks.rank, ranks.world),
        )
        for batch in batches:
            ranks.sync_gradients(policy, config.optim.grad_sync == "each" or batch is batches[-1])
            coefficients = losses.loss_rows(batch, minibatch, self.objective, update_samples=self.update_samples)
            # Times world: the weights of samples are those of the whole mini-batch, FSDP averages over ranks.
            scaled = replace(coefficients, weight=ranks.world * coefficients.weight)
            out = losses.joint_loss(policy, batch, scaled, temperature=self.objective.temperature)
            out.loss.backward()
            if self.unscored:
                self._compare(out, batch, minibatch)
            loss += float(out.loss.detach()) / ranks.world
            self.totals.add(out, coefficients)
        return loss

    def _compare(self, out: PawLoss, batch: losses.Batch, minibatch: list[Sample]) -> None:
        """The responses of a micro-batch, of all ranks, with what the sampler gave for them; before any step."""
        self.unscored = False
        sampled = [value for i in batch.indices for value in minibatch[i].sampled_logp] if batch.with_action else []
        pair = out.logp[batch.kind == ACTION].tolist(), sampled
        ours, theirs = zip(*self.ranks.gather(pair, tuple[list[float], list[float]]), strict=True)
        if any(ours) and all(math.isfinite(value) for part in ours for value in part):  # else the update is skipped
            self.sampler = sampler_mismatch(ours, theirs)

    def _take(self) -> tuple[list[Tensor | None], float]:
        """The gradients so far, which leave the parameters, and their norm."""
        gradients = [parameter.grad for parameter in self.policy.parameters()]
        self.policy.zero_grad(set_to_none=True)
        return gradients, _norm(gradients)


def _norm(gradients: list[Tensor | None]) -> float:
    return float(whole(nn.utils.get_total_norm([g for g in gradients if g is not None])))
