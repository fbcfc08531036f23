"""The joint loss against full logits in float64, and that no way of cutting the batch changes its
gradient."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from joint import (
    VOCAB,
    Objective,
    dense,
    make_rows,
    packed,
    packed_in_ranks,
    relative,
    tiny_policy,
    token_logps,
)

from paw.algo import loss as losses
from paw.algo.batches import collate, micro_batches
from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw.algo.sequences import minibatches
from paw.algo.token_sums import RunningSums, token_metrics, token_sums
from paw.metric_list import METRICS
from paw_kernels import token_stats

OBJECTIVES = {
    "paper": Objective(rho=0.05),
    "kl and entropy": Objective(rho=0.05, kl_coef=0.1, entropy_coef=0.01),
    "sample mean": Objective(rho=0.05, norm="sample", clip_high=0.28),
    "verl's mean": Objective(rho=0.05, norm="verl", verl_samples=7),
    "mae, scaled": Objective(wm="mae", wm_scale=3.0),
    "gce, truncated importance": Objective(wm="gce", q=0.4, tis_cap=2.0),
    "gspo": Objective(rho=0.05, policy="gspo", norm="sample", clip_low=0.1, clip_high=0.1),
    "gspo, several tokens' mean": Objective(
        rho=0.05, policy="gspo", clip_low=0.1, clip_high=0.1, kl_coef=0.1
    ),
    "cispo": Objective(rho=0.05, policy="cispo", clip_low=1.0, clip_high=0.1),
    "masked tokens": Objective(rho=0.05, tis_cap=2.0, ratio_bounds=(0.4, 2.5)),
    "masked responses": Objective(
        rho=0.05, tis_cap=1.2, ratio_bounds=(0.5, 1.6), ratio_level="response"
    ),
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
    rng = random.Random(5)
    rows = make_rows(policy, reference=True)
    if name == "kl and entropy":  # PPO's advantages, one a token
        rows = [
            replace(row, token_advantage=[rng.gauss(0, 1) for _ in row.response_ids])
            for row in rows
        ]
    loss, gradient = packed(policy, rows, objective, update_samples=40)
    expected, expected_gradient, masked, live = dense(policy, rows, objective, update_samples=40)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-5
    assert live > 20
    assert (masked > 2) is (objective.wm == "cmae")


@pytest.mark.parametrize("budget", [10**6, 40])
def test_sequences_that_share_their_prefixes_have_the_same_loss_and_gradient(budget):
    """Groups begin with a system prompt and a task of their own; ranks take a part of the batches each."""
    policy = tiny_policy("llama")
    rows = make_rows(policy, reference=True)
    for row in rows:
        row.prompt_ids = [1, 2, 3, 4, 5, 6, 7, 8, 10 + row.group, 9, *row.prompt_ids[:2]]
    expected_loss, expected_gradient = packed(policy, rows, FULL, update_samples=40)

    options = {"update_samples": 40, "budget": budget, "share_prefixes": "always"}
    loss, gradient = packed(policy, rows, FULL, **options)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-6

    parts = packed_in_ranks(policy, rows, FULL, 2, **options)
    assert sum(part_loss for part_loss, _ in parts) == pytest.approx(expected_loss, rel=1e-5)
    assert relative(sum(part for _, part in parts), expected_gradient) < 1e-6

    packing = Packing(budget=budget, share_prefixes="always")
    batches = micro_batches(rows, packing, with_observation=True, device=CPU)
    assert all(batch.paths is not None for batch in batches)
    assert sum(batch.shared_tokens for batch in batches) > 100


@pytest.mark.parametrize("name", ["ppo", "cmae", "mae", "ce", "gce", "tis"])
def test_gradcheck_of_every_loss(name):
    """Away from the kinks of clip and mask."""
    generator = torch.Generator().manual_seed(0)
    logp = (-3 * torch.rand(50, generator=generator, dtype=torch.float64)).requires_grad_()
    entropy = torch.rand(50, generator=generator, dtype=torch.float64)
    observation = torch.zeros(50, dtype=torch.bool)
    advantage = torch.randn(50, generator=generator).double()
    old_logp = logp.detach() + torch.randn(50, generator=generator).double()
    batch = losses.TokenBatch(
        torch.ones(50), observation, advantage, old_logp, old_logp, old_logp + 0.1
    )
    settings = {"tis_cap": 2.0} if name == "tis" else {}
    loss = getattr(losses, name)
    assert torch.autograd.gradcheck(lambda logp: loss(logp, entropy, batch, **settings), logp)
    joint = losses.joint(lambda *of_tokens: loss(*of_tokens, **settings), losses.ce, kl_coef=0.3)
    assert torch.autograd.gradcheck(
        lambda logp, entropy: joint(logp, entropy, batch), (logp, entropy.requires_grad_())
    )


def test_a_ratio_truncated_at_c_flows_below_it_whatever_the_advantages_sign():
    """J = A min(r, 2): the objective of old_logp = "engine" with tis_cap = 2."""
    ratio = torch.tensor([0.01, 0.5, 1.9, 2.1, 9.0]).repeat(2)
    advantage = torch.tensor([1.0] * 5 + [-1.0] * 5)
    zero = torch.zeros(10)
    batch = losses.TokenBatch(torch.ones(10), zero.bool(), advantage, zero, zero)
    logp = ratio.log().requires_grad_()
    out = losses.tis(logp, zero, batch, tis_cap=2.0)
    torch.testing.assert_close(out.detach(), -advantage * ratio.clamp(max=2))
    (slope,) = torch.autograd.grad(out.sum(), logp)
    assert torch.equal(slope != 0, ratio < 2)


def test_log_probs_are_those_of_full_logits(policy, rows):
    scored = log_probs(policy, rows, Packing(budget=60), temperature=0.7).values()
    for row, (logp, entropy) in zip(rows, scored, strict=True):
        with torch.no_grad():
            logps = token_logps(policy.lm, row, temperature=0.7)
        logps = logps[len(row.prompt_ids) - 1 :][: len(row.response_ids)]
        expected = [float(logps[t, token]) for t, token in enumerate(row.response_ids)]
        assert logp == pytest.approx(expected, abs=1e-5)
        assert entropy == pytest.approx(float((-logps.exp() * logps).sum(-1).mean()), abs=1e-5)


def test_an_empty_response_has_no_log_prob_and_no_entropy(policy, rows):
    with_empty = [rows[0], replace(rows[1], response_ids=[]), rows[2]]
    scored = log_probs(policy, with_empty, Packing(budget=10**6), temperature=0.7)
    assert len(scored[1][0]) == 0
    assert scored[1][1] == 0.0
    _, entropy = scored[0]
    _, entropy_alone = log_probs(policy, [rows[0]], Packing(budget=10**6), temperature=0.7)[0]
    assert entropy == pytest.approx(entropy_alone, abs=1e-5)


@pytest.mark.parametrize("norm", ["token", "group", "verl"])
def test_no_way_of_cutting_the_batch_changes_the_gradient(policy, rows, norm):
    """Micro-batches, the order of samples, ranks' shares."""
    rows = rows[:12]
    objective = replace(FULL, norm=norm, verl_samples=5)
    expected, expected_gradient = packed(policy, rows, objective, update_samples=40)
    cuts = []
    for budget in (1, 40, 100):
        cuts.append(packed(policy, rows, objective, update_samples=40, budget=budget))
    if norm != "verl":
        shuffled = random.Random(1).sample(rows, len(rows))
        cuts.append(packed(policy, shuffled, objective, update_samples=40, budget=100))
    loss_of_ranks = 0.0
    gradient_of_ranks = torch.zeros_like(expected_gradient)
    shares = packed_in_ranks(policy, rows, objective, 3, update_samples=40, budget=60)
    for loss, gradient in shares:
        loss_of_ranks += loss
        gradient_of_ranks += gradient
    cuts.append((loss_of_ranks, gradient_of_ranks))
    for loss, gradient in cuts:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert relative(gradient, expected_gradient) < 1e-6


