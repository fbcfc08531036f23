"""A checkpoint's tensors, put together from its files one at a time."""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paw.model.ranks import Ranks


class Piece(NamedTuple):
    """Rows of a tensor that one file holds, or a tensor that has no rows."""

    file: str
    like: Tensor
    """On the meta device: dtype and shape."""


class Stored(Mapping[str, Tensor]):
    """The tensors of a file stem by name, each put together from the files when it is read.

    Reading a tensor is a call of all ranks, unless every rank sees all files that hold rows of it.
    """

    def __init__(
        self, ranks: Ranks, seen: Sequence[set[str]], files: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """`seen` names the files that each rank sees; `files` has the tensors of those that this
        rank sees, mapped from disk."""
        self._ranks = ranks
        self._seen = seen
        self._files = files
        self._seen_by_all = set.intersection(*seen)
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self.meta: dict[str, Tensor] = {}
        """Each full tensor without its values, on the meta device: its dtype and shape."""

    def add(self, file: str, name: str, like: Tensor) -> None:
        """Add the next rows of a tensor, or all of it.

        Raises RuntimeError if they do not fit the rows before.
        """
        self._pieces[name].append(Piece(file, like))
        if name in self.meta:
            self.meta[name] = torch.cat([self.meta[name], like])
        else:
            self.meta[name] = like

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, sys.maxsize)

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows `first` to `end` of a tensor, which may differ between ranks; all of one that has no rows."""
        slices = self._slices(name, first, end)
        received = self._exchange(name, slices)

        parts = []
        for i, rows in slices.items():
            tensor = received[i] if i in received else self._files[self._pieces[name][i].file][name]
            parts.append(tensor[rows] if tensor.ndim else tensor)

        if not parts:  # an empty tensor, or a rank without any rows
            like = self.meta[name]
            return torch.empty((0, *like.shape[1:]), dtype=like.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _slices(self, name: str, first: int, end: int) -> dict[int, slice]:
        """The pieces that hold rows `first` to `end`, by index, and which of their own rows these are."""
        slices: dict[int, slice] = {}
        start = 0
        for i, piece in enumerate(self._pieces[name]):
            rows = len(piece.like) if piece.like.ndim else 1
            if start < end and first < start + rows:
                slices[i] = slice(max(first - start, 0), min(end - start, rows))
            start += rows
        return slices

    def _exchange(self, name: str, wanted: Collection[int]) -> dict[int, Tensor]:
        """The pieces that some rank wants and does not see, each sent by the first rank that sees it."""
        pieces = self._pieces[name]
        ranks = self._ranks
        if all(piece.file in self._seen_by_all for piece in pieces):
            return {}

        unseen = [i for i in wanted if pieces[i].file not in self._files]
        lacking: set[int] = set()
        for lacking_on_rank in ranks.gather(unseen, list[int]):
            lacking.update(lacking_on_rank)

        received = {}
        for i in sorted(lacking):
            file, like = pieces[i]
            source = next(rank for rank, names in enumerate(self._seen) if file in names)
            if source == ranks.rank:
                received[i] = self._files[file][name]
            else:
                received[i] = torch.empty(like.shape, dtype=like.dtype)
            ranks.broadcast(received[i], source)
        return received
