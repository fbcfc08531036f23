"""A checkpoint's tensors, joined from the files of all ranks when they are read."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file stem by name, each joined from its pieces when it is read."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Tensor]] = defaultdict(list)
        """The parts of each tensor in row order, one from each file, mapped from disk."""
        self.meta: dict[str, Tensor] = {}
        """The dtype and shape of each full tensor, as a meta tensor without values."""

    def add(self, name: str, rows: Tensor) -> None:
        """Add the next rows of a tensor, or the whole tensor.

        Raises RuntimeError if they do not fit the earlier rows.
        """
        rows_meta = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
        if name in self.meta:
            self.meta[name] = torch.cat([self.meta[name], rows_meta])
        else:
            self.meta[name] = rows_meta
        self._pieces[name].append(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, sys.maxsize)

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Return rows `first` to `end` (exclusive) of a tensor, or a 0-dim tensor whole."""
        full_meta = self.meta[name]
        if full_meta.ndim == 0:
            return self._pieces[name][0]

        rank_rows = []
        piece_start = 0
        for piece in self._pieces[name]:
            if piece_start < end and first < piece_start + len(piece):
                rank_rows.append(piece[max(first - piece_start, 0) : end - piece_start])
            piece_start += len(piece)

        if not rank_rows:  # an empty tensor, or a rank without any rows
            return torch.empty((0, *full_meta.shape[1:]), dtype=full_meta.dtype)
        if len(rank_rows) == 1:
            return rank_rows[0]
        return torch.cat(rank_rows)