@pytest.mark.parametrize("norm", ["token", "group", "verl"])
def test_leaving_out_rows_without_a_gradient_changes_nothing(policy, rows, norm):
    objective = replace(OBJECTIVES["paper"], norm=norm, verl_samples=5)
    assert 0 < sum(map(objective.dead, rows)) < len(rows)
    expected, expected_gradient = packed(policy, rows, objective, update_samples=40, budget=100)
    loss, gradient = packed(
        policy, rows, objective, update_samples=40, budget=100, skip_without_loss=True
    )
    assert loss == pytest.approx(expected, rel=1e-6)
    assert relative(gradient, expected_gradient) < 1e-6
    if norm != "token":  # a wrong mean would be seen
        _, by_token = packed(policy, rows, replace(objective, norm="token"), update_samples=40)
        assert relative(by_token, expected_gradient) > 1e-2


def test_observations_of_unselected_rows_do_not_change_the_gradient(policy, rows):
    without = []
    for row in rows:
        if not row.wm_weight:
            row = replace(row, separator_ids=[], observation_ids=[])
        without.append(row)
    assert without != rows
    loss, gradient = packed(policy, rows, FULL, update_samples=40)
    loss_without, gradient_without = packed(policy, without, FULL, update_samples=40)
    assert loss == loss_without
    assert torch.equal(gradient, gradient_without)


