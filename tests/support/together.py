"""Ranks that are threads of this process, for what ranks exchange without a model."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paw.distributed.parallel import DistributedRanks


class Together(DistributedRanks):
    """One of several ranks, each in a thread."""

    def __init__(self, rank, table, meeting):
        self.rank = rank
        self.world_size = len(table)
        self.table = table
        self.meeting = meeting
        self.bytes_sent = 0
        """To other ranks, one by one."""

    def gather_flat(self, values):
        return self._meet(values)

    def exchange_flat(self, parts):
        for rank, part in enumerate(parts):
            if rank != self.rank:
                self.bytes_sent += part.nbytes
        return [parts_of_rank[self.rank] for parts_of_rank in self._meet(parts)]

    def _meet(self, item):
        self.table[self.rank] = item
        self.meeting.wait(60)
        items = list(self.table)
        self.meeting.wait(60)
        return items


def make_ranks(count: int) -> list[Together]:
    table: list[Any] = [None] * count
    meeting = threading.Barrier(count)
    return [Together(rank, table, meeting) for rank in range(count)]


def on_all(ranks: list[Together], call: Callable[[Together], Any]) -> list[Any]:
    """`call(rank)` of all ranks at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))
