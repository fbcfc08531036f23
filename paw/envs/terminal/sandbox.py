"""A shell in a sandbox: bubblewrap's namespaces, or a container that the user's command starts.

Commands can see only the machine's programs, which are read-only. They have no network, no
capabilities and none of this process's variables. The kernel limits each process. Their total use
of memory and disk is checked every TICK_S while a command runs.
"""

import errno
import functools
import itertools
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from paw.errors import EnvironmentFailure, UserError, clean

DRIVER = Path(__file__).with_name("driver.sh").read_text(encoding="utf-8")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of programs outside /usr. On most systems they are links into it."""
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
"""Files outside /usr that programs need in order to start and run as usual."""
TASK_FOLDER = "/task"
"""The folder in which commands begin. It has the files of generated tasks and our own format."""
RESERVED = ("usr", *SYSTEM_FOLDERS, "etc", "dev", "proc", "sys", "run")
"""The sandbox's own top-level folders. No task can have files there."""
NOBODY = 65534
"""User and group of the commands if this process runs as root. They own nothing of value."""
TICK_S = 0.05
"""Seconds between two checks of a running command's memory and files."""
OUTPUT_MAX = 1 << 20
"""Bytes of output after which a command is stopped."""
OPEN_FILES = 256
"""Maximum number of files that a process may have open."""
FILES_MAX = 20_000
"""Maximum number of files and folders."""
DEPTH_MAX = 100
"""Maximum depth of nested folders. The path of a deeper one may be too long to use."""
DEATH_S = 10.0
"""Seconds that killed processes have to end."""
FIX = (
    "install bubblewrap (apt-get install bubblewrap), or name a container command: --env.container "
    '"docker run --rm -i --network none -v {folder}:/task -w /task IMAGE" (docs/terminal.md)'
)


class Limits(NamedTuple):
    """What commands may use."""

    memory_mib: int
    """Memory of a process, and of all processes together."""
    processes: int
    disk_mib: int
    """Size of a file, and of all files together."""

    def ulimits(self) -> list[str]:
        """Return the limits that the kernel holds, as arguments of bash's ulimit."""
        memory = ["-v", str(self.memory_mib * 1024)]
        disk = ["-f", str(self.disk_mib * 1024)]
        return ["-c", "0", "-n", str(OPEN_FILES), "-u", str(self.processes), *memory, *disk]


class Result(NamedTuple):
    """How a command ended."""

    output: bytes
    """What it printed, at most OUTPUT_MAX bytes."""
    status: int | None
    """Its exit status. None if it was stopped."""
    stopped: str = ""
    """Why it was stopped, or ""."""


