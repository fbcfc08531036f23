"""PaW Eq. (11) from the groups of an update to its gradient, against the equation written out once
more."""

import copy
import math
import random
import statistics

import pytest
import torch
from joint import VOCAB, Objective, fill, gradients, packed, relative, tiny_policy

from paw.algo.samples import to_samples
from paw.types import Group, Outcome, Task, Trajectory, Turn

REWARD_MAX = 10.0
PENALTY = 0.1
ALPHA = 0.6
RHO = 0.05
SEPARATOR = [5, 9]
RETURNS = [[10.0, 0.0, 0.0], [0.0, 0.0, 0.0], [10.0, 10.0, 0.0, 0.0], [10.0, 10.0, 10.0]]
"""Of each trajectory, by group: lambda 2/3, 1, 1/2 and 0."""


def play(seed=0):
    """Groups of random episodes; some turns invalid, some observations empty."""
    rng = random.Random(seed)

    def ids(low, limit):
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, limit))]

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
    for number, returns in enumerate(RETURNS):
        task = Task(str(number), "pick")
        trajectories = []
        for member, episode_return in enumerate(returns):
            n = rng.randint(1, 4)
            turns = [turn(episode_return if t == n - 1 else 0.0, t == n - 1) for t in range(n)]
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
    rated = []
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(turn.response_ids) for group in groups for _, turn in turns_of(group))
    for number, group in enumerate(groups):
        played = turns_of(group)
        if norm == "group":
            tokens = len(groups) * sum(len(turn.response_ids) for _, turn in played)
        scores = []
        for episode, turn in played:
            scores.append(episode.episode_return - (0 if turn.outcome.valid else PENALTY))
        mean = statistics.mean(scores)
        std = statistics.stdev(scores)
        for score, (_, turn) in zip(scores, played, strict=True):
            target = encode(turn.outcome.observation)
            ids = [*turn.prompt_ids, *turn.response_ids, *SEPARATOR, *target]
            logps = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            of_response = logps[len(turn.prompt_ids) - 1 :][: len(turn.response_ids)]
            of_target = logps[len(ids) - len(target) - 1 :]

            advantage = (score - mean) / (std + 1e-6)
            old_logp = old_logps[len(rated)]
            for t, token in enumerate(turn.response_ids):
                ratio = (of_response[t, token] - old_logp[t]).exp()
                term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if advantage <= 0:
                    term = term.clamp(min=3 * advantage)
                total = total - term / tokens
            entropy = -(of_response.exp() * of_response).sum(-1).mean().item()
            p = [of_target[t, token].exp() for t, token in enumerate(target)]
            rated.append((number, entropy, p))

    candidates = [turn for turn in rated if turn[2]]
    candidates.sort(key=lambda turn: -turn[1])
    chosen = candidates[: math.ceil(ALPHA * len(candidates))]
    for number, _, p in chosen:
        cmae = torch.zeros((), dtype=torch.float64)
        for probability in p:
            if probability <= RHO:
                cmae = cmae + (1 - probability)
        weight = 1 - statistics.mean(RETURNS[number]) / REWARD_MAX
        of_group = sum(other == number for other, _, _ in chosen)
        total = total + weight * (cmae / len(p)) / of_group / len(groups)
    total.backward()
    return total.item(), gradients(lm)


def turns_of(group):
    """(episode, turn) of every turn of a group."""
    return [(episode, turn) for episode in group.trajectories for turn in episode.turns]


@pytest.mark.parametrize(("norm", "family"), [("token", "llama"), ("group", "qwen2-tied")])
def test_an_update_in_one_step_is_equation_11(norm, family):
    policy = tiny_policy(family)
    groups = play()
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
