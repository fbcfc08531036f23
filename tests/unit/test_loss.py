"""The joint loss against full logits in float64, and that no way of cutting the batch changes its gradient."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from joint import FAMILIES, VOCAB, dense, make_row, make_rows, packed, relative, tiny_policy, token_logps

from paw.algo.loss import Objective, Totals, collate, joint_loss, loss_rows, micro_batches, score
from paw_kernels import ACTION, OBSERVATION, token_stats

OBJECTIVES = {
    "paper": Objective(rho=0.05),
    "kl and entropy": Objective(rho=0.05, kl_coef=0.1, entropy_coef=0.01),
    "row mean": Objective(rho=0.05, loss_norm="row", clip_high=0.28),
    "verl's mean": Objective(rho=0.05, loss_norm="verl", verl_rows=7),
    "mae, scaled": Objective(observation_loss="mae", wm_scale=3.0),
    "gce": Objective(observation_loss="gce", q=0.4),
    "ce, at a temperature": Objective(observation_loss="ce", temperature=0.7, dual_clip=1.5),
}
FULL = OBJECTIVES["kl and entropy"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def rows(policy):
    return make_rows(policy, reference=True)


def test_collate_as_documented():
    row = replace(make_row(random.Random(0)), prompt_ids=[1, 5, 6], response_ids=[7, 2], separator_ids=[1])
    selected = replace(row, observation_ids=[8, 9], wm_weight=0.5)
    batch = collate([selected], [0], with_observation=True, device=CPU)
    assert batch.input_ids.tolist() == [1, 5, 6, 7, 2, 1, 8, 9]
    assert batch.lengths == [8]
    assert batch.target.tolist() == [7, 2, 8, 9]
    assert batch.position.tolist() == [2, 3, 5, 6]
    assert batch.kind.tolist() == [ACTION, ACTION, OBSERVATION, OBSERVATION]


def test_collate_packs_and_leaves_out_observations_that_carry_no_weight(rows):
    unselected = next(i for i, row in enumerate(rows) if row.observation_ids and not row.wm_weight)
    selected = next(i for i, row in enumerate(rows) if row.wm_weight)
    batch = collate(rows, [unselected, selected], with_observation=True, device=CPU)
    row = rows[unselected]
    ids = row.prompt_ids + row.response_ids
    assert batch.lengths == [len(ids), len(rows[selected])]
    assert batch.input_ids[: len(ids)].tolist() == ids
    assert batch.input_ids.tolist()[-1] == rows[selected].observation_ids[-1]
    n, m = len(row.response_ids), len(rows[selected].response_ids)
    assert batch.kind.tolist() == [ACTION] * (n + m) + [OBSERVATION] * len(rows[selected].observation_ids)
    assert torch.equal(batch.input_ids[batch.position + 1], batch.target)
    acting = collate(rows, [selected], with_observation=False, device=CPU)
    assert acting.lengths == [len(acting.input_ids)] == [len(rows[selected].prompt_ids) + m]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_those_of_full_logits(family, name):
    objective = OBJECTIVES[name]
    policy = tiny_policy(family)
    rows = make_rows(policy, reference=True)
    loss, gradient = packed(policy, rows, objective, update_samples=40)
    expected, expected_gradient, masked, live = dense(policy, rows, objective, update_samples=40)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-5
    assert live > 20 and (masked > 2) is (objective.observation_loss == "cmae")


def test_an_advantage_for_each_token(policy, rows):
    rng = random.Random(5)
    rows = [replace(row, token_advantage=[rng.gauss(0, 1) for _ in row.response_ids]) for row in rows]
    loss, gradient = packed(policy, rows, FULL, update_samples=40, budget=100)
    expected, expected_gradient, *_ = dense(policy, rows, FULL, update_samples=40)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-5


def test_verls_mean_by_hand(policy, rows):
    """Responses of 1, 3 and 2 tokens, two rows a micro-batch: means over 4 and over 2 tokens, each weighs a half."""
    minibatch = [replace(rows[0], response_ids=[3] * n, old_logp=[-1.0] * n, wm_weight=0.0) for n in (1, 3, 2)]
    batch = collate(minibatch, [2, 0, 1], with_observation=False, device=CPU)  # however it is packed
    found = loss_rows(batch, minibatch, Objective(loss_norm="verl", verl_rows=2), update_samples=3)
    assert found.weight.tolist() == [1 / 4] * 2 + [1 / 8] + [1 / 8] * 3
    one = loss_rows(batch, minibatch, Objective(loss_norm="verl", verl_rows=3), update_samples=3)
    assert torch.equal(one.weight, loss_rows(batch, minibatch, Objective(), update_samples=3).weight)


@pytest.mark.parametrize("budget", [1, 100])
def test_packing_does_not_change_verls_mean(policy, rows, budget):
    objective = replace(FULL, loss_norm="verl", verl_rows=5)
    whole = packed(policy, rows, objective, update_samples=40)
    cut = packed(policy, rows, objective, update_samples=40, budget=budget, skip=objective.dead)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert relative(cut[1], whole[1]) < 1e-6
    assert relative(packed(policy, rows, FULL, update_samples=40)[1], whole[1]) > 1e-3


def test_scores_are_those_of_full_logits(policy, rows):
    scored = score(policy, rows, temperature=0.7, budget=60).values()
    for row, (logp, entropy) in zip(rows, scored, strict=True):
        at = len(row.prompt_ids) - 1
        with torch.no_grad():
            logps = token_logps(policy.lm, row, temperature=0.7)[at : at + len(row.response_ids)]
        assert logp == pytest.approx([float(logps[t, i]) for t, i in enumerate(row.response_ids)], abs=1e-5)
        assert entropy == pytest.approx(float((-logps.exp() * logps).sum(-1).mean()), abs=1e-5)


@pytest.mark.parametrize("budget", [1, 40, 100, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_micro_batch_budget_does_not_change_the_gradient(family, budget):
    policy = tiny_policy(family)
    rows = make_rows(policy, reference=True)
    whole = packed(policy, rows, FULL, update_samples=40)
    cut = packed(policy, rows, FULL, update_samples=40, budget=budget)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert relative(cut[1], whole[1]) < 1e-6


def test_row_order_does_not_change_the_gradient(policy, rows):
    whole = packed(policy, rows, FULL, update_samples=40, budget=100)
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows, len(rows))
        other = packed(policy, shuffled, FULL, update_samples=40, budget=100)
        assert other[0] == pytest.approx(whole[0], rel=1e-6)
        assert relative(other[1], whole[1]) < 1e-6


def test_padding_does_not_change_the_gradient(policy, rows):
    """A long row in the batch pads the others; alone it has no loss."""
    long = replace(make_row(random.Random(1)), prompt_ids=[3] * 90, response_ids=[4], advantage=0.0, old_logp=[-1.0])
    long.ref_logp, long.observation_ids = [-1.0], []
    objective = OBJECTIVES["paper"]
    together = packed(policy, [*rows, long], objective, update_samples=41)[1]
    apart = packed(policy, [*rows, long], objective, update_samples=41, skip=lambda row: row is long)[1]
    assert relative(together, apart) < 1e-6


def test_skipping_dead_rows_does_not_change_the_gradient(policy, rows):
    objective = OBJECTIVES["paper"]
    dead = sum(map(objective.dead, rows))
    assert 0 < dead < len(rows)
    for norm in ("token", "row"):
        variant = replace(objective, loss_norm=norm)
        kept = packed(policy, rows, variant, update_samples=40, budget=100)
        skipped = packed(policy, rows, variant, update_samples=40, budget=100, skip=variant.dead)
        assert skipped[0] == pytest.approx(kept[0], rel=1e-6)
        assert relative(skipped[1], kept[1]) < 1e-6


def test_a_row_is_dead_only_without_any_term():
    plain = Objective()
    row = replace(make_row(random.Random(0)), advantage=0.0, wm_weight=0.0)
    assert plain.dead(row)
    assert not plain.dead(replace(row, advantage=-0.1))
    assert not plain.dead(replace(row, wm_weight=0.1))
    assert not plain.dead(replace(row, token_advantage=[0.0] * (len(row.response_ids) - 1) + [0.1]))
    assert plain.dead(replace(row, advantage=1.0, token_advantage=[0.0] * len(row.response_ids)))
    assert not Objective(kl_coef=0.01).dead(row)
    assert not Objective(entropy_coef=0.01).dead(row)


def test_observations_of_unselected_rows_do_not_change_the_gradient(policy, rows):
    without = [row if row.wm_weight else replace(row, separator_ids=[], observation_ids=[]) for row in rows]
    assert sum(len(a) - len(b) for a, b in zip(rows, without, strict=True)) > 0
    a, b = packed(policy, rows, FULL, update_samples=40), packed(policy, without, FULL, update_samples=40)
    assert a[0] == b[0]
    assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_appended_observation_changes_no_action_log_prob_by_a_single_bit(family):
    """Causal attention: same shape, same bits, whatever follows the response."""
    policy = tiny_policy(family)
    rows = make_rows(policy)
    selected = [replace(row, wm_weight=1.0) for row in rows if row.observation_ids]
    batch = collate(selected, range(len(selected)), with_observation=True, device=CPU)
    bare = batch.input_ids.clone()
    for end, row in zip(accumulate(batch.lengths), selected, strict=True):
        bare[end - len(row.separator_ids) - len(row.observation_ids) : end] = 0
    assert not torch.equal(bare, batch.input_ids)

    def action_logps(input_ids):
        actions = batch.kind == ACTION
        hidden = policy.hidden(input_ids, batch.lengths)[batch.position[actions]]
        return token_stats(hidden, policy.head_weight, batch.target[actions], bias=policy.head_bias).logp

    with torch.no_grad():
        assert torch.equal(action_logps(batch.input_ids), action_logps(bare))


def test_the_world_term_leaves_the_policy_term_alone(policy, rows):
    """The gradient is the sum of both; without weights it is the policy's, bit for bit."""
    objective = OBJECTIVES["paper"]
    joint = packed(policy, rows, objective, update_samples=40)[1]
    no_weight = [replace(row, wm_weight=0.0) for row in rows]
    alone = packed(policy, no_weight, objective, update_samples=40)[1]
    world = packed(policy, [replace(row, advantage=0.0) for row in rows], objective, update_samples=40)[1]
    assert world.norm() > 1e-3 * alone.norm()
    assert relative(alone + world, joint) < 1e-6
    disabled = packed(policy, no_weight, objective, update_samples=40, with_observation=False)[1]
    assert torch.equal(disabled, alone)


