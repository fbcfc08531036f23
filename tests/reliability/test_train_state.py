"""Optimizer and random state through a checkpoint, bit for bit. Whole runs are in test_resume.py."""

import json
import random
import shutil

import numpy as np
import pytest
import torch

from paw.state import checkpoint, restore, train_state


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def build(seed: int, **options) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, **options)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_resume_through_a_checkpoint_is_bitwise(tmp_path, options):
    model, optimizer = build(0, **options)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 5e-3
    moments, info = train_state.optimizer_tensors(optimizer, model.named_parameters())
    rng, rng_info = train_state.rng_tensors()
    parts = {"model": dict(model.named_parameters()), "optimizer": moments, "rng": rng}
    path = checkpoint.save(tmp_path, 3, parts, {"optimizer": info, "rng": rng_info})
    train(model, optimizer)

    resumed, fresh = build(1, **options)
    loaded, state = restore.load(path, like={"model": dict(resumed.named_parameters())})
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(loaded["model"][name])
    restore.load_optimizer(fresh, resumed.named_parameters(), loaded["optimizer"], state["optimizer"])
    restore.load_rng(loaded["rng"], state["rng"])
    shutil.rmtree(path)  # nothing loaded may still lean on the files
    train(resumed, fresh)

    assert [group["lr"] for group in fresh.param_groups] == [5e-3, 1e-2]
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, fresh.state[b][key]), key


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.randn(1).item()]


def test_random_states_return_through_json_mid_pair():
    """Gaussians come in pairs: one odd draw leaves a cached half that must travel too. A trial changes nothing."""
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal()
    saved, info = train_state.rng_tensors()
    info = json.loads(json.dumps(info))
    expected = [draw() for _ in range(5)]
    restore.load_rng(saved, info, trial=True)
    assert draw() not in expected
    restore.load_rng(saved, info)
    assert [draw() for _ in range(5)] == expected
