"""PaW Eq. (11) from the groups of an update to its gradient, against the equation written out once more."""

import copy
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from joint import VOCAB, Objective, gradients, packed, relative, tiny_policy

from paw.algo.advantages import grpo
from paw.algo.loss import log_probs
from paw.algo.samples import minibatches, to_samples
from paw.algo.world_model import select
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
        outcome = Outcome(observation, reward, done, reward > 0, action="a", valid=rng.random() < 0.8)
        return Turn(ids(2, 10), response, [-1.0] * len(response), None, "p", "r", outcome, anchor="s", version=0)

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


def prepared(policy, groups, *, drift=0.0):
    """Rows after every stage; `drift` moves old log-probs away from the policy's."""
    rows = to_samples(groups, separator_ids=SEPARATOR, encode_observation=encode, invalid_penalty=PENALTY)
    for row, advantage in zip(rows, grpo(rows), strict=True):
        row.advantage = advantage
    rng = random.Random(7)
    for row, (logp, entropy) in zip(rows, log_probs(policy, rows, temperature=1.0, budget=100).values(), strict=True):
        row.old_logp = [value + rng.gauss(0, drift) for value in logp]
        row.entropy = entropy
    chosen = select(rows, alpha=ALPHA, weight="adaptive", reward_max=REWARD_MAX, n_groups=len(groups))
    for row, weight in zip(rows, chosen.weights, strict=True):
        row.wm_weight = weight
    return rows


def equation_11(policy, groups, old_logps, norm):
    """Straight from the episodes: nothing of paw.algo is called. Returns loss and gradient.

    `norm`: the policy's term is a mean over all tokens, or over groups of the mean over the group's tokens.
    """
    lm = copy.deepcopy(policy.lm).double()
    turns, tokens = [], sum(len(t.response_ids) for g in groups for e in g.trajectories for t in e.turns)
    total = torch.zeros((), dtype=torch.float64)
    for g, group in enumerate(groups):
        played = [(e, t) for e in group.trajectories for t in e.turns]
        if norm == "group":
            tokens = len(groups) * sum(len(turn.response_ids) for _, turn in played)
        steps = [(e.episode_return - (0 if t.outcome.valid else PENALTY), t) for e, t in played]
        scores = [s for s, _ in steps]
        mean, std = statistics.mean(scores), statistics.stdev(scores)
        for own, turn in steps:
            ids = turn.prompt_ids + turn.response_ids + SEPARATOR + encode(turn.outcome.observation)
            logps = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            at = logps[len(turn.prompt_ids) - 1 :][: len(turn.response_ids)]
            entropy = -(at.exp() * at).sum(-1).mean().item()
            advantage, old = (own - mean) / (std + 1e-6), old_logps[len(turns)]
            for t, token in enumerate(turn.response_ids):
                ratio = (at[t, token] - old[t]).exp()
                term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                total = total - (term if advantage > 0 else term.clamp(min=3 * advantage)) / tokens
            start = len(turn.prompt_ids) + len(turn.response_ids) + len(SEPARATOR)
            target = encode(turn.outcome.observation)
            p = [logps[start + i - 1, token].exp() for i, token in enumerate(target)]
            turns.append((g, entropy, p))
    candidates = sorted((i for i, (_, _, p) in enumerate(turns) if p), key=lambda i: -turns[i][1])
    chosen = candidates[: math.ceil(ALPHA * len(candidates))]
    for g, returns in enumerate(RETURNS):
        selected = [turns[i][2] for i in chosen if turns[i][0] == g]
        for p in selected:
            cmae = sum(((1 - x) for x in p if x <= RHO), start=torch.zeros((), dtype=torch.float64)) / len(p)
            weight = 1 - sum(returns) / len(returns) / REWARD_MAX
            total = total + weight * cmae / len(selected) / len(groups)
    total.backward()
    return total.item(), gradients(lm)


@pytest.mark.parametrize("family", ["qwen2-tied", "llama"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("norm", ["token", "group"])
def test_an_update_in_one_step_is_equation_11(family, seed, norm):
    policy, groups = tiny_policy(family), play(seed)
    rows = prepared(policy, groups, drift=0.3)
    assert {row.group for row in rows if row.wm_weight} == {0, 1, 2}
    objective = Objective(rho=RHO, norm=norm)
    loss, gradient = packed(policy, rows, objective, update_samples=len(rows), budget=60)
    expected, expected_gradient = equation_11(policy, groups, [row.old_logp for row in rows], norm)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-5


@pytest.mark.parametrize(("budget", "world"), [(30, 1), (60, 2), (200, 3)])
def test_neither_micro_batches_nor_ranks_change_the_mean_over_groups(budget, world):
    policy = tiny_policy()
    rows = prepared(policy, play(), drift=0.3)
    policy.double()  # the body: its rounding depends on what a row is batched with
    part, objective = rows[::2], Objective(rho=RHO, norm="group", entropy_coef=0.01)
    loss, gradient = packed(policy, part, objective, update_samples=len(rows))
    shares = [
        packed(policy, part, objective, update_samples=len(rows), budget=budget, share=(rank, world))
        for rank in range(world)
    ]
    assert sum(share[0] for share in shares) == pytest.approx(loss, rel=1e-6)
    assert relative(sum(share[1] for share in shares), gradient) < 1e-6
    by_token = packed(policy, part, replace(objective, norm="token"), update_samples=len(rows))[1]
    assert relative(by_token, gradient) > 1e-2  # it can tell


def test_weights_are_lambda_over_groups_and_selected_rows():
    policy, groups = tiny_policy(), play()
    rows = prepared(policy, groups)
    for g, returns in enumerate(RETURNS):
        weights = [row.wm_weight for row in rows if row.group == g and row.wm_weight]
        expected = (1 - sum(returns) / len(returns) / REWARD_MAX) / len(RETURNS)
        assert sum(weights) == pytest.approx(expected)
        assert len(set(weights)) <= 1


@pytest.mark.parametrize("norm", ["token", "sample", "group"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_mini_batches_sum_to_the_whole_update(norm, size):
    """The world term weighted by rows, the policy term too, unless it is a mean over tokens."""
    policy, groups = tiny_policy(), play()
    rows = prepared(policy, groups, drift=0.3)
    objective = Objective(rho=RHO, norm=norm)
    policy.double()  # the body: its rounding depends on what a row is batched with

    def split(part, update_samples):
        """Gradients of the policy and of the world-model term of one mini-batch."""
        acting = packed(policy, part, objective, update_samples=update_samples, with_observation=False)[1]
        observing = [replace(row, advantage=0.0) for row in part]
        return acting, packed(policy, observing, objective, update_samples=update_samples)[1]

    acting, world = split(rows, len(rows))
    parts = minibatches(rows, size=size, seed=0)
    assert len(parts) > 2
    acting_sum, world_sum = torch.zeros_like(acting), torch.zeros_like(world)
    tokens = sum(len(row.response_ids) for row in rows)
    for part in parts:
        part_acting, part_world = split(part, len(rows))
        part_tokens = sum(len(row.response_ids) for row in part)
        acting_sum += part_acting * (part_tokens / tokens if norm == "token" else len(part) / len(rows))
        world_sum += part_world * (len(part) / len(rows))
    assert relative(acting_sum, acting) < 1e-6
    assert relative(world_sum, world) < 1e-6


def test_a_group_that_always_wins_learns_no_world_model():
    policy = tiny_policy()
    rows = prepared(policy, play())
    assert not any(row.wm_weight for row in rows if row.group == 3)
    assert any(row.observation_ids for row in rows if row.group == 3)
