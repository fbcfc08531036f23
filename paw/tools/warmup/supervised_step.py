"""One optimizer step of supervised fine-tuning, used by `paw sft`, the warm-up and RWML."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paw.algo.batches import micro_batches
from paw.algo.device import to_device
from paw.algo.loss import TokenBatch, ce, joint, joint_loss
from paw.algo.packing import Packing
from paw.model.optim import set_learning_rate
from paw.model.policy import Policy
from paw.types import Ids, Sample, no_ids

LOSS = joint(ce, ce)
"""Cross-entropy of answers and of observations."""


def step(
    policy: Policy,
    optimizers: Sequence[torch.optim.Optimizer],
    rows: Sequence[Sample],
    *,
    lr: float,
    clip: float = 1.0,
    lm_weight: float = 0.0,
    observations: bool = True,
    by_row: bool = False,
    packing: Packing | None,
) -> float:
    """Take one optimizer step. Returns the answers' loss, in nats.

    The loss is the mean negative log-likelihood of the answer tokens. The gradient is that of this
    loss plus `lm_weight` times the mean over the other tokens.

    Args:
        clip: largest norm of the gradient.
        observations: whether the other tokens are those of prompt, separator and observation, or
            only those of the prompt.
        by_row: divide the sum over answer tokens by the number of rows, not of answer tokens.
        packing: how rows are cut into micro-batches for the fused head. None: all rows at once,
            with full logits.
    """
    weighted_rows = _weighted_rows(
        rows,
        lm_weight=lm_weight,
        observations=observations,
        by_row=by_row,
        answers_only=lm_weight <= 0 and packing is not None,
    )

    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    if packing is None:
        answer_loss = _backward_full_logits(policy, weighted_rows)
    else:
        answer_loss = _backward_fused_head(policy, weighted_rows, packing)

    torch.nn.utils.clip_grad_norm_(policy.parameters(), clip)
    for optimizer in optimizers:
        set_learning_rate(optimizer, lr)
        optimizer.step()
    return answer_loss


class _WeightedRow(NamedTuple):
    """A row cut into context and target tokens. The arrays have an entry for each target token."""

    sample: Sample
    """Its `prompt_ids` are the context, its `response_ids` the target tokens."""
    weights: np.ndarray
    """[n] float32: weights of the tokens' negative log-likelihoods in the loss."""
    is_answer: np.ndarray
    """[n] bool."""


def _weighted_rows(
    rows: Sequence[Sample],
    *,
    lm_weight: float,
    observations: bool,
    by_row: bool,
    answers_only: bool,
) -> list[_WeightedRow]:
    """Cut the rows into context and target tokens.

    With `answers_only` the targets are the answers. Otherwise they are all tokens except the first,
    which nothing can predict because nothing precedes it.
    """
    continuations: list[Ids] = []
    for row in rows:
        continuation = no_ids()
        if observations:
            continuation = np.concatenate([row.separator_ids, row.observation_ids])
        continuations.append(continuation)

    # The answers' weights sum to 1 and those of the other tokens to lm_weight, over all rows.
    answer_tokens = sum(len(row.response_ids) for row in rows)
    other_tokens = sum(len(row.prompt_ids) - 1 for row in rows)
    other_tokens += sum(len(continuation) for continuation in continuations)
    answer_weight = 1.0 / (len(rows) if by_row else answer_tokens)
    other_weight = float(torch.tensor(lm_weight) / max(1, other_tokens))  # divided in float32

    weighted_rows = []
    for row, continuation in zip(rows, continuations, strict=True):
        answer = row.response_ids
        context = row.prompt_ids
        before = no_ids()
        after = no_ids()
        if not answers_only:
            context = row.prompt_ids[:1]
            before = row.prompt_ids[1:]
            after = continuation

        sample = Sample(
            group=0,
            trajectory=0,
            step=0,
            prompt_ids=context,
            response_ids=np.concatenate([before, answer, after]),
        )
        is_answer = np.repeat([False, True, False], [len(before), len(answer), len(after)])
        weights = np.where(is_answer, answer_weight, other_weight).astype(np.float32)
        weighted_rows.append(_WeightedRow(sample, weights, is_answer))
    return weighted_rows


def _backward_fused_head(policy: Policy, rows: Sequence[_WeightedRow], packing: Packing) -> float:
    """Compute the gradients in micro-batches. Returns the answers' part of the loss."""
    answer_loss = torch.zeros((), dtype=torch.float64, device=policy.device)
    batches = micro_batches(
        [row.sample for row in rows],
        packing,
        with_observation=False,
        device=policy.device,
    )
    for batch in batches:
        batch_rows = [rows[index] for index in batch.indices]
        weights = np.concatenate([row.weights for row in batch_rows])
        is_answer = np.concatenate([row.is_answer for row in batch_rows])
        weight, answer_index = to_device([weights, np.flatnonzero(is_answer)], policy.device)

        zero = torch.zeros_like(weight)
        tokens = TokenBatch(
            weight=weight,
            observation=batch.observation,
            advantage=zero,
            old_logp=zero,
            sampled_logp=zero,
        )
        joint = joint_loss(policy, batch, tokens, LOSS, temperature=1.0)
        joint.loss.backward()
        answer_loss += joint.token_loss[answer_index].sum()
    return float(answer_loss)


def _backward_full_logits(policy: Policy, rows: Sequence[_WeightedRow]) -> float:
    """Compute the gradients of all rows at once. Returns the answers' part of the loss."""
    longest = max(len(row.weights) for row in rows)
    weights = np.zeros((len(rows), longest), np.float32)
    flags = np.zeros((len(rows), longest), np.bool_)
    for i, row in enumerate(rows):
        weights[i, : len(row.weights)] = row.weights
        flags[i, : len(row.weights)] = row.is_answer
    weight = torch.from_numpy(weights)
    is_answer = torch.from_numpy(flags)

    token_loss = _negative_log_likelihood(policy, [row.sample for row in rows]) * weight
    token_loss.sum().backward()
    return float(token_loss.detach()[is_answer].sum())


def _negative_log_likelihood(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """Return -log p of all tokens except the first, [B, longest - 1], from full logits.

    The quickstart model's small vocabulary makes their memory affordable.
    """
    rows = [np.concatenate([sample.prompt_ids, sample.response_ids]) for sample in samples]
    longest = max(len(row) for row in rows)
    padded = np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    input_ids = torch.from_numpy(padded)
    hidden = policy.hidden(input_ids.flatten(), [longest] * len(rows)).view(*input_ids.shape, -1)
    logits = hidden[:, :-1] @ policy.head_weight.T
    log_probs = torch.log_softmax(logits, -1)
    return -log_probs.gather(2, input_ids[:, 1:, None])[..., 0]
