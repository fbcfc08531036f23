"""The joint loss against full logits in float64, and that no way of cutting the batch changes its gradient."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from joint import VOCAB, Objective, dense, make_rows, packed, relative, tiny_policy, token_logps

from paw.algo import loss as losses
from paw.algo.loss import log_probs
from paw.algo.samples import collate, micro_batches, minibatches
from paw_kernels import token_stats

OBJECTIVES = {
    "paper": Objective(rho=0.05),
    "kl and entropy": Objective(rho=0.05, kl_coef=0.1, entropy_coef=0.01),
    "sample mean": Objective(rho=0.05, norm="sample", clip_high=0.28),
    "verl's mean": Objective(rho=0.05, norm="verl", verl_samples=7),
    "mae, scaled": Objective(wm="mae", wm_scale=3.0),
    "gce, truncated importance": Objective(wm="gce", q=0.4, tis_cap=2.0),
    "ce, at a temperature": Objective(wm="ce", temperature=0.7, dual_clip=1.5),
}
FULL = OBJECTIVES["kl and entropy"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def rows(policy):
    return make_rows(policy, reference=True)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_those_of_full_logits(name):
    objective = OBJECTIVES[name]
    policy = tiny_policy("qwen2-tied" if objective.wm == "cmae" else "llama")
    rng, rows = random.Random(5), make_rows(policy, reference=True)
    if name == "kl and entropy":  # PPO's advantages, one a token
        rows = [replace(row, token_advantage=[rng.gauss(0, 1) for _ in row.response_ids]) for row in rows]
    loss, gradient = packed(policy, rows, objective, update_samples=40)
    expected, expected_gradient, masked, live = dense(policy, rows, objective, update_samples=40)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-5
    assert live > 20 and (masked > 2) is (objective.wm == "cmae")


@pytest.mark.parametrize("name", ["ppo", "cmae", "mae", "ce", "gce", "tis"])
def test_gradcheck_of_every_loss(name):
    """Away from the kinks of clip and mask."""
    g = torch.Generator().manual_seed(0)
    logp = (-3 * torch.rand(50, generator=g, dtype=torch.float64)).requires_grad_()
    entropy, observation = torch.rand(50, generator=g, dtype=torch.float64), torch.zeros(50, dtype=torch.bool)
    advantage, old = torch.randn(50, generator=g).double(), logp.detach() + torch.randn(50, generator=g).double()
    batch = losses.TokenBatch(torch.ones(50), observation, advantage, old, old, old + 0.1)
    settings = {"tis_cap": 2.0} if name == "tis" else {}
    of = getattr(losses, name)
    assert torch.autograd.gradcheck(lambda logp: of(logp, entropy, batch, **settings), logp)


def test_a_ratio_truncated_at_c_flows_below_it_whatever_the_advantages_sign():
    """J = A min(r, 2): the objective of old_logp = "engine" with tis_cap = 2."""
    ratio = torch.tensor([0.01, 0.5, 1.9, 2.1, 9.0]).repeat(2)
    advantage, zero = torch.tensor([1.0] * 5 + [-1.0] * 5), torch.zeros(10)
    batch = losses.TokenBatch(torch.ones(10), zero.bool(), advantage, zero, zero)
    logp = ratio.log().requires_grad_()
    out = losses.tis(logp, zero, batch, tis_cap=2.0)
    torch.testing.assert_close(out.detach(), -advantage * ratio.clamp(max=2))
    (slope,) = torch.autograd.grad(out.sum(), logp)
    assert torch.equal(slope != 0, ratio < 2)


def test_log_probs_are_those_of_full_logits(policy, rows):
    scored = log_probs(policy, rows, temperature=0.7, budget=60).values()
    for row, (logp, entropy) in zip(rows, scored, strict=True):
        at = len(row.prompt_ids) - 1
        with torch.no_grad():
            logps = token_logps(policy.lm, row, temperature=0.7)[at : at + len(row.response_ids)]
        assert logp == pytest.approx([float(logps[t, i]) for t, i in enumerate(row.response_ids)], abs=1e-5)
        assert entropy == pytest.approx(float((-logps.exp() * logps).sum(-1).mean()), abs=1e-5)


@pytest.mark.parametrize("norm", ["token", "group", "verl"])
def test_no_way_of_cutting_the_batch_changes_the_gradient(policy, rows, norm):
    """Micro-batches, the order of samples, ranks' shares, leaving out what has no gradient."""
    objective = replace(FULL, norm=norm, verl_samples=5)
    whole = packed(policy, rows, objective, update_samples=40)
    cuts = [packed(policy, rows, objective, update_samples=40, budget=budget) for budget in (1, 60)]
    shares = [packed(policy, rows, objective, update_samples=40, budget=60, share=(rank, 3)) for rank in range(3)]
    cuts.append(tuple(map(sum, zip(*shares, strict=True))))
    if norm != "verl":
        cuts.append(packed(policy, random.Random(1).sample(rows, len(rows)), objective, update_samples=40, budget=100))
    for loss, gradient in cuts:
        assert loss == pytest.approx(whole[0], rel=1e-6)
        assert relative(gradient, whole[1]) < 1e-6
    plain = replace(OBJECTIVES["paper"], norm=norm, verl_samples=5)
    assert 0 < sum(map(plain.dead, rows)) < len(rows)
    kept = packed(policy, rows, plain, update_samples=40, budget=100)
    skipped = packed(policy, rows, plain, update_samples=40, budget=100, skip=plain.dead)
    assert skipped[0] == pytest.approx(kept[0], rel=1e-6) and relative(skipped[1], kept[1]) < 1e-6


