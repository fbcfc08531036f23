"""Sequences -> micro-batches: packed tokens on the device, each made when it is asked for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paw.algo.device import to_device
from paw.algo.packing import Packing, RankGroup
from paw.algo.prefixes import clusters, prefix_tree
from paw.algo.rows import move_chains
from paw.algo.sequences import row_ids, sequences, target_spans
from paw.algo.shared_samples import SharedSamples
from paw.algo.shares import share_sequences
from paw.types import Ids, Sample


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
    token_rows = [row_ids(samples[members[-1]], with_observation) for members in chosen]
    return _pack(
        samples,
        chosen,
        token_rows,
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
    layout = _tree_layout(rows) if share_prefixes else _row_layout(rows)

    positions = [np.empty(0, np.int64)]
    targets = [np.empty(0, np.int64)]
    span_lengths: list[int] = []
    is_observed: list[bool] = []
    for members, token_row, index in zip(chosen, rows, layout.index_of_row, strict=False):
        for target_start, target_end, observed in target_spans(samples, members, with_observation):
            positions.append(index[target_start - 1 : target_end - 1])
            targets.append(token_row[target_start:target_end])
            span_lengths.append(target_end - target_start)
            is_observed.append(observed)

    observation = np.repeat(np.array(is_observed, np.bool_), np.array(span_lengths, np.int64))
    tensors = to_device(
        [
            layout.input_ids.astype(np.int64),
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
        lengths=layout.lengths,
        position=tensors[1],
        target=tensors[2],
        observation=tensors[3],
        response_index=tensors[4],
        observation_index=tensors[5],
        indices=[i for members in chosen for i in members],
        with_observation=with_observation,
        paths=layout.paths,
        shared_tokens=sum(map(len, rows)) - len(layout.input_ids),
    )


class _Layout(NamedTuple):
    """Where the tokens of the sequences are in a batch. `Batch` has the other fields."""

    input_ids: Ids
    index_of_row: Sequence[np.ndarray]
    """For each sequence, the indices of its tokens among those of the batch."""
    lengths: list[int]
    paths: list[np.ndarray] | None


def _row_layout(rows: Sequence[Ids]) -> _Layout:
    """One sequence after another."""
    lengths = [len(token_row) for token_row in rows]
    input_ids = np.concatenate(rows)
    index_of_row = np.split(np.arange(len(input_ids)), np.cumsum(lengths)[:-1])
    return _Layout(input_ids, index_of_row, lengths, paths=None)


def _tree_layout(rows: Sequence[Ids]) -> _Layout:
    """The prefix tree of the sequences."""
    tree = prefix_tree(rows)
    return _Layout(
        tree.input_ids,
        tree.paths,
        lengths=[len(segment) for segment in tree.segments],
        paths=[segment.path for segment in tree.segments],
    )


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
    token_rows = [row_ids(samples[members[-1]], with_observation) for members in chosen]
    indices_of_batches, share_prefixes = _divide(samples, chosen, token_rows, packing)

    def make(indices: Sequence[int]) -> Batch:
        return _pack(
            samples,
            [chosen[j] for j in indices],
            [token_rows[j] for j in indices],
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
    """Move rows to balance the work on the sequences. Return the sequences of this rank."""
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


def _divide(
    samples: Sequence[Sample],
    chosen: Sequence[Sequence[int]],
    rows: Sequence[Ids],
    packing: Packing,
) -> tuple[list[list[int]], bool]:
    """Return (indices of the sequences in each batch, whether sequences share their prefixes)."""
    lengths = [len(token_row) for token_row in rows]
    if packing.share_prefixes != "never":
        groups = [samples[members[0]].group for members in chosen]
        row_clusters = clusters(rows, groups, budget=packing.budget)
        if packing.sharing_pays(row_clusters, lengths):
            return packing.cut_clusters(row_clusters), True
    return packing.cut(lengths), False
