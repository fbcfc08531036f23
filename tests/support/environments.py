"""Environments that misbehave: in games of the class `factory(step=exits)`, `step` exits. Some are
named by `env.name`.

All count to three and win, and `Honest` always does. In the other classes, every fourth environment
misbehaves, so that a group of four loses one member; with `everywhere`, all of them do.
"""

import math
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from paw.algo.advantages import grpo
from paw.envs.base import Endless, Sized, Tasks
from paw.errors import UserError
from paw.types import Outcome, Sample, Task

FAKE = "$_{\x1b[2J\x1b]0;owned\x07update 99/99  reward 9e9\nupdate 100/100  success 100.0%\r\u202e\u200b\ud800\x00}$"
"""Clears the screen, names the window, fakes two lines of progress, reverses the direction of the
text, and is not valid Unicode."""


class Honest:
    name = "attack"
    reward_max = 1.0
    may_block = False
    runs_others_code = True
    wrong: Mapping[str, Any] = MappingProxyType({})
    """Methods of the game that misbehave, and values that replace fields of its outcomes."""
    everywhere = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.invalid_penalty = 0.0
        self.made = 0

    def tasks(self, split: str, seed: int) -> Tasks:
        return Endless(lambda i: Task(f"{split}/0/{i}", "count"))

    def make(self) -> "Game":
        self.made += 1
        misbehaves = self.everywhere or self.made % 4 == 2
        if not misbehaves:
            return Game({})
        if "make" in self.wrong and self.made > 1:
            self.wrong["make"](self)
        return Game(self.wrong)

    def fingerprint(self) -> str:
        return "counting to three"


class Game:
    def __init__(self, wrong: Mapping[str, Any]) -> None:
        self.wrong = wrong
        self.n = 0

    def _maybe(self, name: str, value: Any) -> Any:
        return self.wrong[name](self) if name in self.wrong else value

    def reset(self, task: Task) -> str:
        self.n = 0
        return self._maybe("reset", "start")

    def context(self) -> str:
        return self._maybe("context", f"task: put a mug in shelf 1.\nturn {self.n}")

    def anchor(self) -> str:
        return self._maybe("anchor", f"at {self.n}")

    def step(self, response: str) -> Outcome:
        self.n += 1
        done = self.n == 3
        outcome = Outcome(f"now {self.n}", float(done), done, done, response, valid=True)
        changed = {name: value for name, value in self.wrong.items() if name in vars(outcome)}
        return self._maybe("step", Outcome(**vars(outcome) | changed))

    def oracle(self) -> str:
        return self._maybe("oracle", "go")

    def admissible_actions(self) -> list[str]:
        return self._maybe("admissible_actions", ["go", "stay"])

    def close(self) -> None:
        self._maybe("close", None)


def factory(*, may_block: bool = False, everywhere: bool = False, **wrong: Any) -> type[Honest]:
    return type(
        "Attack", (Honest,), {"wrong": wrong, "may_block": may_block, "everywhere": everywhere}
    )


def raises(error: BaseException) -> Callable[[Game], Any]:
    def method(_: Game) -> None:
        raise error

    return method


def exits(_: Game) -> None:
    sys.exit(0)


class Liar(Honest):
    """Every text tries to trick the reader, including names of tasks and exceptions."""

    wrong = MappingProxyType({"step": raises(RuntimeError(FAKE))})

    def tasks(self, split: str, seed: int) -> Tasks:
        return [Task(f"{i}{FAKE}", FAKE) for i in range(4)]

    def make(self) -> Game:
        says = {
            "observation": FAKE,
            "action": FAKE,
            "context": lambda game: FAKE,
            "anchor": lambda game: FAKE,
        }
        game = super().make()
        game.wrong = game.wrong or says
        return game

    def fingerprint(self) -> str:
        return FAKE


def wanders(_: Game) -> str:
    os.chdir(tempfile.mkdtemp())
    return "start"


class ChangesDirectory(Honest):
    wrong = MappingProxyType({"reset": wanders})
    everywhere = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        os.chdir(tempfile.mkdtemp())


class DownInTraining(Honest):
    """From the second update on, nothing works for $ATTACK_DOWN_FOR_S seconds, as if a server were
    restarting."""

    down_until = math.inf

    def tasks(self, split: str, seed: int) -> Tasks:
        listed = super().tasks(split, seed)

        def task(i: int) -> Task:
            # The second update's first.
            if split == "train" and i == 2 and self.down_until == math.inf:
                self.down_until = time.monotonic() + float(os.environ.get("ATTACK_DOWN_FOR_S", "0"))
            return listed[i]

        return Endless(task)

    def make(self) -> Game:
        return Game({"reset": self._connect})

    def _connect(self, game: Game) -> str:
        if time.monotonic() < self.down_until < math.inf:
            raise ConnectionError("connection refused")
        return "start"


