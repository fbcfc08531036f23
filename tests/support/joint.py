"""Tiny random models, random rows, and the joint objective written out once more: full logits, float64, autograd."""

import copy
import math
import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paw.algo import loss as losses
from paw.algo.advantages import grpo
from paw.algo.loss import joint_loss, log_probs, token_batch
from paw.algo.packing import Packing
from paw.algo.samples import micro_batches
from paw.algo.world_model import select
from paw.model.policy import Policy
from paw.types import Sample

VOCAB = 61
FAMILIES = {
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, True),
    "qwen2-untied": (Qwen2Config, Qwen2ForCausalLM, False),
    "llama": (LlamaConfig, LlamaForCausalLM, False),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, True),
}


@dataclass(frozen=True)
class Objective:
    """The settings of the joint loss under test."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    policy: str = "ppo"
    tis_cap: float | None = None
    ratio_bounds: tuple[float, float] | None = None
    ratio_level: str = "token"
    norm: str = "token"
    verl_samples: int = 32
    rho: float = 0.2
    wm: str = "cmae"
    q: float = 0.7
    wm_scale: float = 1.0
    temperature: float = 1.0

    @property
    def terms(self):
        """The losses of response and of observation tokens."""
        names = (
            ("clip_low", "clip_high", "dual_clip")
            if self.policy == "ppo"
            else ("clip_low", "clip_high")
        )
        clips = {name: getattr(self, name) for name in names}
        own = {"cmae": {"rho": self.rho}, "gce": {"q": self.q}}.get(self.wm, {})
        return partial(getattr(losses, self.policy), **clips), partial(
            getattr(losses, self.wm), **own
        )

    @property
    def loss(self):
        how = {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef, "tis_cap": self.tis_cap}
        return losses.joint(*self.terms, ratio_bounds=self.ratio_bounds, **how)

    def tokens(self, batch, minibatch, update_samples):
        how = {
            "norm": self.norm,
            "verl_samples": self.verl_samples,
            "wm_scale": self.wm_scale,
            "ratio_level": self.ratio_level,
        }
        return token_batch(
            batch, minibatch, update_samples=update_samples, reference=self.kl_coef > 0, **how
        )

    def forward(self, policy, batch, minibatch, update_samples):
        tokens = self.tokens(batch, minibatch, update_samples)
        return joint_loss(policy, batch, tokens, self.loss, temperature=self.temperature), tokens

    def dead(self, sample):
        return not (any(sample.advantages) or self.kl_coef or self.entropy_coef or sample.wm_weight)


def make_lm(family="qwen2-tied", *, seed=0, **settings):
    config, model, tied = FAMILIES[family]
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    more = dict(
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.2
    )
    return model(config(**(sizes | more | dict(tie_word_embeddings=tied) | settings)))


def make_row(rng, group=0, trajectory=0, step=0, **values):
    """Lengths differ from row to row; about one row in six has no target."""

    def ids(n):
        return [rng.randrange(VOCAB) for _ in range(n)]

    n, m = rng.randint(1, 6), 0 if rng.random() < 1 / 6 else rng.randint(1, 9)
    episode_return = float(rng.choice([0, 10]))
    row = dict(
        prompt_ids=ids(rng.randint(1, 12)),
        response_ids=ids(n),
        separator_ids=ids(2) if m else [],
        observation_ids=ids(m),
        sampled_logp=[-1.0] * n,
        score=episode_return,
        episode_return=episode_return,
        advantage=rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)]),
    )
    return Sample(group, trajectory, step, **(row | values))


def make_rows(policy, n=24, *, seed=0, groups=4, reference=False):
    """Rows as they stand before the update: old log-probs a little off the policy's, so that clips occur."""
    rng = random.Random(seed)
    rows = [make_row(rng, group=i % groups, trajectory=i % (2 * groups)) for i in range(n)]
    for row, (logp, entropy) in zip(
        rows, log_probs(policy, rows, Packing(budget=10**6), temperature=1.0).values(), strict=True
    ):
        row.old_logp = [value + rng.gauss(0, 0.3) for value in logp]
        row.entropy = entropy
        if reference:
            row.ref_logp = [value + rng.gauss(0, 0.5) for value in logp]
        if row.observation_ids and rng.random() < 0.75:
            row.wm_weight = rng.random() / n
        row.token_weight = (
            1 / groups / sum(len(other.response_ids) for other in rows if other.group == row.group)
        )
    return rows


def fill(policy, samples, *, n_groups, alpha):
    """What the stages give to samples fresh from episodes; old log-probs a little off the policy's."""
    rng = random.Random(1)
    scored = log_probs(policy, samples, Packing(budget=100), temperature=1.0).values()
    for sample, advantage, (logp, entropy) in zip(samples, grpo(samples), scored, strict=True):
        sample.advantage, sample.entropy = advantage, entropy
        sample.old_logp = [value + rng.gauss(0, 0.3) for value in logp]
        sample.ref_logp = [value - 0.1 for value in logp]
    chosen = select(samples, alpha=alpha, weight="adaptive", reward_max=10.0, n_groups=n_groups)
    for sample, weight in zip(samples, chosen.weights, strict=True):
        sample.wm_weight = weight
    return samples


