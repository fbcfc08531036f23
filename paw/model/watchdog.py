"""Ends a rank that would wait in vain for another one, outside the collective call that it waits in.

Each rank tells the others every second, through the store, how far it has come and in which phase it is; one that is
stopped, or whose machine is gone, falls silent. Seconds are counted in a rank's own waking time: if all are stopped
(Ctrl-Z) and go on later, none has missed anything.
"""

import os
import threading
from contextlib import suppress
from typing import Any

from paw.watcher import say_ending

TICK_S = 1.0
PATIENCE_S = 3600.0
"""For a phase that no update has been through yet, as loading, and for "save": some begin a checkpoint, others wait for
the disk."""
DONE = -1


class Watchdog:
    """Threads of one rank, from the moment the ranks have met until `close`."""

    def __init__(self, store: Any, rank: int, world: int, *, timeout_s: float) -> None:
        """`store`: a torch.distributed Store that nothing else uses. `timeout_s` is run.peer_timeout_s."""
        self._store, self.rank, self.timeout_s = store, rank, timeout_s
        self._tick = self._moved = self._moves = 0
        self._phase = "start"
        self._longest: dict[str, int] = {}
        self._heard = {other: (0, f"0 {self._phase}", 0) for other in range(world) if other != rank}
        """Of each other rank: its last word's number, that word, and the tick at which it was heard."""
        self._closed, self._speaking, self._last = threading.Event(), threading.Lock(), 0
        self._tell(0)
        for work in (self._talk, self._judge):
            threading.Thread(target=work, daemon=True).start()

    def enter(self, phase: str) -> None:
        self._phase, self._moves, self._moved = phase, self._moves + 1, self._tick

    def leave(self) -> None:
        self._longest[self._phase] = max(self._longest.get(self._phase, 0), self._tick - self._moved)
        self.enter(f"after {self._phase}")

    def wait(self) -> None:
        """The rank has come to where it waits for the others."""
        self._moves += 1

    def close(self) -> None:
        """The others need not wait for this rank any more."""
        with suppress(RuntimeError):  # rank 0 may have gone, and the store with it
            self._tell(DONE)
        self._closed.set()

    def verdict(self) -> str | None:
        """Why the run cannot go on, naming the rank; None while it can."""
        setting = f"run.peer_timeout_s = {self.timeout_s:g}"
        for other, (number, word, tick) in self._heard.items():
            if number != DONE and (self._tick - tick) * TICK_S > self.timeout_s:
                phase = word.partition(" ")[2]
                return (
                    f"rank {other} has been silent for {self._tick - tick} s ({setting}), last in phase '{phase}': it"
                    " is stopped, or its machine is gone"
                )
        bound = self.timeout_s + max(self._longest.values(), default=0) * TICK_S
        if self._phase not in self._longest or self._phase == "save":
            bound = max(bound, PATIENCE_S)
        spent = (self._tick - self._moved) * TICK_S
        if spent <= bound + 2 * TICK_S:  # a rank that was stopped in this phase is found silent first
            return None
        came = {other: int(word.partition(" ")[0]) for other, (_, word, _) in self._heard.items()}
        behind = min([*came.items(), (self.rank, self._moves)], key=lambda item: (item[1], item[0]))[0]
        return (
            f"rank {behind} does not go on: phase '{self._phase}' has taken {spent:.0f} s, the longest before it"
            f" {max(self._longest.values(), default=0) * TICK_S:.0f} ({setting})"
        )

    def _tell(self, number: int) -> None:
        with self._speaking:
            self._last = self._last if self._last == DONE else number
            self._store.set(f"paw/{self.rank}", f"{self._last} {self._moves} {self._phase}")

    def _talk(self) -> None:
        number = 0
        while not self._closed.wait(TICK_S):
            number += 1
            with suppress(RuntimeError):  # the store is gone: rank 0 falls silent
                self._tell(number)
                words = self._store.multi_get([f"paw/{other}" for other in self._heard])
                for other, said in zip(self._heard, words, strict=True):
                    its, _, word = said.decode().partition(" ")
                    if int(its) != self._heard[other][0]:
                        self._heard[other] = int(its), word, self._tick

    def _judge(self) -> None:
        while not self._closed.wait(TICK_S):
            self._tick += 1
            if reason := self.verdict():
                os.write(2, f"paw: {reason}; checkpoints are kept (--resume auto)\n".encode())
                say_ending(3)
                os._exit(3)
