"""What ranks exchange about the samples of an update: numbers of all, and rows of tokens.

Each row of tokens is on one rank, its holder. Numbers of a turn alone (its return, the lengths of
its rows) are gathered as columns: `share_scalars`, `gather_numbers`. Rows move straight to the rank
whose micro-batch needs them: `move_chains`. They travel as int32 and float32, in which engines and
models give them.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paw.algo.packing import RankGroup
from paw.algo.prefixes import common_prefix, sorted_order
from paw.algo.shared_samples import SharedSamples, held
from paw.config.traits import Anchors
from paw.types import Sample

IDS = tuple(name for name in Sample.IDS if name not in ("prompt_ids", "response_ids"))
"""Rows of integers that move, besides the prompt and the response."""
VALUES = Sample.VALUES
"""Rows of real numbers that move."""
DIGEST_BYTES = 16


def gather_numbers(samples: Sequence[Sample], own: Sequence[float], ranks: RankGroup) -> np.ndarray:
    """Return a number of each sample, float64 [n], given those of the samples that this rank holds,
    in order. A call of all ranks."""
    numbers = np.asarray(own, np.float64)
    if not isinstance(samples, SharedSamples):
        return numbers
    return samples.columns.in_order(ranks.gather_array(numbers))


def compute_by_group(
    samples: Sequence[Sample],
    compute: Callable[[Sequence[Sample]], Sequence[float]],
    ranks: RankGroup,
) -> np.ndarray:
    """Return `compute(samples)`, float64 [n]. Each rank computes the numbers of some groups.

    `compute` returns a number of each sample, which depends on the samples of its group alone.
    Samples are ordered by group. A call of all ranks. Errors as in `Ranks.run_on_all`.
    """
    if not isinstance(samples, SharedSamples):
        return np.asarray(compute(samples), np.float64)
    group = samples.column("group")
    starts = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    # Ranks play groups in this order, so they compute mostly those whose turns they hold.
    rank_of_group = starts * ranks.world_size // len(samples)
    first_group, end_group = np.searchsorted(rank_of_group, [ranks.rank, ranks.rank + 1])
    bounds = np.append(starts, len(samples))
    own_samples = samples[bounds[first_group] : bounds[end_group]]

    numbers = ranks.run_on_all(lambda: compute(own_samples) if own_samples else [])
    return np.concatenate(ranks.gather_array(np.asarray(numbers, np.float64)))


def gather_digests(samples: Sequence[Sample], ranks: RankGroup) -> list[bytes]:
    """Return for each sample a digest of its prompt, response and observation."""
    digests = [_digest(samples[i]) for i in held(samples, ranks)]
    if not isinstance(samples, SharedSamples):
        return digests
    all_digests = _gather_digests(samples, digests, ranks).tobytes()
    return [
        all_digests[start : start + DIGEST_BYTES]
        for start in range(0, len(all_digests), DIGEST_BYTES)
    ]


def _digest(sample: Sample) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for token_ids in (sample.prompt_ids, sample.response_ids, sample.observation_ids):
        digest.update(len(token_ids).to_bytes(8, "little"))
        digest.update(_array(token_ids, np.int32).tobytes())
    return digest.digest()


def _gather_digests(samples: SharedSamples, own: Sequence[bytes], ranks: RankGroup) -> np.ndarray:
    """As `gather_numbers`, for digests: [n, DIGEST_BYTES] uint8."""
    joined = np.frombuffer(bytearray(b"".join(own)), np.uint8)
    rank_digests = [
        rank_bytes.reshape(-1, DIGEST_BYTES) for rank_bytes in ranks.gather_array(joined)
    ]
    return samples.columns.in_order(rank_digests)


# --- after the rollout
# ------------------------------------------------------------------------------------------------


def share_scalars(
    samples: SharedSamples, ranks: RankGroup, *, anchors: Anchors, share_prefixes: bool
) -> None:
    """Fill the columns, from the samples that each rank holds. A call of all ranks.

    With `share_prefixes`, also fills `shared_prefix` and `prefix_order`.
    """
    own_samples = [samples[i] for i in samples.held()]
    servers = _number_servers(own_samples, ranks)
    integer_parts: list[np.ndarray] = []
    for rank_numbers in ranks.gather_array(
        _integers(own_samples, servers, share_prefixes).reshape(-1)
    ):
        integer_parts.append(rank_numbers.reshape(-1, INTEGERS))
    reals = [(sample.reward, sample.penalty, sample.episode_return) for sample in own_samples]
    real_parts: list[np.ndarray] = []
    for rank_numbers in ranks.gather_array(np.array(reals, np.float64).reshape(-1)):
        real_parts.append(rank_numbers.reshape(-1, REALS))

    columns = samples.columns
    columns.servers = list(servers)
    integers = columns.in_order(integer_parts)
    flags = integers[:, 4]
    columns.prompt_length = integers[:, 0].copy()
    columns.response_length = integers[:, 1].copy()
    columns.separator_length = integers[:, 2].copy()
    columns.observation_length = integers[:, 3].copy()
    columns.continues = flags & CONTINUES != 0
    columns.continues_target = flags & CONTINUES_TARGET != 0
    columns.has_entropy = flags & HAS_ENTROPY != 0
    columns.server = integers[:, 5].copy()
    columns.shared_prefix = integers[:, 6].copy()
    # The chains of one rank come after those of the rank before it.
    counts = [len(rank_numbers) for rank_numbers in integer_parts]
    samples_before = np.cumsum([0, *counts[:-1]], dtype=np.int32)
    columns.prefix_order = integers[:, 7] + samples_before[columns.holder]

    reals_in_order = columns.in_order(real_parts)
    columns.reward = reals_in_order[:, 0].copy()
    columns.penalty = reals_in_order[:, 1].copy()
    columns.episode_return = reals_in_order[:, 2].copy()
    _share_anchors(samples, own_samples, ranks, anchors)


INTEGERS = 8
"""Numbers of a sample in `_integers`."""
REALS = 3
CONTINUES = 1
CONTINUES_TARGET = 2
HAS_ENTROPY = 4


def _integers(own: Sequence[Sample], servers: dict[str, int], share_prefixes: bool) -> np.ndarray:
    """Return [n, INTEGERS] int32: what `share_scalars` reads."""
    continues_target = _compare_with_previous(own)
    prefixes = [(0, 0)] * len(own)
    if share_prefixes:
        prefixes = _compare_prefixes(own)

    rows: list[tuple[int, ...]] = []
    for i, sample in enumerate(own):
        flags = CONTINUES * sample.continues
        flags += CONTINUES_TARGET * continues_target[i]
        flags += HAS_ENTROPY * (sample.sampled_entropy is not None)
        rows.append(
            (
                len(sample.prompt_ids),
                len(sample.response_ids),
                len(sample.separator_ids),
                len(sample.observation_ids),
                flags,
                servers[sample.server],
                *prefixes[i],
            )
        )
    return np.array(rows, np.int32).reshape(-1, INTEGERS)


def _compare_with_previous(own: Sequence[Sample]) -> list[bool]:
    """Return `Columns.continues_target` of samples in order."""
    result: list[bool] = []
    for i, sample in enumerate(own):
        continues_target = False
        if sample.continues:
            previous = own[i - 1]
            observation_start = len(previous.prompt_ids) + len(previous.response_ids)
            target = [*previous.separator_ids, *previous.observation_ids]
            following = sample.prompt_ids[observation_start : observation_start + len(target)]
            continues_target = np.array_equal(following, target)
        result.append(continues_target)
    return result


def _compare_prefixes(own: Sequence[Sample]) -> list[tuple[int, int]]:
    """Return (shared_prefix, prefix_order) of samples in order; (0, 0) within a chain."""
    chains_of_group: dict[int, list[list[int]]] = {}
    for chain in _chains(own):
        chains_of_group.setdefault(own[chain[0]].group, []).append(chain)

    result = [(0, 0)] * len(own)
    order = 0
    for members in chains_of_group.values():
        chain_rows = [_chain_ids(own[chain[-1]]).astype(np.int64) for chain in members]
        previous = np.empty(0, np.int64)
        for j in sorted_order(chain_rows):
            result[members[j][0]] = (common_prefix(chain_rows[j], previous), order)
            order += 1
            previous = chain_rows[j]
    return result


def _chains(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of samples that continue one another, in order."""
    members_of: list[list[int]] = []
    for i, sample in enumerate(samples):
        previous = samples[i - 1]
        is_next_turn = (sample.trajectory, sample.step) == (previous.trajectory, previous.step + 1)
        if i > 0 and sample.continues and is_next_turn:
            members_of[-1].append(i)
        else:
            members_of.append([i])
    return members_of