class Folder:
    """The files of one sandbox, in a temporary folder of this machine.

    Each folder at its top is visible in the sandbox under the same name: `root/task` as /task.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, inside: str) -> Path:
        """Return where a path of the sandbox is on this machine."""
        return self.root / inside.lstrip("/")

    def write(self, inside: str, content: bytes, *, executable: bool = False) -> None:
        """Create a file and its parent folders."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if executable else 0o644)

    def hand_over(self) -> None:
        """Make the user that commands run as the owner of everything."""
        if os.geteuid() == 0:
            for folder, _, names in os.walk(self.root):  # does not follow links
                os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
                for name in names:
                    os.chown(Path(folder, name), NOBODY, NOBODY, follow_symlinks=False)

    def clear(self) -> None:
        """Delete everything except the top-level folders, whatever its permissions."""
        self.unlock()
        for top in self.root.iterdir():
            for entry in list(os.scandir(top)):
                remove(Path(entry.path))

    def unlock(self) -> None:
        """Restore the permissions of the top-level folders, one of which a shell starts in."""
        for top in self.root.iterdir():
            top.chmod(0o755)

    def read(self, inside: str, limit: int = 1 << 16) -> bytes | None:
        """Return the first `limit` bytes of a file; None if there is no regular file.

        Does not follow links, which may lead out of the sandbox, and does not wait for pipes.
        """
        *folders, name = inside.strip("/").split("/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = [os.open(self.root, flags | os.O_DIRECTORY)]
        try:
            for folder in folders:
                opened.append(os.open(folder, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
            opened.append(os.open(name, flags | os.O_NONBLOCK, dir_fd=opened[-1]))
            return os.read(opened[-1], limit)
        except OSError:
            return None
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def is_within(self, limits: Limits) -> bool:
        """Whether the files are few and small enough, and no folder is too deep."""
        bytes_left = limits.disk_mib << 20
        entry_count = 0
        folders = [(str(self.root), 0)]
        while folders:
            folder, depth = folders.pop()
            try:
                entries = list(os.scandir(folder))
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return False
                continue  # unreadable, or deleted meanwhile
            entry_count += len(entries)
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    bytes_left -= status.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
            if bytes_left < 0 or entry_count > FILES_MAX or depth > DEPTH_MAX:
                return False
        return True


@contextmanager
def temporary_folder() -> Iterator[Folder]:
    """Make a folder for a sandbox, and delete it at the end."""
    folder = new_folder()
    try:
        yield folder
    finally:
        remove(folder.root)


def new_folder() -> Folder:
    """Make a folder for a sandbox.

    Its user deletes it with `remove`. Otherwise it is deleted with the object, or with the process.
    """
    folder = Folder(Path(tempfile.mkdtemp(prefix="paw-terminal-")))
    weakref.finalize(folder, remove, folder.root)
    return folder


def remove(path: Path) -> None:
    """Delete a file or a folder, even one whose permissions forbid it or that is very deep."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    path.chmod(0o700)
    top = path / secrets.token_hex(8)
    numbers = itertools.count()
    folders = [path]
    while folders:
        folder = folders.pop()
        for inner in list(folder.iterdir()):
            with suppress(OSError):
                if inner.is_symlink() or not inner.is_dir():
                    inner.unlink()
                    continue
                inner.chmod(0o700)
                # Moved up, because the path of a folder in it could be too long.
                folders.append(inner.rename(f"{top}-{next(numbers)}"))
        if folder != path:
            with suppress(OSError):
                folder.rmdir()
    with suppress(OSError):
        path.rmdir()


class Shell:
    """A process that runs commands, one after the other, in a sandbox.

    `start` is the command line that starts bash in the sandbox; bash's arguments are appended. Bash
    starts with the first command, and again after a command that had to be stopped.
    """

    def __init__(
        self,
        start: Sequence[str],
        *,
        workdir: str,
        state: str,
        limits: Limits,
        folder: Folder | None,
        stop: Sequence[str] = (),
    ) -> None:
        self.limits = limits
        self._folder = folder
        """The files to watch; None if they are in a container."""
        self._is_alone = folder is not None
        """Whether the shell is the first process of its own PID namespace."""
        ulimits = limits.ulimits() if self._is_alone else []
        mode = "alone" if self._is_alone else "shared"
        self._command = [*start, "-c", DRIVER, "bash", mode, state, workdir, *ulimits]
        self._stop = list(stop)
        """A command that ends what a killed client leaves running."""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: str, seconds: float, *, new: bool = False) -> Result:
        """Run a command for at most `seconds`. If it exceeds a limit, it and the shell are stopped.

        With `new`, the variables and the folder of earlier commands are forgotten first. Raises
        EnvironmentFailure if the sandbox does not start or has ended by itself.
        """
        process = self._process or self._start()
        self._process = process
        assert process.stdin is not None
        nonce = f"{'new' if new else 'old'}-{secrets.token_hex(8)}".encode()
        message = command.replace("\0", "").encode("utf-8", "replace")
        try:
            process.stdin.write(nonce + b"\0" + message + b"\0")
            process.stdin.flush()
        except OSError:
            raise self._ended(b"") from None
        return self._read(process, nonce, seconds)

    def close(self) -> None:
        """End the sandbox and everything in it. The next command starts another."""
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._stop:
            subprocess.run(self._stop, capture_output=True, timeout=60, check=False)
        _await_end(process.stdout.fileno())
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._folder is not None:
            self._folder.unlock()
        user = NOBODY if self._is_alone and os.geteuid() == 0 else None

        def start() -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(os.environ) if not self._is_alone else {},
                cwd="/",
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )

        try:
            return _spawner().submit(start).result()
        except OSError as error:
            raise EnvironmentFailure(f"terminal: {self._command[0]}: {error.strerror}") from None

    def _read(self, process: "subprocess.Popen[bytes]", nonce: bytes, seconds: float) -> Result:
        """Read the output up to the line that ends it, and stop the command at a limit."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        marker = b"\0" + nonce + b" "
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        next_look = time.monotonic() + TICK_S
        output = bytearray()
        while True:
            if poll.poll(TICK_S * 1000):
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise self._ended(bytes(output))
                searched = max(0, len(output) - len(marker) - 8)
                output += chunk
                marker_start = output.find(marker, searched)
                if (
                    marker_start >= 0
                    and output.endswith(b"\0")
                    and len(output) > marker_start + len(marker)
                ):
                    status = int(output[marker_start + len(marker) : -1])
                    return Result(bytes(output[:marker_start]), status, self._excess_of_files())

            now = time.monotonic()
            stopped = ""
            if len(output) > OUTPUT_MAX:
                stopped = f"it printed more than {OUTPUT_MAX >> 20} MiB"
            elif now > deadline:
                stopped = f"it took longer than {seconds:g} s"
            elif now > next_look:
                next_look = now + TICK_S
                stopped = self._excess_of_memory(process.pid) or self._excess_of_files()
            if stopped:
                self.close()
                return Result(bytes(output[:OUTPUT_MAX]), None, stopped)

    def _excess_of_files(self) -> str:
        if self._folder is None or self._folder.is_within(self.limits):
            return ""
        return (
            f"it left more than {self.limits.disk_mib} MiB, {FILES_MAX:,} files "
            f"or {DEPTH_MAX} nested folders"
        )

    def _excess_of_memory(self, pid: int) -> str:
        if not self._is_alone or memory_of(pid) <= self.limits.memory_mib << 20:
            return ""
        return f"its processes held more than {self.limits.memory_mib} MiB of memory"

    def _ended(self, output: bytes) -> EnvironmentFailure:
        self.close()
        reason = clean(output.decode("utf-8", "replace").strip())
        return EnvironmentFailure(f"terminal: the sandbox ended: {reason or 'without a word'}")


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """Return the thread that starts all sandboxes. The kernel ends them when the thread ends."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="terminal")


def memory_of(pid: int) -> int:
    """Return the bytes of memory of a process and its descendants, without shared files."""
    resident_bytes = 0
    pids = [pid]
    while pids:
        process = Path(f"/proc/{pids.pop()}")
        try:
            for line in (process / "status").read_text(encoding="utf-8").splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    resident_bytes += int(line.split()[1]) * 1024
            for thread in (process / "task").iterdir():
                pids += map(int, (thread / "children").read_text(encoding="ascii").split())
        except (OSError, ValueError):
            continue  # it has just ended
    return resident_bytes


def _await_end(descriptor: int) -> None:
    """Wait until all processes that could write to a pipe have ended."""
    deadline = time.monotonic() + DEATH_S
    while (seconds_left := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([descriptor], [], [], seconds_left)
        if not readable or not os.read(descriptor, 1 << 16):
            return


# ---- bubblewrap


def bubblewrap(
    folder: Folder,
    *,
    workdir: str,
    variables: Mapping[str, str],
    readable: Sequence[Path] = (),
) -> list[str]:
    """Return the command line that starts a bash in bubblewrap's namespaces.

    Only the top-level folders of `folder` can be written to. `readable` are further folders of this
    machine, whose bin/ comes first in PATH.
    """
    binary = shutil.which("bwrap")
    if binary is None:
        raise UserError(f"env.name = 'terminal': there is no bwrap here; {FIX}")
    command = [binary, "--unshare-all", "--unshare-user"]
    if "--disable-userns" in _help(binary):
        command += ["--disable-userns"]
    command += [
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
        "--hostname",
        "sandbox",
    ]

    command += ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_FOLDERS:
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    for file in SYSTEM_FILES:
        command += ["--ro-bind-try", file, file]
    for path in readable:
        command += ["--ro-bind", str(path), str(path)]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(1 << 20), "--tmpfs", "/run"]
    for top in sorted(folder.root.iterdir()):
        command += ["--bind", str(top), f"/{top.name}"]
    command += ["--remount-ro", "/", "--chdir", workdir]

    path = ":".join([*(str(entry / "bin") for entry in readable), SYSTEM_PATH])
    defaults = {"PATH": path, "HOME": workdir, "LANG": "C.UTF-8", "TERM": "dumb"}
    for name, value in (defaults | dict(variables)).items():
        command += ["--setenv", name, value]
    return [*command, "--", "/bin/bash", "--norc", "--noprofile"]


def open_shell(
    folder: Folder,
    *,
    workdir: str,
    limits: Limits,
    variables: Mapping[str, str] | None = None,
    readable: Sequence[Path] = (),
) -> Shell:
    """Return a shell in bubblewrap's namespaces. Raises UserError if bubblewrap is missing."""
    start = bubblewrap(folder, workdir=workdir, variables=variables or {}, readable=readable)
    return Shell(start, workdir=workdir, state="/run/state", limits=limits, folder=folder)


@functools.cache
def _help(binary: str) -> str:
    return subprocess.run([binary, "--help"], capture_output=True, text=True, check=False).stdout


def problem() -> str:
    """Return why bubblewrap cannot make a sandbox on this machine, or "" if it can."""
    binary = shutil.which("bwrap")
    return _problem(binary) if binary else "there is no bwrap here"


@functools.cache
def _problem(binary: str) -> str:
    del binary  # only a cache key, because another binary may have been installed
    limits = Limits(memory_mib=256, processes=16, disk_mib=1)
    with temporary_folder() as folder:
        folder.path(TASK_FOLDER).mkdir()
        folder.hand_over()
        shell = open_shell(folder, workdir=TASK_FOLDER, limits=limits)
        try:
            result = shell.run("echo fine", DEATH_S)
        except EnvironmentFailure as error:
            return str(error)
        finally:
            shell.close()
    if result.output == b"fine\n":
        return ""
    return clean(result.output.decode("utf-8", "replace")) or result.stopped
