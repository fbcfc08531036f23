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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paw.algo.device import to_device
from paw.algo.packing import Packing, RankGroup
from paw.algo.placement import Chains, place
from paw.algo.prefixes import clusters, prefix_tree
from paw.algo.rows import move_chains
from paw.algo.shared_samples import Columns, SharedSamples, assign, column
from paw.types import AwayTrajectory, Group, Ids, Sample, Trajectory, Turn, as_ids, no_ids


def to_samples(
    groups: list[Group],
    *,
    separator_ids: list[int],
    encode_observation: Callable[[str], Ids] | None,
    invalid_penalty: float | Mapping[str, float],
    rank: int = 0,
    share: Callable[[SharedSamples], None] | None = None,
) -> Sequence[Sample]:
    """Return the samples of an update, ordered by group, trajectory and step: a list, on one rank.

    With several ranks, this one is `rank`, and `share` fills the numbers of the turns that other
    ranks have played (`algo.rows.share_scalars`).

    Token ids and log-probs are the engine's own, never re-encoded. `encode_observation` turns the
    raw next observation into target ids. If it is None (world model off), or if an observation is
    empty, samples have no target. `invalid_penalty` may be that of each environment, by
    `Task.env`.
    """
    template_separator = as_ids(separator_ids)
    here: dict[int, Sample] = {}
    group_of_trajectory: list[int] = []
    holder_of_trajectory: list[int] = []
    turn_counts: list[int] = []
    first_index = 0
    for group_index, group in enumerate(groups):
        group_penalty = invalid_penalty
        if isinstance(group_penalty, Mapping):
            group_penalty = group_penalty[group.task.env]
        for trajectory in group.trajectories:
            holder = rank
            if isinstance(trajectory, AwayTrajectory):
                holder = trajectory.rank
            else:
                own_samples = _trajectory_samples(
                    trajectory,
                    group=group_index,
                    index=len(turn_counts),
                    template_separator=template_separator,
                    encode_observation=encode_observation,
                    invalid_penalty=group_penalty,
                )
                here.update(enumerate(own_samples, first_index))
            group_of_trajectory.append(group_index)
            holder_of_trajectory.append(holder)
            turn_counts.append(len(trajectory.turns))
            first_index += len(trajectory.turns)

    samples: Sequence[Sample] = list(here.values())
    if share:
        counts = np.array(turn_counts, np.int64)
        firsts = np.cumsum(counts) - counts
        columns = Columns.of_turns(
            group=np.repeat(np.array(group_of_trajectory, np.int32), counts),
            trajectory=np.repeat(np.arange(len(counts)), counts),
            step=np.arange(first_index) - np.repeat(firsts, counts),
            holder=np.repeat(np.array(holder_of_trajectory, np.int32), counts),
        )
        samples = SharedSamples(columns, here, rank)
        share(samples)
    _fill_token_weights(samples, n_groups=len(groups))
    return samples


def _trajectory_samples(
    trajectory: Trajectory,
    *,
    group: int,
    index: int,
    template_separator: Ids,
    encode_observation: Callable[[str], Ids] | None,
    invalid_penalty: float,
) -> list[Sample]:
    """Return the samples of the trajectory with that index, of a group with that index."""
    episode_return = trajectory.episode_return
    samples: list[Sample] = []
    previous: Turn | None = None
    for step, turn in enumerate(trajectory.turns):
        penalty = 0.0 if turn.outcome.valid else invalid_penalty
        target = _target_ids(turn, encode_observation)
        separator = turn.separator_ids
        if separator is None:
            separator = template_separator
        versions = turn.versions
        if versions is None:
            versions = np.full(len(turn.response_ids), turn.version, np.int32)
        samples.append(
            Sample(
                group=group,
                trajectory=index,
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
            )
        )
        previous = turn
    return samples


