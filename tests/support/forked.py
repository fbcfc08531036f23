"""Commands forked from a process that has already loaded torch and transformers, which takes six
seconds of a core."""

import atexit
import faulthandler
import gc
import inspect
import logging
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn
from unittest.mock import patch

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "paw.tools.train.train",
        "paw.model.critic",
        "paw.distributed.parallel",
        "paw.rollouts.background.ahead",
        "paw.rollouts.background.player",
        "paw.rollouts.engines.generation",
        "paw.tools.experiment.runs",
    ]
)


def start_server() -> None:
    """Start the server of forks, which forks all children here.

    The server is a fork of this process, which has imported nearly everything; a new interpreter
    would take seconds for that. Call this when only tests have been imported, so that no thread of
    torch is running yet. A process that may use a GPU cannot be forked.
    """
    if torch.cuda.is_available():
        return
    resource_tracker.ensure_running()
    with patch.object(forkserver.util, "spawnv_passfds", fork_server):
        forkserver.ensure_running()


def fork_server(_: str, words: list[str], descriptors: list[int]) -> int:
    """Stand in for multiprocessing's start of a new interpreter. `words` end with its program."""
    pid = os.fork()
    if pid:
        return pid

    # No file of the parent stays open, but its number stays taken: the parent's objects close it.
    nothing = os.open(os.devnull, os.O_RDWR)
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        if number not in (1, 2, nothing, *descriptors):
            with suppress(OSError):  # the folder's own is closed already
                os.fstat(number)
                os.dup2(nothing, number)
    # What pytest has changed in this process.
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    options = {"buffering": 1, "errors": "backslashreplace", "closefd": False}
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", **options)
    faulthandler.disable()
    logging.root.handlers.clear()
    atexit._clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)

    try:
        exec(words[-1], {})  # noqa: S102
    finally:  # it ends with SystemExit, which is not for the tests' process to see
        os._exit(0)


