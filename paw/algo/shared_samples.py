"""The samples of an update on several ranks: a few numbers of all, objects for those held here.

An update may have hundreds of thousands of turns. Making an object for each would take a rank
longer than its share of all other work. So a rank has objects only for the turns whose tokens it
holds. For every other turn it has a row of numbers in `Columns`, from which an object is made when
one is asked for.

`column`, `assign` and `held` also take a list of samples, as a run on one rank has it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from paw.algo.packing import RankGroup
from paw.away import away
from paw.types import Sample

LENGTHS = ("prompt_ids", "response_ids", "separator_ids", "observation_ids")
"""Rows of a sample whose lengths are columns."""


@dataclass(kw_only=True)
class Columns:
    """Numbers of the N samples of an update, which all ranks have. Each field is [N].

    Fields that are also in `Sample` mean the same here.
    """

    group: np.ndarray
    trajectory: np.ndarray
    step: np.ndarray
    holder: np.ndarray
    """int32: the rank that holds the tokens."""

    prompt_length: np.ndarray
    response_length: np.ndarray
    separator_length: np.ndarray
    observation_length: np.ndarray
    server: np.ndarray
    """int32: index in `servers`."""
    shared_prefix: np.ndarray
    """int32: how many tokens the chain that this sample begins shares with the chain before it in
    `prefix_order`. See `algo.placement`."""
    prefix_order: np.ndarray
    """int32: the place of that chain among those of its group, in which neighbours share the most
    tokens."""
    continues: np.ndarray
    continues_target: np.ndarray
    """bool: whether the previous turn's separator and observation follow these in the prompt."""
    has_entropy: np.ndarray
    """bool: whether the engine reported entropies."""

    reward: np.ndarray
    penalty: np.ndarray
    episode_return: np.ndarray
    token_weight: np.ndarray
    advantage: np.ndarray
    """float64; PPO: 0 if all tokens have 0, else 1."""
    entropy: np.ndarray
    wm_weight: np.ndarray

    servers: list[str] = field(default_factory=list)
    anchors: list[str] | np.ndarray | None = None
    """The texts, or [N, n] uint8 digests of them. None if nobody reads them."""

    @classmethod
    def of_turns(
        cls, *, group: Any, trajectory: Any, step: Any, holder: Any, **others: Any
    ) -> "Columns":
        """Return the columns of an update. Those that are not given are 0."""
        for name, dtype in DTYPES.items():
            others.setdefault(name, np.zeros(len(group), dtype))
        return cls(
            group=np.asarray(group, np.int32),
            trajectory=np.asarray(trajectory, np.int32),
            step=np.asarray(step, np.int32),
            holder=np.asarray(holder, np.int32),
            **others,
        )

    def in_order(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the rows of all samples, given those that each rank holds, in order."""
        joined = np.concatenate(parts)
        result = np.empty_like(joined)
        result[np.argsort(self.holder, kind="stable")] = joined
        return result


DTYPES: dict[str, type[np.generic]] = {
    "prompt_length": np.int32,
    "response_length": np.int32,
    "separator_length": np.int32,
    "observation_length": np.int32,
    "server": np.int32,
    "shared_prefix": np.int32,
    "prefix_order": np.int32,
    "continues": np.bool_,
    "continues_target": np.bool_,
    "has_entropy": np.bool_,
    "reward": np.float64,
    "penalty": np.float64,
    "episode_return": np.float64,
    "token_weight": np.float64,
    "advantage": np.float64,
    "entropy": np.float64,
    "wm_weight": np.float64,
}
"""The type of each column that is filled after the rollout."""
COPIED = ("token_weight", "advantage", "entropy", "wm_weight")
"""Columns that a sample has as an attribute once they are known."""


class SharedSamples(Sequence[Sample]):
    """The samples of an update, or of a mini-batch, of which this rank holds a part.

    An item is the object that this rank has, or a new one without tokens (`Away`), of which changes
    are lost: use `assign`.
    """

    def __init__(
        self,
        columns: Columns,
        here: dict[int, Sample],
        rank: int,
        indices: np.ndarray | None = None,
    ) -> None:
        self.columns = columns
        """Of the whole update."""
        self.here = here
        """What this rank holds of the whole update, by the index there."""
        self.rank = rank
        self._indices = np.arange(len(columns.group)) if indices is None else indices
        """[n]: the index in the update of each sample."""

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        update_index = int(self._indices[index])
        sample = self.here.get(update_index)
        return self._away_sample(update_index) if sample is None else sample

    def subset(self, indices: np.ndarray) -> "SharedSamples":
        """Return the samples of these indices, in this order. Objects and columns are the same."""
        return SharedSamples(self.columns, self.here, self.rank, self._indices[indices])

    def column(self, name: str) -> np.ndarray:
        """Return a column of these samples, [n]."""
        return getattr(self.columns, name)[self._indices]

    def assign(self, name: str, values: Iterable[float]) -> None:
        """Set a number of each sample, in the column and in the objects."""
        array = np.asarray(values)
        getattr(self.columns, name)[self._indices] = array
        for i in self.held():
            setattr(self[i], name, array[i].item())

    def held(self) -> list[int]:
        """Return the indices of the samples whose tokens this rank holds."""
        return np.flatnonzero(self.column("holder") == self.rank).tolist()

    def chain_starts(self) -> np.ndarray:
        """Return the index of the first sample of each chain: turns that continue one another."""
        return np.flatnonzero(~self.continues_previous())

    def continues_previous(self) -> np.ndarray:
        """[n] bool: whether a sample continues the one before it here."""
        trajectory = self.column("trajectory")
        step = self.column("step")
        is_continued = self.column("continues").copy()
        is_continued[:1] = False
        is_continued[1:] &= (trajectory[1:] == trajectory[:-1]) & (step[1:] == step[:-1] + 1)
        return is_continued

    def set_holder(self, indices: np.ndarray, holder: np.ndarray) -> None:
        self.columns.holder[self._indices[indices]] = holder

    def take_away(self, index: int) -> Sample:
        """Give up a sample that this rank holds, and return it."""
        return self.here.pop(int(self._indices[index]))

    def receive(self, index: int) -> Sample:
        """Return a new object for a sample that this rank holds from now on, without its rows."""
        update_index = int(self._indices[index])
        sample = self._away_sample(update_index)
        self.here[update_index] = sample
        return sample

    def _away_sample(self, i: int) -> Sample:
        """Make an object for the sample of that index in the update, by its numbers."""
        columns = self.columns
        holder = int(columns.holder[i])
        response = away(int(columns.response_length[i]), holder)
        episode_return = columns.episode_return[i].item()
        penalty = columns.penalty[i].item()
        sample = Sample(
            group=int(columns.group[i]),
            trajectory=int(columns.trajectory[i]),
            step=int(columns.step[i]),
            prompt_ids=away(int(columns.prompt_length[i]), holder),
            response_ids=response,
            separator_ids=away(int(columns.separator_length[i]), holder),
            observation_ids=away(int(columns.observation_length[i]), holder),
            sampled_logp=response,
            sampled_entropy=response if columns.has_entropy[i] else None,
            versions=response,
            values=away(0, holder),
            returns=away(0, holder),
            old_logp=away(0, holder),
            server=columns.servers[columns.server[i]] if columns.servers else "",
            score=episode_return - penalty,
            episode_return=episode_return,
            reward=columns.reward[i].item(),
            penalty=penalty,
            anchor=self._anchor(i),
            continues=bool(columns.continues[i]),
        )
        for name in COPIED:
            setattr(sample, name, getattr(columns, name)[i].item())
        return sample

    def _anchor(self, i: int) -> str:
        anchors = self.columns.anchors
        if anchors is None:
            return ""
        if isinstance(anchors, list):
            return anchors[i]
        return anchors[i].tobytes().hex()


def column(samples: Sequence[Sample], name: str) -> np.ndarray:
    """Return a number of each sample, [n]. `name` is a field of `Columns`."""
    if isinstance(samples, SharedSamples):
        return samples.column(name)
    ids_field = name.removesuffix("_length") + "_ids"
    if ids_field in LENGTHS:
        return np.array([len(getattr(sample, ids_field)) for sample in samples], np.int64)
    if name == "has_entropy":
        return np.array([sample.sampled_entropy is not None for sample in samples])
    return np.array([getattr(sample, name) for sample in samples])


def assign(samples: Sequence[Sample], name: str, values: Sequence[float] | np.ndarray) -> None:
    """Set a number of each sample."""
    if isinstance(samples, SharedSamples):
        samples.assign(name, values)
        return
    for sample, value in zip(samples, np.asarray(values).tolist(), strict=True):
        setattr(sample, name, value)


def held(samples: Sequence[Sample], ranks: RankGroup) -> list[int]:
    """Return the indices of the samples whose tokens this rank holds: all on one rank."""
    if isinstance(samples, SharedSamples):
        return samples.held()
    assert ranks.world_size == 1, "several ranks share SharedSamples"
    return list(range(len(samples)))
