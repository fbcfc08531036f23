"""Ends a rank that waits in vain for another one, from outside its collective call.

Every second, each rank tells the others through the store how many steps it has taken and which
phase it is in. A rank that is stopped, or whose machine is gone, becomes silent. Time is counted in
ticks of a rank's own threads, so no rank looks silent if all are stopped (Ctrl-Z) and continue
later.
"""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paw.processes.watcher import say_ending

TICK_S = 1.0
PATIENCE_S = 3600.0
"""Minimum time limit for a phase that no update has gone through yet, such as loading. It also
applies to "save", in which some ranks start a checkpoint while others wait for the disk."""
DONE = -1
"""Message number of a rank that has left the run."""


@dataclass
class Message:
    """The newest message of another rank."""

    number: int
    """The number of that rank's messages so far, or DONE once it has left.

    A rank whose number does not change is silent.
    """
    moves: int
    """Number of phases and waits that that rank has entered."""
    phase: str
    tick: int
    """This rank's tick when it first saw the message."""


class Watchdog:
    """Two threads of a rank: until `close`, one reports to the other ranks and one judges them."""

    def __init__(self, store: Any, rank: int, world: int, *, timeout_s: float) -> None:
        """`store` is a torch.distributed Store that nothing else uses; `timeout_s` is
        run.peer_timeout_s."""
        self._store = store
        self.rank = rank
        self.timeout_s = timeout_s
        self._tick = 0
        self._phase = "start"
        self._phase_began = 0
        """The tick at which this rank entered the phase."""
        self._moves = 0
        """Number of phases and waits this rank has entered."""
        self._longest: dict[str, int] = {}
        """The longest time this rank has spent in each phase, in ticks."""
        others = [other_rank for other_rank in range(world) if other_rank != rank]
        self._heard = {
            other_rank: Message(number=0, moves=0, phase="start", tick=0) for other_rank in others
        }
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._last_number = 0
        self._send(0)
        threading.Thread(target=self._report, daemon=True).start()
        threading.Thread(target=self._judge, daemon=True).start()

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._moves += 1
        self._phase_began = self._tick

    def leave(self) -> None:
        ticks = self._tick - self._phase_began
        self._longest[self._phase] = max(self._longest.get(self._phase, 0), ticks)
        self.enter(f"after {self._phase}")

    def note_wait(self) -> None:
        """Note that the rank has reached a point where it waits for the others."""
        self._moves += 1

    def close(self) -> None:
        """Tell the others that they no longer need to wait for this rank."""
        with suppress(RuntimeError):  # rank 0 may have gone, and the store with it
            self._send(DONE)
        self._closed.set()

    def verdict(self) -> str | None:
        """Return why the run cannot continue and which rank is to blame; None while it can."""
        return self._silent_rank() or self._hanging_rank()

    def _silent_rank(self) -> str | None:
        for other_rank, message in self._heard.items():
            silent_ticks = self._tick - message.tick
            if message.number != DONE and silent_ticks * TICK_S > self.timeout_s:
                return (
                    f"rank {other_rank} has been silent for {silent_ticks} s "
                    f"(run.peer_timeout_s = {self.timeout_s:g}), last in phase "
                    f"'{message.phase}': it is stopped, or its machine is gone"
                )
        return None

    def _hanging_rank(self) -> str | None:
        """Blame the rank furthest behind if the phase exceeds the timeout and all earlier times."""
        longest_s = max(self._longest.values(), default=0) * TICK_S
        limit_s = self.timeout_s + longest_s
        if self._phase not in self._longest or self._phase == "save":
            limit_s = max(limit_s, PATIENCE_S)
        spent_s = (self._tick - self._phase_began) * TICK_S
        # Two more ticks, so that a rank that was stopped in this phase is found silent first.
        if spent_s <= limit_s + 2 * TICK_S:
            return None
        moves = {other_rank: message.moves for other_rank, message in self._heard.items()}
        moves[self.rank] = self._moves
        furthest_behind = min(moves, key=lambda rank: (moves[rank], rank))
        return (
            f"rank {furthest_behind} is stuck: phase '{self._phase}' has taken "
            f"{spent_s:.0f} s, the longest before it {longest_s:.0f} "
            f"(run.peer_timeout_s = {self.timeout_s:g})"
        )

    def _send(self, number: int) -> None:
        with self._sending:
            if self._last_number != DONE:
                self._last_number = number
            self._store.set(f"paw/{self.rank}", f"{self._last_number} {self._moves} {self._phase}")

    def _report(self) -> None:
        number = 0
        while not self._closed.wait(TICK_S):
            number += 1
            with suppress(RuntimeError):  # the store is gone, so rank 0 becomes silent
                self._send(number)
                self._receive()

    def _receive(self) -> None:
        answers = self._store.multi_get([f"paw/{other_rank}" for other_rank in self._heard])
        for other_rank, answer in zip(self._heard, answers, strict=True):
            number, moves, phase = answer.decode().split(" ", 2)
            if int(number) != self._heard[other_rank].number:
                self._heard[other_rank] = Message(int(number), int(moves), phase, tick=self._tick)

    def _judge(self) -> None:
        while not self._closed.wait(TICK_S):
            self._tick += 1
            reason = self.verdict()
            if reason:
                os.write(2, f"paw: {reason}; checkpoints are kept (--resume auto)\n".encode())
                say_ending(3)
                os._exit(3)
