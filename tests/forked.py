"""Commands forked from a process that has loaded torch and transformers, which takes six seconds of a core each time.

`python tests/forked.py FD` is that process: for each request on the Unix socket FD it forks a child, which runs the
command line as `python -m paw` would, in the environment and folder it is told.
"""

import atexit
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
BYTES = 1 << 20
"""Of a request."""
LOADED = ("paw.train", "paw.algo.critic", "paw.model.parallel", "paw.rollout.engines.transformers")


class Forks:
    """The process that commands are forked from, started with the first one."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def start(self, words: list[str], *, env: dict[str, str], cwd: str, out: int, err: int, report: bool) -> "Child":
        """`paw WORDS`, its output going to two descriptors; `report`: draw the run's report."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, __file__, str(theirs.fileno())]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.Popen(command, env=one_thread, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
        request = json.dumps({"words": words, "env": env, "cwd": cwd, "report": report}).encode()
        assert len(request) < BYTES
        status, theirs = os.pipe()
        socket.send_fds(self._socket, [request], [out, err, theirs])
        os.close(theirs)
        return Child(int(self._socket.recv(32)), status)


class Child:
    """As subprocess.Popen."""

    stderr: IO[str]

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            (self.returncode,) = struct.unpack("i", os.read(self._status, 4))
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("paw", timeout)
            time.sleep(0.01)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


FORKS = Forks()


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
            files = {"out": nowhere.fileno(), "err": error.fileno()}
            ranks.append(FORKS.start(words, env=env, cwd=str(folder), report=False, **files))
            stack.callback(ranks[-1].kill)
        codes = [rank.wait(200) for rank in ranks]
        for error in errors:
            error.seek(0)
        return [(code, error.read()) for code, error in zip(codes, errors, strict=True)]


def serve(channel: socket.socket) -> None:
    """Fork until the other end is closed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    for name in LOADED:
        importlib.import_module(name)
    running: dict[int, int] = {}
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready = select.select([channel, awake], [], [])[0]
        if awake in ready:
            os.read(awake, 4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                told = running.pop(pid)
                os.write(told, struct.pack("i", os.waitstatus_to_exitcode(status)))
                os.close(told)
        if channel in ready:
            request, files, _, _ = socket.recv_fds(channel, BYTES, 3)
            if not request:
                return
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                channel.close()
                run(json.loads(request), *files)
            running[pid] = files[2]
            channel.send(str(pid).encode())
            os.close(files[0]), os.close(files[1])


def run(request: dict[str, Any], out: int, err: int, status: int) -> NoReturn:
    """The command, in this process; ends it."""
    code: Any = 1
    try:
        os.dup2(out, 1), os.dup2(err, 2), os.close(out), os.close(err), os.close(status)
        for number, handler in ((signal.SIGCHLD, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        random.seed()
        sys.argv = ["paw", *request["words"]]
        if not request["report"]:
            from paw.plugins import CALLBACKS

            CALLBACKS["report"] = "builtins:object"
        from paw.__main__ import run as command

        command()
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