def test_the_world_term_leaves_the_policy_term_alone(policy, rows):
    """The gradient is the sum of both; without weights it is the policy's, bit for bit."""
    objective = OBJECTIVES["paper"]
    no_weight = [replace(row, wm_weight=0.0) for row in rows]
    no_advantage = [replace(row, advantage=0.0) for row in rows]
    _, joint = packed(policy, rows, objective, update_samples=40)
    _, acting = packed(policy, no_weight, objective, update_samples=40)
    _, world = packed(policy, no_advantage, objective, update_samples=40)
    assert world.norm() > 1e-3 * acting.norm()
    assert relative(acting + world, joint) < 1e-6
    _, disabled = packed(policy, no_weight, objective, update_samples=40, with_observation=False)
    assert torch.equal(disabled, acting)


def test_on_policy_the_loss_is_minus_the_mean_advantage(policy, rows):
    """Ratio 1: the loss of every token is -A; nothing is clipped, KL to itself is 0."""
    on_policy = [replace(row, wm_weight=0.0) for row in rows]
    scored = log_probs(policy, on_policy, Packing(budget=10**6), temperature=1.0).values()
    for row, (logp, _) in zip(on_policy, scored, strict=True):
        row.old_logp = logp
        row.ref_logp = logp
    objective = Objective(kl_coef=0.1)
    each_alone = [[i] for i in range(len(on_policy))]
    batch = collate(on_policy, each_alone, with_observation=False, device=CPU)
    out, tokens = objective.forward(policy, batch, on_policy, len(on_policy))
    response_tokens = sum(len(row.response_ids) for row in on_policy)
    mean = sum(row.advantage * len(row.response_ids) for row in on_policy) / response_tokens
    assert float(out.loss.detach()) == pytest.approx(-mean, abs=1e-5)
    policy_loss, wm_loss = objective.terms
    sums = token_sums(out, tokens, batch, policy=policy_loss, wm=wm_loss)
    assert sums["clipped"] == 0
    assert abs(sums["kl"]) < 1e-6


