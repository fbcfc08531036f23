"""Trajectories -> samples (one per turn) -> sequences (turns that continue one another) -> micro-batches of tokens.

A turn whose prompt begins with the turn before it, prompt and response, continues that turn's
sequence: nothing is run twice, and the observation between them is already there as a target. So a
conversation is one sequence, and the paper's prompts, each of one message, are a sequence each.
What is learned is the same either way (tested): weights, advantages and selection belong to the
turns, and a target is found inside a prompt only where it would have had the same context, right
after what the template puts there: its turn separator, or what begins a tool's result, both after
the end token of a response that was cut. A turn with a target that is not found there ends its
sequence, and its observation is appended; so is that of the last turn.
"""

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paw.algo.packing import alike_batches, balanced_batches
from paw.types import Group, Sample


def to_samples(
    groups: list[Group],
    *,
    separator_ids: list[int],
    encode_observation: Callable[[str], list[int]] | None,
    invalid_penalty: float,
) -> list[Sample]:
    """Samples of an update in group, trajectory, step order.

    Token ids and log-probs are the engine's own, never re-encoded. `encode_observation` turns the
    raw next observation into target ids; None (world model off) leaves samples without a target, as
    an empty observation does.
    """
    samples: list[Sample] = []
    trajectory_index = 0
    for group_index, group in enumerate(groups):
        for trajectory in group.trajectories:
            episode_return = trajectory.episode_return
            before: list[int] = []
            for step, turn in enumerate(trajectory.turns):
                penalty = 0.0 if turn.outcome.valid else invalid_penalty
                target = turn.observation_ids
                if encode_observation is None or target is None:
                    target = encode_observation(turn.observation) if encode_observation else []
                separator = separator_ids if turn.separator_ids is None else turn.separator_ids
                samples.append(
                    Sample(
                        group=group_index,
                        trajectory=trajectory_index,
                        step=step,
                        continues=step > 0 and turn.prompt_ids[: len(before)] == before,
                        prompt_ids=turn.prompt_ids,
                        response_ids=turn.response_ids,
                        separator_ids=separator if target else [],
                        observation_ids=target,
                        spans=turn.spans if target else [],
                        sampled_logp=turn.sampled_logp,
                        sampled_entropy=turn.entropy,
                        versions=turn.versions or [turn.version] * len(turn.response_ids),
                        server=turn.server,
                        score=episode_return - penalty,
                        episode_return=episode_return,
                        reward=turn.outcome.reward,
                        penalty=penalty,
                        anchor=turn.anchor,
                    )
                )
                before = turn.prompt_ids + turn.response_ids
            trajectory_index += 1
    tokens = Counter(sample.group for sample in samples for _ in sample.response_ids)
    for sample in samples:
        sample.token_weight = 1.0 / (len(groups) * tokens[sample.group])
    return samples


def sequences(samples: Sequence[Sample], *, with_observation: bool) -> list[list[int]]:
    """Indices of the samples that share a sequence, in the order of samples.

    Without observations all that continue one another do; with them a target must stand in the
    prompt that follows.
    """
    found: list[list[int]] = []
    for i, sample in enumerate(samples):
        before = samples[i - 1]
        continues = i > 0 and sample.continues
        continues &= (before.trajectory, before.step + 1) == (sample.trajectory, sample.step)
        if continues and (target := _appended(before, with_observation)):
            start = len(before.prompt_ids) + len(before.response_ids)
            continues = sample.prompt_ids[start : start + len(target)] == target
        if continues:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _appended(last: Sample, with_observation: bool) -> list[int]:
    """What follows the response of a sequence's last sample: its observation, where that is a target."""
    return (
        last.separator_ids + last.observation_ids
        if with_observation and last.wm_weight > 0.0
        else []
    )


