"""A whole update is the same update however it is computed; what may differ is the order of sums.

Beside these: gradients by micro-batch, packing, row order and head in test_loss, test_head_backends, test_attention;
by number of ranks in tests/distributed; by engine in tests/e2e/test_vllm_engine; action log-probs under an appended
observation, bit for bit, in test_loss.
"""

import random

import pytest
import torch
from test_update import make_config, start  # noqa: F401  (a fixture)

from paw.rollout.scheduler import Rollouts
from paw.rollout.sync import push_weights
from paw.run import open_run
from paw.train import update

VARIANTS = {
    "micro-batches of 300 tokens": {"optim_micro_batch_tokens": 300},
    "one micro-batch": {"optim_micro_batch_tokens": 10**6},
    "the plain torch head": {"model_head_backend": "torch"},
    "full checkpointing": {"model_checkpointing": "full"},
    "another order of groups and members": {"order": 1},
}


class Shuffled(Rollouts):
    """The episodes of an update, their groups and members in another order."""

    def training(self, *args, **kwargs):
        groups, stats = super().training(*args, **kwargs)
        rng = random.Random(0)
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group.trajectories)
        return groups, stats


@pytest.fixture(scope="module")
def weights_after(start, tmp_path_factory):  # noqa: F811
    """The weights after one update of one optimizer step (mini-batches are drawn by position), as one vector."""

    def run_one(order=0, **changes):
        # Cross-entropy: of a fresh model's observations p is nearly 0, and so is the gradient of any other loss.
        plain = {"run_updates": 1, "optim_minibatch_samples": 10**6, "optim_weight_decay": 0.0, "wm_loss": "ce"}
        # Adam's first step is lr * g / (|g| + eps): a large eps makes it proportional to the gradient.
        config = make_config(start, tmp_path_factory.mktemp("run"), **plain | changes)
        with open_run(config) as run:
            for group in run.optimizer.param_groups:
                group["eps"] = 1.0
            rollouts = (Shuffled if order else Rollouts)(run.factory, run.engine, run.chat, config)
            push_weights(run.policy.lm, run.engine, version=0)
            before = torch.cat([p.detach().flatten().double() for p in run.policy.named_parameters_once().values()])
            update(run, rollouts)
            after = torch.cat([p.detach().flatten().double() for p in run.policy.named_parameters_once().values()])
            return before, after

    return run_one


@pytest.mark.slow
def test_an_update_is_the_same_however_it_is_computed(weights_after):
    before, expected = weights_after()
    way = (expected - before).norm()
    assert way > 0
    for name, changes in VARIANTS.items():
        assert (weights_after(**changes)[1] - expected).norm() < 1e-4 * way, name
    assert (weights_after(wm_alpha=0.5)[1] - expected).norm() > 1e-3 * way  # it can tell
