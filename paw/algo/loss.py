"""Micro-batches and the joint objective, PaW Eq. (11), through the fused head.

    Eq. (11):  mean over groups of [ L_RL(g) + lambda_g * mean over the selected samples of g of CMAE ]
    computed:  mean over the mini-batch's response tokens of L_RL
               + mean over groups of lambda_g * mean over the selected samples of g of CMAE

The world-model term is the equation's. The policy term is that of the reference code: every token weighs the same, so a
group weighs by its tokens. `loss_norm = "group"` is the equation to the letter, L_RL(g) the mean over g's response
tokens; "row" and "verl" are further means. World-model weights, and those of "group", were fixed for the whole update
and are scaled by (samples in the update / samples in the mini-batch). All normalisers live in the token weights, so a
mini-batch's gradient is the same however it is cut into micro-batches.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from paw.algo.packing import alike_batches, balanced_batches
from paw.types import Sample
from paw_kernels import ACTION, OBSERVATION, LossRows, PawLoss, TokenStats, paw_loss, segment_mean, token_stats


class Head(Protocol):
    """What the losses need of a model: hidden states, and the head's parameters (never logits)."""

    def __call__(self, compute: Callable[[], Any]) -> Any:
        """compute(), inside which the members below may be used."""
        ...

    def hidden(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T] int64, samples of the given lengths one after another -> [T, D]; no sample sees another."""
        ...

    @property
    def head_weight(self) -> Tensor: ...

    def head_options(self, temperature: float) -> dict[str, Any]:
        """What the kernels need besides: bias, temperature, softcap, backend."""
        ...

    @property
    def quadratic(self) -> float | None:
        """What attention costs for a sample of n tokens over n^2, in units of what the rest costs a token.

        None: attention pads the samples of a batch to the longest.
        """
        ...

    @property
    def device(self) -> torch.device: ...


@dataclass
class Batch:
    """Samples of one forward pass, packed: T tokens one sample after another, N of them targets.

    Example: sample 1 5 6 | 7 2 | 1 | 8 9 (prompt, response, separator, observation) gives target [7, 2, 8, 9], read at
    position [2, 3, 5, 6] (each predicted by the token before it), kind [1, 1, 2, 2].
    """

    input_ids: Tensor
    """[T] int64."""
    lengths: list[int]
    """[B] tokens of each sample."""
    position: Tensor
    """[N] int64 into the T tokens: the one that predicts each target."""
    target: Tensor
    """[N] int64."""
    kind: Tensor
    """[N] uint8: ACTION or OBSERVATION."""
    indices: list[int]
    """[B] indices of the samples in the sequence the batch was cut from."""
    with_action: bool = True
    with_observation: bool = True


@dataclass(frozen=True)
class Objective:
    """The coefficients of the loss (ALGORITHM sections 4 and 5)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    tis_cap: float | None = None
    """Weigh each response token's surrogate by min(pi_old / pi_sampler, tis_cap) (truncated importance sampling)."""
    loss_norm: str = "token"
    verl_rows: int = 32
    rho: float = 0.2
    observation_loss: str = "cmae"
    q: float = 0.7
    wm_scale: float = 1.0
    temperature: float = 1.0

    def dead(self, sample: Sample) -> bool:
        """Whether a sample can have no gradient at all, so that its forward pass is not worth making."""
        return self.idle(sample) and sample.wm_weight == 0.0

    def idle(self, sample: Sample) -> bool:
        """Whether a sample can have no gradient of the policy term."""
        return not any(sample.advantages) and self.kl_coef == 0.0 and self.entropy_coef == 0.0