def _number_servers(own: Sequence[Sample], ranks: RankGroup) -> dict[str, int]:
    """Return a number for each server that has sampled for any rank."""
    names: set[str] = set()
    for rank_names in ranks.gather(sorted({sample.server for sample in own}), list[str]):
        names.update(rank_names)
    return {name: number for number, name in enumerate(sorted(names))}


def _share_anchors(
    samples: SharedSamples, own: Sequence[Sample], ranks: RankGroup, anchors: Anchors
) -> None:
    """Fill the anchors, or replace all by digests if only their equality matters."""
    if anchors == "equality":
        digests = [_text_digest(sample.anchor) for sample in own]
        samples.columns.anchors = _gather_digests(samples, digests, ranks)
        for sample, digest in zip(own, digests, strict=True):
            sample.anchor = digest.hex()
    elif anchors == "text":
        anchor_texts = ranks.gather([sample.anchor for sample in own], list[str])
        texts_of_rank = [iter(rank_texts) for rank_texts in anchor_texts]
        holders = samples.columns.holder.tolist()
        samples.columns.anchors = [next(texts_of_rank[holder]) for holder in holders]


def _text_digest(text: str) -> bytes:
    text_bytes = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text_bytes, digest_size=DIGEST_BYTES).digest()


# --- between passes
# ------------------------------------------------------------------------------------------------


