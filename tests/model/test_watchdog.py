"""Ranks that watch each other through a real store, many times faster than in earnest."""

import re
import time

import pytest
import torch.distributed as dist

from paw.distributed import watchdog
from paw.distributed.watchdog import Watchdog


@pytest.fixture
def make(monkeypatch):
    """`make(rank, timeout_s=...)` returns one of three ranks; the thread that would end the
    process is replaced."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)
    monkeypatch.setattr(watchdog, "PATIENCE_S", 2.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watchdogs = []

    def start(rank, timeout_s):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        monkeypatch.setattr(Watchdog, "_judge", count)
        watchdogs.append(Watchdog(store, rank, 3, timeout_s=timeout_s))
        return watchdogs[-1]

    def count(self):
        while not self._closed.wait(watchdog.TICK_S):
            self._tick += 1

    yield start
    for started in watchdogs:
        started.close()


def verdict(watched, seconds=5.0):
    deadline = time.monotonic() + seconds
    while watched.verdict() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return watched.verdict()


def silence(watched):
    """As SIGSTOP does."""
    watched._closed.set()


def test_a_silent_rank_is_named_with_its_phase(make):
    ranks = [make(rank, timeout_s=0.5) for rank in range(3)]
    ranks[2].enter("update")
    time.sleep(0.2)
    silence(ranks[2])
    for rank in ranks[:2]:
        sentence = verdict(rank)
        assert re.match(
            r"rank 2 has been silent for \d+ s \(run\.peer_timeout_s = 0\.5\), last in phase 'update'",
            sentence,
        )


def test_ranks_that_talk_or_have_done_their_work_are_left_in_peace(make):
    ranks = [make(rank, timeout_s=0.5) for rank in range(3)]
    ranks[0].enter("rollout")
    ranks[2].close()
    time.sleep(1.2)
    assert [rank.verdict() for rank in ranks[:2]] == [None] * 2


def test_a_rank_that_does_not_go_on_is_named_by_those_who_wait(make):
    ranks = [make(rank, timeout_s=0.3) for rank in range(3)]
    for rank in ranks:
        rank.enter("rollout")
        time.sleep(0.05)
        rank.leave()
        rank.enter("rollout")
    ranks[0].note_wait()
    ranks[2].note_wait()
    for rank in ranks:
        assert re.match(r"rank 1 is stuck: phase 'rollout' has taken", verdict(rank))


@pytest.mark.slow
def test_a_phase_may_take_longer_than_the_longest_by_the_timeout_and_an_unknown_one_an_hour(make):
    ranks = [make(rank, timeout_s=0.3) for rank in range(3)]
    for rank in ranks:
        rank.enter("eval")
    time.sleep(0.5)
    for rank in ranks:
        rank.leave()
        rank.enter("eval")
    assert verdict(ranks[0], 0.6) is None  # 0.5 + 0.3 s
    for phase in ("sync", "save", "save"):  # the disk's time is not that of the last time
        for rank in ranks:
            rank.enter(phase)
        assert verdict(ranks[0], 1.5) is None  # PATIENCE_S
        assert f"phase '{phase}'" in verdict(ranks[0])
        for rank in ranks:
            rank.leave()
