"""Guess a number: an environment alone, for the command line.

    paw env check examples/number_game.py:Guess     # does it follow the rules that training needs?
    paw play examples/number_game.py:Guess          # what the agent sees
    paw train own-environment --env.name examples/number_game.py:Guess

own_environment.py trains on another environment from Python.
"""

import re

import paw


class Guess:
    """One object plays one episode at a time. Every tenth task is held out for evaluation."""

    tasks = [paw.Task(f"guess {n}", payload=n) for n in range(1, 100)]

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
        return paw.Outcome(observation, float(won), won, won, action=str(guess), valid=bool(number))

    def oracle(self):
        return str((self.low + self.high) // 2)

    def admissible_actions(self):
        return [str(guess) for guess in range(self.low, self.high + 1)]