def move_chains(
    samples: SharedSamples,
    starts: np.ndarray,
    ends: np.ndarray,
    destinations: np.ndarray,
    ranks: RankGroup,
) -> None:
    """Move the rows of each chain to the rank that is its destination. A call of all ranks.

    Chain c is samples [starts[c], ends[c]): turns that continue one another. Its tokens travel
    once: the prompts of its turns become views of the last one.
    """
    holders = samples.column("holder")[starts]
    is_moving = holders != destinations
    outgoing = [_Parcel() for _ in range(ranks.world_size)]
    for c in np.flatnonzero(is_moving & (holders == ranks.rank)).tolist():
        members = [samples.take_away(i) for i in range(starts[c], ends[c])]
        outgoing[destinations[c]].pack(members)

    sizes = (ends - starts)[is_moving]
    ends_of_moved = np.cumsum(sizes)
    offsets = np.repeat(starts[is_moving] - (ends_of_moved - sizes), sizes)
    moved = offsets + np.arange(len(offsets))
    samples.set_holder(moved, np.repeat(destinations[is_moving], sizes))

    parcels = _exchange(outgoing, ranks)
    for c in np.flatnonzero(is_moving & (destinations == ranks.rank)).tolist():
        members = [samples.receive(i) for i in range(starts[c], ends[c])]
        parcels[holders[c]].unpack(members)


def with_all_rows(samples: Sequence[Sample], ranks: RankGroup) -> list[Sample]:
    """Return copies of the samples with the rows of all ranks. A call of all ranks.

    It takes the memory of the whole update on every rank.
    """
    copies = [replace(sample) for sample in samples]
    if not isinstance(samples, SharedSamples):
        return copies
    parcel = _Parcel()
    for i in samples.held():
        parcel.pack([samples[i]])
    gathered = [ranks.gather_array(array) for array in parcel.arrays()]
    parcels = [_Parcel(*parcel_fields) for parcel_fields in zip(*gathered, strict=True)]
    for sample, holder in zip(copies, samples.column("holder").tolist(), strict=True):
        if holder != ranks.rank:
            parcels[holder].unpack([sample])
    return copies


class _Parcel:
    """Rows on their way from one rank to another."""

    def __init__(
        self, lengths: np.ndarray | None = None, ids: Any = None, values: Any = None
    ) -> None:
        self.lengths: list[int] = [] if lengths is None else lengths.tolist()
        """Of each row, in order; -1 for None."""
        self.ids: list[np.ndarray] = [] if ids is None else [ids]
        self.values: list[np.ndarray] = [] if values is None else [values]
        self._row = 0
        self._id = 0
        self._value = 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (lengths, ids, values), flat."""
        token_ids = np.concatenate(self.ids) if self.ids else np.empty(0, np.int32)
        values = np.concatenate(self.values) if self.values else np.empty(0, np.float32)
        return np.array(self.lengths, np.int32), token_ids, values

    def pack(self, chain: Sequence[Sample]) -> None:
        self._add(self.ids, _chain_ids(chain[-1]))
        for sample in chain:
            self._add(self.ids, [number for span in sample.spans for number in span])
            for name in IDS:
                self._add(self.ids, getattr(sample, name))
            for name in VALUES:
                self._add(self.values, getattr(sample, name))

    def unpack(self, chain: Sequence[Sample]) -> None:
        """Fill the rows of a chain, which must be the next one that was packed."""
        tokens = self._next_ids()
        for sample in chain:
            response_start = len(sample.prompt_ids)
            sample.prompt_ids = tokens[:response_start]
            sample.response_ids = tokens[response_start : response_start + len(sample.response_ids)]
            bounds = self._next_ids().tolist()
            sample.spans = list(zip(bounds[::2], bounds[1::2], strict=True))
            for name in IDS:
                setattr(sample, name, self._next_ids())
            for name in VALUES:
                setattr(sample, name, self._next_values())

    def _add(self, rows: list[np.ndarray], row: Any) -> None:
        if row is None:
            self.lengths.append(-1)
            return
        dtype = np.int32 if rows is self.ids else np.float32
        rows.append(_array(row, dtype))
        self.lengths.append(len(row))

    def _next_ids(self) -> Any:
        length = self.lengths[self._row]
        self._row += 1
        self._id += length
        return self.ids[0][self._id - length : self._id]

    def _next_values(self) -> Any:
        length = self.lengths[self._row]
        self._row += 1
        if length < 0:
            return None
        self._value += length
        return self.values[0][self._value - length : self._value]


def _exchange(outgoing: Sequence[_Parcel], ranks: RankGroup) -> list[_Parcel]:
    """Send a parcel to each rank. Returns the parcels from each."""
    columns = zip(*(parcel.arrays() for parcel in outgoing), strict=True)
    received = [ranks.exchange_arrays(column_parts) for column_parts in columns]
    return [_Parcel(*column_parts) for column_parts in zip(*received, strict=True)]


def _chain_ids(last: Sample) -> np.ndarray:
    """[n] int32: the tokens of a chain, by its last sample, without observations."""
    rows = (_array(last.prompt_ids, np.int32), _array(last.response_ids, np.int32))
    return np.concatenate(rows)


def _array(row: Any, dtype: Any) -> np.ndarray:
    return np.asarray(row, dtype)