def collate(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    with_observation: bool,
    with_action: bool = True,
    device: torch.device,
) -> Batch:
    """Pack the given samples; observations only of those with a world-model weight. No samples: one token, no target.

    Without `with_action` responses are context, no targets.
    """
    input_ids, lengths, position, target, kind = [], [], [], [], []
    for i in indices:
        sample, start = samples[i], len(input_ids)
        spans = [(sample.prompt_ids, None), (sample.response_ids, ACTION if with_action else None)]
        if with_observation and sample.wm_weight > 0.0:
            spans += [(sample.separator_ids, None), (sample.observation_ids, OBSERVATION)]
        for ids, what in spans:
            if what is not None:
                position.extend(range(len(input_ids) - 1, len(input_ids) + len(ids) - 1))
                target.extend(ids)
                kind.extend([what] * len(ids))
            input_ids.extend(ids)
        lengths.append(len(input_ids) - start)
    return Batch(
        input_ids=torch.tensor(input_ids or [0], dtype=torch.int64, device=device),
        lengths=lengths or [1],
        position=torch.tensor(position, dtype=torch.int64, device=device),
        target=torch.tensor(target, dtype=torch.int64, device=device),
        kind=torch.tensor(kind, dtype=torch.uint8, device=device),
        indices=list(indices),
        with_action=with_action,
        with_observation=with_observation,
    )


def micro_batches(
    samples: Sequence[Sample],
    *,
    budget: int,
    with_observation: bool,
    with_action: bool = True,
    device: torch.device,
    quadratic: float | None = 0.0,
    skip: Any = None,
    share: tuple[int, int] = (0, 1),
) -> list[Batch]:
    """Batches of at most `budget` tokens over the samples for which `skip(sample)` is false; `quadratic` as in Head.

    `share` (rank, world): every world-th batch, from the rank-th on. Each rank gets as many as the others, some of them
    without samples where these are few: their forward passes are collective.
    """
    rank, world = share
    kept = [i for i, sample in enumerate(samples) if skip is None or not skip(sample)]
    lengths = [
        len(samples[i]) if with_observation and samples[i].wm_weight > 0.0 else _acting_length(samples[i]) for i in kept
    ]
    if quadratic is None:
        cut = alike_batches(lengths, budget=budget, multiple=world)
    else:
        cut = balanced_batches(lengths, budget=budget, multiple=world, quadratic=quadratic)
    return [
        collate(
            samples,
            [kept[j] for j in picked],
            with_observation=with_observation,
            with_action=with_action,
            device=device,
        )
        for picked in cut[rank::world]
    ]


@torch.no_grad()
def score(
    model: Head, samples: Sequence[Sample], *, temperature: float, budget: int, share: tuple[int, int] = (0, 1)
) -> dict[int, tuple[list[float], float]]:
    """(log-prob of each response token, mean full-vocabulary entropy there), nats, by the sample's index.

    Of all samples, or of those in this rank's `share` of the batches; in the order of samples.
    """

    def stats(batch: Batch) -> TokenStats:
        return token_stats(
            model.hidden(batch.input_ids, batch.lengths)[batch.position],
            model.head_weight,
            batch.target,
            **model.head_options(temperature),
        )

    scores: dict[int, tuple[list[float], float]] = {}
    for batch in micro_batches(
        samples, budget=budget, with_observation=False, device=model.device, quadratic=model.quadratic, share=share
    ):
        found = model(partial(stats, batch))
        ends = [0, *accumulate(len(samples[i].response_ids) for i in batch.indices)]
        entropy = segment_mean(found.entropy, torch.tensor(ends, device=model.device)).tolist()
        logp = found.logp.tolist()
        for i, (start, end), mean in zip(batch.indices, pairwise(ends), entropy, strict=True):
            scores[i] = (logp[start:end], mean)
    return dict(sorted(scores.items()))


def loss_rows(batch: Batch, minibatch: Sequence[Sample], objective: Objective, *, update_samples: int) -> LossRows:
    """Token weights and references of a batch cut from `minibatch`; the update had `update_samples`."""
    per_token = _token_weights(minibatch, objective, update_samples=update_samples)
    wm_scale = objective.wm_scale * update_samples / len(minibatch)
    weight: list[float] = []
    advantage: list[float] = []
    old_logp: list[float] = []
    ref_logp: list[float] = []
    for i in batch.indices:
        sample = minibatch[i]
        m = len(sample.observation_ids) if batch.with_observation and sample.wm_weight > 0.0 else 0
        n = len(sample.response_ids) if batch.with_action else 0
        weight += [per_token[i]] * n + [sample.wm_weight * wm_scale / max(m, 1)] * m
        trust = [1.0] * n
        if objective.tis_cap:
            pairs = zip(sample.old_logp, sample.sampled_logp, strict=True)
            trust = [math.exp(min(old - sampled, math.log(objective.tis_cap))) for old, sampled in pairs][:n]
        advantage += [value * ratio for value, ratio in zip(sample.advantages[:n], trust, strict=True)] + [0.0] * m
        old_logp += sample.old_logp[:n] + [0.0] * m
        if objective.kl_coef > 0.0:
            assert sample.ref_logp is not None, "kl_coef > 0 needs reference log-probs"
            ref_logp += sample.ref_logp[:n] + [0.0] * m

    def as_tensor(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=batch.target.device)

    return LossRows(
        kind=batch.kind,
        weight=as_tensor(weight),
        advantage=as_tensor(advantage),
        old_logp=as_tensor(old_logp),
        ref_logp=as_tensor(ref_logp) if objective.kl_coef > 0.0 else None,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        kl_coef=objective.kl_coef,
        entropy_coef=objective.entropy_coef,
        rho=objective.rho,
        observation_loss=objective.observation_loss,
        q=objective.q,
    )


