"""The smallest environments: countdowns, for tests of what plays them. For text a model can learn see toyworld.py."""

from paw.envs.base import Endless
from paw.types import Outcome, Task


class Count:
    """Counts down by the response "go". One reward a turn; won at nothing left."""

    tasks = [Task(str(n), payload=n) for n in range(30)]

    def reset(self, task):
        self.left = task.payload
        return f"{self.left} left"

    def context(self):
        return f"Say go, {self.left} times."

    def step(self, response):
        self.left -= response == "go"
        return Outcome(f"{self.left} left", reward=1.0, done=self.left <= 0, won=self.left <= 0)


class CountConfigured(Count):
    def __init__(self, config, extra=None):
        self.most = config.max_turns


class Counting:
    """A factory of countdowns: endless training tasks, three held out, drawn with replacement."""

    name, reward_max, invalid_penalty, may_block, distinct_eval = "counting", 5.0, 0.5, True, False

    def tasks(self, split, seed):
        return Endless(lambda i: Task(f"{split}/{seed}/{i}", payload=i)) if split == "train" else Count.tasks[:3]

    def make(self):
        return Count()

    def fingerprint(self):
        return "counting 1"