def test_mini_batches_sum_to_the_whole_update(policy, rows):
    """Each weighted by its samples, a policy term that is a mean over samples."""
    objective = replace(OBJECTIVES["paper"], norm="sample")
    loss, gradient = packed(policy, rows, objective, update_samples=len(rows))
    parts = minibatches(rows, size=5, seed=0)
    found = [(len(part), packed(policy, part, objective, update_samples=len(rows))) for part in parts]
    assert sum(n * each for n, (each, _) in found) / len(rows) == pytest.approx(loss, rel=1e-6)
    assert relative(sum(n * each for n, (_, each) in found) / len(rows), gradient) < 1e-6


def test_an_appended_observation_changes_no_action_log_prob_by_a_single_bit(policy):
    """Causal attention: same shape, same bits, whatever follows the response."""
    selected = [replace(row, wm_weight=1.0) for row in make_rows(policy) if row.observation_ids]
    batch = collate(selected, [[i] for i in range(len(selected))], with_observation=True, device=CPU)
    bare = batch.input_ids.clone()
    for end, row in zip(accumulate(batch.lengths), selected, strict=True):
        bare[end - len(row.separator_ids) - len(row.observation_ids) : end] = 0
    assert not torch.equal(bare, batch.input_ids)

    def action_logps(input_ids):
        actions = ~batch.observation
        hidden = policy.hidden(input_ids, batch.lengths)[batch.position[actions]]
        return token_stats(hidden, policy.head_weight, batch.target[actions], bias=policy.head_bias).logp

    with torch.no_grad():
        assert torch.equal(action_logps(batch.input_ids), action_logps(bare))


def metrics(policy, rows, objective, budget):
    sums = [0.0] * len(losses.SUMS)
    for batch in micro_batches(rows, budget=budget, with_observation=True, device=CPU):
        out, tokens = objective.forward(policy, batch, rows, 40)
        sums = [a + b for a, b in zip(sums, losses.tally(out, tokens, *objective.terms), strict=True)]
    return losses.metrics(sums, steps=1, reference=objective.kl_coef > 0, masks=objective.wm == "cmae")


def test_metrics_of_micro_batches_are_those_of_one(policy, rows):
    whole = metrics(policy, rows, FULL, 10**6)
    assert metrics(policy, rows, FULL, 50) == pytest.approx(whole, rel=1e-5)
    assert whole["policy/loss"] + whole["wm/loss"] == pytest.approx(packed(policy, rows, FULL, update_samples=40)[0])
    assert (
        0 < whole["policy/clip_frac"] < 1 and 0 < whole["wm/masked_frac"] < 1 and 0 < whole["optim/gradient_frac"] < 1
    )
    assert 0 < whole["policy/entropy"] < torch.tensor(float(VOCAB)).log() and whole["policy/kl"] > 0


@pytest.mark.parametrize(("changed", "absent"), [({"kl_coef": 0.0}, "policy/kl"), ({"wm": "ce"}, "wm/masked_frac")])
def test_what_was_not_measured_is_absent(policy, rows, changed, absent):
    """And means over nothing: no entropy of 0 that a collapse warning would take for real."""
    every = metrics(policy, rows, FULL, 10**6).keys()
    assert every - metrics(policy, rows, replace(FULL, **changed), 10**6).keys() == {absent}
    nothing = losses.metrics([0.0] * len(losses.SUMS), steps=2, reference=True, masks=True)
    assert nothing == {"policy/loss": 0.0}