def test_kl_needs_reference_log_probs(policy):
    rows = make_rows(policy)
    with pytest.raises(AssertionError, match="reference"):
        packed(policy, rows, FULL, update_samples=40)


def test_on_policy_the_loss_is_minus_the_mean_advantage(policy, rows):
    """Ratio 1: the loss of every token is -A; nothing is clipped, KL to itself is 0."""
    fresh = [replace(row, wm_weight=0.0) for row in rows]
    for row, (logp, _) in zip(fresh, score(policy, fresh, temperature=1.0, budget=10**6).values(), strict=True):
        row.old_logp = row.ref_logp = logp
    objective = Objective(kl_coef=0.1)
    batch = collate(fresh, range(len(fresh)), with_observation=False, device=CPU)
    coefficients = loss_rows(batch, fresh, objective, update_samples=len(fresh))
    out = joint_loss(policy, batch, coefficients, temperature=1.0)
    tokens = sum(len(row.response_ids) for row in fresh)
    mean = sum(row.advantage * len(row.response_ids) for row in fresh) / tokens
    assert float(out.loss.detach()) == pytest.approx(-mean, abs=1e-5)
    assert not out.clipped.any()
    assert out.kl.abs().max() < 1e-9


def test_totals_of_micro_batches_are_those_of_one(policy, rows):
    def metrics(budget):
        totals = Totals()
        for batch in micro_batches(rows, budget=budget, with_observation=True, device=CPU):
            coefficients = loss_rows(batch, rows, FULL, update_samples=40)
            totals.add(joint_loss(policy, batch, coefficients, temperature=1.0), coefficients)
        return totals.metrics(FULL, minibatches=1)

    whole = metrics(10**6)
    assert metrics(50) == pytest.approx(whole, rel=1e-5)
    assert whole["policy/loss"] + whole["wm/loss"] == pytest.approx(packed(policy, rows, FULL, update_samples=40)[0])
    assert 0 < whole["policy/clip_frac"] < 1 and 0 < whole["wm/masked_frac"] < 1 and 0 < whole["wm/live_frac"] < 1
    assert 0 < whole["policy/entropy"] < torch.tensor(float(VOCAB)).log()
    assert whole["policy/kl"] > 0