class Breaks(Honest):
    """Texts are drawn at random. If $ATTACK is set, it says what ends the second update."""

    def tasks(self, split: str, seed: int) -> Tasks:
        listed = super().tasks(split, seed)

        def task(i: int) -> Task:
            if (split, i) == ("train", 2):  # the second update's first
                match os.environ.get("ATTACK"):
                    case "tasks":
                        raise OSError("broken")
                    case "tasks that exit":
                        sys.exit("broken")
                    case "tasks that hang":
                        threading.Event().wait()
            return listed[i]

        return Endless(task)

    def make(self) -> Game:
        return Drawing({})

    def fingerprint(self) -> str:
        if os.environ.get("ATTACK") == "a fingerprint that exits":
            sys.exit("broken")
        return super().fingerprint()


class Drawing(Game):
    def reset(self, task: Task) -> str:
        self.breaks = (os.environ.get("ATTACK"), task.id) == ("play", "train/0/3")
        return super().reset(task)

    def context(self) -> str:
        if self.breaks and self.n == 2:
            raise UserError("broken")
        return f"turn {random.random()}"


class Callback:
    step = 0

    def __init__(self) -> None:
        Callback.step = 0
        if os.environ.get("ATTACK") == "a callback that exits when it is made":
            sys.exit("broken")

    def on_start(self, run: Any) -> None:
        if os.environ.get("ATTACK") == "on_start that exits":
            sys.exit("broken")

    def on_update(self, run: Any, metrics: Mapping[str, float]) -> None:
        Callback.step = run.step
        if run.step == 1:
            match os.environ.get("ATTACK"):
                case "update":
                    raise UserError("broken")
                case "on_update that exits":
                    sys.exit("broken")
                case "on_update that recurs":
                    self.on_update(run, metrics)

        if run.step == 2:
            if run.config.run.save_every:
                run.settle()  # the checkpoint of update 1 may still be being written
            match os.environ.get("ATTACK"):
                case "renamed":
                    run.directory.rename(run.directory.with_name("elsewhere"))
                case "renamed, and another made":
                    run.directory.rename(run.directory.with_name("elsewhere"))
                    run.directory.mkdir()
                case "deleted":
                    shutil.rmtree(run.directory)
                case "deleted, and another made":
                    shutil.rmtree(run.directory)
                    run.directory.mkdir()
                case "logs deleted":
                    (run.directory / "metrics.jsonl").unlink()
                    (run.directory / "samples.jsonl").unlink()

    def on_evaluation(self, run: Any, groups: Any, metrics: dict[Any, Any]) -> None:
        if run.step == 1:
            attack = os.environ.get("ATTACK", "")
            match attack:
                case "evaluation":
                    raise UserError("broken")
                case "on_evaluation that exits":
                    sys.exit("broken")
            metrics |= METRICS.get(attack, {})

    def on_end(self, run: Any) -> None:
        if os.environ.get("ATTACK") == "on_end that exits":
            sys.exit("broken")


ITSELF: dict[str, Any] = {}
ITSELF["itself"] = ITSELF
METRICS: dict[str, dict[Any, Any]] = {
    "a huge metric": {"mine": 10**400},
    "a metric without end": {"mine": ITSELF},
    "a metric of many": {"mine": np.zeros(3)},
    "a metric that has no name": {None: 1.0},
    "a time in words": {"time/eval": "soon"},
}
"""The entries that a callback adds to an evaluation's metrics."""


def advantages(samples: Sequence[Sample]) -> list[float]:
    if Callback.step == 1:
        match os.environ.get("ATTACK"):
            case "score":
                raise UserError("broken")
            case "advantages that exit":
                sys.exit("broken")
    return grpo(samples)


def loss(logp: Any, entropy: Any, batch: Any) -> Any:
    if (os.environ.get("ATTACK"), Callback.step) == ("a loss that exits", 1):
        sys.exit("broken")
    return -batch.advantage * logp


class ExitsInStep(Honest):
    wrong = MappingProxyType({"step": exits})
    everywhere = True


def hangs(_: Game) -> None:
    threading.Event().wait()


class HangsInStep(Honest):
    wrong = MappingProxyType({"step": hangs})
    everywhere = True


class LaterTasks(Honest):
    """All tasks except the first exit or hang, depending on $ATTACK."""

    def tasks(self, split: str, seed: int) -> Tasks:
        listed = super().tasks(split, seed)

        def task(i: int) -> Task:
            if i > 0:
                match os.environ.get("ATTACK"):
                    case "tasks that exit":
                        sys.exit("broken")
                    case "tasks that hang":
                        threading.Event().wait()
            return listed[i]

        return Sized(task, 20)


class Crashing(Honest):
    """Every fifth task raises in its second turn, except the first of an update. The reward depends
    on the response."""

    def make(self) -> Game:
        return Fragile({})


class Fragile(Game):
    def reset(self, task: Task) -> str:
        self.crashes = not task.id.endswith("/0") and zlib.crc32(task.id.encode()) % 5 == 0
        return super().reset(task)

    def step(self, response: str) -> Outcome:
        outcome = super().step(response)
        if self.crashes and self.n == 2:
            raise OSError("the simulator is gone")
        reward = float(outcome.done and zlib.crc32(response.encode()) % 2)
        return replace(outcome, reward=reward, won=reward > 0)
