"""PaW Eq. (11) from the groups of an update to its gradient, against the equation written out once more."""

import copy
import math
import random
import statistics

import pytest
import torch
from joint import VOCAB, Objective, fill, gradients, packed, relative, tiny_policy

from paw.algo.samples import to_samples
from paw.types import Group, Outcome, Task, Trajectory, Turn

REWARD_MAX, PENALTY, ALPHA, RHO = 10.0, 0.1, 0.6, 0.05
SEPARATOR = [5, 9]
RETURNS = [[10.0, 0.0, 0.0], [0.0, 0.0, 0.0], [10.0, 10.0, 0.0, 0.0], [10.0, 10.0, 10.0]]
"""Of each trajectory, by group: lambda 2/3, 1, 1/2 and 0."""


def play(seed=0):
    """Groups of random episodes; some turns invalid, some observations empty."""
    rng = random.Random(seed)

    def ids(least, most):
        return [rng.randrange(VOCAB) for _ in range(rng.randint(least, most))]

    def turn(reward, done):
        response = ids(1, 5)
        observation = "" if rng.random() < 0.2 else "".join(chr(i) for i in ids(1, 8))
        outcome = Outcome(
            observation, reward, done, reward > 0, action="a", valid=rng.random() < 0.8
        )
        return Turn(
            ids(2, 10),
            response,
            [-1.0] * len(response),
            None,
            "p",
            "r",
            outcome,
            anchor="s",
            version=0,
        )

    groups = []
    for g, returns in enumerate(RETURNS):
        task = Task(str(g), "pick")
        trajectories = []
        for member, won in enumerate(returns):
            n = rng.randint(1, 4)
            turns = [turn(won if t == n - 1 else 0.0, t == n - 1) for t in range(n)]
            trajectories.append(Trajectory(task, member, turns))
        groups.append(Group(task, trajectories))
    return groups


def encode(text):
    return [ord(c) for c in text]


def equation_11(policy, groups, old_logps, norm):
    """Straight from the episodes: nothing of paw.algo is called. Returns loss and gradient.

    `norm`: the policy's term is a mean over all tokens, or over groups of the mean over the group's
    tokens.
    """
    lm = copy.deepcopy(policy.lm).double()
    turns, tokens = (
        [],
        sum(len(t.response_ids) for g in groups for e in g.trajectories for t in e.turns),
    )
    total = torch.zeros((), dtype=torch.float64)
    for g, group in enumerate(groups):
        played = [(e, t) for e in group.trajectories for t in e.turns]
        if norm == "group":
            tokens = len(groups) * sum(len(turn.response_ids) for _, turn in played)
        scores = [e.episode_return - (0 if t.outcome.valid else PENALTY) for e, t in played]
        mean, std = statistics.mean(scores), statistics.stdev(scores)
        for score, (_, turn) in zip(scores, played, strict=True):
            target = encode(turn.outcome.observation)
            ids = turn.prompt_ids + turn.response_ids + SEPARATOR + target
            logps = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            at = logps[len(turn.prompt_ids) - 1 :][: len(turn.response_ids)]
            advantage, old = (score - mean) / (std + 1e-6), old_logps[len(turns)]
            for t, token in enumerate(turn.response_ids):
                ratio = (at[t, token] - old[t]).exp()
                term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                total = total - (term if advantage > 0 else term.clamp(min=3 * advantage)) / tokens
            p = [
                each[token].exp()
                for each, token in zip(logps[len(ids) - len(target) - 1 :], target, strict=False)
            ]
            turns.append((g, -(at.exp() * at).sum(-1).mean().item(), p))
    candidates = sorted((turn for turn in turns if turn[2]), key=lambda turn: -turn[1])
    chosen = candidates[: math.ceil(ALPHA * len(candidates))]
    for g, _, p in chosen:
        cmae = sum(
            (1 - x for x in p if x <= RHO), start=torch.zeros((), dtype=torch.float64)
        ) / len(p)
        weight = 1 - statistics.mean(RETURNS[g]) / REWARD_MAX
        total = total + weight * cmae / sum(other[0] == g for other in chosen) / len(groups)
    total.backward()
    return total.item(), gradients(lm)


@pytest.mark.parametrize(("norm", "family"), [("token", "llama"), ("group", "qwen2-tied")])
def test_an_update_in_one_step_is_equation_11(norm, family):
    policy, groups = tiny_policy(family), play()
    rows = to_samples(
        groups, separator_ids=SEPARATOR, encode_observation=encode, invalid_penalty=PENALTY
    )
    rows = fill(policy, rows, n_groups=len(groups), alpha=ALPHA)
    assert {row.group for row in rows if row.wm_weight} == {0, 1, 2}
    objective = Objective(rho=RHO, norm=norm)
    loss, gradient = packed(policy, rows, objective, update_samples=len(rows), budget=60)
    expected, expected_gradient = equation_11(policy, groups, [row.old_logp for row in rows], norm)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-5
