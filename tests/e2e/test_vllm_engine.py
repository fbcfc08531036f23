"""Compares the vLLM engine with the trainer's own forward pass before and after every sync, and
runs full rollouts on it."""

import copy
import importlib
import importlib.util
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paw.algo import loss as losses
from paw.algo.batches import micro_batches
from paw.algo.packing import Packing
from paw.config.sections import LoraConfig
from paw.errors import UserError
from paw.model.lora import add_adapters
from paw.model.policy import Policy
from paw.rollouts.engines.base import Request
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.engines.vllm import VllmEngine
from paw.rollouts.engines.vllm_instance import global_state_kept
from paw.rollouts.engines.vllm_library import import_vllm
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import StaleWeightsError, push_weights, sampler_mismatch
from paw.types import Sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
bench = importlib.import_module("bench.rollout.continuous")
simulation = importlib.import_module("bench.rollout.simulation")
SHAPE = simulation.SHAPES["quickstart"]
LIMIT = simulation.MAX_PROMPT + simulation.MAX_RESPONSE
BLOCK = 32  # of the prefix cache on a CPU


def test_what_vllm_cannot_serve_is_a_users_error(vllm_here, tmp_path):
    config = simulation.qwen2(64, 96, 2, 4, 4, 128)
    config.architectures = ["Qwen2ForCausalLM"]
    for problem in ("local directory", "head_dim=16"):
        with pytest.raises(UserError, match=f"model.path = '{tmp_path}'.*{problem}"):
            VllmEngine(tmp_path, end_ids=[3], max_model_len=LIMIT, dtype="float32")
        config.save_pretrained(tmp_path)


def test_vllm_leaves_the_number_of_threads(monkeypatch):
    """What a GPU's worker does before it compiles. Otherwise graphs would be guarded by a number
    that the trainer puts back."""
    import_vllm()
    from vllm.utils.torch_utils import set_torch_threads_for_runtime

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with global_state_kept():
            set_torch_threads_for_runtime()
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
        assert os.environ.get("OMP_NUM_THREADS") == "7"
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def setup(vllm_here, tmp_path_factory):
    """(model, engine that holds its weights) in one thread, where sums have a single order. The
    engine loads no weights."""
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE)
    model.save_pretrained(folder)
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    engine = VllmEngine(folder, end_ids=[], max_model_len=LIMIT, dtype="float32", max_num_seqs=200)
    assert engine._instance.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 200
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert torch.get_num_threads() == 1
    with pytest.raises(RuntimeError, match="call sync first"):
        engine.submit(Request(0, [1], 0, 1.0, 1))
    push_weights(model, engine, version=0)
    yield model, engine
    engine.close()
    engine.close()
    torch.set_num_threads(threads)


def make_requests(max_tokens=20):
    generator = torch.Generator().manual_seed(0)
    requests = []
    for place, length in enumerate((1, 33, 64, 130, 17)):
        prompt_ids = torch.randint(4, SHAPE.vocab_size, (length,), generator=generator).tolist()
        temperature = (0.4, 1.0, 0.0)[place % 3]
        requests.append(Request(50 + place, prompt_ids, 900 + place, temperature, max_tokens))
    return requests


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    completions = {}
    while engine.pending:
        completions |= {completion.key: completion for completion in engine.step()}
    assert engine.step() == []
    return [completions[request.key] for request in requests]


@torch.no_grad()
def trainer_logp(model, requests, completions):
    """The log-probs of each response, from the model's logits in float64."""
    rows = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        logits = model(input_ids=ids).logits[0].double()
        logits = logits[len(request.prompt_ids) - 1 : -1] / (request.temperature or 1.0)
        tokens = torch.tensor(completion.token_ids)[:, None]
        rows.append(logits.log_softmax(-1).gather(-1, tokens)[:, 0].tolist())
    return rows


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def logps_of(completions):
    return [completion.logp for completion in completions]


def mismatch(model, requests, completions):
    expected = trainer_logp(model, requests, completions)
    sampled = logps_of(completions)
    return sampler_mismatch(np.concatenate(expected), np.concatenate(sampled))[
        "health/sampler_mismatch"
    ]


