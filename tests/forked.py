"""Commands forked from a process that has loaded torch and transformers, which takes six seconds of a core."""

import atexit
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["paw.train", "paw.algo.critic", "paw.model.parallel", "paw.rollout.engines.transformers"]
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


def run_ranks(commands: Sequence[list[str]], folders: Sequence[Path], *, on_host: int) -> list[tuple[int, str]]:
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
            env = os.environ | {name: str(value) for name, value in own.items()}
            ranks.append(Child(words, env=env, cwd=str(folder), out=nowhere.fileno(), err=error.fileno()))
            stack.callback(ranks[-1].kill)
        codes = [rank.wait(200) for rank in ranks]
        for error in errors:
            error.seek(0)
        return [(code, error.read()) for code, error in zip(codes, errors, strict=True)]


def run(words: list[str], env: dict[str, str], cwd: str, out: Connection, err: Connection) -> NoReturn:
    """The command, in this process; ends it."""
    code: Any = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        out.close()
        err.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        random.seed()
        sys.argv = ["paw", *words]
        from paw.plugins import CALLBACKS

        CALLBACKS["report"] = "builtins:object"  # takes seconds
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
