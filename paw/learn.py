"""The optimizer steps of an update.

Each step takes a mini-batch, which is cut into micro-batches of one fused pass each. The loss and
its gradient are those of the whole mini-batch, however it is cut into micro-batches and however
these are shared among ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from paw.algo import loss as losses
from paw.algo.batches import Batch, micro_batches
from paw.algo.loss import JointLoss, TokenBatch, TokenLossFunction, traits_of
from paw.algo.token_sums import RunningSums, add, token_metrics, token_sums
from paw.config import plugins
from paw.config.sections import Config
from paw.distributed.ranks import Ranks, full_tensor
from paw.model.optim import learning_rate, set_learning_rate
from paw.rollouts.episode import bind
from paw.rollouts.sync import SampledBy, sampled_by, sampler_mismatch
from paw.run import Run
from paw.types import Sample, no_values
from paw_kernels import TokenLoss


def optimize(run: Run, samples: Sequence[Sample]) -> dict[str, float]:
    """Take the update's optimizer steps and return its metrics. PPO's critic takes its steps last.

    Raises StaleWeightsError, before any gradient or step, if there was no scoring pass and the
    first micro-batch shows that the sampler had different weights. Raises TrainingStopped if too
    many steps in a row are not finite.
    """
    config = run.config
    objective = Objective.from_config(config)
    lr = learning_rate(config.optim, update=run.step, updates=config.run.updates)
    set_learning_rate(run.optimizer, lr)

    policy_update = PolicyUpdate(run, objective, update_samples=len(samples))
    for minibatch in run.minibatches(samples):
        loss = policy_update.accumulate_gradients(minibatch)
        policy_update.optimizer_step(loss)

    metrics: dict[str, float] = {}
    if run.critic:
        metrics |= run.critic.optimize(run.minibatches(samples))
    metrics |= policy_update.metrics()
    metrics["optim/lr"] = lr
    return metrics


@dataclass(frozen=True)
class Objective:
    """What an update minimizes."""

    policy: TokenLossFunction
    """The loss of response tokens, with its settings."""
    wm: TokenLossFunction
    """The loss of observation tokens, with its settings."""
    loss: JointLoss
    """Both losses with their weights, and the KL and entropy terms, for the fused head."""
    tis_cap: float | None
    """Upper bound of the factor pi_old / pi_sampler on the policy loss; None without the factor."""
    ratio_bounds: tuple[float, float] | None
    """Bounds of pi_old / pi_sampler. Tokens outside have no policy loss. None without a mask."""

    @classmethod
    def from_config(cls, config: Config) -> "Objective":
        """Raises UserError if a custom loss cannot be imported or built."""
        options = config.policy
        tis_cap = options.tis_cap
        policy_loss = plugins.load("losses", options.loss)
        if options.old_logp == "engine":
            # Here pi_old is pi_sampler, so the cap bounds pi / pi_old instead of PPO's clip.
            if tis_cap is not None and options.loss == "ppo":
                policy_loss = losses.tis
            tis_cap = None

        policy = bind(policy_loss, options)
        wm = bind(plugins.load("losses", config.wm.loss), config.wm)
        loss = losses.joint(
            policy,
            wm,
            kl_coef=options.kl_coef,
            entropy_coef=options.entropy_coef,
            tis_cap=tis_cap,
            ratio_bounds=options.importance_mask,
        )
        return cls(
            policy=policy,
            wm=wm,
            loss=loss,
            tis_cap=tis_cap,
            ratio_bounds=options.importance_mask,
        )


class PolicyUpdate:
    """The policy's gradients and steps in one update, and the measurements made on the way."""

    def __init__(self, run: Run, objective: Objective, *, update_samples: int) -> None:
        self.run = run
        self.objective = objective
        self.update_samples = update_samples
        self.sums = RunningSums()
        """This rank's sums over tokens so far, on the device."""
        self.row_tokens = 0
        """Tokens of this rank's sequences so far, whether computed or shared."""
        self.shared_tokens = 0
        """Those that were not computed, because another sequence has them."""
        self.steps = 0
        self.grad_norms: list[float] = []
        """Norms of the steps taken, before clipping."""
        self.sampler_metrics: dict[str, float] = {}
        self.sampler_is_checked = "health/sampler_mismatch" in run.metrics

    def accumulate_gradients(self, minibatch: Sequence[Sample]) -> Tensor:
        """Add up the mini-batch's gradient over micro-batches and ranks.

        Returns this rank's part of the mini-batch's loss, float64 on the device. The loop reads
        nothing from the device but what the head needs (docs/kernels.md) and, if the first
        micro-batch of an update is compared with the sampler, its log-probs. So the host prepares
        the next micro-batch while the device computes.
        """
        config = self.run.config
        ranks = self.run.ranks
        policy = self.run.policy
        batches = micro_batches(
            minibatch,
            self.run.packing,
            with_observation=config.wm.enabled,
            device=policy.device,
            skip_without_loss=may_skip_without_loss(config, self.objective),
        )
        loss = torch.zeros((), dtype=torch.float64, device=policy.device)
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches)
            ranks.sync_gradients(policy, config.optim.grad_sync == "each" or is_last)
            loss += self._backward(batch, minibatch)
        ranks.average_gradients(policy)
        return loss

    def _backward(self, batch: Batch, minibatch: Sequence[Sample]) -> Tensor:
        """Run a micro-batch forward and backward.

        Returns its part of the mini-batch's loss, float64 on the device.
        """
        run = self.run
        world_size = run.ranks.world_size
        tokens = losses.token_batch(
            batch,
            minibatch,
            update_samples=self.update_samples,
            norm=run.config.policy.loss_norm,
            verl_samples=run.config.policy.verl_samples,
            wm_scale=run.config.wm.scale,
            reference=run.config.policy.kl_coef > 0.0,
            ratio_level=run.config.policy.importance_level,
        )
        # Gradients are averaged over the ranks, but the loss is summed over them.
        scaled_tokens = replace(tokens, weight=world_size * tokens.weight)
        joint = losses.joint_loss(
            run.policy,
            batch,
            scaled_tokens,
            self.objective.loss,
            temperature=run.config.rollout.temperature,
        )
        if not self.sampler_is_checked:  # before the first gradient
            samples = [minibatch[i] for i in batch.indices]
            self.sampler_metrics = compare_sampler(
                joint, tokens, samples, ranks=run.ranks, version=run.step
            )
            self.sampler_is_checked = True
        if run.episode_log:
            run.episode_log.observe(joint.logp, batch, minibatch)
        joint.loss.backward()

        unscaled = joint._replace(token_loss=joint.token_loss / world_size)
        sums = token_sums(
            unscaled,
            tokens,
            batch,
            policy=self.objective.policy,
            wm=self.objective.wm,
            tis_cap=self.objective.tis_cap,
            ratio_bounds=self.objective.ratio_bounds,
        )
        self.sums.add(sums)
        self.shared_tokens += batch.shared_tokens
        self.row_tokens += batch.shared_tokens + len(batch.input_ids)
        return joint.loss.detach().double() / world_size

    def optimizer_step(self, loss: Tensor) -> None:
        """Take a step if the gradients and the loss are finite.

        `loss` is this rank's part of the mini-batch's loss. It is read from the device together
        with the norm of the gradients.
        """
        run = self.run
        self.steps += 1
        clipped = clip_grad_norm_(run.policy.parameters(), run.config.optim.grad_clip)
        own_loss, grad_norm = torch.stack([loss, full_tensor(clipped).to(loss)]).tolist()
        if run.guard.allows(loss=sum(run.ranks.gather(own_loss)), grad_norm=grad_norm):
            run.optimizer.step()
            self.grad_norms.append(grad_norm)
        run.optimizer.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the update over all ranks. A collective call."""
        own_totals = self.sums.read()
        if self.run.packing.share_prefixes != "never":
            own_totals["shared_tokens"] = self.shared_tokens
            own_totals["row_tokens"] = self.row_tokens
        totals: dict[str, float] = {}
        for rank_totals in self.run.ranks.gather(own_totals, dict[str, float]):
            add(totals, rank_totals)

        metrics = token_metrics(totals, steps=self.steps)
        metrics |= self.sampler_metrics
        if self.grad_norms:
            metrics["optim/grad_norm"] = fmean(self.grad_norms)
        metrics["optim/skipped"] = self.run.guard.skipped
        return metrics


def may_skip_without_loss(config: Config, objective: Objective) -> bool:
    """Whether samples with neither an advantage nor a world-model weight are certain to have no
    gradient."""
    if config.policy.kl_coef > 0.0 or config.policy.entropy_coef > 0.0:
        return False
    return traits_of(objective.policy).zero_without_advantage


def compare_sampler(
    out: TokenLoss, tokens: TokenBatch, samples: Sequence[Sample], *, ranks: Ranks, version: int
) -> dict[str, float]:
    """Return metrics of how far a micro-batch's response log-probs are from the sampler's.

    A collective call, to be made before the first gradient. `version` is the version of the
    weights. The result is empty if a log-prob is not finite, since the guard then skips the step.
    Raises StaleWeightsError on all ranks if the sampler had different weights. If the sampler
    reported entropies, they are compared too.
    """
    is_response = ~tokens.observation
    sampled_entropies = [
        sample.sampled_entropy for sample in samples if sample.sampled_entropy is not None
    ]
    origins = sampled_by(samples, version)
    entropy = out.entropy[is_response].numpy(force=True)
    entropy_origins = origins
    if len(sampled_entropies) < len(samples):  # the engine does not report all of them
        sampled_entropies = []
        entropy = no_values()
        entropy_origins = SampledBy.of_all([])
    logp = out.logp[is_response].numpy(force=True)
    if not all(ranks.gather(bool(np.isfinite(logp).all()))):
        return {}
    sampler_mismatch(
        entropy,
        np.concatenate([no_values(), *sampled_entropies]),
        entropy_origins,
        what="entropies",
        ranks=ranks,
    )
    sampled_logp = tokens.sampled_logp[is_response].numpy(force=True)
    return sampler_mismatch(logp, sampled_logp, origins, ranks=ranks)
