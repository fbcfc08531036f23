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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paw.algo.device import to_device
from paw.algo.packing import Packing, RankGroup
from paw.algo.placement import Chain, place
from paw.algo.prefixes import clusters, prefix_tree
from paw.algo.rows import IDS, VALUES, move_chains
from paw.algo.rows import chains as chains_of
from paw.away import away
from paw.types import AwayTrajectory, Group, Ids, Sample, Turn, as_ids, no_ids


def to_samples(
    groups: list[Group],
    *,
    separator_ids: list[int],
    encode_observation: Callable[[str], Ids] | None,
    invalid_penalty: float | Mapping[str, float],
    rank: int = 0,
    share: Callable[[list[Sample]], None] | None = None,
) -> list[Sample]:
    """Return the samples of an update, ordered by group, trajectory and step.

    With several ranks, this one is `rank`, and `share` fills the samples of the turns that other ranks have played
    (`algo.rows.share_scalars`).

    Token ids and log-probs are the engine's own, never re-encoded. `encode_observation` turns the
    raw next observation into target ids. If it is None (world model off), or if an observation is
    empty, samples have no target. `invalid_penalty` may be that of each environment, by
    `Task.env`.
    """
    template_separator = as_ids(separator_ids)
    samples: list[Sample] = []
    trajectory_index = 0
    for group_index, group in enumerate(groups):
        group_penalty = invalid_penalty
        if isinstance(group_penalty, Mapping):
            group_penalty = group_penalty[group.task.env]
        for trajectory in group.trajectories:
            if isinstance(trajectory, AwayTrajectory):
                samples += _away_samples(trajectory, group_index, trajectory_index)
                trajectory_index += 1
                continue
            episode_return = trajectory.episode_return
            previous: Turn | None = None
            for step, turn in enumerate(trajectory.turns):
                penalty = 0.0 if turn.outcome.valid else group_penalty
                target = _target_ids(turn, encode_observation)
                separator = turn.separator_ids
                if separator is None:
                    separator = template_separator
                versions = turn.versions
                if versions is None:
                    versions = np.full(len(turn.response_ids), turn.version, np.int32)
                samples.append(
                    Sample(
                        group=group_index,
                        trajectory=trajectory_index,
                        step=step,
                        continues=previous is not None and _begins_with(turn, previous),
                        prompt_ids=turn.prompt_ids,
                        response_ids=turn.response_ids,
                        separator_ids=separator if len(target) else no_ids(),
                        observation_ids=target,
                        spans=turn.spans if len(target) else [],
                        sampled_logp=turn.sampled_logp,
                        sampled_entropy=turn.entropy,
                        versions=versions,
                        server=turn.server,
                        score=episode_return - penalty,
                        episode_return=episode_return,
                        reward=turn.outcome.reward,
                        penalty=penalty,
                        anchor=turn.anchor,
                        holder=rank,
                    )
                )
                previous = turn
            trajectory_index += 1
    if share:
        share(samples)
    _fill_token_weights(samples, n_groups=len(groups))
    return samples


def _begins_with(turn: Turn, previous: Turn) -> bool:
    """Whether a turn's prompt begins with the prompt and response of the previous one."""
    response_start = len(previous.prompt_ids)
    response_end = response_start + len(previous.response_ids)
    prompt_ids = turn.prompt_ids
    return np.array_equal(prompt_ids[:response_start], previous.prompt_ids) and np.array_equal(
        prompt_ids[response_start:response_end], previous.response_ids
    )


def _away_samples(trajectory: AwayTrajectory, group: int, index: int) -> list[Sample]:
    """Return samples without any content, for the turns of the trajectory with that index."""
    nothing = away(0, trajectory.rank)
    rows: dict[str, Any] = dict.fromkeys(("prompt_ids", "response_ids", *IDS, *VALUES), nothing)
    rows |= dict.fromkeys(("sampled_entropy", "token_advantage", "ref_logp"))
    samples: list[Sample] = []
    for step in range(len(trajectory.turns)):
        samples.append(Sample(group, index, step, **rows, holder=trajectory.rank))
    return samples


def _fill_token_weights(samples: list[Sample], *, n_groups: int) -> None:
    """Fill the weight of a response token: a mean over each group's tokens, then over groups."""
    group_tokens: Counter[int] = Counter()
    for sample in samples:
        group_tokens[sample.group] += len(sample.response_ids)
    for sample in samples:
        sample.token_weight = 1.0 / (n_groups * group_tokens[sample.group])


