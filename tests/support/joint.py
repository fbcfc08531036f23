"""Tiny random models, random rows, and a second version of the joint objective: full logits,
float64, autograd."""

import copy
import math
import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from together import make_ranks, on_all, shared
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
from paw.algo.batches import micro_batches
from paw.algo.loss import joint_loss, log_probs, token_batch
from paw.algo.packing import Packing
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
        return self._with_settings(self.policy), self._with_settings(self.wm)

    def _with_settings(self, name):
        """A loss with its settings, which are fields of the objective."""
        function = getattr(losses, name)
        settings = {key: getattr(self, key) for key in losses.settings_of(function)}
        return partial(function, **settings)

    @property
    def loss(self):
        return losses.joint(
            *self.terms,
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
            tis_cap=self.tis_cap,
            ratio_bounds=self.ratio_bounds,
        )

    def tokens(self, batch, minibatch, update_samples):
        return token_batch(
            batch,
            minibatch,
            update_samples=update_samples,
            reference=self.kl_coef > 0,
            norm=self.norm,
            verl_samples=self.verl_samples,
            wm_scale=self.wm_scale,
            ratio_level=self.ratio_level,
        )

    def forward(self, policy, batch, minibatch, update_samples):
        tokens = self.tokens(batch, minibatch, update_samples)
        return joint_loss(policy, batch, tokens, self.loss, temperature=self.temperature), tokens

    def dead(self, sample):
        return not (any(sample.advantages) or self.kl_coef or self.entropy_coef or sample.wm_weight)


def make_lm(family="qwen2-tied", *, seed=0, **settings):
    config_class, model_class, ties_embeddings = FAMILIES[family]
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": ties_embeddings,
    }
    torch.manual_seed(seed)
    return model_class(config_class(**(defaults | settings)))


def make_row(rng, group=0, trajectory=0, step=0, **values):
    """Rows of different lengths. About one in six has no target."""

    def ids(length):
        return [rng.randrange(VOCAB) for _ in range(length)]

    response_length = rng.randint(1, 6)
    target_length = 0 if rng.random() < 1 / 6 else rng.randint(1, 9)
    episode_return = float(rng.choice([0, 10]))
    row = dict(
        prompt_ids=ids(rng.randint(1, 12)),
        response_ids=ids(response_length),
        separator_ids=ids(2) if target_length else [],
        observation_ids=ids(target_length),
        sampled_logp=[-1.0] * response_length,
        score=episode_return,
        episode_return=episode_return,
        advantage=rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)]),
    )
    return Sample(group, trajectory, step, **(row | values))


def make_rows(policy, n=24, *, seed=0, groups=4, reference=False):
    """Rows before the update. Old log-probs are slightly off, so that some are clipped."""
    rng = random.Random(seed)
    rows = [make_row(rng, group=i % groups, trajectory=i % (2 * groups)) for i in range(n)]
    scored = log_probs(policy, rows, Packing(budget=10**6), temperature=1.0).values()
    for row, (logp, entropy) in zip(rows, scored, strict=True):
        row.old_logp = [value + rng.gauss(0, 0.3) for value in logp]
        row.entropy = entropy
        if reference:
            row.ref_logp = [value + rng.gauss(0, 0.5) for value in logp]
        if len(row.observation_ids) and rng.random() < 0.75:
            row.wm_weight = rng.random() / n
        of_group = [member for member in rows if member.group == row.group]
        row.token_weight = 1 / groups / sum(len(member.response_ids) for member in of_group)
    return rows


def fill(policy, samples, *, n_groups, alpha):
    """Fill in what the trainer's stages add to the samples of a rollout. Old log-probs are slightly
    off the policy's."""
    rng = random.Random(1)
    scored = log_probs(policy, samples, Packing(budget=100), temperature=1.0).values()
    for sample, advantage, (logp, entropy) in zip(samples, grpo(samples), scored, strict=True):
        sample.advantage = advantage
        sample.entropy = entropy
        sample.old_logp = [value + rng.gauss(0, 0.3) for value in logp]
        sample.ref_logp = [value - 0.1 for value in logp]
    selection = select(samples, alpha=alpha, weight="adaptive", reward_max=10.0, n_groups=n_groups)
    for sample, weight in zip(samples, selection.weights, strict=True):
        sample.wm_weight = weight
    return samples


def gradients(policy, loss=None):
    """The parameters' gradients as one float64 vector, zeros for missing ones. Clears them."""
    gradient_list = []
    for parameter in policy.parameters():
        has_gradient = parameter.grad is not None
        gradient_list.append(parameter.grad if has_gradient else torch.zeros_like(parameter))
    policy.zero_grad(set_to_none=True)
    return torch.cat([gradient.double().flatten() for gradient in gradient_list])


def packed(policy, minibatch, objective, *, update_samples, **options):
    """(loss, gradient) of a mini-batch, computed through the fused head as in the trainer."""
    batches = batches_of(policy, minibatch, **options)
    return learned(policy, batches, minibatch, objective, update_samples)


def packed_in_ranks(policy, minibatch, objective, count, *, update_samples, **options):
    """`packed` on each of several ranks. The trajectories are dealt out in turn."""
    ranks = make_ranks(count)
    minibatches = on_all(ranks, partial(shared, minibatch))

    batches = on_all(
        ranks, lambda rank: batches_of(policy, minibatches[rank.rank], ranks=rank, **options)
    )
    results = []
    for own_batches, own_rows in zip(batches, minibatches, strict=True):
        results.append(learned(policy, own_batches, own_rows, objective, update_samples))
    return results


