"""Trajectories -> samples -> sequences -> micro-batches of tokens.

A sample is one turn. A sequence consists of turns that continue one another.

A turn continues the sequence of the previous turn if its prompt begins with that turn's prompt and
response. Then no token is computed twice, and the observation between the turns is already in the
sequence as a target. So a conversation is one sequence. The paper's prompts consist of one message
each, and each makes its own sequence. The result of learning is the same either way (tested).
Weights, advantages and selection belong to the turns. A target counts as found in the next prompt
only if its context there is the same. It must come right after the text that the template puts
before it: the turn separator, or the opening of a tool's result (preceded by the end token if the
response was cut). If a turn's target is not found there, its sequence ends and its observation is
appended, as for the last turn.
"""

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paw.algo.packing import Packing
from paw.types import Group, Sample, Turn


def to_samples(
    groups: list[Group],
    *,
    separator_ids: list[int],
    encode_observation: Callable[[str], list[int]] | None,
    invalid_penalty: float,
) -> list[Sample]:
    """Return the samples of an update, ordered by group, trajectory and step.

    Token ids and log-probs are the engine's own, never re-encoded. `encode_observation` turns the
    raw next observation into target ids. If it is None (world model off), or if an observation is
    empty, samples have no target.
    """
    samples: list[Sample] = []
    trajectory_index = 0
    for group_index, group in enumerate(groups):
        for trajectory in group.trajectories:
            episode_return = trajectory.episode_return
            previous_ids: list[int] = []  # prompt and response of the previous turn
            for step, turn in enumerate(trajectory.turns):
                penalty = 0.0 if turn.outcome.valid else invalid_penalty
                target = _target_ids(turn, encode_observation)
                separator = separator_ids if turn.separator_ids is None else turn.separator_ids
                prefix = turn.prompt_ids[: len(previous_ids)]
                samples.append(
                    Sample(
                        group=group_index,
                        trajectory=trajectory_index,
                        step=step,
                        continues=step > 0 and prefix == previous_ids,
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
                previous_ids = turn.prompt_ids + turn.response_ids
            trajectory_index += 1
    _fill_token_weights(samples, n_groups=len(groups))
    return samples


def _fill_token_weights(samples: list[Sample], *, n_groups: int) -> None:
    """Fill the weight of a response token: a mean over each group's tokens, then over groups."""
    group_tokens: Counter[int] = Counter()
    for sample in samples:
        group_tokens[sample.group] += len(sample.response_ids)
    for sample in samples:
        sample.token_weight = 1.0 / (n_groups * group_tokens[sample.group])


def _target_ids(turn: Turn, encode_observation: Callable[[str], list[int]] | None) -> list[int]:
    """Return the world model's target of a turn; empty without a world model."""
    if encode_observation is None:
        return []
    if turn.observation_ids is not None:
        return turn.observation_ids
    return encode_observation(turn.observation)


def sequences(samples: Sequence[Sample], *, with_observation: bool) -> list[list[int]]:
    """Return, for each sequence, the indices of its samples, in sample order.

    Without observations, samples share a sequence if they continue one another. With observations,
    an observation that is a target must also be in the prompt that follows.
    """
    members_of: list[list[int]] = []
    for i, sample in enumerate(samples):
        if i > 0 and _continues(samples[i - 1], sample, with_observation):
            members_of[-1].append(i)
        else:
            members_of.append([i])
    return members_of


def _continues(previous: Sample, sample: Sample, with_observation: bool) -> bool:
    """Whether a sample continues the sequence of the previous one."""
    is_next_turn = (sample.trajectory, sample.step) == (previous.trajectory, previous.step + 1)
    if not (sample.continues and is_next_turn):
        return False
    appended = _appended_ids(previous, with_observation)
    start = len(previous.prompt_ids) + len(previous.response_ids)
    return sample.prompt_ids[start : start + len(appended)] == appended


def _appended_ids(sample: Sample, with_observation: bool) -> list[int]:
    """Return the separator and observation to append after a response, if it is a target."""
    if with_observation and sample.wm_weight > 0.0:
        return sample.separator_ids + sample.observation_ids
    return []


def minibatches(samples: Sequence[Sample], *, size: int, seed: int) -> list[list[Sample]]:
    """Cut a seeded shuffle of the update's sequences into mini-batches of about `size` samples.

    n samples make round(n / size) mini-batches, but at least one. Sequences are not split.
    """
    shuffled = sequences(samples, with_observation=False)
    random.Random(seed).shuffle(shuffled)

    count = max(1, round(len(samples) / size))
    cuts = [len(samples) * i // count for i in range(1, count)]
    parts: list[list[Sample]] = [[] for _ in range(count)]
    samples_so_far = 0
    for members in shuffled:
        parts[bisect_right(cuts, samples_so_far)] += [samples[i] for i in members]
        samples_so_far += len(members)
    return [part for part in parts if part]


@dataclass
class Batch:
    """Sequences of one forward pass, packed: T tokens, one sequence after another, N targets.

    Example: sequence 1 5 6 | 7 2 | 1 | 8 9 (prompt, response, separator, observation) gives target
    [7, 2, 8, 9], read at position [2, 3, 5, 6] (each predicted by the token before it), observation
    [False, False, True, True].
    """

    input_ids: Tensor
    """[T] int64."""
    lengths: list[int]
    """[B] tokens of each sequence."""
    position: Tensor
    """[N] int64: for each target the index, among the T tokens, of the token that predicts it."""
    target: Tensor
    """[N] int64: for each sample the tokens of its response, then those of its observation."""
    observation: Tensor
    """[N] bool: whether the target belongs to an observation, not to a response."""
    indices: list[int]
    """Indices of the samples, in the list that the batch was cut from."""
    with_observation: bool = True


def collate(
    samples: Sequence[Sample],
    chosen: Sequence[Sequence[int]],
    *,
    with_observation: bool,
    device: torch.device,
) -> Batch:
    """Pack the chosen `sequences`, with the observations of samples with a world-model weight.

    If no sequence is chosen, the batch has one token and no target.
    """
    input_ids: list[int] = []
    lengths: list[int] = []
    position: list[int] = []
    target: list[int] = []
    observation: list[bool] = []

    def add_targets(ids: list[int], start: int, *, observed: bool) -> None:
        """Make targets of the tokens `ids`, the first of which is input token `start`."""
        position.extend(range(start - 1, start + len(ids) - 1))
        target.extend(ids)
        observation.extend([observed] * len(ids))

    for members in chosen:
        sequence_start = len(input_ids)
        last = samples[members[-1]]  # its prompt holds the samples before it
        input_ids += last.prompt_ids + last.response_ids + _appended_ids(last, with_observation)
        for sample in (samples[i] for i in members):
            response_start = sequence_start + len(sample.prompt_ids)
            add_targets(sample.response_ids, response_start, observed=False)
            if with_observation and sample.wm_weight > 0.0:
                separator_start = response_start + len(sample.response_ids)
                observation_start = separator_start + len(sample.separator_ids)
                for offset, ids in sample.targets:
                    add_targets(ids, observation_start + offset, observed=True)
        lengths.append(len(input_ids) - sequence_start)

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
    packing: Packing,
    *,
    with_observation: bool,
    device: torch.device,
    skip: Callable[[Sample], bool] | None = None,
) -> list[Batch]:
    """Return this rank's batches, leaving out sequences whose samples are all skipped.

    `skip(sample)` says whether a sample needs no forward pass. If there are few samples, some
    batches are empty (`Packing.cut`).
    """
    sequence_members: list[list[int]] = []
    lengths: list[int] = []
    for members in sequences(samples, with_observation=with_observation):
        if skip is not None and all(skip(samples[i]) for i in members):
            continue
        last = samples[members[-1]]
        appended = _appended_ids(last, with_observation)
        sequence_members.append(members)
        lengths.append(len(last.prompt_ids) + len(last.response_ids) + len(appended))

    batches: list[Batch] = []
    for sequence_indices in packing.cut(lengths):
        chosen = [sequence_members[index] for index in sequence_indices]
        batches.append(collate(samples, chosen, with_observation=with_observation, device=device))
    return batches
