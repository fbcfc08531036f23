"""Whole updates of the trainer: without a world model they are GRPO and nothing else, bit for
bit."""

import copy
import math
import random
import statistics
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from forked import call_in_ranks
from toyworld import ENV, make_factory, make_tokenizer, practised_model

from paw.algo.batches import micro_batches
from paw.algo.loss import TokenBatch, ce, joint, ppo
from paw.algo.packing import Packing
from paw.build import join_ranks
from paw.config.recipe import validate
from paw.config.sections import Config
from paw.envs.base import train_tasks
from paw.learn import compare_sampler
from paw.model.loading import load_policy, load_tokenizer
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import StaleWeightsError, push_weights
from paw.rollouts.text.chat import Chat
from paw.run import open_run
from paw.tools.warmup import quickstart
from paw.trainer import optimize, prepare, update
from paw.types import Sample
from paw_kernels import token_loss, token_stats

LR = 3e-3
CLIP = 0.2
EPS = 1e-6
BUDGET = 2048
MINIBATCH = 32


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    quickstart.save(practised_model(), make_tokenizer(), folder)
    return folder


def make_config(start, folder, **changes) -> Config:
    tree = {
        "run": {"dir": str(folder), "updates": 3, "save_every": 0},
        "model": {"path": str(start), "dtype": "float32", "device": "cpu"},
        "env": ENV.model_dump(),
        "rollout": {
            "tasks": 4,
            "group_size": 4,
            "max_prompt_tokens": 256,
            "max_response_tokens": 3,
        },
        "policy": {"kl_coef": 0.0, "entropy_coef": 0.0},
        "optim": {"lr": LR, "minibatch_samples": MINIBATCH, "micro_batch_tokens": BUDGET},
        "eval": {"every": 0, "games": 2},
        "wm": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        tree.setdefault(section, {})[name] = value
    return validate(tree, origin="test")


class Recorded(Rollouts):
    """Rollouts that remember what was played."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.history = []

    def training(self, *args, **kwargs):
        groups, stats = super().training(*args, **kwargs)
        turns = [[episode.turns for episode in group.trajectories] for group in groups]
        self.history.append(turns)
        return groups, stats


def run_updates(config, count):
    """(parameters after every update, groups of every update, metrics of every update)."""
    with open_run(config) as run:
        rollouts = Recorded(run.factory, run.engine, run.chat, config)
        push_weights(run.policy.lm, run.engine, version=0)
        weights = []
        for _ in range(count):
            update(run, rollouts)
            weights.append(
                {
                    name: parameter.detach().clone()
                    for name, parameter in run.policy.named_parameters_once().items()
                }
            )
        return weights, rollouts.history, list(run.log.history)


def vanilla_grpo(start, count):
    """GRPO as the textbook has it: the same kernels and batches, no selection or observation in
    sight."""
    policy = load_policy(start)
    tokenizer = load_tokenizer(start)
    chat = Chat(tokenizer)
    factory = make_factory()
    engine = TransformersEngine(policy.lm, end_ids=chat.end_ids)
    rollouts = Rollouts(factory, engine, chat, make_config(start, start))
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01, fused=True
    )
    weights = []
    for step in range(count):
        tasks = train_tasks(factory, step, 4, 0)
        groups, _ = rollouts.play_tasks(
            tasks, group_size=4, temperature=1.0, seed=0, stream=f"train/{step}"
        )
        samples = [sample for group in groups for sample in vanilla_samples(group)]
        score_vanilla(policy, samples)
        random.Random(31 * step).shuffle(samples)
        parts = max(1, round(len(samples) / MINIBATCH))
        for begin, end in pairwise([len(samples) * i // parts for i in range(parts + 1)]):
            vanilla_step(policy, optimizer, samples[begin:end])
        engine.sync([], version=step + 1)
        weights.append({name: p.detach().clone() for name, p in policy.lm.named_parameters()})
    return weights


def vanilla_samples(group):
    """The turns of a group with GRPO's advantages."""
    turns = []
    scores = []
    for episode in group.trajectories:
        for turn in episode.turns:
            turns.append(turn)
            scores.append(episode.episode_return - (0.0 if turn.outcome.valid else 0.1))
    mean = statistics.mean(scores)
    std = statistics.stdev(scores)
    samples = []
    for turn, score in zip(turns, scores, strict=True):
        advantage = (score - mean) / (std + EPS)
        samples.append(Sample(0, 0, 0, turn.prompt_ids, turn.response_ids, advantage=advantage))
    return samples


def score_vanilla(policy, samples):
    with torch.no_grad():
        for batch in batches(samples):
            hidden = policy.hidden(batch.input_ids, batch.lengths)[batch.position]
            logp = token_stats(hidden, policy.head_weight, batch.target).logp.tolist()
            for sample in (samples[i] for i in batch.indices):
                length = len(sample.response_ids)
                sample.old_logp = logp[:length]
                logp = logp[length:]


def vanilla_step(policy, optimizer, minibatch):
    weight = 1.0 / sum(len(sample.response_ids) for sample in minibatch)
    live = [sample for sample in minibatch if sample.advantage != 0.0]
    loss = joint(partial(ppo, clip_low=CLIP, clip_high=CLIP), ce)
    for batch in batches(live):
        columns = []
        for i in batch.indices:
            columns += [(live[i].advantage, old_logp) for old_logp in live[i].old_logp]
        advantage, old_logp = torch.tensor(columns, dtype=torch.float32).unbind(1)
        tokens = TokenBatch(
            torch.full_like(old_logp, weight), advantage.isnan(), advantage, old_logp, old_logp
        )
        hidden = policy.hidden(batch.input_ids, batch.lengths)[batch.position]
        token_loss(hidden, policy.head_weight, batch.target, loss, tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def batches(samples):
    packing = Packing(budget=BUDGET, pads=True)
    return micro_batches(samples, packing, with_observation=False, device=torch.device("cpu"))


def test_without_world_model_an_update_is_vanilla_grpo_bit_for_bit(start, tmp_path):
    trained, _, metrics = run_updates(make_config(start, tmp_path, wm_enabled=False), 3)
    expected = vanilla_grpo(start, 3)
    for weights, expected_weights in zip(trained, expected, strict=True):
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    initial = load_policy(start).named_parameters_once()
    assert any(not torch.equal(trained[0][name], parameter) for name, parameter in initial.items())
    assert not any(key.startswith("wm/") for line in metrics for key in line)


@pytest.mark.slow
def test_the_world_model_trains_without_changing_the_first_rollouts_and_with_weight_zero_nothing(
    start, tmp_path
):
    (
        (weights_off, groups_off, _),
        (weights_zero, groups_zero, _),
        (weights_on, groups_on, metrics),
    ) = (
        run_updates(make_config(start, tmp_path / name, **changes), 2)
        for name, changes in {
            "off": {"wm_enabled": False},
            "zero": {"wm_weight": 0.0},
            "on": {},
        }.items()
    )
    assert groups_off == groups_zero
    assert all(
        torch.equal(weights_off[-1][name], weights_zero[-1][name]) for name in weights_off[-1]
    )
    assert groups_off[0] == groups_on[0]
    assert groups_off[1] != groups_on[1]
    assert any(
        not torch.equal(weights_off[0][name], weights_on[0][name]) for name in weights_off[0]
    )
    assert metrics[-1]["wm/loss"] > 0
    assert 0.7 < metrics[-1]["wm/selected_frac"] <= 0.8


def test_kl_to_the_start_model_is_zero_on_the_first_update_and_grows(start, tmp_path):
    _, _, metrics = run_updates(
        make_config(start, tmp_path, policy_kl_coef=0.1, optim_minibatch_samples=1000), 2
    )
    assert metrics[0]["policy/kl"] < 1e-9
    assert metrics[1]["policy/kl"] > 1e-4


def test_an_update_whose_steps_are_all_skipped_has_no_gradient_norm(start, tmp_path):
    config = make_config(start, tmp_path, optim_minibatch_samples=1000)
    with open_run(config) as run:
        push_weights(run.policy.lm, run.engine, version=0)
        groups, _ = Rollouts(run.factory, run.engine, run.chat, config).training(0, 4)
        rows = prepare(run, groups)
        next(run.policy.parameters()).register_hook(lambda gradient: math.nan * gradient)
        metrics = optimize(run, rows)
    assert metrics["optim/skipped"] == 1
    assert "optim/grad_norm" not in metrics


@pytest.mark.parametrize("wm_enabled", [True, False])
def test_stale_weights_are_seen_without_a_scoring_pass(start, tmp_path, wm_enabled):
    """An engine with weights of its own, whose sync does nothing: no optimizer step is made from
    what it samples."""
    config = make_config(start, tmp_path, policy_old_logp="engine", wm_enabled=wm_enabled)
    with open_run(config) as run:
        rollouts = Rollouts(run.factory, run.engine, run.chat, config)
        run.engine.sync([], version=0)
        update(run, rollouts)
        assert 0 < run.log.history[-1]["health/sampler_mismatch"] < 1e-4
        if wm_enabled:  # selection needs the engine's entropies
            groups, _ = rollouts.training(1, 4)
            for turn in (
                turn for group in groups for episode in group.trajectories for turn in episode.turns
            ):
                turn.entropy = [value + 1.0 for value in turn.entropy]
            with pytest.raises(
                StaleWeightsError, match="the sampler's entropies differ from the trainer's"
            ):
                optimize(run, prepare(run, groups))
            run.optimizer.zero_grad()
        run.engine = TransformersEngine(
            copy.deepcopy(run.policy.lm), end_ids=run.chat.end_ids, own_weights=True
        )
        run.engine.sync = lambda parameters, version: setattr(run.engine, "version", version)
        with torch.no_grad():
            for parameter in run.policy.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                )
        push_weights(run.policy.lm, run.engine, version=1)
        weights_before = {
            name: parameter.detach().clone()
            for name, parameter in run.policy.named_parameters_once().items()
        }
        with pytest.raises(
            StaleWeightsError, match="`sync` copies every tensor into the parameter"
        ):
            update(run, Rollouts(run.factory, run.engine, run.chat, config))
        assert all(
            torch.equal(parameter, weights_before[name])
            for name, parameter in run.policy.named_parameters_once().items()
        )


class TwoServers(TransformersEngine):
    """Answers by turns as two servers, of which those that are `wrong` have other weights."""

    def __init__(self, *args, wrong, **options):
        super().__init__(*args, **options)
        self.urls = ["http://a", "http://b"]
        self.wrong = wrong

    def step(self):
        completions = []
        for completion in super().step():
            url = self.urls[completion.key % len(self.urls)]
            logp = [value - (url in self.wrong) for value in completion.logp]
            completions.append(replace(completion, server=url, logp=logp))
        return completions

    def exclude(self, servers):
        self.urls = [url for url in self.urls if url not in servers] or self.urls
        return not set(self.urls) & set(servers)


@pytest.mark.parametrize("old_logp", ["trainer", "engine"])
def test_a_server_of_other_weights_is_left_out_and_the_update_played_again(
    start, tmp_path, capsys, old_logp
):
    """Whether the log-prob pass finds it, or the first micro-batch of the optimizer steps."""
    config = make_config(start, tmp_path, policy_old_logp=old_logp, wm_entropy="sampled")
    with open_run(config) as run:
        run.engine = TwoServers(run.policy.lm, end_ids=run.chat.end_ids, wrong=["http://b"])
        push_weights(run.policy.lm, run.engine, version=0)
        update(run, Rollouts(run.factory, run.engine, run.chat, config))
        assert run.step == 1
        assert run.log.history[-1]["health/sampler_mismatch"] < 1e-4
        output = capsys.readouterr().out
        assert "more than 0.5 nats on 100% of" in output
        assert "http://b excluded" in output
        assert "http://a" not in output
        run.engine.wrong = ["http://a"]
        with pytest.raises(StaleWeightsError, match="http://a"):
            update(run, Rollouts(run.factory, run.engine, run.chat, config))


def test_stale_log_probs_reach_neither_policy_nor_critic(start, tmp_path):
    changes = {"advantage_type": "ppo", "critic_lr": 1e-2, "wm_enabled": False}
    config = make_config(start, tmp_path, policy_old_logp="engine", **changes)
    with open_run(config) as run:
        both = ["http://a", "http://b"]
        run.engine = TwoServers(run.policy.lm, end_ids=run.chat.end_ids, wrong=both)
        push_weights(run.policy.lm, run.engine, version=0)
        before = [[p.clone() for p in learner.parameters.values()] for learner in run.learners]
        with pytest.raises(StaleWeightsError, match="http://a"):
            update(run, Rollouts(run.factory, run.engine, run.chat, config))
        for learner, weights in zip(run.learners, before, strict=True):
            now = learner.parameters.values()
            assert all(torch.equal(old, new) for old, new in zip(weights, now, strict=True))
            assert all(parameter.grad is None for parameter in now)


def rank_compares(rank):
    """On rank 1 alone the sampler's entropies are of other weights."""
    ranks = join_ranks(torch.device("cpu"))
    logp = [-1.0, -2.0]
    tokens = TokenBatch(
        weight=torch.ones(2),
        observation=torch.zeros(2, dtype=torch.bool),
        advantage=torch.ones(2),
        old_logp=torch.tensor(logp),
        sampled_logp=torch.tensor(logp),
    )
    out = SimpleNamespace(logp=torch.tensor(logp), entropy=torch.tensor([0.5, 0.5]))
    entropy = [0.5 + 3 * rank] * 2
    sample = Sample(0, 0, 0, [1], [2, 3], versions=[4, 4], sampled_entropy=entropy)
    with pytest.raises(StaleWeightsError, match="the sampler's entropies differ"):
        compare_sampler(out, tokens, [sample], ranks=ranks, version=4)
    assert ranks.gather(rank) == [0, 1]  # both went on to the same call
    ranks.close()


def test_all_ranks_hear_of_the_entropies_of_one():
    call_in_ranks(rank_compares, 2, on_host=2)


@pytest.mark.slow
@pytest.mark.parametrize("old_logp", ["trainer", "engine"])
def test_truncated_importance_sampling_on_policy_is_the_plain_update(start, tmp_path, old_logp):
    """The sampler has the trainer's weights: every ratio of the first optimizer step is 1."""
    plain, _, _ = run_updates(
        make_config(start, tmp_path / "plain", optim_minibatch_samples=1000), 1
    )
    options = {"optim_minibatch_samples": 1000, "policy_old_logp": old_logp, "policy_tis_cap": 2.0}
    truncated, _, metrics = run_updates(make_config(start, tmp_path / "tis", **options), 1)
    initial = load_policy(start).named_parameters_once()
    for name, ours in truncated[-1].items():
        distance = (plain[-1][name] - initial[name]).norm()
        assert (ours - plain[-1][name]).norm() < 1e-2 * distance
    assert metrics[0]["policy/clip_frac"] == 0


class Shuffled(Rollouts):
    """The episodes of an update, their groups and members in another order."""

    def training(self, *args, **kwargs):
        groups, stats = super().training(*args, **kwargs)
        for group in groups:
            group.trajectories.reverse()
        return groups[::-1], stats


@pytest.mark.slow
def test_an_update_is_the_same_however_it_is_computed(start, tmp_path):
    """But for the order of sums. Beside this: cuts of the batch in test_loss, numbers of ranks in
    tests/distributed, engines in tests/e2e/test_vllm_engine."""

    def weights(run):
        parts = [parameter.detach().flatten().double() for parameter in run.policy.parameters()]
        return torch.cat(parts)

    def step(rollouts=Rollouts, **changes):
        """How the weights move in one optimizer step (mini-batches are drawn by position)."""
        # Cross-entropy: of a fresh model's observations p is nearly 0, and so is the gradient of
        # any other loss.
        plain = {
            "run_updates": 1,
            "optim_minibatch_samples": 10**6,
            "optim_weight_decay": 0.0,
            "wm_loss": "ce",
        }
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with open_run(make_config(start, folder, **plain | changes)) as run:
            for group in run.optimizer.param_groups:
                # Adam's first step is lr * g / (|g| + eps): proportional to the gradient.
                group["eps"] = 1.0
            push_weights(run.policy.lm, run.engine, version=0)
            weights_before = weights(run)
            update(run, rollouts(run.factory, run.engine, run.chat, run.config))
            return weights(run) - weights_before

    expected = step()
    for changes in (
        {"optim_micro_batch_tokens": 300},
        {"optim_micro_batch_tokens": 10**6},
        {"model_head_backend": "torch"},
        {"model_checkpointing": "full"},
        {"rollouts": Shuffled},
    ):
        assert (step(**changes) - expected).norm() < 1e-4 * expected.norm(), changes
    assert (step(wm_alpha=0.5) - expected).norm() > 1e-3 * expected.norm()  # it can tell