def _target_ids(turn: Turn, encode_observation: Callable[[str], Ids] | None) -> Ids:
    """Return the world model's target of a turn; empty without a world model."""
    if encode_observation is None:
        return no_ids()
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
    if not with_observation or previous.wm_weight == 0.0:
        return True
    if sample.continues_target is not None:
        return sample.continues_target
    appended = _appended_ids(previous, with_observation)
    start = len(previous.prompt_ids) + len(previous.response_ids)
    return np.array_equal(sample.prompt_ids[start : start + len(appended)], appended)


def _appended_ids(sample: Sample, with_observation: bool) -> Ids:
    """Return the separator and observation to append after a response, if it is a target."""
    if with_observation and sample.wm_weight > 0.0:
        return np.concatenate([sample.separator_ids, sample.observation_ids])
    return no_ids()


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
    """[B] tokens of each sequence, or of each segment of the sequences' prefix tree."""
    position: Tensor
    """[N] int64: for each target the index, among the T tokens, of the token that predicts it."""
    target: Tensor
    """[N] int64: for each sample the tokens of its response, then those of its observation."""
    observation: Tensor
    """[N] bool: whether the target belongs to an observation, not to a response."""
    response_index: Tensor
    """[R] int64: the indices, among the N targets, of those of responses."""
    observation_index: Tensor
    """[N - R] int64: the indices of those of observations."""
    indices: list[int]
    """Indices of the samples, in the list that the batch was cut from."""
    with_observation: bool = True
    paths: list[np.ndarray] | None = None
    """What each segment of a prefix tree sees, as indices among the T tokens; None if every
    sequence stands alone."""
    shared_tokens: int = 0
    """Tokens of the sequences that are not there, because another sequence has them."""


def collate(
    samples: Sequence[Sample],
    chosen: Sequence[Sequence[int]],
    *,
    with_observation: bool,
    device: torch.device,
    share_prefixes: bool = False,
) -> Batch:
    """Pack the chosen `sequences`, with the observations of samples with a world-model weight.

    With `share_prefixes` the batch is their prefix tree. If none are chosen, the batch has one
    token and no target.
    """
    rows = [_row_ids(samples[members[-1]], with_observation) for members in chosen]
    return _pack(
        samples,
        chosen,
        rows,
        with_observation=with_observation,
        device=device,
        share_prefixes=share_prefixes,
    )


def _pack(
    samples: Sequence[Sample],
    chosen: Sequence[Sequence[int]],
    rows: Sequence[Ids],
    *,
    with_observation: bool,
    device: torch.device,
    share_prefixes: bool,
) -> Batch:
    """As `collate`, with the token ids of each chosen sequence."""
    if not rows:
        rows = [np.zeros(1, np.int32)]
    lengths = [len(row) for row in rows]
    if share_prefixes:
        tree = prefix_tree(rows)
        input_ids = tree.input_ids
        index_of_row = tree.paths
        batch_lengths = [len(segment) for segment in tree.segments]
        paths = [segment.path for segment in tree.segments]
    else:
        input_ids = np.concatenate(rows)
        index_of_row = np.split(np.arange(len(input_ids)), np.cumsum(lengths)[:-1])
        batch_lengths = lengths
        paths = None

    positions = [np.empty(0, np.int64)]
    targets = [np.empty(0, np.int64)]
    span_lengths: list[int] = []
    is_observed: list[bool] = []
    for members, row, index in zip(chosen, rows, index_of_row, strict=False):
        for start, end, observed in _target_spans(samples, members, with_observation):
            positions.append(index[start - 1 : end - 1])
            targets.append(row[start:end])
            span_lengths.append(end - start)
            is_observed.append(observed)

    observation = np.repeat(np.array(is_observed, np.bool_), np.array(span_lengths, np.int64))
    tensors = to_device(
        [
            input_ids.astype(np.int64),
            np.concatenate(positions),
            np.concatenate(targets),
            observation,
            np.flatnonzero(~observation),
            np.flatnonzero(observation),
        ],
        device,
    )
    return Batch(
        input_ids=tensors[0],
        lengths=batch_lengths,
        position=tensors[1],
        target=tensors[2],
        observation=tensors[3],
        response_index=tensors[4],
        observation_index=tensors[5],
        indices=[i for members in chosen for i in members],
        with_observation=with_observation,
        paths=paths,
        shared_tokens=sum(lengths) - len(input_ids),
    )


def _row_ids(last: Sample, with_observation: bool) -> Ids:
    """The tokens of a sequence, by its last sample, whose prompt holds the others."""
    appended = _appended_ids(last, with_observation)
    return np.concatenate([last.prompt_ids, last.response_ids, appended])


