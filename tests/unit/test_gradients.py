"""Gradients of both terms apart: their sum is the joint one, and what balance and separate clipping make of them."""

from dataclasses import replace

import pytest
import torch
from joint import dense, gradients, make_rows, packed, relative, tiny_policy

from paw.algo.gradients import Gradients
from paw.algo.loss import Objective
from paw.model.parallel import Ranks
from paw.recipe import validate

OBJECTIVE = Objective(rho=0.05, entropy_coef=0.01)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def rows(policy):
    made = make_rows(policy, 40)
    policy.double()  # the body: its rounding depends on what a row is batched with
    return made


def form(policy, rows, objective=OBJECTIVE, *, wm=None, optim=None):
    """(gradient, norm returned, metrics) of a mini-batch; by default nothing is clipped."""
    tree = {
        "model": {"path": "x"},
        "wm": wm or {},
        "optim": {"micro_batch_tokens": 100, "grad_clip": 1e9} | (optim or {}),
    }
    maker = Gradients(validate(tree, origin="test"), policy, Ranks(CPU, tasks=1), objective, update_samples=len(rows))
    loss, norm = maker.form(rows)
    return gradients(policy), norm, maker.metrics(minibatches=1) | {"loss": loss}


def terms(policy, rows):
    """The gradients of the policy term and of the world-model term, each formed alone."""
    world = packed(
        policy, [replace(r, advantage=0.0) for r in rows], replace(OBJECTIVE, entropy_coef=0.0), update_samples=40
    )
    acting = packed(policy, rows, OBJECTIVE, update_samples=40, with_observation=False)
    return acting[1], world[1]


def test_apart_or_joint_the_gradient_is_the_same(policy, rows):
    joint, norm, found = form(policy, rows)
    apart, norm_apart, found_apart = form(policy, rows, wm={"grad_norms": True})
    assert relative(apart, joint) < 1e-6
    assert norm == pytest.approx(float(joint.norm()), rel=1e-5) and norm_apart == pytest.approx(norm, rel=1e-5)
    acting, world = terms(policy, rows)
    assert found_apart["policy/grad_norm"] == pytest.approx(float(acting.norm()), rel=1e-5)
    assert found_apart["wm/grad_norm"] == pytest.approx(float(world.norm()), rel=1e-5)
    more = {"policy/grad_norm", "wm/grad_norm"}
    assert found_apart.keys() - found.keys() == more and not found.keys() & more
    shared = found.keys() - {"wm/live_frac"}  # apart, rows without any policy gradient are not even run
    assert {key: found_apart[key] for key in shared} == pytest.approx({key: found[key] for key in shared}, rel=1e-5)


@pytest.mark.parametrize("ratio", [0.1, 2.0])
def test_balance_holds_the_ratio_of_the_norms(policy, rows, ratio):
    acting, world = terms(policy, rows)
    balanced, _, found = form(policy, rows, wm={"balance": "gradient", "ratio": ratio, "scale": 3.0})
    factor = ratio * acting.norm() / world.norm()
    assert relative(balanced, acting + factor * world) < 1e-5
    assert found["wm/grad_norm"] == pytest.approx(ratio * found["policy/grad_norm"], rel=1e-5)


def test_without_a_policy_gradient_the_world_term_stays_as_it_is(policy, rows):
    still = [replace(row, advantage=0.0) for row in rows]
    objective = replace(OBJECTIVE, entropy_coef=0.0)
    plain, _, _ = form(policy, still, objective)
    balanced, _, found = form(policy, still, objective, wm={"balance": "gradient"})
    assert plain.norm() > 0 and relative(balanced, plain) < 1e-6
    assert found["policy/grad_norm"] == 0.0 and found["wm/factor"] == 1.0


def test_clipped_apart_a_large_world_term_leaves_the_policy_term_alone(policy, rows):
    """The world term is made 100 times the limit, the policy term stays below it."""
    acting, world = terms(policy, rows)
    limit = 2 * float(acting.norm())
    objective = replace(OBJECTIVE, wm_scale=100 * limit / float(world.norm()))
    apart, norm, _ = form(policy, rows, objective, optim={"clip": "separate", "grad_clip": limit})
    expected = acting + limit * world / world.norm()
    assert relative(apart, expected) < 1e-5 and norm == pytest.approx(float(expected.norm()), rel=1e-5)
    joint, _, _ = form(policy, rows, objective, optim={"grad_clip": limit})
    assert float(joint.norm()) == pytest.approx(limit, rel=1e-4)
    assert float((joint @ acting) / acting.norm() ** 2) < 0.5  # what joint clipping leaves of the policy's gradient


@pytest.mark.parametrize("loss", ["cmae", "ce"])
def test_targets_beyond_one_turn_are_those_of_full_logits(policy, rows, loss):
    """The mean runs over the observation tokens of all turns; actions in between carry no loss."""
    longer = [
        replace(row, further=[([4, 9, 2], [5, 6]), ([7], [8, 3, 1])] if row.observation_ids else []) for row in rows
    ]
    objective = replace(OBJECTIVE, observation_loss=loss)
    expected = dense(policy, longer, objective, update_samples=50)
    found = packed(policy, longer, objective, update_samples=50, budget=100)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert relative(found[1], expected[1]) < 1e-5
    assert relative(found[1], packed(policy, rows, objective, update_samples=50)[1]) > 1e-3
