"""Plays one episode at a time: commands, their output, and the check at the end."""

import base64
import itertools
import math
import os
import shlex
from pathlib import Path, PurePosixPath

from paw.envs.terminal.folders import TaskFolder, copy
from paw.envs.terminal.generated import ANSWER, EXIT, GeneratedTask, commands, next_command
from paw.envs.terminal.prompt import START, CompactStyle, PaperStyle, Style, shown
from paw.envs.terminal.sandbox import (
    TASK_FOLDER,
    Folder,
    Limits,
    Result,
    Shell,
    new_folder,
    open_shell,
    remove,
)
from paw.envs.terminal.settings import TerminalConfig
from paw.errors import NoOracleError
from paw.types import Outcome, Task

_names = itertools.count()
"""Numbers for the names of containers."""


class TerminalEnv:
    """Plays a generated task or a task folder, in a sandbox or container.

    Generated tasks share a sandbox: between two of them, its files, variables and processes are
    replaced. A task folder gets a new one for each episode, and another for its check. A container
    lives for one episode.
    """

    task: str = ""

    def __init__(self, config: TerminalConfig) -> None:
        self.config = config
        style = PaperStyle if config.style == "paper" else CompactStyle
        self.style: Style = style(history=config.history, think=config.think)
        self._limits = Limits(config.memory_mib, config.max_processes, config.disk_mib)
        self._folder: Folder | None = None
        self._shell: Shell | None = None
        # Set by `reset`.
        self._task: GeneratedTask | TaskFolder
        self._is_new = False
        """Whether the next command is the first of its episode."""
        self._text = START
        """The last observation."""
        self._past: list[tuple[str, str]] = []
        """(observation, command) of each turn so far."""

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a GeneratedTask or a TaskFolder."""
        payload: GeneratedTask | TaskFolder = task.payload
        if isinstance(payload, GeneratedTask):
            self._start_generated(payload)
        else:
            self._start_folder(payload)
        self._task = payload
        self._is_new = True
        self.task = payload.instruction
        self._past = []
        self._text = START
        return self._text

    def context(self) -> str:
        return self.style.prompt(self.task, self._past, self._text)

    def step(self, response: str) -> Outcome:
        """Run the command in `response`.

        The episode ends with the command exit or after env.max_turns turns. Then the task is
        checked. It fails if the files exceed env.disk_mib, or if a container had to be ended.
        Raises EnvironmentFailure if the sandbox broke.
        """
        command, valid = self.style.parse_command(response)
        has_ended = command == EXIT
        lost = False
        observation = ""
        if not command:
            observation = "[no command]"
        elif not has_ended:
            result = self._run(command, self.config.command_timeout_s)
            observation = shown(result, self.config.output_chars)
            if result.stopped:
                lost = self.config.container is not None or not self._files_fit()

        self._past.append((self._text, command))
        self._text = observation
        has_ended = has_ended or lost or len(self._past) >= self.config.max_turns
        score = self._score() if has_ended and not lost else 0.0
        return Outcome(
            observation=observation,
            reward=self.config.reward * score,
            done=has_ended,
            won=score == 1.0,
            action=command,
            valid=valid,
            score=score,
        )

    def oracle(self) -> str:
        last = self._past[-1][1] if self._past else ""
        if isinstance(self._task, GeneratedTask):
            solved = self._generated_score(self._task) == 1.0
            command = next_command(self._task, solved=solved, last=last, output=self._text)
        elif self._task.solution is None:
            raise NoOracleError(f"the task {self._task.name} has no solution")
        else:
            solution = self._task.solution.strip()
            command = EXIT if last == solution else solution
        return self.style.format_action(command)

    def admissible_actions(self) -> list[str]:
        """Return some sensible commands of a generated task. Any other command can be run too."""
        return commands(self._task) if isinstance(self._task, GeneratedTask) else []

    def format_action(self, action: str) -> str:
        return self.style.format_action(action)

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()
        if self._folder is not None:
            remove(self._folder.root)
        self._shell = None
        self._folder = None

    # ---- sandboxes

    def _start_generated(self, task: GeneratedTask) -> None:
        is_shared = self._folder is not None and isinstance(self._task, GeneratedTask)
        if not is_shared or self.config.container is not None:
            self.close()
            self._folder = new_folder()
            for inside in (TASK_FOLDER, "/tmp"):
                self._folder.path(inside).mkdir()
        assert self._folder is not None
        self._folder.clear()
        for name, content in task.files.items():
            self._folder.write(f"{TASK_FOLDER}/{name}", content.encode())
        self._hand_over(self._folder)
        if self._shell is None:
            self._shell = self._new_shell(self._folder, TASK_FOLDER, {}, image="")

    def _start_folder(self, task: TaskFolder) -> None:
        self.close()
        self._folder = new_folder()
        task.fill(self._folder)
        self._hand_over(self._folder)
        self._shell = self._new_shell(self._folder, task.workdir, task.variables, image=task.image)

    def _hand_over(self, folder: Folder) -> None:
        """Let commands change the files. A container has its own users."""
        if self.config.container is None:
            folder.hand_over()

    def _new_shell(
        self, folder: Folder, workdir: str, variables: dict[str, str], *, image: str
    ) -> Shell:
        config = self.config
        if config.container is None:
            return open_shell(
                folder,
                workdir=workdir,
                limits=self._limits,
                variables=variables,
                readable=[path.expanduser().resolve() for path in config.readable],
            )
        values = {
            "image": image,
            "folder": str(folder.path(workdir)),
            "name": f"paw-{os.getpid()}-{next(_names)}",
        }
        return Shell(
            [*fill(config.container, values), "bash", "--norc", "--noprofile"],
            workdir=workdir,
            state="/tmp/.paw-state",
            limits=self._limits,
            folder=None,
            stop=fill(config.container_stop, values) if config.container_stop else (),
        )

    def _run(self, command: str, seconds: float) -> Result:
        assert self._shell is not None, "step() before reset()"
        new = self._is_new
        self._is_new = False
        return self._shell.run(command, seconds, new=new)

    def _files_fit(self) -> bool:
        assert self._folder is not None
        return self._folder.is_within(self._limits)

    # ---- the check

    def _score(self) -> float:
        """Return how well the task is solved, in [0, 1]."""
        if isinstance(self._task, GeneratedTask):
            return self._generated_score(self._task)
        if self.config.container is None:
            return self._check_in_sandbox(self._task)
        return self._check_in_container(self._task)

    def _generated_score(self, task: GeneratedTask) -> float:
        """Compare the files with those wanted, while no process of the agent is running."""
        assert self._folder is not None
        for name, content in task.wanted.items():
            actual = self._folder.read(f"{TASK_FOLDER}/{name}")
            if actual is None:
                return 0.0
            if name == ANSWER:
                actual = actual.strip() + b"\n"
            if actual != content.encode():
                return 0.0
        return 1.0

    def _check_in_sandbox(self, task: TaskFolder) -> float:
        """Run the check in a new sandbox with the agent's files, after its processes have ended."""
        assert self._folder is not None and self._shell is not None
        folder = self._folder
        self._shell.close()
        new_files = [*task.check.files]
        if task.check.reward_file:
            new_files.append(task.check.reward_file)
        for top in {inside.split("/")[1] for inside in new_files}:
            remove(folder.root / top)  # the task may have one, and the agent may have changed it
        for inside, source in task.check.files.items():
            copy(folder, inside, source)
        if task.check.reward_file:
            folder.path(task.check.reward_file).parent.mkdir(parents=True)
        folder.hand_over()
        self._shell = self._new_shell(folder, task.workdir, task.variables, image=task.image)
        result = self._run(task.check.command, self._check_seconds(task))
        self._shell.close()
        if result.stopped:
            return 0.0
        if not task.check.reward_file:
            return float(result.status == 0)
        return parse_score(folder.read(task.check.reward_file))

    def _check_in_container(self, task: TaskFolder) -> float:
        """Run the check in the agent's container, where its files and services are."""
        assert self._shell is not None
        seconds = self._check_seconds(task)
        for inside, source in task.check.files.items():
            result = self._run(_write_command(inside, source), seconds)
            if result.status != 0:
                return 0.0
        if task.check.reward_file:
            reward_folder = shlex.quote(str(PurePosixPath(task.check.reward_file).parent))
            self._run(f"rm -rf {reward_folder}; mkdir -p {reward_folder}", seconds)
        self._is_new = True
        exports = [
            f"export {shlex.quote(f'{variable}={setting}')}"
            for variable, setting in task.variables.items()
        ]
        enter = f"cd {shlex.quote(task.workdir)}"
        result = self._run("\n".join([*exports, f"{enter} && {task.check.command}"]), seconds)
        if not task.check.reward_file:
            return float(result.status == 0)
        if result.stopped:
            return 0.0
        return parse_score(self._run(f"cat {task.check.reward_file}", seconds).output)

    def _check_seconds(self, task: TaskFolder) -> float:
        return task.check.seconds or self.config.check_timeout_s


def fill(command: str, values: dict[str, str]) -> list[str]:
    """Return a container command as words, with the placeholders replaced."""
    words = shlex.split(command)
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    return words


def parse_score(content: bytes | None) -> float:
    """Return the number in a check's file, within [0, 1]. 0 if there is none."""
    try:
        score = float((content or b"").decode("ascii"))
    except ValueError:
        return 0.0
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def _write_command(inside: str, source: Path) -> str:
    """Return a command that writes a file of this machine in a container."""
    encoded = base64.b64encode(source.read_bytes()).decode("ascii")
    path = shlex.quote(inside)
    parent = shlex.quote(str(PurePosixPath(inside).parent))
    return f"mkdir -p {parent} && base64 -d > {path} <<'PAW' && chmod 755 {path}\n{encoded}\nPAW"