def batches_of(
    policy,
    minibatch,
    *,
    budget=10**6,
    with_observation=True,
    skip_without_loss=False,
    ranks=None,
    share_prefixes="never",
):
    packing = Packing(
        budget=budget,
        pads=policy.pads_sequences,
        quadratic=policy.quadratic,
        share_prefixes=share_prefixes,
        ranks=ranks,
    )
    return micro_batches(
        minibatch,
        packing,
        with_observation=with_observation,
        device=policy.device,
        skip_without_loss=skip_without_loss,
    )


def learned(policy, batches, minibatch, objective, update_samples):
    """(loss, gradient) of micro-batches."""
    loss_sum = 0.0
    for batch in batches:
        output, _ = objective.forward(policy, batch, minibatch, update_samples)
        output.loss.backward()
        # Terms of both signs nearly cancel, so they are summed in float64.
        loss_sum += output.token_loss.double().sum().item()
        assert output.loss.item() == pytest.approx(output.token_loss.sum().item())
    return loss_sum, gradients(policy)


def token_logps(lm, row, *, temperature=1.0):
    """[T, V] float64 log-probs of every next token of one row, unpadded, with its observation."""
    ids = [*row.prompt_ids, *row.response_ids, *row.separator_ids, *row.observation_ids]
    return (lm(input_ids=torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)


def dense(policy, minibatch, objective: Objective, *, update_samples):
    """(loss, gradient, numbers of masked and unmasked observation tokens), from full logits in
    float64."""
    lm = copy.deepcopy(policy.lm).double()
    part_size = objective.verl_samples if objective.norm == "verl" else len(minibatch)
    row_parts = [minibatch[i : i + part_size] for i in range(0, len(minibatch), part_size)]
    loss_sum = torch.zeros((), dtype=torch.float64)
    masked = 0
    unmasked = 0
    for index, row in enumerate(minibatch):
        logps = token_logps(lm, row, temperature=objective.temperature)
        response_length = len(row.response_ids)
        if objective.norm == "sample":
            token_weight = 1 / (response_length * len(minibatch))
        else:
            row_part = row_parts[index // part_size]
            part_tokens = sum(len(member.response_ids) for member in row_part)
            token_weight = 1 / (part_tokens * len(row_parts))
        loss_sum = loss_sum + token_weight * response_loss(logps, row, objective)

        if not row.wm_weight:
            continue
        start = len(row.prompt_ids) + response_length + len(row.separator_ids)
        scale = objective.wm_scale * update_samples / len(minibatch)
        for position, token in enumerate(row.observation_ids, start):
            logp = logps[position - 1, token]
            if objective.wm == "cmae" and logp.exp() > objective.rho:
                masked += 1
                continue
            unmasked += 1
            token_loss = observation_loss(logp, objective)
            loss_sum = loss_sum + scale * row.wm_weight * token_loss / len(row.observation_ids)
    loss_sum.backward()
    return float(loss_sum.detach()), gradients(lm), masked, unmasked


def response_loss(logps, row, objective):
    """The policy's loss summed over the response's tokens, including KL and entropy."""
    # [response, V]: each row is the distribution of one token.
    logps = logps[len(row.prompt_ids) - 1 :][: len(row.response_ids)]
    log_ratios = [
        logps[index, token] - row.old_logp[index] for index, token in enumerate(row.response_ids)
    ]
    sampler_log_ratios = [
        old - sampled for old, sampled in zip(row.old_logp, row.sampled_logp, strict=True)
    ]
    if objective.ratio_level == "response":
        mean_log_ratio = sum(sampler_log_ratios) / len(sampler_log_ratios)
        sampler_log_ratios = [mean_log_ratio] * len(sampler_log_ratios)

    loss_sum = torch.zeros((), dtype=torch.float64)
    for index, token in enumerate(row.response_ids):
        logp = logps[index, token]
        is_by_response = objective.policy == "gspo"
        log_ratio = sum(log_ratios) / len(log_ratios) if is_by_response else log_ratios[index]
        ratio = log_ratio.exp()
        clamped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        advantage = row.advantage if row.token_advantage is None else row.token_advantage[index]
        token_loss = torch.maximum(-advantage * ratio, -advantage * clamped)
        if objective.policy == "cispo":
            token_loss = -advantage * clamped.detach() * logp
        if advantage < 0 and objective.policy == "ppo":
            dual_clip_limit = torch.tensor(-advantage * objective.dual_clip, dtype=torch.float64)
            token_loss = torch.minimum(token_loss, dual_clip_limit)

        sampler_ratio = math.exp(sampler_log_ratios[index])
        if objective.tis_cap is not None:
            token_loss = token_loss * min(sampler_ratio, objective.tis_cap)
        if objective.ratio_bounds:
            lowest, highest = objective.ratio_bounds
            if not lowest <= sampler_ratio <= highest:
                token_loss = 0.0 * token_loss
        if objective.kl_coef:
            reference_log_ratio = row.ref_logp[index] - logp
            kl = (reference_log_ratio.exp() - reference_log_ratio - 1).clamp(-10, 10)
            token_loss = token_loss + objective.kl_coef * kl
        negative_entropy = (logps[index].exp() * logps[index]).sum()
        loss_sum = loss_sum + token_loss + objective.entropy_coef * negative_entropy
    return loss_sum


def observation_loss(logp, objective):
    """The world model's loss of an observation token that is not masked."""
    if objective.wm == "ce":
        return -logp
    exponent = objective.q if objective.wm == "gce" else 1
    return (1 - logp.exp() ** exponent) / exponent


def relative(gradient, expected):
    """Distance of two gradients, relative to the norm of the second."""
    return float((gradient - expected).norm() / expected.norm())


def tiny_policy(family="qwen2-tied", **settings):
    return Policy(make_lm(family, **settings))
