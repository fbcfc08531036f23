"""The process that plays ahead, with its own environment, agent and connections.

It closes its environments and ends when the trainer does (supervisor.py).
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from pydantic import ValidationError

from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.envs.base import EnvFactory
from paw.errors import UserError, describe
from paw.io.threads import Threads
from paw.model.loading import load_tokenizer
from paw.rollouts.background.messages import (
    Alive,
    Channel,
    ChannelClosed,
    EpisodesEnded,
    FromTrainer,
    PlayUpdate,
    Ready,
    Start,
    UpdateFailed,
    UpdatePlayed,
    WeightsArrived,
    WeightsExpected,
)
from paw.rollouts.background.supervisor import CLOSE_S
from paw.rollouts.engines.pool import ServerPool
from paw.rollouts.engines.server import ServerEngine
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.text.chat import Chat
from paw.rundir.signals import ignore_stops

BEAT_S = 1.0
"""Seconds between signs of life."""
MARGIN_S = 2.0
"""The part of CLOSE_S left for episodes in play to end before environments are closed."""


class PlayerRollouts(Rollouts):
    """Rollouts in their own thread, which another thread watches and stops."""

    def __init__(
        self, factory: EnvFactory, engine: ServerEngine, chat: Chat, config: Config, ranks: Ranks
    ) -> None:
        super().__init__(factory, engine, chat, config, ranks)
        self.playing: threading.Thread | None = None
        """The thread that plays an update."""
        self._awaits_sign = False
        """Whether the loop still owes a sign of life."""

    def loop_goes_on(self) -> bool:
        """Whether nothing has blocked the event loop since the last call."""
        if self._awaits_sign:
            return not self.loop.is_running()
        self._awaits_sign = True
        self.loop.call_soon_threadsafe(self._give_sign)
        return True

    def _give_sign(self) -> None:
        self._awaits_sign = False

    def stop(self) -> None:
        """Drop the episodes in play."""
        self.loop.call_soon_threadsafe(self.end, UserError("the run has ended"))


class Player:
    """Plays the updates that the trainer asks for, each in a thread of its own.

    Updates played at the same time have separate environments.
    """

    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self._config = Config.model_validate_json(start.config)
        self._chat = Chat(
            load_tokenizer(start.model),
            self._config.model.chat_template_kwargs,
            self._config.model.tool_parser,
        )
        self._factory = make_factory(self._config)
        self._positions = start.positions
        self._ranks = Ranks()
        self._ranks.rank = start.rank
        self._ranks.world_size = start.world_size
        self._pool = ServerPool(
            start.urls,
            end_ids=start.end_ids,
            vocabulary=start.vocabulary,
            timeout_s=start.timeout_s,
            ranks=self._ranks,
            entropy=start.entropy,
            model=start.served_model,
        )
        self._rollouts: list[PlayerRollouts] = []
        self._idle = [self._make_rollouts()]

    def handle(self, message: PlayUpdate | WeightsExpected | WeightsArrived) -> None:
        match message:
            case WeightsExpected():
                self._pool.expect(message.version)
            case WeightsArrived():
                self._pool.arrive(message.version, message.faults)
            case PlayUpdate():
                rollouts = self._idle.pop() if self._idle else self._make_rollouts()
                rollouts.playing = threading.Thread(
                    target=self._play, args=(rollouts, message), daemon=True
                )
                rollouts.playing.start()

    def goes_on(self) -> bool:
        """Whether every event loop is running. An agent may block one."""
        # Ask all loops, even after one turns out to be blocked.
        signs = [rollouts.loop_goes_on() for rollouts in self._rollouts]
        return all(signs)

    def close(self) -> None:
        """Drop the episodes in play and close the environments, within CLOSE_S in total."""
        deadline = time.monotonic() + MARGIN_S
        for rollouts in self._rollouts:
            rollouts.stop()
        for rollouts in self._rollouts:
            playing = rollouts.playing
            if playing:
                playing.join(max(0.0, deadline - time.monotonic()))

        # In threads, in case closing raises or hangs.
        threads = Threads(self._config.env.threads, CLOSE_S - 2 * MARGIN_S)
        closing_calls: list[Callable[[], None]] = []
        for rollouts in self._rollouts:
            closing_calls += rollouts.closing_calls(busy=True)
        threads.close(*closing_calls)

    def _play(self, rollouts: PlayerRollouts, request: PlayUpdate) -> None:
        with suppress(ChannelClosed):  # the trainer has ended
            try:
                tasks = rollouts.tasks(request.step, request.count)
                result = rollouts.play_share_of_update(request.step, tasks, self._report)
                answer = UpdatePlayed.pack(request.step, result, tasks)
                rollouts.playing = None
                self._idle.append(rollouts)
                self._channel.send(answer)
            except ChannelClosed:
                raise
            except BaseException as error:
                self._channel.send(UpdateFailed.of(request.step, as_user_error(error)))

    def _report(self, done: int, total: int) -> None:
        self._channel.send(EpisodesEnded(done=done, total=total))

    def _make_rollouts(self) -> PlayerRollouts:
        engine = ServerEngine(self._pool, self._positions)
        rollouts = PlayerRollouts(self._factory, engine, self._chat, self._config, self._ranks)
        self._rollouts.append(rollouts)
        return rollouts


def as_user_error(error: BaseException) -> UserError:
    """Return a UserError unchanged. For any other error, print its traceback and wrap it."""
    if isinstance(error, UserError):
        return error
    if not isinstance(error, ValidationError):
        print_traceback(error)
    return UserError(f"the process that plays ahead: {describe(error)}")


def print_traceback(error: BaseException) -> None:
    with suppress(Exception):  # the terminal may be gone
        traceback.print_exception(error)


class PlayerProcess:
    """Handles this process's signals, socket, signs of life and end."""

    def __init__(self, socket_fd: int) -> None:
        self._socket = socket.socket(fileno=socket_fd)
        self._channel = Channel(self._socket, FromTrainer)
        self._supervisor = os.getppid()
        self._player: Player | None = None

    def run(self) -> NoReturn:
        ignore_stops()  # a terminal or launcher sends them here too, but the trainer saves first
        self._socket.set_inheritable(False)
        os.register_at_fork(after_in_child=self._socket.close)
        threading.Thread(target=self._show_life, daemon=True).start()
        exit_code = 0
        try:
            self._serve()
        except (EOFError, OSError):
            pass  # the trainer has ended
        except BaseException as error:
            print_traceback(error)
            exit_code = 1
        self._end(exit_code)

    def _serve(self) -> None:
        try:
            self._player = Player(self._channel, self._channel.receive())
        except BaseException as error:
            self._channel.send(UpdateFailed.of(None, as_user_error(error)))
            return
        self._channel.send(Ready())
        while True:
            self._player.handle(self._channel.receive())

    def _show_life(self) -> None:
        with suppress(OSError):  # the trainer has ended
            while os.getppid() == self._supervisor:
                if self._player and self._player.goes_on():
                    self._channel.send(Alive())
                time.sleep(BEAT_S)
        if os.getppid() != self._supervisor:  # it was killed, so it can no longer end this process
            self._close_environments()
            os.killpg(0, signal.SIGKILL)

    def _close_environments(self) -> None:
        if self._player:
            self._player.close()

    def _end(self, exit_code: int) -> NoReturn:
        self._close_environments()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)  # whatever the threads are doing


if __name__ == "__main__":
    PlayerProcess(int(sys.argv[1])).run()