def test_totals_of_nothing_report_no_means():
    """No entropy of 0 that a collapse warning would take for real."""
    assert Totals().metrics(FULL, minibatches=2) == {"policy/loss": 0.0}


@pytest.mark.parametrize(
    ("changed", "absent"), [({"kl_coef": 0.0}, "policy/kl"), ({"observation_loss": "ce"}, "wm/masked_frac")]
)
def test_what_was_not_measured_is_absent(policy, rows, changed, absent):
    def keys(objective):
        batch = collate(rows, range(len(rows)), with_observation=True, device=CPU)
        coefficients, totals = loss_rows(batch, rows, objective, update_samples=40), Totals()
        totals.add(joint_loss(policy, batch, coefficients, temperature=1.0), coefficients)
        return totals.metrics(objective, minibatches=1).keys()

    assert keys(FULL) - keys(replace(FULL, **changed)) == {absent}


def test_truncated_importance_sampling_by_hand():
    """Response of two tokens: pi_old / pi_sampler = e^0.2 and e^2, the second cut at 2."""
    row = replace(make_row(random.Random(0)), prompt_ids=[1], response_ids=[7, 2], observation_ids=[], advantage=-3.0)
    row.sampled_logp, row.old_logp = [-1.0, -4.0], [-0.8, -2.0]
    batch = collate([row], [0], with_observation=False, device=CPU)
    plain = loss_rows(batch, [row], Objective(), update_samples=1)
    assert plain.advantage.tolist() == [-3.0, -3.0]
    cut = loss_rows(batch, [row], Objective(tis_cap=2.0), update_samples=1)
    assert cut.advantage.tolist() == pytest.approx([-3.0 * math.exp(0.2), -6.0])
    assert cut.old_logp.tolist() == plain.old_logp.tolist()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_truncated_at_c_flows_below_it_whatever_the_advantages_sign(policy, advantage):
    """J = A min(r, 2): the objective of old_logp = "engine" with tis_cap = 2."""
    truncated = Objective(clip_low=1.0, clip_high=1.0, dual_clip=2.0)
    row = replace(make_row(random.Random(0)), observation_ids=[], advantage=advantage)
    ((logp, _),) = score(policy, [row], temperature=1.0, budget=99).values()
    for ratio in (0.01, 0.5, 1.9, 2.1, 9.0):
        row.old_logp = [value - math.log(ratio) for value in logp]
        batch = collate([row], [0], with_observation=False, device=CPU)
        policy.zero_grad()
        out = joint_loss(policy, batch, loss_rows(batch, [row], truncated, update_samples=1), temperature=1.0)
        out.loss.backward()
        assert float(out.loss.detach()) == pytest.approx(-advantage * min(ratio, 2.0), rel=1e-4)
        assert (sum(float(p.grad.norm()) for p in policy.parameters()) > 0) is (ratio < 2)
