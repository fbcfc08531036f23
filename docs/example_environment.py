"""Guess a number, an environment in one file: paw train RECIPE --env.name docs/example_environment.py:Guess"""

import re

from paw.types import Outcome, Task


class Guess:
    """One episode at a time. Of the tasks every tenth is held out for evaluation."""

    tasks = [Task(f"guess {n}", payload=n) for n in range(1, 100)]

    def reset(self, task):
        self.secret, self.low, self.high = task.payload, 1, 99
        return "I think of a number."

    def context(self):
        return f"I think of a number from {self.low} to {self.high}. Your guess?"

    def step(self, response):
        found = re.search(r"[0-9]{1,2}", response)
        guess = int(found[0]) if found else 0
        won, more = guess == self.secret, guess < self.secret
        self.low, self.high = (
            (max(self.low, guess + 1), self.high) if more else (self.low, min(self.high, guess - 1))
        )
        text = "That is it." if won else f"It is {'more' if more else 'less'} than {guess}."
        return Outcome(
            text, reward=float(won), done=won, won=won, action=str(guess), valid=found is not None
        )

    # Optional: a warm-up model and `paw env check` play the oracle, `paw play` lists the actions.

    def oracle(self):
        return str((self.low + self.high) // 2)

    def admissible_actions(self):
        return [str(guess) for guess in range(self.low, self.high + 1)]
