"""Episodes of the next updates, played while the trainer works: in a process of each rank's own, for threads of one
Python process wait for one another, over servers that take new weights meanwhile.

Those of update t begin when the trainer begins with update t - rollout.ahead, so no token is of older weights. The
process has an environment, an agent and a connection to the servers of its own; it ends with the trainer.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pydantic import ValidationError

from paw.config import Config
from paw.envs import make_factory
from paw.errors import UserError, describe, to_stderr
from paw.model.policy import load_tokenizer
from paw.model.ranks import Ranks
from paw.rollout.chat import Chat
from paw.rollout.engines.server import Fleet, ServerEngine
from paw.rollout.episode import Played
from paw.rollout.exchange import set_tasks
from paw.rollout.scheduler import Progress, Rollouts
from paw.state.signals import STOPS

STOP_S = 10.0
"""Seconds for the process to end its environments."""


class Ahead:
    """Plays `rollout.ahead` updates before the one that is asked for. `now` plays what the trainer waits for; `model`
    is the folder of its tokenizer."""

    def __init__(self, now: Rollouts, model: str) -> None:
        self._now, self._model = now, model
        self._playing: dict[int, tuple[int, Future[Played]]] = {}
        """Update -> (tasks, what is played of them)."""
        self._begun, self._lost = -1, None
        self._progress: Progress = lambda done, total: None
        self._start()
        now.engine.fleet.tell = self._send

    def training(self, step: int, count: int, progress: Progress | None = None) -> Played:
        """The episodes of update `step`, as `Rollouts.training` plays them; takes all ranks."""
        now, config = self._now, self._now.config
        self._progress = progress or self._progress
        for later in range(max(step, self._begun + 1), min(step + config.rollout.ahead, config.run.updates - 1) + 1):
            self._begun = later
            self._begin(later, count)
        tasks, options = now.tasks(step, count), now.options(step)
        own: Played | None = None
        if step in self._playing:  # else they failed, and are played again
            try:
                own = self._playing[step][1].result()
            except EOFError:
                to_stderr(f"the process that plays ahead has ended ({self._ending()}): its episodes are played again")
                self._start()
                for later, (again, of) in list(self._playing.items()):
                    if later != step and of.exception():  # what had been played before it ended is kept
                        self._begin(later, again)
            del self._playing[step]
        own = own or now.play_own(tasks, **options, progress=progress)
        set_tasks(own, {task.id: task for task in tasks})
        return now.refill(now.share(own, tasks, options["group_size"]), step, count, progress)

    def evaluation(self, progress: Progress | None = None) -> Played:
        return self._now.evaluation(progress)

    def close(self) -> None:
        """What is in play is dropped: a run that goes on plays it again."""
        self._playing.clear()
        self._now.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._ending()

    def _start(self) -> None:
        now, fleet = self._now, self._now.engine.fleet
        self._socket, theirs = socket.socketpair()
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "paw.rollout.ahead", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()])
        self._pipe, self._lost = Connection(os.dup(self._socket.fileno())), None
        threading.Thread(target=self._listen, args=(self._pipe,), daemon=True).start()
        ranks, urls = now.ranks or Ranks(), [server.url for server in fleet.servers]
        own = {"end_ids": fleet.end_ids, "entropy": fleet.entropy, "model": fleet.model}
        own["vocabulary"] = fleet.vocabulary
        given = own | {"timeout_s": now.config.engine.timeout_s}
        parts = now.config.model_dump_json(), self._model, now.engine.positions
        self._send(*parts, urls, (ranks.rank, ranks.world_size), given)
        self._send("expect", fleet.coming)
        self._send("arrive", fleet.version, fleet.faults)

    def _begin(self, step: int, count: int) -> None:
        self._playing[step] = count, Future[Played]()
        self._send("play", step, count)
        self._tell_lost()

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # of a process that has ended, which `_listen` hears
            self._pipe.send(message)

    def _listen(self, pipe: Connection) -> None:
        lost: BaseException = EOFError()
        with suppress(OSError, EOFError):
            while True:
                what, *found = pipe.recv()
                if what == "progress":
                    self._progress(*found)
                elif what == "broken":
                    (lost,) = found
                elif isinstance(found[0], BaseException):
                    self._playing[what][1].set_exception(found[0])
                else:
                    self._playing[what][1].set_result(found[0])
        self._lost = lost
        self._tell_lost()

    def _tell_lost(self) -> None:
        """Whoever waits for a process that has ended waits no longer."""
        lost = self._lost  # which another process, once started, sets to None
        for _, future in list(self._playing.values()) if lost else ():
            with suppress(InvalidStateError):
                future.set_exception(lost)

    def _ending(self) -> str:
        try:
            code = self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# --- the process -----------------------------------------------------------------------------------------------------


class Player:
    """What the process holds. `play`, `expect` and `arrive` are the messages it takes."""

    def __init__(
        self, send: Callable[..., None], config: str, model: str, positions: int, urls: Any, place: Any, given: Any
    ) -> None:
        self._send, self._config = send, Config.model_validate_json(config)
        template = self._config.model
        self._chat = Chat(load_tokenizer(model), template.chat_template_kwargs, template.tool_parser)
        self._factory, self._positions, self._ranks = make_factory(self._config), positions, Ranks()
        self._ranks.rank, self._ranks.world_size = place
        self._fleet = Fleet(urls, None, ranks=self._ranks, **given)
        self.expect, self.arrive = self._fleet.expect, self._fleet.arrive
        self._idle = [self._make()]

    def play(self, step: int, count: int) -> None:
        rollouts = self._idle.pop() if self._idle else self._make()

        def play() -> None:
            try:
                tasks, progress = rollouts.tasks(step, count), partial(self._send, "progress")
                own = rollouts.play_own(tasks, **rollouts.options(step), progress=progress)
                set_tasks(own, {task.id: replace(task, payload=None) for task in tasks})
                self._idle.append(rollouts)
                self._send(step, own)
            except BaseException as error:
                self._send(step, sendable(error))

        threading.Thread(target=play, daemon=True).start()

    def _make(self) -> Rollouts:
        engine = ServerEngine(self._fleet, self._positions)
        return Rollouts(self._factory, engine, self._chat, self._config, self._ranks)


def sendable(error: BaseException) -> UserError:
    """A mistake of the user as it is; of what is none, the trace goes to the terminal."""
    if isinstance(error, UserError):
        return error
    if not isinstance(error, ValidationError):
        traceback.print_exception(error)
    return UserError(f"the process that plays ahead: {describe(error)}")


def main(pipe: Connection) -> NoReturn:
    for number in STOPS:  # of a terminal or a launcher: the trainer saves first
        signal.signal(number, signal.SIG_IGN)
    sending = threading.Lock()

    def send(*message: Any) -> None:
        with sending:
            pipe.send(message)

    with suppress(EOFError, OSError):  # the trainer has ended
        player: Any = None
        try:
            player = Player(send, *pipe.recv())
        except Exception as error:
            send("broken", sendable(error))
        while player:
            what, *given = pipe.recv()
            getattr(player, what)(*given)
    os._exit(0)  # whatever its threads do; its environments end with it


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
