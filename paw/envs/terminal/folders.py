"""Task folders: PaW's own, Harbor's and Terminal-Bench's (docs/terminal.md has the files of each).

A Dockerfile is read but not built. If it only names a base, copies files and sets variables, the
task can be played in bubblewrap. Otherwise it needs an image and the user's container command.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml  # transformers depends on it

from paw.envs.checked import checked
from paw.envs.terminal.sandbox import RESERVED, TASK_FOLDER, Folder
from paw.errors import UserError, clean

TESTS = "/tests"
REWARD = "/logs/verifier/reward.txt"
"""File to which a Harbor check writes its score."""
DOWNLOADS = re.compile(
    r"^[^#\n]*\b(apt(-get)? [^\n]*install|pip3? install|uv (pip|add|init|run)|uvx |curl |wget )",
    re.M,
)
"""Matches a line of a check that needs the network."""
IGNORED = ("FROM", "LABEL", "CMD", "EXPOSE", "MAINTAINER", "USER", "ARG", "STOPSIGNAL", "VOLUME")
"""Instructions of a Dockerfile that change no file."""


class Check(NamedTuple):
    """How a task is checked."""

    command: str
    files: dict[str, Path]
    """Files to add before the check: path in the sandbox -> file of this machine."""
    reward_file: str = ""
    """File with the score. "" if the command's exit status says whether the task is solved."""
    seconds: float | None = None
    """The task's own limit."""


class TaskFolder(NamedTuple):
    name: str
    kind: str
    instruction: str
    workdir: str
    files: dict[str, Path]
    """Files at the start: path in the sandbox -> file of this machine."""
    folders: tuple[str, ...]
    """Folders at the start, which may be empty."""
    variables: dict[str, str]
    check: Check
    solution: str | None
    """A script that solves the task."""
    image: str
    """What {image} of a container command stands for."""
    unplayable: str
    """Why it cannot be played without its own image, or ""."""

    @property
    def size(self) -> int:
        """Bytes of its files, those of the check included."""
        files = [*self.files.values(), *self.check.files.values()]
        return sum(file.stat().st_size for file in files)

    def fill(self, folder: Folder) -> None:
        """Copy the files to a new folder of a sandbox."""
        for inside in (self.workdir, "/tmp", *self.folders):
            folder.path(inside).mkdir(parents=True, exist_ok=True)
        for inside, source in self.files.items():
            copy(folder, inside, source)


def copy(folder: Folder, inside: str, source: Path) -> None:
    """Copy a file of this machine into a sandbox's folder."""
    executable = bool(source.stat().st_mode & 0o111)
    folder.write(inside, source.read_bytes(), executable=executable)


def is_task(path: Path) -> bool:
    return any((path / name).is_file() for name in ("instruction.md", "task.yaml"))


def load(path: Path) -> TaskFolder:
    """Read a task folder. Raises UserError if it lacks something or cannot be read."""
    try:
        if (path / "task.toml").is_file():
            return _harbor(path)
        if (path / "task.yaml").is_file():
            return _terminal_bench(path)
        return _own(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"env.data: {path}: {clean(error)}") from None


def _own(path: Path) -> TaskFolder:
    files = _files_below(path / "files", TASK_FOLDER)
    check = Check(f"bash {TESTS}/check.sh", {f"{TESTS}/check.sh": _required(path, "check.sh")})
    return TaskFolder(
        name=path.name,
        kind="task",
        instruction=_text(path, "instruction.md"),
        workdir=TASK_FOLDER,
        files=files,
        folders=(),
        variables={},
        check=check,
        solution=_optional_text(path / "solution.sh"),
        image=path.name,
        unplayable="",
    )


def _harbor(path: Path) -> TaskFolder:
    settings = checked(
        dict[str, Any],
        tomllib.loads((path / "task.toml").read_text(encoding="utf-8")),
        origin=f"env.data: {path / 'task.toml'}",
    )
    _required(path, "tests/test.sh")
    docker = _Dockerfile(path / "environment")
    check_files = _files_below(path / "tests", TESTS)
    environment = _table(settings, "environment")
    return TaskFolder(
        name=path.name,
        kind=str(_table(settings, "metadata").get("category", "task")),
        instruction=_text(path, "instruction.md"),
        workdir=docker.workdir,
        files=docker.files,
        folders=docker.folders,
        variables=docker.variables,
        check=Check(
            f"bash {TESTS}/test.sh",
            check_files,
            reward_file=REWARD,
            seconds=_seconds(_table(settings, "verifier").get("timeout_sec")),
        ),
        solution=_optional_text(path / "solution/solve.sh"),
        image=str(environment.get("docker_image") or path.name),
        unplayable=docker.problem or _download(path / "tests/test.sh"),
    )


