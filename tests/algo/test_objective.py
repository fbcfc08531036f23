"""From the groups of an update to its gradient: PaW Eq. (11) matches a second implementation."""

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
"""The trajectories' returns by group: lambda is 2/3, 1, 1/2 and 0."""


def play(seed=0):
    """Groups of random episodes. Some turns are invalid and some observations are empty."""
    rng = random.Random(seed)

    def ids(lowest, highest):
        return [rng.randrange(VOCAB) for _ in range(rng.randint(lowest, highest))]

    def turn(reward, done):
        response = ids(1, 5)
        observation = "" if rng.random() < 0.2 else "".join(chr(i) for i in ids(1, 8))
        outcome = Outcome(
            observation, reward, done, reward > 0, action="a", valid=rng.random() < 0.8
        )
        return Turn(
            prompt_ids=ids(2, 10),
            response_ids=response,
            sampled_logp=[-1.0] * len(response),
            entropy=None,
            prompt="p",
            response="r",
            outcome=outcome,
            anchor="s",
            version=0,
        )

    groups = []
    for number, returns in enumerate(RETURNS):
        task = Task(str(number), "pick")
        trajectories = []
        for member, episode_return in enumerate(returns):
            turn_count = rng.randint(1, 4)
            turns = [turn(0.0, done=False) for _ in range(turn_count - 1)]
            turns.append(turn(episode_return, done=True))
            trajectories.append(Trajectory(task, member, turns))
        groups.append(Group(task, trajectories))
    return groups


def encode(text):
    return [ord(c) for c in text]


def equation_11(policy, groups, old_logps, norm):
    """(loss, gradient), computed directly from the episodes without any code of paw.algo.

    `norm`: the policy's term is a mean over all tokens, or over groups of the mean over the group's
    tokens.
    """
    lm = copy.deepcopy(policy.lm).double()
    rated = []
    loss = torch.zeros((), dtype=torch.float64)
    token_count = sum(len(turn.response_ids) for group in groups for _, turn in turns_of(group))
    for group_index, group in enumerate(groups):
        played = turns_of(group)
        if norm == "group":
            token_count = len(groups) * sum(len(turn.response_ids) for _, turn in played)
        scores = []
        for episode, turn in played:
            scores.append(episode.episode_return - (0 if turn.outcome.valid else PENALTY))
        mean = statistics.mean(scores)
        std = statistics.stdev(scores)
        for score, (_, turn) in zip(scores, played, strict=True):
            response_logps, target_probabilities = predictions(lm, turn)
            advantage = (score - mean) / (std + 1e-6)
            old_logp = old_logps[len(rated)]
            for objective in clipped_objectives(response_logps, turn, old_logp, advantage):
                loss = loss - objective / token_count
            entropy = -(response_logps.exp() * response_logps).sum(-1).mean().item()
            rated.append((group_index, entropy, target_probabilities))

    chosen = most_uncertain(rated)
    for group_index, _, target_probabilities in chosen:
        cmae = torch.zeros((), dtype=torch.float64)
        for probability in target_probabilities:
            if probability <= RHO:
                cmae = cmae + (1 - probability)
        weight = 1 - statistics.mean(RETURNS[group_index]) / REWARD_MAX
        chosen_of_group = sum(other == group_index for other, _, _ in chosen)
        wm_loss = weight * (cmae / len(target_probabilities))
        loss = loss + wm_loss / chosen_of_group / len(groups)
    loss.backward()
    return loss.item(), gradients(lm)


def predictions(lm, turn):
    """([response, V] log-probs, probability of each observation token) of a turn."""
    target = encode(turn.outcome.observation)
    ids = [*turn.prompt_ids, *turn.response_ids, *SEPARATOR, *target]
    logps = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    response_logps = logps[len(turn.prompt_ids) - 1 :][: len(turn.response_ids)]
    target_logps = logps[len(ids) - len(target) - 1 :]
    return response_logps, [target_logps[t, token].exp() for t, token in enumerate(target)]


def clipped_objectives(response_logps, turn, old_logp, advantage):
    """PPO's clipped objective of each response token, with the dual clip."""
    objectives = []
    for t, token in enumerate(turn.response_ids):
        ratio = (response_logps[t, token] - old_logp[t]).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if advantage <= 0:
            clipped = clipped.clamp(min=3 * advantage)
        objectives.append(clipped)
    return objectives


def most_uncertain(rated):
    """The share ALPHA of (group, entropy, target probabilities) with the highest entropies."""
    candidates = [turn for turn in rated if turn[2]]
    candidates.sort(key=lambda turn: -turn[1])
    return candidates[: math.ceil(ALPHA * len(candidates))]


def turns_of(group):
    """(episode, turn) for every turn of a group."""
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
