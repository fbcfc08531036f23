"""The samples of an update on several ranks.

Every rank has all samples, but each row of tokens is on one rank, its holder. Numbers of a turn
alone (its return, the lengths of its rows) are gathered: `share_scalars`, `gather_numbers`. Rows
move straight to the rank whose micro-batch needs them: `move_chains`. They travel as int32 and
float32, in which engines and models give them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paw.algo.packing import RankGroup
from paw.algo.prefixes import common_prefix, sorted_order
from paw.away import away
from paw.config.traits import Anchors
from paw.types import Sample

IDS = tuple(name for name in Sample.IDS if name not in ("prompt_ids", "response_ids"))
"""Rows of integers that move, besides the prompt and the response."""
VALUES = Sample.VALUES
"""Rows of real numbers that move."""
DIGEST_BYTES = 16


def held(samples: Sequence[Sample], ranks: RankGroup) -> list[int]:
    """Return the indices of the samples whose tokens this rank holds."""
    return [i for i, sample in enumerate(samples) if sample.holder == ranks.rank]


def gather_numbers(
    samples: Sequence[Sample], own: Sequence[float], ranks: RankGroup
) -> list[float]:
    """Return a number of each sample, given those of the samples that this rank holds, in order."""
    parts = [iter(part.tolist()) for part in ranks.gather_array(np.asarray(own, np.float64))]
    return [next(parts[sample.holder]) for sample in samples]


def gather_digests(samples: Sequence[Sample], ranks: RankGroup) -> list[bytes]:
    """Return for each sample a digest of its prompt, response and observation."""
    digests = [_digest(samples[i]) for i in held(samples, ranks)]
    return _gather_bytes(samples, digests, ranks)


def _digest(sample: Sample) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for row in (sample.prompt_ids, sample.response_ids, sample.observation_ids):
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(_array(row, np.int32).tobytes())
    return digest.digest()


def _gather_bytes(samples: Sequence[Sample], own: Sequence[bytes], ranks: RankGroup) -> list[bytes]:
    """As `gather_numbers`, for DIGEST_BYTES of each sample."""
    joined = np.array(bytearray(b"".join(own)), np.uint8)
    parts: list[Iterator[bytes]] = []
    for part in ranks.gather_array(joined):
        data = part.tobytes()
        starts = range(0, len(data), DIGEST_BYTES)
        parts.append(iter([data[start : start + DIGEST_BYTES] for start in starts]))
    return [next(parts[sample.holder]) for sample in samples]


# --- after the rollout
# ------------------------------------------------------------------------------------------------


def share_scalars(
    samples: Sequence[Sample], ranks: RankGroup, *, anchors: Anchors, share_prefixes: bool
) -> None:
    """Fill the samples that other ranks hold, all but their rows. A call of all ranks.

    Their rows become `Away`. With `share_prefixes`, also fills `shared_prefix` and `prefix_order`.
    """
    own = [samples[i] for i in held(samples, ranks)]
    _compare_with_next(own)
    if share_prefixes:
        _compare_prefixes(own)
    servers = _number_servers(own, ranks)

    integers = [_integers(sample, servers) for sample in own]
    reals = [(sample.reward, sample.penalty, sample.episode_return) for sample in own]
    integer_parts = ranks.gather_array(np.array(integers, np.int32).reshape(-1))
    real_parts = ranks.gather_array(np.array(reals, np.float64).reshape(-1))

    rows: list[Iterator[Any]] = []
    samples_before: list[int] = [0]
    for integer_part, real_part in zip(integer_parts, real_parts, strict=True):
        integer_rows = integer_part.reshape(-1, INTEGERS).tolist()
        rows.append(zip(integer_rows, real_part.reshape(-1, REALS).tolist(), strict=True))
        samples_before.append(samples_before[-1] + len(integer_rows))
    names = list(servers)
    for sample in samples:
        integer_row, real_row = next(rows[sample.holder])
        if sample.holder != ranks.rank:
            _fill_away(sample, integer_row, real_row, names)
        # The sequences of one rank come after those of the rank before it.
        sample.prefix_order += samples_before[sample.holder]
    _share_anchors(samples, own, ranks, anchors)


INTEGERS = 8
"""Numbers of `_integers`."""
REALS = 3
CONTINUES = 1
CONTINUES_TARGET = 2
HAS_ENTROPY = 4


def _integers(sample: Sample, servers: dict[str, int]) -> tuple[int, ...]:
    """Return what `_fill_away` reads."""
    flags = CONTINUES * sample.continues
    flags += CONTINUES_TARGET * bool(sample.continues_target)
    flags += HAS_ENTROPY * (sample.sampled_entropy is not None)
    return (
        len(sample.prompt_ids),
        len(sample.response_ids),
        len(sample.separator_ids),
        len(sample.observation_ids),
        flags,
        servers[sample.server],
        sample.shared_prefix,
        sample.prefix_order,
    )


def _fill_away(
    sample: Sample, integers: Sequence[int], reals: Sequence[float], servers: Sequence[str]
) -> None:
    prompt, response, separator, observation, flags, server, shared, order = integers
    sample.continues = bool(flags & CONTINUES)
    sample.continues_target = bool(flags & CONTINUES_TARGET)
    sample.server = servers[server]
    sample.shared_prefix = shared
    sample.prefix_order = order
    sample.reward, sample.penalty, sample.episode_return = reals
    sample.score = sample.episode_return - sample.penalty

    responses = away(response, sample.holder)
    sample.prompt_ids = away(prompt, sample.holder)
    sample.response_ids = responses
    sample.separator_ids = away(separator, sample.holder)
    sample.observation_ids = away(observation, sample.holder)
    sample.versions = responses
    sample.sampled_logp = responses
    sample.sampled_entropy = responses if flags & HAS_ENTROPY else None


def _compare_with_next(own: Sequence[Sample]) -> None:
    """Fill `continues_target` of samples in order."""
    for i, sample in enumerate(own):
        sample.continues_target = False
        if sample.continues:
            previous = own[i - 1]
            start = len(previous.prompt_ids) + len(previous.response_ids)
            target = [*previous.separator_ids, *previous.observation_ids]
            following = sample.prompt_ids[start : start + len(target)]
            sample.continues_target = np.array_equal(following, target)


def _compare_prefixes(own: Sequence[Sample]) -> None:
    """Fill `shared_prefix` and `prefix_order` of samples that begin a chain."""
    chains_of_group: dict[int, list[list[int]]] = {}
    for chain in chains(own):
        chains_of_group.setdefault(own[chain[0]].group, []).append(chain)

    order = 0
    for members in chains_of_group.values():
        rows = [_chain_ids(own[chain[-1]]).astype(np.int64) for chain in members]
        previous = np.empty(0, np.int64)
        for j in sorted_order(rows):
            first = own[members[j][0]]
            first.shared_prefix = common_prefix(rows[j], previous)
            first.prefix_order = order
            order += 1
            previous = rows[j]


def _number_servers(own: Sequence[Sample], ranks: RankGroup) -> dict[str, int]:
    """Return a number for each server that has sampled for any rank."""
    names: set[str] = set()
    for rank_names in ranks.gather(sorted({sample.server for sample in own}), list[str]):
        names.update(rank_names)
    return {name: number for number, name in enumerate(sorted(names))}


def _share_anchors(
    samples: Sequence[Sample], own: Sequence[Sample], ranks: RankGroup, anchors: Anchors
) -> None:
    """Fill the anchors, or replace all by digests if only their equality matters."""
    if anchors == "equality":
        digests = [_text_digest(sample.anchor) for sample in own]
        for sample, digest in zip(samples, _gather_bytes(samples, digests, ranks), strict=True):
            sample.anchor = digest.hex()
    elif anchors == "text":
        texts = ranks.gather([sample.anchor for sample in own], list[str])
        texts_of_rank = [iter(rank_texts) for rank_texts in texts]
        for sample in samples:
            sample.anchor = next(texts_of_rank[sample.holder])


def _text_digest(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


# --- between passes
# ------------------------------------------------------------------------------------------------


def chains(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of samples that continue one another, in order. They move together."""
    members_of: list[list[int]] = []
    for i, sample in enumerate(samples):
        previous = samples[i - 1]
        is_next_turn = (sample.trajectory, sample.step) == (previous.trajectory, previous.step + 1)
        if i > 0 and sample.continues and is_next_turn:
            members_of[-1].append(i)
        else:
            members_of.append([i])
    return members_of


