"""Rollouts on a real vLLM engine: continuous and lock-step give the same episodes, the former in half the steps."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from paw.rollout.scheduler import Rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
sys.path.insert(0, str(Path(__file__).parents[2]))
bench, simulation = (importlib.import_module(f"bench.{name}") for name in ("rollout", "rollout_simulation"))
WORDS = simulation.SHAPES["quickstart"].vocab_size
BLOCK = 32  # of the prefix cache on a CPU


@pytest.fixture(scope="module")
def setup():
    """(engine, what gives it its weights and an empty prefix cache, chat); in one thread, where sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine, lm = bench.make_engine("quickstart", "float32", gpu=False)

    def sync():
        engine.sync(lm.named_parameters(remove_duplicate=False), version=0)

    yield engine, sync, simulation.make_chat(WORDS)
    engine.close()
    torch.set_num_threads(threads)


def play(setup, factory, *, reference=False, envs=32):
    """Episodes with responses a fifth as long as the benchmark's."""
    engine, sync, chat = setup
    sync()
    meter = simulation.Meter(engine, chat, factory.made if reference else (), lock_step=reference, median=11)
    rollouts = Rollouts(factory, meter, chat, bench.CONFIG)
    groups, stats = rollouts.play(factory.tasks(envs // 8), group_size=8, temperature=1.0, seed=0, stream="")
    assert engine.pending == 0 and stats.failures == []
    return groups, stats, len(meter.batches)


def test_the_same_episodes_in_half_the_engine_steps(setup):
    groups, stats, steps = play(setup, simulation.SimulatedFactory(WORDS, most_turns=20))
    factory = simulation.SimulatedFactory(WORDS, most_turns=20)
    others, their_stats, their_steps = play(setup, factory, reference=True)  # in lock-step, the finished ones as well
    found = bench.difference(groups, others)
    assert found["same_turns"] == len(bench.turns_of(groups)) > 400
    assert found["logp_difference"] < bench.ROUNDING
    assert their_stats == stats
    assert their_steps >= 2 * steps
    episodes = [episode for group in groups for episode in group.trajectories]
    longest = max(sum(len(turn.response_ids) for turn in episode.turns) for episode in episodes)
    assert longest <= steps <= longest + 25  # it never waits: the longest episode alone takes as many


def test_the_hit_rate_that_training_logs(setup):
    """One turn of two groups of eight: the first of each computes its prompt, the others the end of theirs."""
    groups, stats, _ = play(setup, simulation.SimulatedFactory(WORDS, most_turns=1), envs=16)
    shared = simulation.SHARED // BLOCK * BLOCK  # observations differ from member to member
    prompts = sum(len(turn.prompt_ids) for turn in bench.turns_of(groups))
    assert stats.metrics()["perf/cached_frac"] == pytest.approx(2 * 7 * shared / prompts)