class Child:
    """Runs `paw WORDS` without a report, with output to two descriptors. Like subprocess.Popen."""

    stderr: IO[str]
    returncode: int | None = None

    def __init__(
        self, words: list[str], *, env: dict[str, str], cwd: str, out: int, err: int
    ) -> None:
        self._process = CONTEXT.Process(
            target=run, args=(words, env, cwd, Connection(os.dup(out)), Connection(os.dup(err)))
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def trainer(self) -> int:
        """Id of the process that runs the command. `pid` is its parent, which watches it."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[0]) if children else self.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while the command runs."""
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
    commands: Sequence[list[str]],
    folders: Sequence[Path],
    *,
    on_host: int,
    homes: Sequence[Path] = (),
) -> list[tuple[int, str]]:
    """Run `paw` in a rank for each command, in its folder, as torchrun would. Returns (exit code,
    standard error) of each."""
    shared = torchrun_variables(len(commands), on_host)
    with ExitStack() as cleanup:
        nowhere = cleanup.enter_context(Path(os.devnull).open("w"))
        error_files = [cleanup.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        children = []
        for rank, (words, folder) in enumerate(zip(commands, folders, strict=True)):
            variables = shared | {"RANK": rank, "LOCAL_RANK": rank % on_host, "OMP_NUM_THREADS": 1}
            if homes:
                variables["HOME"] = homes[rank]
            child = Child(
                words,
                env=os.environ | {name: str(value) for name, value in variables.items()},
                cwd=str(folder),
                out=nowhere.fileno(),
                err=error_files[rank].fileno(),
            )
            children.append(child)
            cleanup.callback(child.kill)
        exit_codes = [child.wait(200) for child in children]
        errors = []
        for error_file in error_files:
            error_file.seek(0)
            errors.append(error_file.read())
        return list(zip(exit_codes, errors, strict=True))


def torchrun_variables(count: int, on_host: int) -> dict[str, Any]:
    """The variables that torchrun sets for all of `count` ranks. They meet at a free local port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous_port = server.getsockname()[1]
    return {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": on_host,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": rendezvous_port,
    }


def call_in_ranks(function: Callable[..., None], count: int, *arguments: Any, on_host: int) -> None:
    """Run `function(rank, *arguments)` in a process for each rank. It is found by its module and
    name."""
    shared = torchrun_variables(count, on_host)
    children = []
    for rank in range(count):
        child = CONTEXT.Process(target=call, args=(function, rank, shared, arguments))
        children.append(child)
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    assert [child.exitcode for child in children] == [0] * count


def call(
    function: Callable[..., None], rank: int, shared: dict[str, Any], arguments: tuple[Any, ...]
) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": 0, **shared}
    os.environ.update({name: str(value) for name, value in variables.items()})
    function(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an ordinary exit sometimes aborts in a gloo thread


class Forked(subprocess.Popen):
    """A rank of `paw train --gpus` or a run of an experiment, forked from its parent instead of
    started in a new interpreter."""

    def _execute_child(self, args, *options):
        names = inspect.signature(super()._execute_child).parameters
        options_by_name = dict(zip(names, (args, *options), strict=True))
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            return
        for number, file in ((1, options_by_name["c2pwrite"]), (2, options_by_name["errwrite"])):
            if file >= 0:
                os.dup2(file, number)
        for path in Path("/proc/self/fd").iterdir():
            if path.is_socket() and int(path.name) not in (0, 1, 2, *options_by_name["pass_fds"]):
                os.close(int(path.name))
        run(args[3:], dict(options_by_name["env"] or os.environ), str(Path.cwd()))


class ForkedPlayer(subprocess.Popen):
    """The process that plays ahead, forked by its supervisor instead of a new interpreter."""

    def _execute_child(self, args, *options):
        self._child_created = True
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            with Path(os.devnull).open() as nothing:
                os.dup2(nothing.fileno(), 0)
            from paw.rollouts.background.player import PlayerProcess

            PlayerProcess(int(args[-1])).run()


def supervise(trainer: int, socket_fd: int, stdin_fd: int, constants: dict[str, float]) -> NoReturn:
    """Runs as the supervisor of such a process, with some constants of its module changed."""
    from paw.rollouts.background import supervisor

    os.dup2(stdin_fd, 0)
    os.close(stdin_fd)
    supervisor.subprocess = SimpleNamespace(Popen=ForkedPlayer, DEVNULL=subprocess.DEVNULL)
    for name, value in constants.items():
        setattr(supervisor, name, value)
    os._exit(supervisor.main(trainer, [], socket_fd))


def player(**constants: float) -> type[subprocess.Popen]:
    """A supervisor that waits to be started. It is forked early, before this process has
    threads."""
    near_end, far_end = socket.socketpair()
    trainer = os.getpid()
    pid = os.fork()
    if not pid:
        near_end.close()
        _, pipes, *_ = socket.recv_fds(far_end, 1, 2)
        far_end.close()
        if pipes:
            os.setsid()
            supervise(trainer, *pipes, constants)
        os._exit(0)
    far_end.close()

    class Supervisor(subprocess.Popen):
        def _execute_child(self, args, *options):
            names = inspect.signature(super()._execute_child).parameters
            options_by_name = dict(zip(names, (args, *options), strict=True))
            self.pid = pid
            self._child_created = True
            socket.send_fds(near_end, [b"."], [int(args[-1]), options_by_name["p2cread"]])
            os.close(options_by_name["p2cread"])

    return Supervisor


def enter_with_player(entry: Callable[[], NoReturn]) -> NoReturn:
    """Run the command in this process, because a supervisor has to be its child."""
    from paw.rollouts.background import ahead

    ahead.subprocess = SimpleNamespace(
        Popen=player(), PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    entry()


def serve_as_supervisor(
    socket_end: Connection, stdin: Connection, env: dict[str, str], **constants: float
) -> None:
    os.setsid()
    os.environ.update(env)
    supervise(os.getppid(), os.dup(socket_end.fileno()), os.dup(stdin.fileno()), constants)


class Supervisor:
    """A supervisor for a process that has threads, as subprocess.Popen, forked by the server of
    forks."""

    constants: dict[str, float] = {}

    def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "wb", buffering=0)
        with Connection(os.dup(int(command[-1]))) as socket_end, Connection(reading) as stdin:
            self._process = CONTEXT.Process(
                target=serve_as_supervisor, args=(socket_end, stdin, env), kwargs=self.constants
            )
            self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("supervisor", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(words: list[str], env: dict[str, str], cwd: str, *output: Connection) -> NoReturn:
    """Run the command in this process, then end it."""
    code: Any = 1
    gc.freeze()  # otherwise the first garbage collection copies the memory of everything imported
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
        from paw import cli
        from paw.config.plugins import CALLBACKS
        from paw.distributed import launcher
        from paw.tools.experiment import runs

        CALLBACKS["report"] = "builtins:object"  # takes seconds
        for module in (launcher, runs):
            module.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
        if "--rollout.ahead" in words:
            cli.entry = partial(enter_with_player, cli.entry)
        # A test's own file runs before the command.
        if patch := os.environ.get("FORKED_PATCH"):
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
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):  # nobody reads it, or it does not exist
                stream.flush()
        if code is None:
            code = 0
        os._exit(code if isinstance(code, int) else 1)