def move_chains(
    samples: Sequence[Sample],
    chains: Sequence[Sequence[int]],
    destinations: Sequence[int],
    ranks: RankGroup,
) -> None:
    """Move the rows of each chain to the rank that is its destination. A call of all ranks.

    The chain's tokens travel once: the prompts of its turns become views of the last one.
    """
    outgoing = [_Parcel() for _ in range(ranks.world_size)]
    incoming: list[list[Sequence[int]]] = [[] for _ in range(ranks.world_size)]
    for chain, destination in zip(chains, destinations, strict=True):
        holder = samples[chain[0]].holder
        if holder == destination:
            continue
        members = [samples[i] for i in chain]
        if holder == ranks.rank:
            outgoing[destination].pack(members)
        elif destination == ranks.rank:
            incoming[holder].append(chain)
        for sample in members:
            sample.holder = destination
            if holder == ranks.rank:
                _send_away(sample, destination)

    for parcel, chains_of_rank in zip(_exchange(outgoing, ranks), incoming, strict=True):
        for chain in chains_of_rank:
            parcel.unpack([samples[i] for i in chain])


def with_all_rows(samples: Sequence[Sample], ranks: RankGroup) -> list[Sample]:
    """Return copies of the samples with the rows of all ranks. A call of all ranks.

    It takes the memory of the whole update on every rank.
    """
    copies = [replace(sample) for sample in samples]
    parcel = _Parcel()
    for i in held(samples, ranks):
        parcel.pack([samples[i]])
    gathered = [ranks.gather_array(array) for array in parcel.arrays()]
    parcels = [_Parcel(*parts) for parts in zip(*gathered, strict=True)]
    for sample in copies:
        if sample.holder != ranks.rank:
            parcels[sample.holder].unpack([sample])
    return copies