def gradients(policy, loss=None):
    """The parameters' gradients as one float64 vector; zeros where there is none. Clears them."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    policy.zero_grad(set_to_none=True)
    return torch.cat([part.double().flatten() for part in parts])


def packed(
    policy,
    minibatch,
    objective,
    *,
    update_samples,
    budget=10**6,
    with_observation=True,
    skip=None,
    share=(0, 1),
):
    """(loss, gradient) of a mini-batch, or a rank's share, as the trainer makes them: through the fused head."""
    rank, world_size = share
    total = 0.0
    batches = micro_batches(
        minibatch,
        Packing(
            budget=budget,
            pads=policy.pads_sequences,
            quadratic=policy.quadratic,
            rank=rank,
            world_size=world_size,
        ),
        with_observation=with_observation,
        device=policy.device,
        skip=skip,
    )
    for batch in batches:
        out = objective.forward(policy, batch, minibatch, update_samples)[0]
        out.loss.backward()
        # Of either sign: what is left of them is small beside each.
        total += out.token_loss.double().sum().item()
        assert out.loss.item() == pytest.approx(out.token_loss.sum().item())
    return total, gradients(policy)


def token_logps(lm, row, *, temperature=1.0):
    """[T, V] float64 log-probs of every next token of one row alone, unpadded, its observation included."""
    ids = row.prompt_ids + row.response_ids + row.separator_ids + row.observation_ids
    return (lm(input_ids=torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)


def dense(policy, minibatch, objective: Objective, *, update_samples):
    """(loss, gradient, number of masked, of live observation tokens) by full logits in float64."""
    lm = copy.deepcopy(policy.lm).double()
    rows = objective.verl_samples if objective.norm == "verl" else len(minibatch)
    parts = [minibatch[i : i + rows] for i in range(0, len(minibatch), rows)]
    total, masked, live = torch.zeros((), dtype=torch.float64), 0, 0
    for i, row in enumerate(minibatch):
        tokens = sum(len(other.response_ids) for other in parts[i // rows]) * len(parts)
        logps = token_logps(lm, row, temperature=objective.temperature)
        start = len(row.prompt_ids)
        surrogate = torch.zeros((), dtype=torch.float64)
        gaps = [
            logps[start + t - 1, token] - row.old_logp[t]
            for t, token in enumerate(row.response_ids)
        ]
        drift = [old - sampled for old, sampled in zip(row.old_logp, row.sampled_logp, strict=True)]
        drift = (
            [sum(drift) / len(drift)] * len(drift) if objective.ratio_level == "response" else drift
        )
        for t, token in enumerate(row.response_ids):
            at = logps[start + t - 1]
            ratio = (sum(gaps) / len(gaps) if objective.policy == "gspo" else gaps[t]).exp()
            clamped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            advantage = row.advantage if row.token_advantage is None else row.token_advantage[t]
            term = torch.maximum(-advantage * ratio, -advantage * clamped)
            if objective.policy == "cispo":
                term = -advantage * clamped.detach() * at[token]
            if advantage < 0 and objective.policy == "ppo":
                term = torch.minimum(
                    term, torch.tensor(-advantage * objective.dual_clip, dtype=torch.float64)
                )
            if objective.tis_cap is not None:
                term = term * min(math.exp(drift[t]), objective.tis_cap)
            if (
                objective.ratio_bounds
                and not objective.ratio_bounds[0] <= math.exp(drift[t]) <= objective.ratio_bounds[1]
            ):
                term = 0.0 * term
            if objective.kl_coef:
                gap = row.ref_logp[t] - at[token]
                term = term + objective.kl_coef * (gap.exp() - gap - 1).clamp(-10, 10)
            surrogate = surrogate + term + objective.entropy_coef * (at.exp() * at).sum()
        n, m = len(row.response_ids), len(row.observation_ids)
        per_row = 1 / (n * len(minibatch)) if objective.norm == "sample" else 1 / tokens
        total = total + per_row * surrogate
        start += n
        start += len(row.separator_ids)
        for at, token in enumerate(row.observation_ids if row.wm_weight else [], start):
            logp = logps[at - 1, token]
            p = logp.exp()
            if objective.wm == "cmae" and p > objective.rho:
                masked += 1
                continue
            live += 1
            q = objective.q if objective.wm == "gce" else 1
            term = -logp if objective.wm == "ce" else (1 - p**q) / q
            scale = objective.wm_scale * update_samples / len(minibatch)
            total = total + scale * row.wm_weight * term / m
    total.backward()
    return float(total.detach()), gradients(lm), masked, live


def relative(a, b):
    """Distance of two gradients, relative to the second's norm."""
    return float((a - b).norm() / b.norm())


def tiny_policy(family="qwen2-tied", **settings):
    return Policy(make_lm(family, **settings))
