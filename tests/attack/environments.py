"""Environments that misbehave: every class is a suite, played by `env.name = "tests/attack/environments.py:Class"`.

All count to three and win, `Honest` always. Of the others every fourth environment misbehaves, so that a group of four
loses one member, or all do where the class is named All...
"""

import asyncio
import ctypes
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from paw.errors import UserError
from paw.types import Outcome, Task

FAKE = "$_{\x1b[2J\x1b]0;owned\x07step 99/99  reward 9e9\nstep 100/100  success 100.0%\r\u202e\u200b\ud800\x00}$"
"""Clears the screen, names the window, fakes two lines of progress, turns the text around, and is no Unicode."""


class Honest:
    name, reward_max, may_block = "attack", 1.0, False
    wrong: Mapping[str, Any] = MappingProxyType({})
    """Methods of the game that misbehave, and what the fields of its outcomes are instead."""
    everywhere = False

    def __init__(self, config: Any) -> None:
        self.config, self.invalid_penalty, self.made = config, 0.0, 0

    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        return [Task(f"train/{step}/{i}", "count") for i in range(count)]

    def eval_tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [Task(f"{split}/{i}", "count") for i in range(count or 4)]

    def warmup_tasks(self, start: int, count: int, seed: int) -> list[Task]:
        return [Task(f"warmup/{i}", "count") for i in range(start, start + count)]

    def make(self) -> "Game":
        self.made += 1
        bad = self.everywhere or self.made % 4 == 2
        if bad and "make" in self.wrong and self.made > 1:
            self.wrong["make"](self)
        return Game(self.wrong if bad else {})

    def fingerprint(self) -> str:
        return "counting to three"


class Game:
    def __init__(self, wrong: Mapping[str, Any]) -> None:
        self.wrong, self.n = wrong, 0

    def _maybe(self, name: str, value: Any) -> Any:
        return self.wrong[name](self) if name in self.wrong else value

    def reset(self, task: Task) -> str:
        self.n = 0
        return self._maybe("reset", "start")

    def prompt(self) -> str:
        return self._maybe("prompt", f"task: put a mug in shelf 1.\nturn {self.n}")

    def anchor(self) -> str:
        return self._maybe("anchor", f"at {self.n}")

    def step(self, response: str) -> Outcome:
        self.n += 1
        done = self.n == 3
        outcome = Outcome(f"now {self.n}", float(done), done, done, response, valid=True)
        changed = {name: value for name, value in self.wrong.items() if name in vars(outcome)}
        return self._maybe("step", Outcome(**vars(outcome) | changed))

    def expert(self) -> str:
        return self._maybe("expert", "go")

    def choices(self) -> list[str]:
        return self._maybe("choices", ["go", "stay"])

    def close(self) -> None:
        self._maybe("close", None)


def suite(*, may_block: bool = False, everywhere: bool = False, **wrong: Any) -> type[Honest]:
    return type("Attack", (Honest,), {"wrong": wrong, "may_block": may_block, "everywhere": everywhere})


def raises(error: BaseException) -> Callable[[Game], Any]:
    def method(_: Game) -> None:
        raise error

    return method


# ---- what it raises, and where


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even that")

    __repr__ = __str__


class OwnBase(BaseException):
    pass


def exits(_: Game) -> None:
    sys.exit(0)


def endless(game: Game) -> None:
    endless(game)


ExitsInMake = suite(make=exits)
ExitsInReset = suite(reset=exits)
ExitsInPrompt = suite(prompt=exits)
ExitsInAnchor = suite(anchor=exits)
ExitsInStep = suite(step=exits)
ExitsInClose = suite(step=raises(OSError("broken")), close=exits)
ExitsInThread = suite(step=exits, may_block=True)
ExitsInExpert = suite(expert=exits, choices=lambda game: [])
ExitsInChoices = suite(choices=exits)
AllExitInStep = suite(step=exits, everywhere=True)
AllExitInExpert = suite(expert=exits, choices=lambda game: [], everywhere=True)
GeneratorExits = suite(step=raises(GeneratorExit()))
Cancelled = suite(step=raises(asyncio.CancelledError()))
RaisesOwnBase = suite(prompt=raises(OwnBase("mine")))
RaisesUnprintable = suite(step=raises(Unprintable()))
Stops = suite(step=raises(StopIteration()))
NoMemory = suite(step=raises(MemoryError()))
Recurses = suite(anchor=endless)
CannotBeMade = suite(make=raises(RuntimeError("no licence")))
CannotBeClosed = suite(close=raises(OwnBase("no")), everywhere=True)
OnlyTheUserCanMend = suite(step=raises(UserError("my_game: set MY_KEY")))
OnlyTheUserCanMendInThread = suite(step=raises(UserError("my_game: set MY_KEY")), may_block=True)
PressesCtrlC = suite(step=raises(KeyboardInterrupt()))

