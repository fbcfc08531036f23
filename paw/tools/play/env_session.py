"""What `paw serve env` does for one client."""

from typing import Any

from paw.config.sections import EnvConfig
from paw.envs.base import EnvFactory, read_tasks, size
from paw.errors import quietly
from paw.rollouts.guard import CheckedEnv


class Session:
    """The environment of one client. It is made at the first reset, and again after a failure."""

    def __init__(self, factory: EnvFactory, config: EnvConfig) -> None:
        self.factory = factory
        self.config = config
        self.environment: CheckedEnv | None = None

    def start(self, split: str, seed: int, index: int | None) -> dict[str, Any]:
        """Start a task. Returns the fields of the first observation.

        It is task `index` of the tasks of `split` and `seed`. Without an index, it is task `seed`
        of the tasks of seed 0.
        """
        with read_tasks(self.factory, split, 0 if index is None else seed) as tasks:
            if index is None:
                index = seed % (size(tasks) or 2**63)
            task = tasks[index]
        if self.environment is None:
            self.environment = CheckedEnv(self.factory.make(), self.config)
        observation = self.environment.reset(task)
        return _fields(self.environment, observation, done=False)

    def play(self, environment: CheckedEnv, text: str) -> dict[str, Any]:
        """Play a turn. Returns the fields of its observation."""
        response = text
        if text.strip() in environment.admissible_actions():
            response = environment.format_action(text.strip())
        outcome = environment.step(response)
        return _fields(environment, outcome.observation, done=outcome.done) | {
            "reward": outcome.reward,
            "won": outcome.won,
            "valid": outcome.valid,
            "score": outcome.score,
        }

    def count_tasks(self, split: str) -> int | None:
        """Return the number of tasks of a split; None if they are endless."""
        with read_tasks(self.factory, split, 0) as tasks:
            return size(tasks)

    def close(self) -> None:
        if self.environment:
            with quietly():
                self.environment.close()


def _fields(environment: CheckedEnv, observation: str, *, done: bool) -> dict[str, Any]:
    """Return the observation, with the next turn's prompt and actions (empty at the end)."""
    prompt = ""
    actions: list[str] = []
    if not done:
        context = environment.context()
        if not isinstance(context, str):
            context = "\n\n".join(message["content"] for message in context)
        prompt = context
        actions = environment.admissible_actions()
    return {"text": observation, "prompt": prompt, "admissible_actions": actions, "done": done}
