"""Environments that a thread cannot contain: the first episode of one task ends or blocks its process.

All count to three and win, like those of environments.py. $DEADLY says what the episode does, and
$DEADLY_TASK is the task. $DEADLY_ONCE is a file that the first episode creates. If $DEADLY is a
file, the file names the deed, and the first episode removes it.
"""

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paw.envs.base import Endless
from paw.types import Outcome, Reply, Task, ToolCall


def speaks_out_of_turn() -> None:
    for descriptor in range(3, 500):
        with suppress(OSError):
            os.write(descriptor, b'{"key": 1000000, "text": "mine"}\n')


def dies_with_its_connection_held() -> None:
    if os.fork() == 0:
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_with_the_interpreter() -> None:
    """Hold Python's lock in C code, as a regular expression does, without using processor time."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no signal wakes this thread
    ctypes.PyDLL(None).sleep(1000)


def holds_the_interpreter() -> None:
    """Sleep in a thread, as in training. In the main thread a signal would interrupt the sleep."""
    thread = threading.Thread(target=sleep_with_the_interpreter)
    thread.start()
    thread.join()


DEEDS: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "is killed with its connection held": dies_with_its_connection_held,
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the interpreter": holds_the_interpreter,
    "speaks out of turn": speaks_out_of_turn,
}


def do_the_deed(deed_file: str) -> None:
    """Do the deed, or the one that a file names, if this is the first episode to get here."""
    if deed_file in DEEDS:
        with suppress(FileExistsError), Path(os.environ["DEADLY_ONCE"]).open("x"):
            DEEDS[deed_file]()
        return
    with suppress(FileNotFoundError):
        claimed_file = Path(deed_file).rename(f"{deed_file} of {os.getpid()}")
        DEEDS[claimed_file.read_text()]()


class Counter:
    def reset(self, task: Task) -> str:
        self.n = 0
        self.id = task.id
        return "start"

    def context(self) -> str:
        return f"task: put a mug in shelf 1.\nturn {self.n}"

    def anchor(self) -> str:
        return f"at {self.n}"

    def step(self, response: str) -> Outcome:
        self.n += 1
        is_the_task = self.id == os.environ.get("DEADLY_TASK", "train/0/1")
        if self.n == 2 and is_the_task and "DEADLY" in os.environ:
            do_the_deed(os.environ["DEADLY"])
        done = self.n == 3
        return Outcome(f"now {self.n} {response}", float(done), done, done, response)


class Deadly:
    """A factory whose environments run one after another in each process."""

    name = "deadly"
    reward_max = 1.0

    def tasks(self, split, seed):
        return Endless(lambda i: Task(f"{split}/0/{i}", "count"))

    def make(self):
        return Counter()


class Blocking(Deadly):
    may_block = True


class Meeting(Blocking):
    """Makes an environment only once eight are being made, in all processes together.

    The first one in a process is made at once, because it is the check of the environment.
    """

    is_checked = False

    def make(self):
        if self.is_checked:
            folder = Path(os.environ["DEADLY_MEETING"])
            (folder / f"{os.getpid()} {threading.get_ident()}").touch()
            while len(list(folder.iterdir())) < 8:
                time.sleep(0.01)
        self.is_checked = True
        return Counter()


class AtOnce(Counter):
    async def step(self, response: str) -> Outcome:
        await asyncio.sleep(0.01)
        return super().step(response)


class Coroutines(Deadly):
    def make(self):
        return AtOnce()


class EndsAtOnce(Deadly):
    def make(self):
        os._exit(7)


class WithHelper(Counter):
    """Starts its own program. The program's id is the first observation."""

    def reset(self, task: Task) -> str:
        super().reset(task)
        self.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return str(self.helper.pid)


class Helpers(Deadly):
    def make(self):
        return WithHelper()


class Tools(Counter):
    """A conversation with a tool, with every optional member."""

    tools = [
        {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    ]

    def reset(self, task: Task) -> str:
        self.task = f"add to {task.id}"
        return super().reset(task)

    def context(self):
        return [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"turn {self.n}"},
        ]

    def oracle(self):
        return Reply.of("I add.", ToolCall("add", {"n": 3}, "1"))

    def admissible_actions(self):
        return ["1", "2"]

    def format_action(self, action: str):
        return Reply.of("", ToolCall("add", {"n": int(action)}))

    def step(self, response) -> Outcome:
        arguments = [call.arguments for call in response.calls]
        self.n += 1
        return Outcome(
            f"{arguments} {response.content} {response.problem}",
            0.5,
            self.n == 3,
            False,
            results=["a", "b"],
        )


class WithTools(Deadly):
    def make(self):
        return Tools()


class Wrong(Counter):
    def step(self, response: str) -> Outcome:
        outcome = super().step(response)
        match self.n, self.id.rpartition("/")[2]:
            case 2, "1":
                raise OSError("broken \x1b[2J")
            case 2, "2":
                return Outcome("x", math.nan, False, False)
            case 3, "3":
                sys.exit(3)
        return outcome

    def context(self):
        return "x" * 2000 + super().context()


class Wrongs(Deadly):
    def make(self):
        return Wrong()


class Unsendable(Deadly):
    def tasks(self, split, seed):
        return [Task("a", payload=lambda: 0), Task("b")]
