"""Commands forked from a process that has loaded torch and transformers, which takes six seconds of a core."""

import atexit
import gc
import inspect
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("paw.trainer", "paw.algo.critic", "paw.model.parallel", "paw.rollouts.ahead"),
        *("paw.rollouts.engines.transformers", "paw.tools.experiment.runs"),
    ]
)


class Child:
    """`paw WORDS` without its report, its output going to two descriptors; as subprocess.Popen."""

    stderr: IO[str]
    returncode: int | None = None

    def __init__(self, words: list[str], *, env: dict[str, str], cwd: str, out: int, err: int) -> None:
        self._process = CONTEXT.Process(
            target=run, args=(words, env, cwd, Connection(os.dup(out)), Connection(os.dup(err)))
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def trainer(self) -> int:
        """Id of the process that runs the command; `pid` is its parent, which watches it."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[0]) if children else self.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("paw", timeout)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_ranks(
    commands: Sequence[list[str]], folders: Sequence[Path], *, on_host: int, homes: Sequence[Path] = ()
) -> list[tuple[int, str]]:
    """`paw` in a rank for each command, in its folder, as torchrun would start them: (exit code, standard error)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": len(commands), "LOCAL_WORLD_SIZE": on_host, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        ranks = []
        for rank, (words, folder, error) in enumerate(zip(commands, folders, errors, strict=True)):
            own = {"RANK": rank, "LOCAL_RANK": rank % on_host, "OMP_NUM_THREADS": 1, **shared}
            own |= {"HOME": homes[rank]} if homes else {}
            env = os.environ | {name: str(value) for name, value in own.items()}
            ranks.append(Child(words, env=env, cwd=str(folder), out=nowhere.fileno(), err=error.fileno()))
            stack.callback(ranks[-1].kill)
        codes = [rank.wait(200) for rank in ranks]
        for error in errors:
            error.seek(0)
        return [(code, error.read()) for code, error in zip(codes, errors, strict=True)]


def call_in_ranks(function: Callable[..., None], count: int, *given: Any, on_host: int) -> None:
    """`function(rank, *given)` in a process for each rank, to be named by its module."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": on_host, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = [CONTEXT.Process(target=call, args=(function, rank, shared, given)) for rank in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    assert [child.exitcode for child in children] == [0] * count


def call(function: Callable[..., None], rank: int, shared: dict[str, Any], given: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "LOCAL_RANK": 0, **shared}.items()})
    function(rank, *given)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own way aborts now and then in a thread of gloo's


class Forked(subprocess.Popen):
    """A rank of `paw train --gpus` or a run of an experiment: forked from what starts it, not a new interpreter."""

    def _execute_child(self, args, *options):
        names = inspect.signature(super()._execute_child).parameters
        how = dict(zip(names, (args, *options), strict=True))
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            return
        for number, file in ((1, how["c2pwrite"]), (2, how["errwrite"])):
            if file >= 0:
                os.dup2(file, number)
        for path in Path("/proc/self/fd").iterdir():
            if path.is_socket() and int(path.name) not in (0, 1, 2, *how["pass_fds"]):
                os.close(int(path.name))
        run(args[3:], dict(how["env"] or os.environ), str(Path.cwd()))


def player(ahead: ModuleType) -> type[subprocess.Popen]:
    """The process that plays ahead, which waits to be started: forked now, for later this one has threads."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        _, pipes, *_ = socket.recv_fds(theirs, 1, 1)
        if pipes:
            ahead.main(Connection(pipes[0]))
        os._exit(0)
    theirs.close()

    class Player(subprocess.Popen):
        def _execute_child(self, args, *options):
            self.pid, self._child_created = pid, True
            socket.send_fds(ours, [b"."], [int(args[-1])])

    return Player


def run(words: list[str], env: dict[str, str], cwd: str, *output: Connection) -> NoReturn:
    """The command, in this process; ends it."""
    code: Any = 1
    gc.freeze()  # else its first collection copies the memory of all that is imported
    try:
        for number, file in enumerate(output, start=1):
            os.dup2(file.fileno(), number)
            file.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        random.seed()
        sys.argv = ["paw", *words]
        from paw.model import launcher
        from paw.plugins import CALLBACKS
        from paw.rollouts import ahead
        from paw.tools.experiment import runs

        CALLBACKS["report"] = "builtins:object"  # takes seconds
        for module in (launcher, runs):
            module.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
        if "--rollout.ahead" in words:
            ahead.subprocess = SimpleNamespace(Popen=player(ahead), TimeoutExpired=subprocess.TimeoutExpired)
        if patch := os.environ.get("FORKED_PATCH"):  # a file of a test's own, run before the command
            runpy.run_path(patch)
        from paw.__main__ import run as command

        command()
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