def _terminal_bench(path: Path) -> TaskFolder:
    try:
        content = yaml.safe_load(_text(path, "task.yaml"))
    except yaml.YAMLError as error:
        raise ValueError(f"task.yaml: {clean(error)}") from None
    settings = checked(dict[str, Any], content, origin=f"env.data: {path / 'task.yaml'}")
    instruction = settings.get("instruction")
    if not isinstance(instruction, str):
        raise ValueError("task.yaml has no text as its instruction")
    for description in settings.get("descriptions") or []:  # an older form names one of several
        if description.get("key") == instruction:
            instruction = str(description.get("description"))
            break

    docker = _Dockerfile(path)
    files = _files_below(path / "tests", TESTS)
    command = f"python3 -m pytest -rA {TESTS}/test_outputs.py"
    problem = docker.problem
    if (path / "run-tests.sh").is_file():
        files[f"{TESTS}/run-tests.sh"] = path / "run-tests.sh"
        command = f"bash {TESTS}/run-tests.sh"
        problem = problem or _download(path / "run-tests.sh")
    return TaskFolder(
        name=path.name,
        kind=str(settings.get("category", "task")),
        instruction=instruction,
        workdir=docker.workdir,
        files=docker.files,
        folders=docker.folders,
        variables=docker.variables | {"TEST_DIR": TESTS},
        check=Check(command, files, seconds=_seconds(settings.get("max_test_timeout_sec"))),
        solution=_optional_text(path / "solution.sh"),
        image=path.name,
        unplayable=problem,
    )


class _Dockerfile:
    """The effects of a Dockerfile, as far as it need not be built."""

    def __init__(self, context: Path) -> None:
        self.workdir = "/app"
        self.files: dict[str, Path] = {}
        self.folders: tuple[str, ...] = ()
        self.variables: dict[str, str] = {}
        self.problem = ""
        self._context = context
        path = context / "Dockerfile"
        if not path.is_file():
            self.problem = "it has no Dockerfile, only another description of its containers"
            return
        for number, name, rest in _instructions(path.read_text(encoding="utf-8")):
            if not self._apply(name, rest):
                self.problem = f"its Dockerfile, line {number}, has to be built: {name} {rest}"
                break

    def _apply(self, name: str, rest: str) -> bool:
        """Apply one instruction. Returns False if that needs a build."""
        if name in IGNORED:
            return True
        if name == "WORKDIR":
            self.workdir = str(PurePosixPath(self.workdir, rest))
            self.folders += (self.workdir,)
            return self._is_free(self.workdir)
        if name == "ENV":
            return self._set_variables(rest)
        if name in ("COPY", "ADD"):
            return self._copy(rest)
        if name == "RUN" and re.fullmatch(r"mkdir( -p)?( [\w/.-]+)+", rest):
            made = [argument for argument in rest.split()[1:] if argument != "-p"]
            self.folders += tuple(str(PurePosixPath(self.workdir, folder)) for folder in made)
            return all(map(self._is_free, self.folders))
        return False

    def _set_variables(self, rest: str) -> bool:
        assignments = shlex.split(rest)
        if assignments and "=" not in assignments[0]:  # the old form: ENV name value
            assignments = ["=".join(rest.split(maxsplit=1))]
        for assignment in assignments:
            name, _, value = assignment.partition("=")
            if "$" in value:
                return False
            self.variables[name] = value
        return True

    def _copy(self, rest: str) -> bool:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        flags = [word for word in words if word.startswith("--")]
        if any(not flag.startswith(("--chown=", "--chmod=")) for flag in flags):
            return False
        *sources, target = words[len(flags) :]
        inside = str(PurePosixPath(self.workdir, target))
        if not self._is_free(inside):
            return False
        for source in sources:
            if "://" in source or ".." in source or source.endswith((".tar", ".gz", ".xz")):
                return False
            matches = sorted(self._context.glob(source.strip("/"))) or [self._context]
            if matches == [self._context] and source.strip("/") not in (".", ""):
                return False
            for match in matches:
                if match.is_dir():
                    self.files |= _files_below(match, inside)
                elif target.endswith(("/", ".")) or len(sources) > 1 or len(matches) > 1:
                    self.files[str(PurePosixPath(inside, match.name))] = match
                else:
                    self.files[inside] = match
        return True

    @staticmethod
    def _is_free(inside: str) -> bool:
        """Whether a sandbox can have a folder of the task at this path."""
        parts = PurePosixPath(inside).parts
        return len(parts) > 1 and parts[1] not in RESERVED and ".." not in parts


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (number of its line, name, the rest) of each instruction of a Dockerfile."""
    pending = ""
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not pending:
            first = number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        name, _, rest = pending.partition(" ")
        yield first, name.upper(), " ".join(rest.split()) if name.upper() == "RUN" else rest.strip()
        pending = ""


def _files_below(path: Path, inside: str) -> dict[str, Path]:
    """Return the files below a folder, each with its path in the sandbox. Links are left out."""
    files = {}
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and not file.is_symlink():
                files[str(PurePosixPath(inside, file.relative_to(path).as_posix()))] = file
    return files


def _download(script: Path) -> str:
    match = DOWNLOADS.search(script.read_text(encoding="utf-8"))
    if match is None:
        return ""
    return f"its check ({script.name}) downloads: {clean(match[0].strip(), 80)}"


def _table(settings: dict[str, Any], name: str) -> dict[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{name} is {table!r:.60}, not a table")
    return table


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ValueError(f"the time limit of the check is {value!r:.60}, not a number of seconds")
    return float(value)


def _required(path: Path, name: str) -> Path:
    if not (path / name).is_file():
        raise ValueError(f"it has no {name}")
    return path / name


def _text(path: Path, name: str) -> str:
    text = _required(path, name).read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError(f"its {name} is empty")
    return text


def _optional_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