@pytest.mark.parametrize("norm", ["token", "sample", "group"])
def test_mini_batches_sum_to_the_whole_update(rows, norm):
    """The world term weighted by rows, the policy term too, unless it is a mean over tokens."""
    rows = rows[:12]
    objective = replace(OBJECTIVES["paper"], norm=norm)
    policy = tiny_policy().double()

    def split(part):
        """Gradients of the policy's and of the world model's term."""
        observing = [replace(row, advantage=0.0) for row in part]
        _, acting = packed(
            policy, part, objective, update_samples=len(rows), with_observation=False
        )
        _, world = packed(policy, observing, objective, update_samples=len(rows))
        return acting, world

    acting, world = split(rows)
    tokens = sum(len(row.response_ids) for row in rows)
    for size in (1, 3, 8):
        acting_sum = torch.zeros_like(acting)
        world_sum = torch.zeros_like(world)
        for part in minibatches(rows, size=size, seed=0):
            acting_part, world_part = split(part)
            share = len(part) / len(rows)
            length = sum(len(row.response_ids) for row in part)
            acting_share = length / tokens if norm == "token" else share
            acting_sum += acting_part * acting_share
            world_sum += world_part * share
        assert relative(acting_sum, acting) < 1e-6
        assert relative(world_sum, world) < 1e-6


def test_an_appended_observation_changes_no_action_log_prob_by_a_single_bit(policy):
    """Causal attention: same shape, same bits, whatever follows the response."""
    selected = [
        replace(row, wm_weight=1.0) for row in make_rows(policy) if len(row.observation_ids)
    ]
    batch = collate(
        selected, [[i] for i in range(len(selected))], with_observation=True, device=CPU
    )
    bare = batch.input_ids.clone()
    for end, row in zip(accumulate(batch.lengths), selected, strict=True):
        bare[end - len(row.separator_ids) - len(row.observation_ids) : end] = 0
    assert not torch.equal(bare, batch.input_ids)

    def action_logps(input_ids):
        actions = ~batch.observation
        hidden = policy.hidden(input_ids, batch.lengths)[batch.position[actions]]
        return token_stats(
            hidden, policy.head_weight, batch.target[actions], bias=policy.head_bias
        ).logp

    with torch.no_grad():
        assert torch.equal(action_logps(batch.input_ids), action_logps(bare))


def test_the_shares_of_tokens_that_the_sampler_s_ratio_caps_and_masks(policy, rows):
    objective = Objective()
    cap = 1.1
    low = 0.8
    high = 1.2
    shifted = []
    ratios = []
    for row in rows:
        sampled_logp = [old_logp + 0.15 * (i % 5 - 2) for i, old_logp in enumerate(row.old_logp)]
        shifted.append(replace(row, sampled_logp=sampled_logp))
        for old_logp, sampled in zip(row.old_logp, sampled_logp, strict=True):
            ratios.append(math.exp(old_logp - sampled))
    each_alone = [[i] for i in range(len(rows))]
    batch = collate(shifted, each_alone, with_observation=True, device=CPU)
    out, tokens = objective.forward(policy, batch, shifted, len(shifted))
    policy_loss, wm_loss = objective.terms
    sums = token_sums(
        out, tokens, batch, policy=policy_loss, wm=wm_loss, tis_cap=cap, ratio_bounds=(low, high)
    )
    shares = token_metrics({name: float(value) for name, value in sums.items()}, steps=1)
    capped = sum(ratio > cap for ratio in ratios)
    masked = sum(not low <= ratio <= high for ratio in ratios)
    assert 0 < capped < len(ratios)
    assert 0 < masked < len(ratios)
    assert shares["policy/tis_capped_frac"] == pytest.approx(capped / len(ratios))
    assert shares["policy/importance_masked_frac"] == pytest.approx(masked / len(ratios))


def token_sums_of(policy, rows, objective, budget=10**6):
    policy_loss, wm_loss = objective.terms
    totals = RunningSums()
    for batch in micro_batches(rows, Packing(budget=budget), with_observation=True, device=CPU):
        out, tokens = objective.forward(policy, batch, rows, 40)
        totals.add(token_sums(out, tokens, batch, policy=policy_loss, wm=wm_loss))
    return totals.read()


