"""The plan's memory against a simulated update, and the simulation's tracker against real allocations."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
memory, simulation = (importlib.import_module(f"bench.{name}") for name in ("memory", "memory_simulation"))
shapes = importlib.import_module("paw.tools.shapes")
pytestmark = pytest.mark.slow


def test_the_tracker_counts_what_the_allocator_does():
    tree = {"model": {"path": "-", "dtype": "bfloat16", "checkpointing": "full"}, "optim": {"micro_batch_tokens": 1024}}
    config, small = memory.validate(tree, origin="test"), shapes.Shape(512, 256, 1024, 2, 4, 2, 64, tied=False)
    found = simulation.simulate(config, small, attention="sdpa")
    assert found.update > found.step  # so that activations count
    assert found.update == pytest.approx(simulation.real_peak(config, small), rel=0.02)


@pytest.mark.parametrize("case", [("Qwen2.5-1.5B", 1, "flash-adamw", "full"), ("Qwen2.5-1.5B", 8, "adamw", "full")])
def test_the_plan_agrees_with_the_simulation(case):
    config, shape = memory.make_config(*case, 8192), replace(shapes.SHAPES[case[0]], layers=8)
    wanted, found = memory.predicted(config, shape, case[1]), simulation.simulate(config, shape, case[1])
    assert wanted["update"] == pytest.approx(found.update, rel=0.05)
    assert wanted["step"] == pytest.approx(found.step, rel=0.05)
