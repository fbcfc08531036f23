"""A checkpoint's tensors, put together from its files one at a time."""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paw.model.ranks import Ranks


class Stored(Mapping[str, Tensor]):
    """The tensors of a file stem by name, each put together from the files when it is asked for: a call of all ranks
    where not all of them see its files."""

    def __init__(self, ranks: Ranks, seen: Sequence[set[str]], files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """`seen`: the files that each rank sees; `files`: tensors of those that this one sees, mapped from disk."""
        self._ranks, self._seen, self._files = ranks, seen, files
        self._everywhere = set.intersection(*seen)
        self._pieces: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        self.whole: dict[str, Tensor] = {}
        """Without values, for dtype and shape."""

    def add(self, file: str, name: str, like: Tensor) -> None:
        """The next rows of a tensor, or all; RuntimeError where they do not go together."""
        self._pieces[name].append((file, like))
        self.whole[name] = torch.cat([self.whole[name], like]) if name in self.whole else like

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, sys.maxsize)

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows of a tensor, each rank's own; all of one that has no rows."""
        pieces, wanted, at = self._pieces[name], dict[int, slice](), 0
        for i, (_, like) in enumerate(pieces):
            rows = len(like) if like.ndim else 1
            if at < end and first < at + rows:
                wanted[i] = slice(max(first - at, 0), min(end - at, rows))
            at += rows
        sent = self._exchange(name, wanted)
        whole = {i: sent[i] if i in sent else self._files[pieces[i][0]][name] for i in wanted}
        parts = [tensor[wanted[i]] if tensor.ndim else tensor for i, tensor in whole.items()]
        if not parts:  # an empty tensor, or a rank without any rows
            like = self.whole[name]
            return torch.empty((0, *like.shape[1:]), dtype=like.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _exchange(self, name: str, wanted: Collection[int]) -> dict[int, Tensor]:
        """Pieces that some rank wants and does not see, from the first that does."""
        pieces, ranks = self._pieces[name], self._ranks
        if all(file in self._everywhere for file, _ in pieces):
            return {}
        lacking = ranks.gather([i for i in wanted if pieces[i][0] not in self._files], list[int])
        sent = {}
        for i in sorted({i for of_rank in lacking for i in of_rank}):
            file, like = pieces[i]
            source = next(rank for rank, seen in enumerate(self._seen) if file in seen)
            sent[i] = self._files[file][name] if source == ranks.rank else torch.empty(like.shape, dtype=like.dtype)
            ranks.broadcast(sent[i], source)
        return sent
