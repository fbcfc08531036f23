"""Which rank computes which sequences of a pass."""

from dataclasses import dataclass

import numpy as np

from paw.algo.packing import Packing
from paw.algo.placement import Chains, place
from paw.algo.shared_samples import SharedSamples


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The rank of each of the S sequences of a pass, and of each of the C chains that have them."""

    starts: np.ndarray
    """[S] int: the index of a sequence's first sample."""
    ends: np.ndarray
    """[S] int: the index after that of its last sample."""
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

    moving, moving_index = np.unique(chain_of_sequence, return_inverse=True)
    moving_starts = chain_starts[moving]
    chains = _chains(samples, moving_starts, moving_index, lengths, quadratic=packing.quadratic)
    chain_ranks = place(
        chains,
        world_size=world_size,
        share_prefixes=packing.may_share(chains),
        budget=packing.budget,
    )
    return Shares(
        starts=starts,
        ends=ends,
        ranks=chain_ranks[moving_index],
        chain_starts=moving_starts,
        chain_ends=np.append(chain_starts[1:], len(samples))[moving],
        chain_ranks=chain_ranks,
    )


def _chains(
    samples: SharedSamples,
    chain_starts: np.ndarray,
    chain_of_sequence: np.ndarray,
    lengths: np.ndarray,
    *,
    quadratic: float,
) -> Chains:
    """Return the chains that begin at these samples, for `place`.

    `chain_of_sequence` indexes `chain_starts`. `lengths` are those of the sequences, in tokens.
    """
    chain_count = len(chain_starts)
    tokens = np.bincount(chain_of_sequence, lengths, minlength=chain_count).astype(np.int64)
    work = lengths + quadratic * lengths.astype(np.float64) ** 2
    return Chains(
        holder=samples.column("holder")[chain_starts],
        group=samples.column("group")[chain_starts],
        order=samples.column("prefix_order")[chain_starts],
        tokens=tokens,
        shared=np.minimum(samples.column("shared_prefix")[chain_starts], tokens),
        work=np.bincount(chain_of_sequence, work, minlength=chain_count),
    )


def _continues_sequence(
    samples: SharedSamples, continues: np.ndarray, with_observation: bool
) -> np.ndarray:
    """[n] bool: as `sequences._continues`, given which samples continue the chain before them."""
    if not with_observation:
        return continues
    previous_has_no_target = np.ones(len(samples), np.bool_)
    previous_has_no_target[1:] = samples.column("wm_weight")[:-1] == 0.0
    return continues & (previous_has_no_target | samples.column("continues_target"))


def _row_lengths(samples: SharedSamples, last: np.ndarray, with_observation: bool) -> np.ndarray:
    """Return the number of tokens of each sequence, int64, by the indices of their last samples."""
    lengths = (samples.column("prompt_length") + samples.column("response_length"))[last]
    if with_observation:
        appended = samples.column("separator_length") + samples.column("observation_length")
        has_target = samples.column("wm_weight")[last] > 0.0
        lengths = lengths + np.where(has_target, appended[last], 0)
    return lengths.astype(np.int64)
