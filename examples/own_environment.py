"""Your own environment in one file, and a small model that learns to play it.

Training needs `tasks`, `reset`, `context` and `step`. From the optional `oracle` and
`admissible_actions`, PaW makes a model of 0.2 M parameters that has seen some play ("quickstart").

Needs: pip install paw-trainer
Took: 44 s of processor time on one thread of an AMD EPYC, including the start model.
Change first: the class (`paw env check FILE.py:Class` checks it); then `--model.path NAME`.
"""

from itertools import permutations, product

import paw

MOVES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
TILES = list(product(range(1, 5), repeat=2))


class Fetch:
    """A robot fetches a cup, one episode at a time. Every tenth task is held out for evaluation."""

    tasks = [paw.Task(str(pair), payload=pair) for pair in permutations(TILES, 2)]

    def reset(self, task):
        self.robot, self.cup = task.payload
        return "You are a robot."

    def context(self):
        return f"You are at {self.robot}, the cup is at {self.cup}. Where do you go?"

    def step(self, response):
        east, north = MOVES.get(response.strip(), (0, 0))
        tile = (self.robot[0] + east, self.robot[1] + north)
        if tile in TILES:
            self.robot = tile
        won = self.robot == self.cup
        valid = response.strip() in MOVES
        return paw.Outcome(f"You are at {self.robot}.", float(won), won, won, valid=valid)

    def oracle(self):
        (x, y), (cup_x, cup_y) = self.robot, self.cup
        if x != cup_x:
            return "east" if x < cup_x else "west"
        return "north" if y < cup_y else "south"

    def admissible_actions(self):
        return list(MOVES)


def main(words):
    changes = {"env.name": Fetch, "env.max_turns": 6, "eval.games": 0, "eval.attempts": 8}
    changes |= {"run.updates": 30, "rollout.tasks": 8, "run.name": "own-environment"}
    changes |= {"warmup.max_steps": 60, "warmup.corpus_turns": 1000}
    report = paw.train(paw.load("quickstart", words, **changes), numbered=True)
    success = [*paw.metric(report.parent, "eval/success").values()]
    print(f"Cups fetched from unseen places: {success[0]:.0%} -> {success[-1]:.0%}. {report}")


if __name__ == "__main__":
    paw.script(main)