def _begins_with(turn: Turn, previous: Turn) -> bool:
    """Whether a turn's prompt begins with the prompt and response of the previous one."""
    response_start = len(previous.prompt_ids)
    response_end = response_start + len(previous.response_ids)
    prompt_ids = turn.prompt_ids
    return np.array_equal(prompt_ids[:response_start], previous.prompt_ids) and np.array_equal(
        prompt_ids[response_start:response_end], previous.response_ids
    )


def _fill_token_weights(samples: Sequence[Sample], *, n_groups: int) -> None:
    """Fill the weight of a response token: a mean over each group's tokens, then over groups."""
    group = column(samples, "group").astype(np.int64)
    group_tokens = np.bincount(group, column(samples, "response_length"))
    assign(samples, "token_weight", 1.0 / (n_groups * group_tokens[group]))


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
    appended = _appended_ids(previous, with_observation)
    start = len(previous.prompt_ids) + len(previous.response_ids)
    return np.array_equal(sample.prompt_ids[start : start + len(appended)], appended)


def _appended_ids(sample: Sample, with_observation: bool) -> Ids:
    """Return the separator and observation to append after a response, if it is a target."""
    if with_observation and sample.wm_weight > 0.0:
        return np.concatenate([sample.separator_ids, sample.observation_ids])
    return no_ids()


def minibatches(samples: Sequence[Sample], *, size: int, seed: int) -> list[Sequence[Sample]]:
    """Cut a seeded shuffle of the update's sequences into mini-batches of about `size` samples.

    n samples make round(n / size) mini-batches, but at least one. Sequences are not split.
    """
    if isinstance(samples, SharedSamples):
        starts = samples.chain_starts()
    else:
        firsts = [members[0] for members in sequences(samples, with_observation=False)]
        starts = np.array(firsts, np.int64)
    shuffled = list(range(len(starts)))
    random.Random(seed).shuffle(shuffled)
    sizes = np.diff(np.append(starts, len(samples)))[shuffled]
    samples_before = np.cumsum(sizes) - sizes
    indices = np.repeat(starts[shuffled] - samples_before, sizes) + np.arange(len(samples))

    # A sequence belongs to the mini-batch in which its first sample is.
    count = max(1, round(len(samples) / size))
    cuts = [len(samples) * i // count for i in range(1, count)]
    first_sequences = np.searchsorted(samples_before, [0, *cuts])
    bounds = np.append(samples_before, len(samples))[[*first_sequences, len(shuffled)]].tolist()
    parts: list[Sequence[Sample]] = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        if isinstance(samples, SharedSamples):
            parts.append(samples.subset(indices[start:end]))
        else:
            parts.append([samples[i] for i in indices[start:end]])
    return parts


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
    skip_without_loss: bool = False,
) -> "MicroBatches":
    """Return this rank's batches.

    With `skip_without_loss`, leaves out sequences whose samples have neither an advantage nor a
    world-model weight. If there are few samples, some batches are empty (`Packing.cut`). Sequences
    of a group share their prefixes if the packing allows it and it pays. With several ranks, a call
    of all of them, which first moves rows to the ranks that will compute them.
    """
    if packing.ranks is not None:
        assert isinstance(samples, SharedSamples), "several ranks share SharedSamples"
        chosen = _take_share(
            samples,
            packing,
            packing.ranks,
            with_observation=with_observation,
            skip_without_loss=skip_without_loss,
        )
    else:
        chosen = sequences(samples, with_observation=with_observation)
        if skip_without_loss:
            chosen = [members for members in chosen if any(_has_loss(samples[i]) for i in members)]
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


def _has_loss(sample: Sample) -> bool:
    return sample.has_advantage or sample.wm_weight != 0.0


