"""Ranks that are threads of this process, to test what ranks exchange without a model."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paw.algo.rows import share_scalars
from paw.algo.shared_samples import Columns, SharedSamples
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

    def exchange_flat(self, messages):
        for rank, message in enumerate(messages):
            if rank != self.rank:
                self.bytes_sent += message.nbytes
        return [messages_of_rank[self.rank] for messages_of_rank in self._meet(messages)]

    def _meet(self, own_item):
        self.table[self.rank] = own_item
        self.meeting.wait(60)
        all_items = list(self.table)
        self.meeting.wait(60)
        return all_items


def make_ranks(count: int) -> list[Together]:
    table: list[Any] = [None] * count
    meeting = threading.Barrier(count)
    return [Together(rank, table, meeting) for rank in range(count)]


def on_all(ranks: list[Together], function: Callable[[Together], Any]) -> list[Any]:
    """Run `function(rank)` on all ranks at once."""
    with ThreadPoolExecutor(len(ranks)) as executor:
        return list(executor.map(function, ranks))


def shared(rows, ranks) -> SharedSamples:
    """The rows as if dealt to ranks by trajectory. All ranks call it. Not for PPO."""
    columns = Columns.of_turns(
        group=[row.group for row in rows],
        trajectory=[row.trajectory for row in rows],
        step=[row.step for row in rows],
        holder=[row.trajectory % ranks.world_size for row in rows],
    )
    copies = copy.deepcopy(rows)
    held_rows = {i: copies[i] for i in range(len(rows)) if columns.holder[i] == ranks.rank}
    samples = SharedSamples(columns, held_rows, ranks.rank)
    share_scalars(samples, ranks, anchors="nothing", share_prefixes=False)
    for name in ("token_weight", "advantage", "entropy", "wm_weight"):
        samples.assign(name, [getattr(row, name) for row in rows])
    return samples
