"""Your own reward and loss, in place of the environment's reward and PPO's clip.

The model that plays own_environment.py is rewarded for a quick win, and learns by a smooth function
of the probability ratio. The settings of both (`per_turn`, `width`) are keyword-only parameters,
which become keys: `--reward.per_turn 0.05`. The loss stays fused with the vocabulary head.

Needs: pip install paw-trainer
Took: 51 s of processor time on one thread of an AMD EPYC, including the start model.
Change first: `quick`, a function of the whole episode. Advantages (`advantage.type`) and the world
model's loss (`wm.loss`) are replaced in the same way.
"""

import torch
from own_environment import Fetch

import paw


def quick(trajectory, *, per_turn: float = 0.1) -> float:
    """1 for a win, minus `per_turn` for each turn."""
    return float(trajectory.won) - per_turn * len(trajectory.turns)


def smooth(logp, entropy, batch, *, width: float = 0.2):
    """Return the squashed logarithm of the ratio, one value for each response token."""
    return -batch.advantage * width * torch.tanh((logp - batch.old_logp) / width)


def main(words):
    changes = {
        "env.name": Fetch, "env.max_turns": 12, "reward.type": quick, "policy.loss": smooth,
        "wm.weight": 0.1, "run.updates": 30, "rollout.tasks": 8, "run.name": "own-reward-and-loss",
        "warmup.max_steps": 60, "warmup.corpus_turns": 1000, "eval.games": 0, "eval.attempts": 8,
    }  # fmt: skip
    report = paw.train(paw.load("quickstart", words, **changes), numbered=True)
    for key, meaning in (("eval/success", "cups fetched, share"), ("eval/steps", "moves")):
        values = [*paw.metric(report.parent, key).values()]
        print(f"{meaning}: {values[0]:.2f} -> {values[-1]:.2f}")
    print(report)


if __name__ == "__main__":
    paw.script(main)
