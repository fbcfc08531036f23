"""PPO's critic (arXiv 1707.06347): the start model with a scalar head, which tells what is still to come of a sample.

    V_t  = w . h_t + b                          h_t: the hidden state that predicts response token t, as in verl
    loss = mean over the mini-batch's response tokens of max((V - R)^2, (clip(V, V_old -+ value_clip) - R)^2)

V_old are the values at the time of play, R = A + V_old the returns (algo.gae). The head starts at zero, so
that the first advantages are the returns themselves; verl's is random.
"""

import math
from collections.abc import Iterable
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from paw.algo.gae import gae, whiten
from paw.algo.loss import Batch, micro_batches
from paw.config import Config
from paw.model.optim import make_optimizer
from paw.model.policy import Policy, load_policy
from paw.model.ranks import Ranks, full_tensor
from paw.state.guards import TrainingStopped, UpdateGuard
from paw.types import Sample


def load_critic(path: str, **options: Any) -> Policy:
    """The model of `path` with a scalar head of zeros in place of the vocabulary's; `options` of `load_policy`."""
    model = load_policy(path, check=False, **options)
    body = model.lm.get_input_embeddings().weight
    head = nn.Linear(model.head_weight.shape[1], 1, dtype=body.dtype, device=body.device)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model.lm.set_output_embeddings(head)
    return model


class Critic:
    """The value model with its optimizer; `model` as `load_critic` gives it, sharded where there are several ranks."""

    def __init__(self, model: Policy, config: Config, ranks: Ranks):
        self.model, self.config, self.ranks = model, config, ranks
        self.optimizer = make_optimizer(model.parameters(), config.optim.model_copy(update={"lr": config.critic.lr}))
        self.guard = UpdateGuard(config.run.max_skipped, lr="critic.lr")

    def compute_values(self, samples: list[Sample]) -> dict[str, float]:
        """Fill values, returns and token advantages of an update: GAE within each sample, whitened over all tokens.

        Returns critic/explained_variance, which returns that are all equal do not have. Raises TrainingStopped for
        values that are not finite.
        """
        own: dict[int, list[float]] = {}
        with torch.no_grad():
            for batch in self._batches(samples):
                lengths = [len(samples[i].response_ids) for i in batch.indices]
                values = self.model(partial(self.values, batch)).cpu().split(lengths)
                own |= {i: of.tolist() for i, of in zip(batch.indices, values, strict=True)}
        found = self.ranks.gather_numbered(own)
        if not all(math.isfinite(value) for values in found for value in values):
            raise TrainingStopped(
                "stopped: the critic's values are not finite, its weights have diverged; "
                "resume an earlier checkpoint with a lower critic.lr"
            )
        options = self.config.advantage.settings()
        raw = [gae(found[i], sample.score, **options) for i, sample in enumerate(samples)]
        for i, (sample, whitened) in enumerate(zip(samples, whiten(raw), strict=True)):
            sample.values, sample.token_advantage = found[i], whitened
            sample.returns = [a + value for a, value in zip(raw[i], found[i], strict=True)]
        spread = torch.tensor([value for sample in samples for value in sample.returns]).var()
        unexplained = torch.tensor([value for values in raw for value in values]).var()
        return {"critic/explained_variance": float(1.0 - unexplained / spread)} if spread > 0 else {}

    def optimize(self, minibatches: Iterable[list[Sample]]) -> dict[str, float]:
        """An optimizer step over each mini-batch; steps with non-finite gradients are left out.

        Returns critic/loss, critic/clip_frac and, unless every step was left out, critic/grad_norm.
        """
        losses: list[float] = []
        norms: list[float] = []
        clipped = tokens = 0
        for minibatch in minibatches:
            n = sum(len(sample.response_ids) for sample in minibatch)
            loss = 0.0
            batches = self._batches(minibatch)
            for batch in batches:
                self.ranks.sync_gradients(self.model, self.config.optim.grad_sync == "each" or batch is batches[-1])
                part, limited = self.model(partial(self.loss, batch, minibatch))
                (part * (self.ranks.world_size / n)).backward()  # averaged over ranks
                loss += float(part.detach()) / n
                clipped += int(limited)
            self.ranks.average_gradients(self.model)
            tokens += n
            losses.append(sum(self.ranks.gather(loss)))
            norm = float(full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip)))
            if self.guard.allows(loss=losses[-1], grad_norm=norm):
                self.optimizer.step()
                norms.append(norm)
            self.optimizer.zero_grad(set_to_none=True)
        return {
            "critic/loss": fmean(losses),
            "critic/clip_frac": sum(self.ranks.gather(clipped)) / tokens,
            **({"critic/grad_norm": fmean(norms)} if norms else {}),
        }

    def values(self, batch: Batch) -> Tensor:
        """[N] float32, before each response token; inside a call of the model."""
        model: Any = self.model
        hidden = model.hidden(batch.input_ids, batch.lengths)[batch.position].float()
        return linear(hidden, model.head_weight.float(), model.head_bias.float()).squeeze(-1)

    def loss(self, batch: Batch, minibatch: list[Sample]) -> tuple[Tensor, Tensor]:
        """(sum of the loss, number of tokens that the clip holds back), inside a call of the model."""
        old, returns = (
            torch.tensor([x for i in batch.indices for x in getattr(minibatch[i], name)], device=batch.position.device)
            for name in ("values", "returns")
        )
        loss, limited = value_loss(self.values(batch), old, returns, clip=self.config.critic.value_clip)
        return loss.sum(), limited.sum()

    def _batches(self, samples: list[Sample]) -> list[Batch]:
        return micro_batches(
            samples,
            budget=self.config.optim.micro_batch_tokens,
            with_observation=False,
            device=self.model.device,
            quadratic=self.model.quadratic,
            share=(self.ranks.rank, self.ranks.world_size),
        )


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """(loss, whether the clipped term is the larger) of each token, as the reference code has it; all [N]."""
    near = torch.clamp(values, old - clip, old + clip)
    plain, held = (values - returns) ** 2, (near - returns) ** 2
    return torch.maximum(plain, held), held > plain
