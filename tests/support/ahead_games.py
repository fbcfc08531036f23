"""Environments, an agent and a trainer for tests of the process that plays ahead.

They log the processes that they start to $AHEAD_LOG.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from environments import Game, Honest
from forked import player
from torch import nn

from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.errors import UserError
from paw.model.loading import load_tokenizer
from paw.rollouts.background import ahead
from paw.rollouts.engines.pool import SendingPool
from paw.rollouts.engines.server import ServerEngine
from paw.rollouts.engines.transfer import FileTransfer
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.rollouts.text.chat import Chat
from paw.types import Outcome

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
DAEMON = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""
LOCK = threading.Lock()


def log(*words: object) -> None:
    """Log a line in a single write."""
    descriptor = os.open(os.environ["AHEAD_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{' '.join(map(str, words))}\n".encode())
    os.close(descriptor)


def logged(kind: str) -> list[str]:
    """The rest of each logged line that begins with the word `kind`."""
    path = Path(os.environ["AHEAD_LOG"])
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == kind]


def living(kind: str) -> list[int]:
    """The logged processes of this kind that have not ended."""
    processes = []
    for number in map(int, logged(kind)):
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()[0]
            if state not in "ZX":
                processes.append(number)
    return processes


def ahead_of_the_trainer() -> bool:
    return str(os.getpid()) != os.environ["AHEAD_TRAINER"]


class Logged(Game):
    def reset(self, task: Any) -> str:
        if ahead_of_the_trainer():
            log("player", os.getpid())
        return super().reset(task)


class Refusal(UserError):
    """Cannot be unpickled, because exceptions are unpickled by calling them with their message."""

    exit_code = 5

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class RefusingGame(Logged):
    def step(self, response: str) -> Outcome:
        raise Refusal("the licence", "it has expired\x1b[2J")


class OddOutcome(Outcome):
    def __reduce__(self) -> Any:
        return int, ("no number",)


class OddGame(Logged):
    def step(self, response: str) -> Outcome:
        return OddOutcome(
            **vars(super().step(response)) | {"reward": 0.1 + self.n / 3, "score": 1 / 3}
        )


class ForkingGame(Logged):
    """The first reset forks a process that keeps every open file, bypassing Python's own hooks, and
    then waits to be killed."""

    def reset(self, task: Any) -> str:
        observation = super().reset(task)
        with LOCK:
            if ahead_of_the_trainer() and not logged("forked"):
                pid = ctypes.PyDLL(None).fork()
                if not pid:
                    while True:
                        signal.pause()
                log("forked", pid)
                time.sleep(60)
        return observation


class SlowGame(Logged):
    def step(self, response: str) -> Outcome:
        if self.n == 1:
            time.sleep(2.5)
        return super().step(response)


class HelpedGame(Logged):
    """Starts a program for each game, which `close` ends, and two that nobody ends, one a daemon."""

    def __init__(self, wrong: Any) -> None:
        super().__init__(wrong)
        if not ahead_of_the_trainer():
            return
        self.helper = subprocess.Popen(SLEEP)
        log("helper", self.helper.pid)
        with LOCK:
            if not logged("left"):
                log("left", subprocess.Popen(SLEEP).pid)
                words = [sys.executable, "-S", "-c", DAEMON, *SLEEP]
                log(
                    "left",
                    subprocess.run(
                        words, stdout=subprocess.PIPE, text=True, check=True
                    ).stdout.strip(),
                )

    def reset(self, task: Any) -> str:
        program = subprocess.Popen(SLEEP)
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        forked.start()
        log("helper", program.pid)
        log("helper", forked.pid)
        program.terminate()
        forked.terminate()
        forked.join(10)
        log("ended", program.wait(10), forked.exitcode)
        return super().reset(task)

    def close(self) -> None:
        self.helper.terminate()
        log("closed", self.helper.wait(10))


class PlainHelpedGame(Logged):
    def __init__(self, wrong: Any) -> None:
        super().__init__(wrong)
        if ahead_of_the_trainer():
            log("helper", subprocess.Popen(SLEEP).pid)


class Games(Honest):
    """The same game every time, played in threads."""

    game: type[Game] = Logged

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.may_block = True

    def make(self) -> Game:
        return self.game({})


class Plain(Games):
    """The plain game, without changes."""


class Refusing(Games):
    game = RefusingGame


class Odd(Games):
    game = OddGame


class Forking(Games):
    game = ForkingGame


class Slow(Games):
    game = SlowGame


class Helped(Games):
    game = HelpedGame


class PlainHelped(Games):
    game = PlainHelpedGame


class OtherTasks(Games):
    def tasks(self, split: str, seed: int) -> Any:
        tasks = super().tasks(split, seed)
        return [tasks[i + 10 * ahead_of_the_trainer()] for i in range(10)]


async def blocks(env: Any, model: Any) -> None:
    """Blocks the event loop of the process that plays ahead."""
    await env.reset()
    if ahead_of_the_trainer():
        time.sleep(1000)
    while not env.done:
        await env.step(await model.generate(env.context()))


def make_rollouts(config: Config, url: str, model: str) -> Rollouts:
    """Rollouts that the trainer plays itself, over a server that has weights."""
    transfer = FileTransfer(torch.float32, 10)
    engine = ServerEngine(
        SendingPool([url], transfer, end_ids={3}, vocabulary=50, timeout_s=10, ranks=Ranks()), 64
    )
    engine.positions = 512
    push_weights(nn.Linear(2, 3), engine, version=0)
    return Rollouts(make_factory(config), engine, Chat(load_tokenizer(model)), config, Ranks())


def trainer(settings: str, url: str, model: str, log_file: str) -> None:
    """Plays one update ahead, then waits. A process it has forked keeps its end of the socket."""
    os.environ |= {"AHEAD_LOG": log_file, "AHEAD_TRAINER": str(os.getpid())}
    ahead.subprocess = SimpleNamespace(
        Popen=player(CLOSE_S=1.0, LINGER_S=0.2),
        PIPE=subprocess.PIPE,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    config = Config.model_validate_json(settings)
    rollouts = ahead.AsyncRollouts(make_rollouts(config, url, model), model)
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        while True:
            signal.pause()
    rollouts.training(0, 2)
    log("forked", pid)
    time.sleep(1000)
