"""Episodes of the next updates, played while the trainer works.

Each rank has a process for this, because the threads of one Python process wait for one another.
The process plays on servers, which take new weights while it plays. The episodes of update t start
when the trainer starts update t - rollout.ahead, so no token comes from older weights. The process
has its own environment, agent and connection to the servers (player.py), and ends with the trainer
(supervisor.py). If it has ended or shows no sign of life, the trainer plays the update itself.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from paw.distributed.ranks import Ranks
from paw.envs.checked import problem
from paw.errors import clean, describe, to_stderr
from paw.rollouts.background.messages import (
    Channel,
    EpisodesEnded,
    FromPlayer,
    Message,
    PlayUpdate,
    Ready,
    Start,
    UpdateFailed,
    UpdatePlayed,
    WeightsArrived,
    WeightsExpected,
)
from paw.rollouts.background.supervisor import CLOSE_S, END_NOW, LINGER_S
from paw.rollouts.base import Progress, RolloutResult
from paw.rollouts.scheduler import Rollouts

START_S = 600.0
"""Seconds for the process to import torch and load the tokenizer and the environment.

Disks may be slow.
"""
SILENT_S = 60.0
"""Seconds without a sign of life, added to the env.step_timeout_s that a call may take."""
TICK_S = 1.0
END_S = CLOSE_S + 2 * LINGER_S + 2.0
"""Seconds that the process and everything it started have to end."""


class PlayerLost(Exception):
    """The process that plays ahead no longer answers. The message is one line and says why."""


class PlayerHandle:
    """One process that plays ahead, as the trainer sees it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel,
        *,
        patience_s: float,
        progress: Progress,
    ) -> None:
        self._process = process
        self._channel = channel
        self._patience_s = patience_s
        """Seconds without a sign of life before the process is ended."""
        self._progress = progress
        self._ready = False
        self._end_reason: Exception | None = None
        """Why no more answers come; None while it plays."""
        self._updates: dict[int, Future[UpdatePlayed]] = {}
        self._lock = threading.Lock()
        """Held while an update is added to `_updates`, and while all are removed at the end."""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def play(self, step: int, count: int) -> Future[UpdatePlayed]:
        """Ask for an update to be played.

        The result may be PlayerLost, or the UserError that ended its episodes.
        """
        future = Future[UpdatePlayed]()
        with self._lock:
            if self._end_reason:
                future.set_exception(self._end_reason)
            else:
                self._updates[step] = future
        self.send(PlayUpdate(step=step, count=count))
        return future

    def send(self, message: Message) -> None:
        with suppress(OSError):  # it has ended; `_listen` notices
            self._channel.send(message)

    def close(self) -> None:
        """End the process and everything it started."""
        self._channel.end()
        self._listener.join()
        self._channel.close()
        if self._process.stdin:
            self._process.stdin.close()

    def _listen(self) -> None:
        """Handle its messages until it ends or is ended because it is stuck.

        Then fail the updates that it still owes.
        """
        reason: Exception = PlayerLost("does not answer")
        try:
            reason = self._receive_all()
        except (EOFError, OSError):
            reason = PlayerLost(f"has ended ({self._end()})")
        except ValidationError as error:
            self._kill()
            reason = PlayerLost(
                f"has sent something other than a message ({clean(problem(error), 200)}) "
                "and was ended"
            )
        except Exception as error:
            self._kill()
            reason = PlayerLost(f"could not be heard ({describe(error)}) and was ended")
        finally:
            with self._lock:
                self._end_reason = reason
                waiting = list(self._updates.values())
                self._updates.clear()
            for future in waiting:
                future.set_exception(reason)

    def _receive_all(self) -> Exception:
        """Handle all messages. Returns the reason why no more come."""
        silent_s = 0.0  # counts only the time the trainer runs, as it may be stopped itself
        while True:
            message = self._channel.receive(TICK_S)
            if message is not None and self._ready:
                silent_s = 0.0
            elif self._process.poll() is not None:  # a program that it forked may hold its socket
                return PlayerLost(f"has ended ({self._end()})")
            else:
                silent_s += TICK_S
            patience_s = self._patience_s if self._ready else START_S
            if silent_s > patience_s:
                self._kill()
                return PlayerLost(
                    f"gave no sign of life for {patience_s:g} s "
                    "(stopped, or held by a call that never returns) and was ended"
                )
            match message:
                case Ready():
                    self._ready = True
                case EpisodesEnded():
                    self._progress(message.done, message.total)
                case UpdatePlayed():
                    self._updates.pop(message.step).set_result(message)
                case UpdateFailed(step=None):
                    self._end()
                    return message.error()
                case UpdateFailed(step=int(step)):
                    self._updates.pop(step).set_exception(message.error())

    def _end(self) -> str:
        """Say in words how the process ended. Kills it if it does not end."""
        try:
            exit_code = self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return "it had closed its connection"
        # A negative code is the signal that ended the supervisor; 128 + N that of the process.
        number = -exit_code if exit_code < 0 else exit_code - 128
        if number in signal.valid_signals():
            return f"killed by {signal.Signals(number).name}"
        return f"exit code {exit_code}"

    def _kill(self) -> None:
        """Tell the supervisor to end the process and everything it started."""
        assert self._process.stdin
        with suppress(OSError):
            self._process.send_signal(signal.SIGCONT)  # it may be stopped too
            os.write(self._process.stdin.fileno(), END_NOW)
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class UpdateAhead:
    """An update that is being, or has been, played ahead."""

    count: int
    """Its tasks."""
    result: Future[UpdatePlayed]


