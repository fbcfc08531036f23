"""Tasks from a file, for an agent with its own tools and reward (agent.type = "command")."""

import hashlib
import json
from pathlib import Path
from typing import Any

from paw.config.sections import EnvConfig
from paw.config.values import Positive
from paw.envs.base import EnvFactory, Tasks, every_tenth, means_all_kinds
from paw.envs.checked import json_lines
from paw.errors import UserError, short_repr
from paw.io.files import reading
from paw.types import Outcome, Task

PROMPTS = ("prompt", "question", "task")
"""Fields of a task with its text, in this order. Without any, the text is the whole task."""


class TasksConfig(EnvConfig):
    """Tasks from a file, which an agent gets as they are."""

    name: str = "tasks"
    """Which environment."""
    data: Path | None = None
    """JSON lines, each an object: a task. `id` and `kind` name it in reports; the rest is up to the
    agent."""
    eval_data: Path | None = None
    """JSON lines of tasks to evaluate on. If unset, every tenth task of env.data is held out."""
    eval_split: str = "eval"
    """Split to evaluate on."""
    reward: Positive = 1.0
    """The largest reward of an episode, R_max. An episode that reaches it counts as won."""


class TasksFactory(EnvFactory):
    """The tasks of env.data.

    Raises UserError if the file cannot be read, has no task, or has a line that is not an object.
    """

    Config = TasksConfig
    name = "tasks"

    def __init__(self, config: TasksConfig) -> None:
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        if config.data is None:
            raise UserError(
                "env.name = 'tasks' needs env.data, a file of JSON lines: --env.data FILE.jsonl"
            )
        self._digest = hashlib.sha256()
        training = self._read(config.data, "data", config.train_split)
        if config.eval_data is None:
            self._training = every_tenth(training, held_out=False)
            self._evaluation = every_tenth(training, held_out=True)
        else:
            self._training = training
            self._evaluation = self._read(config.eval_data, "eval_data", config.eval_split)

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the tasks to evaluate on if the split is env.eval_split, else the others."""
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': env.name = 'tasks' has no oracle to warm it up on; "
                "use an instruct model"
            )
        return self._evaluation if split == self.config.eval_split else self._training

    def make(self) -> "TaskEnv":
        return TaskEnv()

    def fingerprint(self) -> str:
        return f"tasks {self._digest.hexdigest()[:16]}"

    def _read(self, path: Path, key: str, split: str) -> list[Task]:
        origin = f"env.{key} = '{path}'"
        tasks: list[Task] = []
        with reading(origin):
            for _, row in json_lines(path.expanduser(), dict[str, Any], origin):
                self._digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "replace"))
                tasks.append(_task(row, f"{split}/{len(tasks)}", origin))
        if not tasks:
            raise UserError(f"{origin}: it holds no tasks")
        return tasks


class TaskEnv:
    """One task at a time. It shows the task, and an answer ends it with reward 0.

    Rewards come from the agent, or from reward.type.
    """

    def __init__(self) -> None:
        self.task = ""
        self.agent_task: dict[str, Any] = {}
        """The task as a program gets it."""

    def reset(self, task: Task) -> str:
        self.agent_task = task.payload
        self.task = _text(task.payload)
        return self.task

    def context(self) -> str:
        return self.task

    def step(self, response: str) -> Outcome:
        return Outcome("", 0.0, done=True, won=False, action=response)


def _task(row: dict[str, Any], name: str, origin: str) -> Task:
    kind = str(row.get("kind", Task.kind))
    if means_all_kinds(kind):
        raise UserError(
            f"{origin}: a task is of the kind {short_repr(kind)}, "
            "a name that reports use for all kinds; give it another kind"
        )
    return Task(str(row.get("id", name)), kind, row)


def _text(row: dict[str, Any]) -> str:
    for field in PROMPTS:
        if isinstance(row.get(field), str):
            return row[field]
    return json.dumps(row, ensure_ascii=False)
