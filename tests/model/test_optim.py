"""The learning-rate schedule, number by number, and what the optimizer is made of."""

import math

import pytest
import torch

from paw.config.sections import OptimConfig
from paw.model.optim import learning_rate, make_optimizer, set_learning_rate


def schedule(updates=10, **settings):
    config = OptimConfig(lr=0.2, **settings)
    return [learning_rate(config, update=update, updates=updates) for update in range(updates)]


def test_warm_up_reaches_lr_at_its_last_update():
    assert schedule() == schedule(warmup_updates=1) == [0.2] * 10
    assert schedule(warmup_updates=4) == pytest.approx([0.05, 0.1, 0.15, 0.2] + [0.2] * 6)


def test_cosine_ends_at_final_lr():
    values = schedule(updates=4, schedule="cosine", final_lr=0.1)
    half_root = 1 / math.sqrt(2)
    assert values == pytest.approx(
        [
            0.2 * (0.1 + 0.45 * (1 + half_root)),
            0.2 * (0.1 + 0.45),
            0.2 * (0.1 + 0.45 * (1 - half_root)),
            0.02,
        ]
    )
    assert schedule(schedule="cosine", final_lr=0.0)[-1] == pytest.approx(0.0)
    falling = schedule(updates=100, schedule="cosine")
    assert falling == sorted(set(falling), reverse=True)
    without_warm_up = schedule(schedule="cosine")
    with_warm_up = schedule(schedule="cosine", warmup_updates=2)
    assert with_warm_up == pytest.approx([without_warm_up[0] / 2, *without_warm_up[1:]])


def test_the_optimizer_takes_its_settings_and_every_lr():
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = make_optimizer(parameters, OptimConfig(lr=0.1, betas=(0.8, 0.95), weight_decay=0.5))
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.1
    assert group["betas"] == (0.8, 0.95)
    assert group["weight_decay"] == 0.5
    set_learning_rate(optimizer, 0.01)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # AdamW's first step: decay by lr * weight_decay, then lr against the gradient's sign.
    for parameter in parameters:
        assert parameter.detach().tolist() == pytest.approx(
            [1 - 0.01 * 0.5 - 0.01] * len(parameter), abs=1e-6
        )