def _send_away(sample: Sample, destination: int) -> None:
    """Drop the rows of a sample, except for their lengths."""
    response = len(sample.response_ids)
    if sample.token_advantage is not None:
        sample.advantage = float(sample.has_advantage)
    sample.prompt_ids = away(len(sample.prompt_ids), destination)
    sample.response_ids = away(response, destination)
    for name in IDS:
        setattr(sample, name, away(len(getattr(sample, name)), destination))
    for name in VALUES:
        row = getattr(sample, name)
        if name == "token_advantage":
            sample.token_advantage = None
        elif row is not None:
            setattr(sample, name, away(len(row), destination))


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
        ids = np.concatenate(self.ids) if self.ids else np.empty(0, np.int32)
        values = np.concatenate(self.values) if self.values else np.empty(0, np.float32)
        return np.array(self.lengths, np.int32), ids, values

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
            start = len(sample.prompt_ids)
            sample.prompt_ids = tokens[:start]
            sample.response_ids = tokens[start : start + len(sample.response_ids)]
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
    received = [ranks.exchange_arrays(parts) for parts in columns]
    return [_Parcel(*parts) for parts in zip(*received, strict=True)]


def _chain_ids(last: Sample) -> np.ndarray:
    """[n] int32: the tokens of a chain, by its last sample, without observations."""
    rows = (_array(last.prompt_ids, np.int32), _array(last.response_ids, np.int32))
    return np.concatenate(rows)


def _array(row: Any, dtype: Any) -> np.ndarray:
    return np.asarray(row, dtype)