def _token_weights(minibatch: Sequence[Sample], objective: Objective, *, update_samples: int) -> list[float]:
    """Weight of a response token of each sample in the mean over tokens, samples, groups or verl's micro-batches."""
    lengths = [len(sample.response_ids) for sample in minibatch]
    if objective.loss_norm == "group":
        return [sample.token_weight * update_samples / len(minibatch) for sample in minibatch]
    if objective.loss_norm == "row":
        return [1.0 / (len(lengths) * n) for n in lengths]
    size = objective.verl_rows if objective.loss_norm == "verl" else len(lengths)
    tokens = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
    return [1.0 / (len(tokens) * tokens[i // size]) for i in range(len(lengths))]


def joint_loss(model: Head, batch: Batch, samples: LossRows, *, temperature: float) -> PawLoss:
    """One forward pass: Eq. (11) restricted to the batch, gradients already formed in the head."""
    return model(
        lambda: paw_loss(
            model.hidden(batch.input_ids, batch.lengths)[batch.position],
            model.head_weight,
            batch.target,
            samples,
            **model.head_options(temperature),
        )
    )


@dataclass
class Totals:
    """Sums over the micro-batches of an update, for its metrics."""

    actions: int = 0
    observations: int = 0
    live: int = 0
    masked: int = 0
    clipped: int = 0
    policy_loss: float = 0.0
    wm_loss: float = 0.0
    row_loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0

    def add(self, out: PawLoss, samples: LossRows) -> None:
        action, observation = samples.kind == ACTION, samples.kind == OBSERVATION
        weighted = samples.weight * out.row_loss
        sums = torch.stack(
            [
                action.sum(),
                observation.sum(),
                out.live.sum(),
                out.masked.sum(),
                out.clipped.sum(),
                weighted[action].sum(),
                weighted[observation].sum(),
                out.row_loss[observation].sum(),
                out.entropy[action].sum(),
                out.kl[action].sum(),
            ]
        ).tolist()  # one transfer
        for name, value in zip(Totals.__dataclass_fields__, sums, strict=True):
            setattr(self, name, getattr(self, name) + value)

    @classmethod
    def sum(cls, parts: Iterable["Totals"]) -> "Totals":
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    def metrics(self, objective: Objective, *, minibatches: int) -> dict[str, float]:
        """Losses are means over the optimizer steps, fractions and means are over tokens.

        What was not measured is absent: a mean over no tokens, KL without a reference, the share masked by a loss that
        masks none. Samples without any gradient made no forward pass and are in no mean.
        """
        steps = max(1, minibatches)
        metrics = {"policy/loss": self.policy_loss / steps}
        if self.actions:
            metrics |= {
                "policy/clip_frac": self.clipped / self.actions,
                "policy/entropy": self.entropy / self.actions,
                "wm/live_frac": self.live / (self.actions + self.observations),
            }
            if objective.kl_coef > 0.0:
                metrics["policy/kl"] = self.kl / self.actions
        if self.observations:
            metrics |= {
                "wm/loss": self.wm_loss / steps,
                "wm/token_loss": self.row_loss / self.observations,
            }
            if objective.observation_loss == "cmae":
                metrics["wm/masked_frac"] = self.masked / self.observations
        return metrics


def _acting_length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)