def _take_share(
    samples: SharedSamples,
    packing: Packing,
    ranks: RankGroup,
    *,
    with_observation: bool,
    skip_without_loss: bool,
) -> list[list[int]]:
    """Move rows so that the work on the sequences is balanced. Return the sequences of this rank."""
    shares = share_sequences(
        samples,
        packing,
        ranks.world_size,
        with_observation=with_observation,
        skip_without_loss=skip_without_loss,
    )
    move_chains(samples, shares.chain_starts, shares.chain_ends, shares.chain_ranks, ranks)
    is_own = shares.ranks == ranks.rank
    bounds = zip(shares.starts[is_own].tolist(), shares.ends[is_own].tolist(), strict=True)
    return [list(range(start, end)) for start, end in bounds]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Which ranks compute the S sequences of a pass, and so hold the C chains that they are of."""

    starts: np.ndarray
    """[S] int: the index of a sequence's first sample. The next field is that after its last."""
    ends: np.ndarray
    ranks: np.ndarray
    """[S] int: the rank of each sequence."""
    chain_starts: np.ndarray
    """[C] int, as `starts`. A chain moves as a whole, even if a pass needs only a part of it."""
    chain_ends: np.ndarray
    chain_ranks: np.ndarray


def share_sequences(
    samples: SharedSamples,
    packing: Packing,
    world_size: int,
    *,
    with_observation: bool,
    skip_without_loss: bool,
) -> Shares:
    """Balance the work on all sequences over the ranks. Every rank computes the same answer.

    So this goes through columns: nothing is done for each sample, except in numpy and in `place`.
    """
    continues = samples.continues_previous()
    chain_starts = np.flatnonzero(~continues)
    starts = np.flatnonzero(~_continues_sequence(samples, continues, with_observation))
    ends = np.append(starts[1:], len(samples))
    lengths = _row_lengths(samples, ends - 1, with_observation)
    chain_of_sequence = np.cumsum(~continues)[starts] - 1
    if skip_without_loss:
        has_loss = (samples.column("advantage") != 0.0) | (samples.column("wm_weight") != 0.0)
        is_needed = np.logical_or.reduceat(has_loss, starts)
        starts = starts[is_needed]
        ends = ends[is_needed]
        lengths = lengths[is_needed]
        chain_of_sequence = chain_of_sequence[is_needed]

    moving, index = np.unique(chain_of_sequence, return_inverse=True)
    moving_starts = chain_starts[moving]
    tokens = np.bincount(index, lengths, minlength=len(moving)).astype(np.int64)
    work = lengths + packing.quadratic * lengths.astype(np.float64) ** 2
    chains = Chains(
        holder=samples.column("holder")[moving_starts],
        group=samples.column("group")[moving_starts],
        order=samples.column("prefix_order")[moving_starts],
        tokens=tokens,
        shared=np.minimum(samples.column("shared_prefix")[moving_starts], tokens),
        work=np.bincount(index, work, minlength=len(moving)),
    )
    chain_ranks = place(
        chains,
        world_size=world_size,
        share_prefixes=packing.may_share(chains),
        budget=packing.budget,
    )
    return Shares(
        starts=starts,
        ends=ends,
        ranks=chain_ranks[index],
        chain_starts=moving_starts,
        chain_ends=np.append(chain_starts[1:], len(samples))[moving],
        chain_ranks=chain_ranks,
    )


def _continues_sequence(
    samples: SharedSamples, continues: np.ndarray, with_observation: bool
) -> np.ndarray:
    """[n] bool: as `_continues`, given which samples continue the chain before them."""
    if not with_observation:
        return continues
    is_plain = np.ones(
        len(samples), np.bool_
    )  # whether the previous turn has no target to be found
    is_plain[1:] = samples.column("wm_weight")[:-1] == 0.0
    return continues & (is_plain | samples.column("continues_target"))


def _row_lengths(samples: SharedSamples, last: np.ndarray, with_observation: bool) -> np.ndarray:
    """Return the number of tokens of each sequence, int64, by the indices of their last samples."""
    lengths = (samples.column("prompt_length") + samples.column("response_length"))[last]
    if with_observation:
        appended = samples.column("separator_length") + samples.column("observation_length")
        has_target = samples.column("wm_weight")[last] > 0.0
        lengths = lengths + np.where(has_target, appended[last], 0)
    return lengths.astype(np.int64)


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