@torch.no_grad()
def perturb(model, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def test_seeds_decide_whatever_is_in_the_batch_or_the_cache(setup):
    """The log-probs are also the trainer's."""
    model, engine = setup
    requests = make_requests()
    together = run(engine, requests)
    cached = run(engine, requests)
    assert mismatch(model, requests, together) < 1e-4
    assert all(completion.entropy is None for completion in together)
    alone = [run(engine, [request])[0] for request in requests]
    assert tokens_of(cached) == tokens_of(together)
    assert tokens_of(alone) == tokens_of(together)
    assert cached[3].cached_tokens == 4 * BLOCK
    other_seeds = [replace(request, seed=request.seed + 1) for request in requests]
    assert tokens_of(run(engine, other_seeds)) != tokens_of(together)


def test_sync_replaces_weights_tied_head_adapters_and_cached_prompts(setup):
    model, engine = setup
    requests = make_requests()
    run(engine, requests)  # fills the prefix cache with the old weights' keys and values
    perturb(model, seed=1, scale=0.05)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    stale = run(engine, requests)
    assert stale[3].cached_tokens > 0
    with pytest.raises(StaleWeightsError, match="stale weights"):
        mismatch(model, requests, stale)
    push_weights(model, engine, version=3)
    fresh = run(engine, requests)
    assert engine.version == 3
    assert fresh[3].cached_tokens == 0
    assert mismatch(model, requests, fresh) < 1e-4
    pytest.importorskip("peft")
    adapted = copy.deepcopy(model)
    add_adapters(adapted, LoraConfig(rank=4), seed=0)
    perturb(adapted, seed=2, scale=0.03)
    with pytest.raises(StaleWeightsError):
        mismatch(adapted, requests, run(engine, requests))
    push_weights(adapted, engine, version=5)
    assert mismatch(adapted, requests, run(engine, requests)) < 1e-4
    push_weights(model, engine, version=6)


def test_a_response_that_is_complete_ends_there_and_leaves_the_others_alone(setup):
    _, engine = setup
    requests = make_requests(max_tokens=25)
    whole = run(engine, requests)
    stopping = []
    for request in requests:
        stopped = (lambda ids: len(ids) >= 5) if request.key % 2 else None
        stopping.append(replace(request, stopped=stopped))
    for request, before, after in zip(requests, whole, run(engine, stopping), strict=True):
        expected_length = 5 if request.key % 2 else 25
        assert after.token_ids == before.token_ids[:expected_length]
        assert after.logp == pytest.approx(before.logp[:expected_length], abs=1e-5)
    assert tokens_of(run(engine, requests)) == tokens_of(whole)


def test_misuse_is_refused(setup):
    model, engine = setup
    with pytest.raises(UserError, match=rf"{LIMIT} positions.*rollout.max_prompt_tokens"):
        engine.submit(Request(1, [5] * (LIMIT - 6), 0, 1.0, 7))
    engine.submit(Request(1, [5] * 9, 0, 1.0, 7))
    with pytest.raises(ValueError, match="key in flight"):
        engine.submit(Request(1, [5] * 9, 0, 1.0, 7))
    for change in (engine.sleep, lambda: push_weights(model, engine, version=9)):
        with pytest.raises(RuntimeError, match="1 requests pending"):
            change()
    while engine.pending:
        engine.step()
    engine.sleep()
    push_weights(model, engine, version=9)
    requests = make_requests()
    assert mismatch(model, requests, run(engine, requests)) < 1e-4


def test_the_gradient_is_the_same_with_the_log_probs_of_either_engine_or_the_trainer(setup):
    """For tokens sampled by vLLM and for those sampled by transformers."""
    model, engine = setup
    policy = Policy(copy.deepcopy(model))
    requests = [replace(request, temperature=1.0) for request in make_requests()]

    def gradient(completions, logps):
        rows = []
        for i, request in enumerate(requests):
            row = Sample(0, i, 0, request.prompt_ids, completions[i].token_ids)
            row.separator_ids = [3]
            row.observation_ids = [7, 8, 9]
            row.sampled_logp = row.old_logp = logps[i]
            row.advantage = (-1.0) ** i
            row.wm_weight = 0.1
            rows.append(row)
        (batch,) = micro_batches(
            rows, Packing(budget=10**6), with_observation=True, device=policy.device
        )
        tokens = losses.token_batch(batch, rows, update_samples=len(rows))
        loss = losses.joint(losses.ppo, losses.ce)
        losses.joint_loss(policy, batch, tokens, loss, temperature=1.0).loss.backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        policy.zero_grad(set_to_none=True)
        return gradients

    for sampler in (engine, TransformersEngine(model, end_ids=[])):
        completions = run(sampler, requests)
        expected = gradient(completions, trainer_logp(model, requests, completions))
        assert expected.norm() > 0
        difference = gradient(completions, logps_of(completions)) - expected
        assert difference.norm() < 1e-4 * expected.norm()


def play(setup, *, reference=False, environments=32, max_turns=12):
    """(groups, statistics, engine steps) of episodes whose responses are a fifth as long as the
    benchmark's."""
    model, engine = setup
    push_weights(model, engine, version=0)  # empties the cache
    factory = simulation.SimulatedFactory(SHAPE.vocab_size, max_turns=max_turns)
    chat = simulation.make_chat(SHAPE.vocab_size)
    meter = simulation.Meter(
        engine, chat, factory.made if reference else (), lock_step=reference, median=11
    )
    rollouts = Rollouts(factory, meter, chat, bench.CONFIG)
    groups, stats = rollouts.play_tasks(
        factory.tasks(environments // 8), group_size=8, temperature=1.0, seed=0, stream=""
    )
    assert engine.pending == 0
    assert stats.failures == []
    return groups, stats, len(meter.batches)


def test_the_same_episodes_in_half_the_engine_steps(setup):
    """They are those of a rollout in lock-step."""
    groups, stats, steps = play(setup)
    groups_in_lock_step, stats_in_lock_step, steps_in_lock_step = play(setup, reference=True)
    differences = bench.difference(groups, groups_in_lock_step)
    assert differences["same_turns"] == len(bench.turns_of(groups)) > 250
    assert differences["logp_difference"] < bench.ROUNDING
    assert stats_in_lock_step == stats
    assert steps_in_lock_step >= 2 * steps
    episodes = [episode for group in groups for episode in group.trajectories]
    lengths = []
    for episode in episodes:
        lengths.append(sum(len(turn.response_ids) for turn in episode.turns))
    # It never waits: the longest episode on its own takes as many steps.
    assert max(lengths) <= steps <= max(lengths) + 25


def test_the_hit_rate_that_training_logs(setup):
    """In one turn of two groups of eight, the first member of a group computes its full prompt, and
    the others only the end of theirs."""
    groups, stats, _ = play(setup, environments=16, max_turns=1)
    shared = simulation.TASK_TOKENS // BLOCK * BLOCK  # observations differ from member to member
    prompts = sum(len(turn.prompt_ids) for turn in bench.turns_of(groups))
    assert stats.metrics()["perf/cached_frac"] == pytest.approx(2 * 7 * shared / prompts)


def test_an_engine_whose_worker_dies_is_one_line(setup, monkeypatch):
    """The run ends with that line, and its last checkpoint is kept, as with any UserError."""
    _, engine = setup

    def execute_model(*args, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    executor = engine._instance.llm.llm_engine.engine_core.engine_core.model_executor
    monkeypatch.setattr(executor, "execute_model", execute_model)
    engine.submit(Request(1, [5] * 9, 0, 1.0, 7))
    with pytest.raises(
        UserError, match="vLLM engine of rank 0 died while sampling: RuntimeError: CUDA error"
    ) as died:
        engine.step()
    assert died.value.exit_code == 1
    assert str(died.value).endswith("checkpoints are kept (--resume auto)")