class AsyncRollouts:
    """Plays `rollout.ahead` updates ahead of the one that is asked for.

    `rollouts` plays evaluations, and updates that could not be played ahead, in this process, while
    the trainer waits. `model` is the folder of its tokenizer.
    """

    def __init__(self, rollouts: Rollouts, model: str) -> None:
        self._rollouts = rollouts
        self._model = model
        self._folder = Path.cwd()
        """Relative paths start here. An environment may change the current folder later."""
        self._updates: dict[int, UpdateAhead] = {}
        self._newest = -1
        """The last update started."""
        self._progress: Progress = lambda done, total: None
        self._player = self._start()
        rollouts.engine.pool.on_expected = self._send_expected
        rollouts.engine.pool.on_arrived = self._send_arrived

    def training(self, step: int, count: int, progress: Progress | None = None) -> RolloutResult:
        """Play the episodes of update `step`, as `Rollouts.training` does.

        Every rank must call this.
        """
        rollouts = self._rollouts
        config = rollouts.config
        self._progress = progress or self._progress

        last_update = min(step + config.rollout.ahead, config.run.updates - 1)
        for later in range(max(step, self._newest + 1), last_update + 1):
            self._newest = later
            self._updates[later] = UpdateAhead(count, self._player.play(later, count))

        tasks = rollouts.tasks(step, count)
        own_result: RolloutResult | None = None
        if step in self._updates:  # otherwise its episodes failed and are played again
            played = self._wait_for(self._updates.pop(step))
            if played:
                own_result = played.unpack(tasks)
        if own_result is None:
            own_result = rollouts.play_share_of_update(step, tasks, progress)
        result = rollouts.gather_groups(own_result, tasks, config.rollout.group_size)
        return rollouts.refill(result, step, count, progress)

    def evaluation(self, progress: Progress | None = None) -> RolloutResult:
        return self._rollouts.evaluation(progress)

    def close(self) -> None:
        """Drop what is in play. A resumed run plays it again."""
        self._updates.clear()
        self._rollouts.close()
        self._player.close()

    def _wait_for(self, update: UpdateAhead) -> UpdatePlayed | None:
        """Return the update once it is played, or None if the process that plays ahead is lost.

        If it is lost, another process is started for the other updates. Raises the UserError that
        ended the episodes.
        """
        try:
            return update.result.result()
        except PlayerLost as lost:
            to_stderr(f"the process that plays ahead {lost}; playing its episodes again")

        self._player.close()
        self._player = self._start()
        for step, other_update in self._updates.items():
            # Updates that have been played are kept.
            if other_update.result.done() and other_update.result.exception():
                other_update.result = self._player.play(step, other_update.count)
        return None

    def _start(self) -> PlayerHandle:
        rollouts = self._rollouts
        our_end, their_end = socket.socketpair()
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        with their_end:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paw.rollouts.background.supervisor",
                    str(os.getpid()),
                    str(their_end.fileno()),
                ],
                env=variables,
                stdin=subprocess.PIPE,
                cwd=self._folder,
                pass_fds=[their_end.fileno()],
                start_new_session=True,
            )
        player = PlayerHandle(
            process,
            Channel(our_end, FromPlayer),
            patience_s=rollouts.config.env.step_timeout_s + SILENT_S,
            progress=lambda done, total: self._progress(done, total),
        )
        pool = rollouts.engine.pool
        ranks = rollouts.ranks or Ranks()
        player.send(
            Start(
                config=rollouts.config.model_dump_json(),
                model=self._model,
                positions=rollouts.engine.positions,
                rank=ranks.rank,
                world_size=ranks.world_size,
                urls=[server.url for server in pool.servers],
                served_model=pool.model,
                end_ids=pool.end_ids,
                vocabulary=pool.vocabulary,
                entropy=pool.entropy,
                timeout_s=pool.timeout_s,
            )
        )
        player.send(WeightsExpected(version=pool.pending_version))
        player.send(WeightsArrived(version=pool.version, faults=pool.faults))
        return player

    def _send_expected(self, version: int) -> None:
        """Called by the pool when weights are on their way."""
        self._player.send(WeightsExpected(version=version))

    def _send_arrived(self, version: int, faults: dict[str, str]) -> None:
        """Called by the pool when all servers have the weights, except those with faults."""
        self._player.send(WeightsArrived(version=version, faults=faults))
