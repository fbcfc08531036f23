"""Guess a number, an environment in one file: paw train RECIPE --env.name docs/example_environment.py:Guess"""

import re

from paw.types import Outcome, Task


class Guess:
    """One object plays one episode at a time. Every tenth task is held out for evaluation."""

    tasks = [Task(f"guess {n}", payload=n) for n in range(1, 100)]

    def reset(self, task):
        self.secret = task.payload
        self.low = 1
        self.high = 99
        return "I think of a number."

    def context(self):
        return f"I think of a number from {self.low} to {self.high}. Your guess?"

    def step(self, response):
        number = re.search(r"[0-9]{1,2}", response)
        guess = int(number[0]) if number else 0
        won = guess == self.secret

        if won:
            observation = "That is it."
        elif guess < self.secret:
            observation = f"It is more than {guess}."
            self.low = max(self.low, guess + 1)
        else:
            observation = f"It is less than {guess}."
            self.high = min(self.high, guess - 1)

        return Outcome(
            observation,
            reward=float(won),
            done=won,
            won=won,
            action=str(guess),
            valid=number is not None,
        )

    # Optional: a warm-up model and `paw env check` play the oracle, `paw play` lists the actions.

    def oracle(self):
        return str((self.low + self.high) // 2)

    def admissible_actions(self):
        return [str(guess) for guess in range(self.low, self.high + 1)]