def minibatches(samples: Sequence[Sample], *, size: int, seed: int) -> list[list[Sample]]:
    """Cut a seeded shuffle of the update's sequences into round(n / size) mini-batches of about as many samples."""
    shuffled = sequences(samples, with_observation=False)
    random.Random(seed).shuffle(shuffled)
    count = max(1, round(len(samples) / size))
    cuts = [len(samples) * i // count for i in range(1, count)]
    found: list[list[Sample]] = [[] for _ in range(count)]
    before = 0
    for members in shuffled:
        found[bisect_right(cuts, before)] += [samples[i] for i in members]
        before += len(members)
    return [minibatch for minibatch in found if minibatch]


@dataclass
class Batch:
    """Sequences of one forward pass, packed: T tokens one sequence after another, N of them targets.

    Example: sequence 1 5 6 | 7 2 | 1 | 8 9 (prompt, response, separator, observation) gives target
    [7, 2, 8, 9], read at position [2, 3, 5, 6] (each predicted by the token before it), observation
    [False, False, True, True].
    """

    input_ids: Tensor
    """[T] int64."""
    lengths: list[int]
    """[B] tokens of each sequence."""
    position: Tensor
    """[N] int64 into the T tokens: the one that predicts each target."""
    target: Tensor
    """[N] int64; of each sample in turn the response, then the observation."""
    observation: Tensor
    """[N] bool: a token of an observation, else of a response."""
    indices: list[int]
    """Of the samples, in the sequence the batch was cut from."""
    with_observation: bool = True


def collate(
    samples: Sequence[Sample],
    chosen: Sequence[Sequence[int]],
    *,
    with_observation: bool,
    device: torch.device,
) -> Batch:
    """Pack the chosen `sequences`; observations only of samples with a world-model weight.

    None: one token without.
    """
    input_ids, lengths, position, target, observation = [], [], [], [], []
    for members in chosen:
        start, last = len(input_ids), samples[members[-1]]
        input_ids += last.prompt_ids + last.response_ids + _appended(last, with_observation)
        for sample in (samples[i] for i in members):
            at = start + len(sample.prompt_ids)
            spans = [(at, sample.response_ids, False)]
            if with_observation and sample.wm_weight > 0.0:
                at += len(sample.response_ids) + len(sample.separator_ids)
                spans += [(at + place, ids, True) for place, ids in sample.targets]
            for at, ids, observed in spans:
                position.extend(range(at - 1, at + len(ids) - 1))
                target.extend(ids)
                observation.extend([observed] * len(ids))
        lengths.append(len(input_ids) - start)
    return Batch(
        input_ids=torch.tensor(input_ids or [0], dtype=torch.int64, device=device),
        lengths=lengths or [1],
        position=torch.tensor(position, dtype=torch.int64, device=device),
        target=torch.tensor(target, dtype=torch.int64, device=device),
        observation=torch.tensor(observation, dtype=torch.bool, device=device),
        indices=[i for members in chosen for i in members],
        with_observation=with_observation,
    )


def micro_batches(
    samples: Sequence[Sample],
    *,
    budget: int,
    with_observation: bool,
    device: torch.device,
    quadratic: float | None = 0.0,
    skip: Callable[[Sample], bool] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[Batch]:
    """Batches of at most `budget` tokens over the sequences with a sample for which `skip(sample)` is false.

    `quadratic` is the policy's. `share` (rank, world): every world-th batch, from the rank-th on.
    Each rank gets as many as the others, some of them without samples where these are few: their
    forward passes are collective.
    """
    rank, world = share
    kept = [
        members
        for members in sequences(samples, with_observation=with_observation)
        if skip is None or not all(skip(samples[i]) for i in members)
    ]
    lengths = [
        len(last.prompt_ids) + len(last.response_ids) + len(_appended(last, with_observation))
        for last in (samples[members[-1]] for members in kept)
    ]
    if quadratic is None:
        cut = alike_batches(lengths, budget=budget, multiple=world)
    else:
        cut = balanced_batches(lengths, budget=budget, multiple=world, quadratic=quadratic)
    return [
        collate(
            samples, [kept[j] for j in picked], with_observation=with_observation, device=device
        )
        for picked in cut[rank::world]
    ]