def _target_spans(
    samples: Sequence[Sample], members: Sequence[int], with_observation: bool
) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether observed) of each target in a sequence, in the order of samples."""
    for sample in (samples[i] for i in members):
        response_start = len(sample.prompt_ids)
        response_end = response_start + len(sample.response_ids)
        yield response_start, response_end, False
        if with_observation and sample.wm_weight > 0.0:
            observation_start = response_end + len(sample.separator_ids)
            for offset, ids in sample.targets:
                start = observation_start + offset
                yield start, start + len(ids), True


def micro_batches(
    samples: Sequence[Sample],
    packing: Packing,
    *,
    with_observation: bool,
    device: torch.device,
    skip: Callable[[Sample], bool] | None = None,
) -> "MicroBatches":
    """Return this rank's batches, leaving out sequences whose samples are all skipped.

    `skip(sample)` says whether a sample needs no forward pass. If there are few samples, some
    batches are empty (`Packing.cut`). Sequences of a group share their prefixes if the packing
    allows it and it pays. With several ranks, a call of all of them, which first moves rows to the
    ranks that will compute them.
    """
    chosen: list[list[int]] = []
    for members in sequences(samples, with_observation=with_observation):
        if skip is None or not all(skip(samples[i]) for i in members):
            chosen.append(members)
    if packing.ranks is not None:
        chosen = _take_share(
            samples, chosen, packing, packing.ranks, with_observation=with_observation
        )
    rows = [_row_ids(samples[members[-1]], with_observation) for members in chosen]
    indices_of_batches, share_prefixes = _divide(samples, chosen, rows, packing)

    def make(indices: Sequence[int]) -> Batch:
        return _pack(
            samples,
            [chosen[j] for j in indices],
            [rows[j] for j in indices],
            with_observation=with_observation,
            device=device,
            share_prefixes=share_prefixes,
        )

    return MicroBatches(indices_of_batches, make)


class MicroBatches:
    """Batches, each made when a loop asks for it.

    Work on a GPU is launched, not waited for. So in a loop, the host makes batch i + 1 and starts
    its copy while the device computes batch i, as long as the loop reads nothing from the device.
    """

    def __init__(
        self, indices_of_batches: list[list[int]], make: Callable[[Sequence[int]], Batch]
    ) -> None:
        self._indices_of_batches = indices_of_batches
        self._make = make

    def __len__(self) -> int:
        return len(self._indices_of_batches)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._make, self._indices_of_batches)


def _take_share(
    samples: Sequence[Sample],
    chosen: Sequence[list[int]],
    packing: Packing,
    ranks: RankGroup,
    *,
    with_observation: bool,
) -> list[list[int]]:
    """Move rows so that the work on the chosen sequences is balanced. Return those of this rank."""
    tokens_of: dict[int, int] = {}  # by the first sample of a sequence
    for members in chosen:
        last = samples[members[-1]]
        tokens_of[members[0]] = _row_length(last, with_observation)

    moving: list[list[int]] = []
    chains: list[Chain] = []
    for members in chains_of(samples):
        lengths = [tokens_of[i] for i in members if i in tokens_of]
        if lengths:
            first = samples[members[0]]
            chain = Chain(
                holder=first.holder,
                group=first.group,
                order=first.prefix_order,
                tokens=sum(lengths),
                shared=min(first.shared_prefix, sum(lengths)),
                work=sum(n + packing.quadratic * n**2 for n in lengths),
            )
            moving.append(members)
            chains.append(chain)

    destinations = place(
        chains,
        world_size=ranks.world_size,
        share_prefixes=packing.may_share(chains),
        budget=packing.budget,
    )
    move_chains(samples, moving, destinations, ranks)
    return [members for members in chosen if samples[members[0]].holder == ranks.rank]


def _row_length(last: Sample, with_observation: bool) -> int:
    """Return the number of tokens of a sequence, by its last sample."""
    length = len(last.prompt_ids) + len(last.response_ids)
    if with_observation and last.wm_weight > 0.0:
        length += len(last.separator_ids) + len(last.observation_ids)
    return length


def _divide(
    samples: Sequence[Sample],
    chosen: Sequence[Sequence[int]],
    rows: Sequence[Ids],
    packing: Packing,
) -> tuple[list[list[int]], bool]:
    """Return (indices of the sequences in each batch, whether sequences share their prefixes)."""
    lengths = [len(row) for row in rows]
    if packing.share_prefixes != "never":
        groups = [samples[members[0]].group for members in chosen]
        row_clusters = clusters(rows, groups, budget=packing.budget)
        if packing.sharing_pays(row_clusters, lengths):
            return packing.cut_clusters(row_clusters), True
    return packing.cut(lengths), False
