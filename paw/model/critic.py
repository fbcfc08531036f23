"""PPO's critic (arXiv 1707.06347): the start model with a scalar head that predicts the return.

    V_t  = w . h_t + b    with h_t the hidden state that predicts response token t, as in verl
    loss = mean over the mini-batch's response tokens of
           max((V - R)^2, (clip(V, V_old -+ value_clip) - R)^2)

V_old are the values at the time when the sample was played, and R = A + V_old are the returns
(algo.gae). The head starts at zero, so the first advantages are the returns themselves. In verl it
starts at random.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from paw.algo.advantages import check_advantages
from paw.algo.batches import Batch, MicroBatches, micro_batches
from paw.algo.device import to_device
from paw.algo.gae import whiten
from paw.algo.packing import Packing
from paw.algo.rows import gather_numbers
from paw.algo.shared_samples import assign, column
from paw.config import plugins
from paw.config.sections import Config
from paw.distributed.ranks import Ranks, full_tensor
from paw.guards import TrainingStopped, UpdateGuard
from paw.model.loading import load_policy
from paw.model.optim import make_optimizer
from paw.model.policy import Policy
from paw.types import Sample, Values, as_values, no_values


def load_critic(path: str, **options: Any) -> Policy:
    """Load the model at `path`, with a scalar head of zeros in place of the vocabulary head.

    `options` are those of `load_policy`.
    """
    model = load_policy(path, check=False, **options)
    embedding = model.lm.get_input_embeddings().weight
    head = nn.Linear(model.head_weight.shape[1], 1, dtype=embedding.dtype, device=embedding.device)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model.lm.set_output_embeddings(head)
    return model


class Critic:
    """The value model and its optimizer.

    `model` comes from `load_critic`, sharded if there are several ranks.
    """

    def __init__(self, model: Policy, config: Config, ranks: Ranks, packing: Packing) -> None:
        self.model = model
        self.config = config
        self.ranks = ranks
        self.packing = packing
        optim = config.optim.model_copy(update={"lr": config.critic.lr})
        self.optimizer = make_optimizer(model.parameters(), optim)
        self.guard = UpdateGuard(config.run.max_skipped, lr="critic.lr")

    def compute_values(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Fill values, returns and token advantages of the samples that this rank holds.

        Advantages are computed by sample, then whitened over all tokens of all ranks. Returns
        critic/explained_variance, unless all returns are equal. Raises TrainingStopped if a value
        is not finite.
        """
        values = dict(sorted(self._values_of_own_share(samples).items()))
        is_finite = all(np.isfinite(sample_values).all() for sample_values in values.values())
        if not all(self.ranks.gather(bool(is_finite))):
            raise TrainingStopped(
                "stopped: the critic's values are not finite, so its weights have diverged; "
                "resume an earlier checkpoint with a lower critic.lr"
            )

        own_samples = [samples[i] for i in values]
        advantages = self.ranks.run_on_all(
            lambda: self._advantages(list(values.values()), own_samples)
        )
        whitened = whiten(advantages, gather=lambda own: self.ranks.gather(own, float))
        for i, (sample, sample_values) in enumerate(zip(own_samples, values.values(), strict=True)):
            sample.values = sample_values
            sample.token_advantage = whitened[i]
            sample.returns = advantages[i] + sample_values
        if self.ranks.world_size > 1:
            has_advantage = [float(sample.has_advantage) for sample in own_samples]
            assign(samples, "advantage", gather_numbers(samples, has_advantage, self.ranks))

        variance = self._variance([sample.returns for sample in own_samples])
        unexplained = self._variance(advantages)
        if variance > 0:
            return {"critic/explained_variance": float(1.0 - unexplained / variance)}
        return {}

    def _advantages(self, values: Sequence[Values], samples: Sequence[Sample]) -> list[Values]:
        """Return the advantage of each response token, not whitened."""
        settings = self.config.advantage
        estimator = plugins.load("advantages", settings.type)
        advantages: list[Values] = []
        for sample_values, sample in zip(values, samples, strict=True):
            returned = estimator(sample_values.tolist(), sample.score, **settings.settings())
            checked = check_advantages(
                returned, settings.type, count=len(sample_values), unit="token"
            )
            advantages.append(as_values(checked))
        return advantages

    def _variance(self, own_rows: Sequence[Values]) -> Tensor:
        """Return the unbiased variance of the numbers on all ranks, as a scalar tensor."""
        values = torch.from_numpy(np.concatenate([no_values(), *own_rows])).float()
        if self.ranks.world_size == 1:
            return values.var()
        value_count = sum(self.ranks.gather(len(values)))
        mean = sum(self.ranks.gather(float(values.double().sum()))) / max(1, value_count)
        squares = float(((values.double() - mean) ** 2).sum())
        return torch.tensor(sum(self.ranks.gather(squares)) / max(1, value_count - 1))

    @torch.no_grad()
    def _values_of_own_share(self, samples: Sequence[Sample]) -> dict[int, Values]:
        """Return the values before each response token of this rank's share, by sample index."""
        indices: list[int] = []
        batch_values: list[Tensor] = []
        for batch in self._batches(samples):
            indices += batch.indices
            batch_values.append(self.model(partial(self.values, batch)))

        lengths = [len(samples[i].response_ids) for i in indices]
        values = torch.cat(batch_values).cpu().split(lengths)  # read once
        return {i: sample_values.numpy() for i, sample_values in zip(indices, values, strict=True)}

    def optimize(self, minibatches: Iterable[Sequence[Sample]]) -> dict[str, float]:
        """Take an optimizer step on each mini-batch, unless its loss or gradient is not finite.

        Returns critic/loss, critic/clip_frac, and critic/grad_norm unless every step was skipped.
        """
        losses: list[float] = []
        grad_norms: list[float] = []
        clipped = 0
        tokens = 0
        for minibatch in minibatches:
            loss, clipped_of_minibatch = self._accumulate_gradients(minibatch)
            clipped_norm = nn.utils.clip_grad_norm_(
                self.model.parameters(), self.config.optim.grad_clip
            )
            measured = [loss, clipped_of_minibatch, full_tensor(clipped_norm).to(loss)]
            own_loss, own_clipped, grad_norm = torch.stack(measured).tolist()
            clipped += int(own_clipped)
            tokens += int(column(minibatch, "response_length").sum())
            losses.append(sum(self.ranks.gather(own_loss)))
            if self.guard.allows(loss=losses[-1], grad_norm=grad_norm):
                self.optimizer.step()
                grad_norms.append(grad_norm)
            self.optimizer.zero_grad(set_to_none=True)

        metrics = {
            "critic/loss": fmean(losses),
            "critic/clip_frac": sum(self.ranks.gather(clipped)) / tokens,
        }
        if grad_norms:
            metrics["critic/grad_norm"] = fmean(grad_norms)
        return metrics

    def _accumulate_gradients(self, minibatch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Accumulate the gradient of a mini-batch.

        Returns this rank's part of (mean loss, number of clipped tokens), float64 on the device.
        The loop reads nothing from it.
        """
        tokens = int(column(minibatch, "response_length").sum())
        loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        clipped = torch.zeros_like(loss)
        batches = self._batches(minibatch)
        for number, batch in enumerate(batches, 1):
            sync = self.config.optim.grad_sync == "each" or number == len(batches)
            self.ranks.sync_gradients(self.model, sync)
            batch_loss, batch_clipped = self.model(partial(self.loss, batch, minibatch))
            # Gradients are averaged over the ranks, but the loss is summed over them.
            scaled_loss = batch_loss * (self.ranks.world_size / tokens)
            scaled_loss.backward()
            loss += batch_loss.detach().double() / tokens
            clipped += batch_clipped
        self.ranks.average_gradients(self.model)
        return loss, clipped

    def values(self, batch: Batch) -> Tensor:
        """Return the value before each response token, [N] float32. Call it inside a model call."""
        model: Any = self.model
        hidden = model.hidden(batch.input_ids, batch.lengths, batch.paths)[batch.position].float()
        return linear(hidden, model.head_weight.float(), model.head_bias.float()).squeeze(-1)

    def loss(self, batch: Batch, minibatch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return (sum of the loss, number of clipped tokens). Call it inside a model call."""
        samples = [minibatch[i] for i in batch.indices]
        target_rows = [
            np.concatenate([no_values(), *(sample.values for sample in samples)]),
            np.concatenate([no_values(), *(sample.returns for sample in samples)]),
        ]
        old_values, returns = to_device(
            [target_row.astype(np.float32) for target_row in target_rows], batch.position.device
        )
        loss, clipped = value_loss(
            self.values(batch), old_values, returns, clip=self.config.critic.value_clip
        )
        return loss.sum(), clipped.sum()

    def _batches(self, samples: Sequence[Sample]) -> MicroBatches:
        return micro_batches(
            samples, self.packing, with_observation=False, device=self.model.device
        )


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Return (loss, whether the clipped term is larger) for each token, as in the reference code.

    Both are [N].
    """
    clipped_values = torch.clamp(values, old - clip, old + clip)
    loss = (values - returns) ** 2
    clipped_loss = (clipped_values - returns) ** 2
    return torch.maximum(loss, clipped_loss), clipped_loss > loss