def metrics(policy, rows, objective, budget):
    return token_metrics(token_sums_of(policy, rows, objective, budget), steps=1)


def test_metrics_of_micro_batches_are_those_of_one(policy, rows):
    whole = metrics(policy, rows, FULL, 10**6)
    assert metrics(policy, rows, FULL, 50) == pytest.approx(whole, rel=1e-5)
    assert whole["policy/loss"] + whole["wm/loss"] == pytest.approx(
        packed(policy, rows, FULL, update_samples=40)[0]
    )
    assert 0 < whole["policy/clip_frac"] < 1
    assert 0 < whole["wm/masked_frac"] < 1
    assert 0 < whole["optim/gradient_frac"] < 1
    assert 0 < whole["policy/entropy"] < torch.tensor(float(VOCAB)).log()
    assert whole["policy/kl"] > 0


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_the_share_of_clipped_tokens_is_that_of_each_loss(policy, rows, loss):
    """ppo and gspo clip a ratio on the side that the advantage favours, and the gradient with it;
    cispo clips it on both sides."""
    objective = Objective(policy=loss, clip_low=0.1, clip_high=0.1, dual_clip=1e6)
    (batch,) = micro_batches(rows, Packing(budget=10**6), with_observation=True, device=CPU)
    out, _ = objective.forward(policy, batch, rows, 40)
    logp = out.logp[~batch.observation].tolist()
    clipped = 0
    tokens = 0
    for row in (rows[i] for i in batch.indices):
        gaps = [new - old for new, old in zip(logp[tokens:], row.old_logp, strict=False)]
        if loss == "gspo":
            gaps = [sum(gaps) / len(gaps)] * len(gaps)
        tokens += len(gaps)
        for gap, advantage in zip(gaps, row.advantages, strict=True):
            above, below = math.exp(gap) > 1.1, math.exp(gap) < 0.9
            if loss == "cispo":
                clipped += advantage != 0 and (above or below)
            else:
                clipped += (advantage > 0 and above) or (advantage < 0 and below)
    assert tokens == len(logp) and 0 < clipped < tokens
    found = metrics(policy, rows, objective, 10**6)["policy/clip_frac"]
    assert found == pytest.approx(clipped / tokens)


def test_every_mean_over_tokens_is_of_sums_that_are_counted(policy, rows):
    objective = replace(FULL, tis_cap=2.0, ratio_bounds=(0.4, 2.5))
    policy_loss, wm_loss = objective.terms
    (batch,) = micro_batches(rows, Packing(budget=10**6), with_observation=True, device=CPU)
    out, tokens = objective.forward(policy, batch, rows, 40)
    sums = token_sums(
        out, tokens, batch, policy=policy_loss, wm=wm_loss, tis_cap=2.0, ratio_bounds=(0.4, 2.5)
    )
    means = {name for metric in METRICS if metric.mean_of for name in metric.mean_of}
    counted_by_the_trainer = {"shared_tokens", "row_tokens"}
    # The two losses are means over steps.
    assert means - counted_by_the_trainer == sums.keys() - {"policy_loss", "wm_loss"}


@pytest.mark.parametrize(
    ("changed", "absent"), [({"kl_coef": 0.0}, "policy/kl"), ({"wm": "ce"}, "wm/masked_frac")]
)
def test_what_was_not_measured_is_absent(policy, rows, changed, absent):
    """And means over nothing: no entropy of 0 that a collapse warning would take for real."""
    names = metrics(policy, rows, FULL, 10**6).keys()
    assert names - metrics(policy, rows, replace(FULL, **changed), 10**6).keys() == {absent}
    assert token_metrics({}, steps=2) == {"policy/loss": 0.0}
    no_tokens = dict.fromkeys(token_sums_of(policy, rows, FULL), 0.0)
    assert token_metrics(no_tokens, steps=2) == {"policy/loss": 0.0}
