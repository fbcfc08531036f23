"""Gradients of one mini-batch: micro-batches, each one fused pass."""

import math
from dataclasses import dataclass, field, replace

from torch import nn

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

    def form(self, minibatch: list[Sample]) -> tuple[float, float]:
        """(loss, norm of the gradient before the joint clip) of a mini-batch; the gradient is clipped.

        Raises StaleWeightsError where the first one finds that the sampler had other weights.
        """
        loss = self._accumulate(minibatch)
        clip = self.config.optim.grad_clip
        return loss, float(whole(nn.utils.clip_grad_norm_(self.policy.parameters(), clip)))

    def metrics(self, *, minibatches: int) -> dict[str, float]:
        """Of the whole update, over all ranks; norms are means over mini-batches."""
        totals = losses.Totals.sum(self.ranks.gather(self.totals))
        return totals.metrics(self.objective, minibatches=minibatches) | self.sampler

    def _accumulate(self, minibatch: list[Sample]) -> float:
        """Adds the gradient of the minibatch's samples; returns this rank's share of the loss."""
        config, policy, ranks, loss = self.config, self.policy, self.ranks, 0.0
        batches = losses.micro_batches(
            minibatch,
            budget=config.optim.micro_batch_tokens,
            with_observation=config.wm.enabled,
            device=policy.device,
            quadratic=policy.quadratic,
            skip=self.objective.dead,
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
