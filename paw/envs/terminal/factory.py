"""The terminal: tasks in a shell, generated or from folders."""

import functools
import hashlib
import os
import shlex
import shutil
from pathlib import Path

from paw.envs.base import Endless, EnvFactory, Tasks, every_tenth
from paw.envs.terminal import folders, generated, sandbox
from paw.envs.terminal.environment import TerminalEnv
from paw.envs.terminal.settings import TerminalConfig
from paw.errors import UserError
from paw.types import Task

HELD_OUT = "test"
"""The split of generated tasks for evaluation."""


class TerminalFactory(EnvFactory):
    """The tasks of env.data, or an endless supply of generated ones.

    Raises UserError if there is neither bubblewrap nor a container command, or if a task cannot be
    read or played.
    """

    Config = TerminalConfig
    name = "terminal"
    may_block = True

    def __init__(self, config: TerminalConfig) -> None:
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        if not config.kinds:
            raise UserError("env.kinds is empty; name at least one of find, count, edit, fix")
        for path in config.readable:
            if not path.expanduser().is_dir():
                raise UserError(f"env.readable: there is no folder {path}")
        self._splits = functools.cache(self._load_split)
        if config.container is None:
            _check_bubblewrap()
        else:
            _check_container(config.container, needs_folder=config.data is None)
            if config.container_stop is not None:
                _check_program("env.container_stop", config.container_stop)
        for split in (config.train_split, config.eval_split):
            self.tasks(split, 0)

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the tasks of a split. Those of the warm-up are always generated.

        Raises UserError if the split is unknown, missing or empty.
        """
        if self.config.data is not None and split != "warmup":
            return self._splits(split)
        if split not in generated.SHARES:
            raise UserError(
                f"generated tasks have no split '{split}'; use 'train' and '{HELD_OUT}', "
                "or set env.data"
            )

        def task(i: int) -> Task:
            payload = generated.generate(split, seed, i, list(self.config.kinds))
            return Task(f"generated/{split}/{seed}/{i}", payload.kind, payload)

        return Endless(task)

    def make(self) -> TerminalEnv:
        return TerminalEnv(self.config)

    def fingerprint(self) -> str:
        """Say where the tasks come from, and their hash."""
        digest = hashlib.sha256()
        if self.config.data is None:
            for split in generated.SHARES:
                for i in range(8):
                    task = generated.generate(split, 0, i, list(self.config.kinds))
                    digest.update(repr(task).encode())
            return f"terminal generated {','.join(self.config.kinds)} {digest.hexdigest()[:16]}"
        for split in dict.fromkeys((self.config.train_split, self.config.eval_split)):
            for task in self._splits(split):
                digest.update(_content(task.payload))
        return f"terminal folders {digest.hexdigest()[:16]}"

    def _load_split(self, split: str) -> list[Task]:
        """Read the task folders of a split: those in its own folder, or a share of all."""
        assert self.config.data is not None
        root = self.config.data.expanduser()
        if not root.is_dir():
            raise UserError(f"env.data: there is no folder {root}")
        own_folder = root / split
        has_splits = own_folder.is_dir() and not folders.is_task(own_folder)
        paths = _task_paths(own_folder if has_splits else root)
        tasks = []
        unplayable = []
        for path in paths:
            payload = folders.load(path)
            if self.config.container is None:
                self._check_size(path, payload)
            tasks.append(Task(path.name, payload.kind, payload))
            if payload.unplayable:
                unplayable.append(payload)
        if unplayable and self.config.container is None:
            first = unplayable[0]
            raise UserError(
                f"env.data: {len(unplayable)} of {len(tasks)} tasks cannot be played in "
                f"bubblewrap, the first of them {first.name}: {first.unplayable}; build its image "
                'and set --env.container "docker run --rm -i --network none {image}"'
            )
        if not has_splits:
            if split not in (self.config.train_split, self.config.eval_split):
                raise UserError(f"env.data: {root} has no folder '{split}'")
            tasks = list(every_tenth(tasks, held_out=split == self.config.eval_split))
        if not tasks:
            raise UserError(
                f"env.data: {root} holds no task for the split '{split}': a task is a folder with "
                "instruction.md or task.yaml (docs/terminal.md)"
            )
        return tasks

    def _check_size(self, path: Path, task: folders.TaskFolder) -> None:
        """Raises UserError if a task's files alone exceed the limit."""
        if task.size > self.config.disk_mib << 20:
            raise UserError(
                f"env.data: {path}: its files hold {task.size / (1 << 20):.0f} MiB, more than "
                f"env.disk_mib = {self.config.disk_mib}"
            )


def _task_paths(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and folders.is_task(path))


def _content(task: folders.TaskFolder) -> bytes:
    """Return everything that determines how a task plays."""
    digest = hashlib.sha256(repr((task.name, task.instruction, task.check.command)).encode())
    for inside, path in sorted((task.files | task.check.files).items()):
        digest.update(os.fsencode(inside) + path.read_bytes())
    return digest.digest()


def _check_bubblewrap() -> None:
    problem = sandbox.problem()
    if problem:
        raise UserError(f"env.name = 'terminal': no sandbox: {problem}; {sandbox.FIX}")


def _check_container(command: str, *, needs_folder: bool) -> None:
    if not command.strip():
        raise UserError("env.container is empty; leave it out to use bubblewrap")
    if needs_folder and "{folder}" not in command:
        raise UserError(
            f"env.container = {command!r}: generated tasks need their files in the container; "
            "mount them: -v {folder}:/task"
        )
    _check_program("env.container", command)


def _check_program(key: str, command: str) -> None:
    """Raise UserError unless the command's first word is a program of this machine."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"{key} = {command!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"{key} = {command!r}: there is no program '{words[0] if words else ''}'")
