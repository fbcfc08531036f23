"""Guess a number, an environment in one file: paw train RECIPE --env.name docs/example_environment.py:Guess"""

import random
import re

from paw.config import EnvConfig
from paw.types import Outcome, Task


class Guess:
    """The factory: which tasks there are, and how to play them."""

    name = "guess"
    reward_max = 1.0
    may_block = False

    def __init__(self, config: EnvConfig):
        self.config, self.invalid_penalty = config, config.invalid_penalty

    def train_tasks(self, step: int, count: int, seed: int) -> list[Task]:
        return [new_task(f"train/{seed}/{i}") for i in range(step * count, (step + 1) * count)]

    def eval_tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [new_task(f"{split}/{seed}/{i}") for i in range(count or 100)]

    def warmup_tasks(self, start: int, count: int, seed: int) -> list[Task]:
        return [new_task(f"warmup/{seed}/{i}") for i in range(start, start + count)]

    def make(self) -> "Game":
        return Game(self.config.max_turns)

    def fingerprint(self) -> str:
        return "guess 1 to 99"


def new_task(id: str) -> Task:
    return Task(id, "guess", payload=random.Random(id).randint(1, 99))


class Game:
    """One episode at a time."""

    def __init__(self, max_turns: int):
        self.max_turns = max_turns

    def reset(self, task: Task) -> str:
        self.secret, self.low, self.high, self.turns, self.done = task.payload, 1, 99, 0, False
        return "I think of a number."

    def context(self) -> str:
        return f"I think of a number from {self.low} to {self.high}. Your guess?"

    def anchor(self) -> str:
        return self.context()

    def step(self, response: str) -> Outcome:
        assert not self.done, "step() after the end"
        found = re.search(r"[0-9]{1,2}", response)
        guess = int(found[0]) if found else 0
        won, more = guess == self.secret, guess < self.secret
        self.low, self.high = (max(self.low, guess + 1), self.high) if more else (self.low, min(self.high, guess - 1))
        self.turns += 1
        self.done = won or self.turns >= self.max_turns
        text = "That is it." if won else f"It is {'more' if more else 'less'} than {guess}."
        return Outcome(text, float(won), self.done, won, action=str(guess), valid=found is not None)

    def oracle(self) -> str:
        return str((self.low + self.high) // 2)

    def admissible_actions(self) -> list[str]:
        return [str(guess) for guess in range(self.low, self.high + 1)]

    def format_action(self, action: str) -> str:
        return action

    def close(self) -> None:
        pass