# ---- what it returns

RewardNan = suite(reward=math.nan)
RewardInf = suite(reward=-math.inf)
RewardHuge = suite(reward=1e308)
RewardInteger = suite(reward=10**400)
RewardNone = suite(reward=None)
RewardText = suite(reward="1")
RewardTensor = suite(reward=torch.tensor(1.0))
RewardArray = suite(reward=np.array([1.0, 2.0]))
RewardNumpyNan = suite(reward=np.float32("nan"))
RewardDecimal = suite(reward=Decimal("1"))
ScoreText = suite(score="good")
ScoreNan = suite(score=math.nan)
ScoreTwo = suite(score=2.0)
DoneNumber = suite(done=1)
WonNone = suite(won=None)
ValidText = suite(valid="yes")
ObservationNone = suite(observation=None)
ObservationBytes = suite(observation=b"now")
ActionNone = suite(action=None)
PromptNone = suite(prompt=lambda game: None)
PromptBytes = suite(prompt=lambda game: b"what now?")
AnchorList = suite(anchor=lambda game: ["at", game.n])
ResetNone = suite(reset=lambda game: None)
StepNone = suite(step=lambda game: None)
StepTuple = suite(step=lambda game: ("now", 1.0, True, {}))
NumpyAnswers = suite(
    reward=np.float32(0.5),
    won=np.bool_(True),
    valid=np.bool_(False),
    score=np.float64(0.25),
    observation=np.str_("now"),
)
"""Numbers and texts all the same."""


class TasksWithoutKind(Honest):
    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        return [Task("a", None)]  # pyright: ignore[reportArgumentType]


# ---- how long it takes


def spins(_: Game) -> None:
    while True:
        pass


def waits(_: Game) -> None:
    threading.Event().wait()


def sleeps_in_c(_: Game) -> None:
    ctypes.CDLL(None).sleep(3600)


SpinsInStep = suite(step=spins)
WaitsInStep = suite(step=waits)
WaitsInReset = suite(reset=waits)
WaitsInPrompt = suite(prompt=waits)
WaitsInMake = suite(make=waits)
WaitsInClose = suite(close=waits, everywhere=True)
SleepsInC = suite(step=sleeps_in_c)
WaitsInThread = suite(step=waits, may_block=True)
AllWait = suite(step=waits, may_block=True, everywhere=True)
NeverDone = suite(done=False, everywhere=True)
FloodsPrompt = suite(prompt=lambda game: "x " * 1_000_000 + f"turn {game.n}", everywhere=True)
FloodsObservation = suite(observation="now" + "x" * 20_000_000, everywhere=True)

# ---- what it says

RaisesFakeProgress = suite(step=raises(RuntimeError(FAKE + "x" * 10_000_000)))
SaysFakeProgress = suite(observation=FAKE, prompt=lambda game: FAKE, everywhere=True)


class Liar(Honest):
    """Every text there is, names of tasks and exceptions among them, is a trick on the reader."""

    wrong = MappingProxyType({"step": raises(RuntimeError(FAKE))})

    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        return [Task(f"{i}{FAKE}", FAKE) for i in range(count)]

    def eval_tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return self.train_tasks(0, count or 4, seed)

    def make(self) -> Game:
        says = {"observation": FAKE, "action": FAKE, "prompt": lambda game: FAKE, "anchor": lambda game: FAKE}
        game = super().make()
        game.wrong = game.wrong or says
        return game

    def fingerprint(self) -> str:
        return FAKE


# ---- what it does to the process


def wanders(_: Game) -> str:
    os.chdir(tempfile.mkdtemp())
    return "start"


class ChangesDirectory(Honest):
    wrong, everywhere = MappingProxyType({"reset": wanders}), True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        os.chdir(tempfile.mkdtemp())


class DownInTraining(Honest):
    """From the second update on nothing works for $ATTACK_DOWN_FOR_S seconds, as while a server restarts."""

    down_until = math.inf

    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        if step and self.down_until == math.inf:
            self.down_until = time.monotonic() + float(os.environ.get("ATTACK_DOWN_FOR_S", "0"))
        return super().train_tasks(step, count, seed)

    def make(self) -> Game:
        return Game({"reset": self._connect})

    def _connect(self, game: Game) -> str:
        if time.monotonic() < self.down_until < math.inf:
            raise ConnectionError("connection refused")
        return "start"
