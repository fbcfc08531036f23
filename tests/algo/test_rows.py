"""The rows of an update on several ranks: no rank has all of them, yet the update is that of one
rank."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from together import make_ranks, on_all

from paw.algo.advantages import gigpo
from paw.algo.batches import micro_batches
from paw.algo.loss import token_batch
from paw.algo.packing import Packing
from paw.algo.rows import (
    compute_by_group,
    gather_digests,
    gather_numbers,
    share_scalars,
    with_all_rows,
)
from paw.algo.samples import to_samples
from paw.algo.sequences import minibatches
from paw.algo.shared_samples import SharedSamples, assign, held
from paw.algo.world_model import select
from paw.away import AwayError
from paw.distributed.ranks import PeerLostError, Ranks
from paw.errors import UserError
from paw.rollouts.base import RolloutStats
from paw.rollouts.exchange import gather_turns
from paw.rollouts.summaries import share_summaries
from paw.types import Group, Outcome, Task, Trajectory, Turn

CPU = torch.device("cpu")
SYSTEM = [1, 2, 3, 4, 5, 6]
SEPARATOR = [9]


def make_turn(rng, prompt_ids, *, is_last):
    """A turn whose numbers distinguish it from all others."""
    response = [rng.randrange(20, 99) for _ in range(rng.randrange(1, 5))]
    reward = rng.choice([0.0, 1.0, 0.3]) if is_last else 0.0
    observation = rng.choice(["door", "mug", "a long hall"])
    return Turn(
        prompt_ids=prompt_ids,
        response_ids=response,
        sampled_logp=[-rng.randrange(1, 64) / 16 for _ in response],
        entropy=[rng.randrange(1, 64) / 16 for _ in response],
        prompt="p",
        response="r",
        outcome=Outcome(observation, reward, is_last, won=reward == 1.0, valid=rng.random() > 0.2),
        anchor=rng.choice("abc"),
        version=rng.randrange(3),
        server=rng.choice(["http://a", "http://b"]),
    )


def encode(text):
    return [ord(letter) for letter in text]


def make_episode(rng, task, member):
    """An episode of one-message prompts, or a conversation. Some of its prompts show other
    observations than the environment returned."""
    turns = []
    turn_count = rng.randrange(1, 6)
    is_conversation = rng.random() < 0.5
    prompt = [*SYSTEM, rng.randrange(20, 99)]
    for step in range(turn_count):
        turn = make_turn(rng, list(prompt), is_last=step == turn_count - 1)
        turns.append(turn)
        if is_conversation:
            shown_ids = encode(turn.outcome.observation) if rng.random() < 0.7 else [11]
            prompt = [*prompt, *turn.response_ids, *SEPARATOR, *shown_ids, 12]
        else:
            prompt = [*SYSTEM, *(rng.randrange(20, 99) for _ in range(rng.randrange(1, 6)))]
    return Trajectory(task, member, turns)


def make_groups(group_count, group_size):
    rng = random.Random(group_count)
    groups = []
    for index in range(group_count):
        task = Task(f"task {index}", "kind", payload=object())
        members = [make_episode(rng, task, member) for member in range(group_size)]
        groups.append(Group(task, members, index))
    return groups


def play_share(groups, ranks):
    """The groups as this rank sees them after the rollout. Their members are dealt in blocks."""
    group_size = len(groups[0].trajectories)
    own_episodes = range(
        len(groups) * group_size * ranks.rank // ranks.world_size,
        len(groups) * group_size * (ranks.rank + 1) // ranks.world_size,
    )
    own_groups = []
    for group in groups:
        members = [
            episode
            for episode in group.trajectories
            if group.index * group_size + episode.member in own_episodes
        ]
        if members:
            own_groups.append(Group(group.task, members, group.index))
    rank_summaries = share_summaries(
        (own_groups, RolloutStats()), [group.task for group in groups], ranks
    )
    visible_groups = [Group(group.task, [], group.index) for group in groups]
    for rank_groups, _ in rank_summaries:
        for group in rank_groups:
            visible_groups[group.index].trajectories += group.trajectories
    return visible_groups


def prepared(groups, ranks, share_prefixes):
    """The update's samples, made as in `paw.trainer.prepare`. The entropies are the sampler's."""
    several = ranks.world_size > 1
    share = partial(
        share_scalars, ranks=ranks, anchors="equality", share_prefixes=share_prefixes != "never"
    )
    samples = to_samples(
        play_share(groups, ranks) if several else groups,
        separator_ids=SEPARATOR,
        encode_observation=encode,
        invalid_penalty=0.1,
        rank=ranks.rank,
        share=share if several else None,
    )
    assign(samples, "advantage", compute_by_group(samples, gigpo, ranks))
    packing = Packing(budget=60, share_prefixes=share_prefixes, ranks=ranks if several else None)
    micro_batches(samples, packing, with_observation=False, device=CPU)  # the scoring pass
    own_indices = held(samples, ranks)
    for i in own_indices:
        samples[i].old_logp = [logp - 0.5 for logp in samples[i].sampled_logp]
    entropies = gather_numbers(
        samples, [max(samples[i].sampled_entropy) for i in own_indices], ranks
    )
    assign(samples, "entropy", entropies)
    digests = gather_digests(samples, ranks)
    selection = select(
        samples,
        n_groups=len(groups),
        alpha=0.5,
        weight="adaptive",
        reward_max=1.0,
        distinct=digests,
    )
    assign(samples, "wm_weight", selection.weights)
    return samples, packing


def learnt(groups, share_prefixes, ranks):
    """(scalars of each sample, rows of what the losses read, numbers of micro-batches)."""
    samples, packing = prepared(groups, ranks, share_prefixes)
    scalars = [(s.score, s.advantage, s.entropy, s.wm_weight, s.token_weight) for s in samples]
    assert ranks.world_size == 1 or len(held(samples, ranks)) < len(samples)
    rows = []
    counts = []
    for epoch in range(2):
        for number, minibatch in enumerate(minibatches(samples, size=12, seed=epoch)):
            batches = micro_batches(
                minibatch,
                packing,
                with_observation=True,
                device=CPU,
                skip_without_loss=True,
            )
            counts.append(len(batches))
            for batch in batches:
                rows += rows_of(batch, minibatch, len(samples), (epoch, number))
    return scalars, rows, counts


def rows_of(batch, minibatch, update_samples, step_key):
    """(step, turn, token, weight, ...) for each target of a micro-batch."""
    if not batch.indices:
        return []
    tokens = token_batch(batch, minibatch, update_samples=update_samples)
    turn_keys = [(minibatch[i].trajectory, minibatch[i].step) for i in batch.indices]
    columns = zip(
        tokens.sample.tolist(),
        batch.target.tolist(),
        batch.input_ids[batch.position].tolist(),
        tokens.weight.tolist(),
        tokens.advantage.tolist(),
        tokens.old_logp.tolist(),
        tokens.sampled_logp.tolist(),
        strict=True,
    )
    return [(step_key, turn_keys[sample], *values) for sample, *values in columns]


@pytest.mark.parametrize("share_prefixes", ["never", "auto"])
@pytest.mark.parametrize(("world", "count", "size"), [(2, 4, 3), (3, 4, 3), (4, 3, 1)])
def test_an_update_is_that_of_one_rank(world, count, size, share_prefixes):
    """Shares are uneven, or there are more ranks than episodes. Advantages, selection and weights
    are equal bit for bit."""
    scalars, rows, _ = learnt(make_groups(count, size), share_prefixes, Ranks())
    results = on_all(make_ranks(world), partial(learnt, make_groups(count, size), share_prefixes))
    together = []
    for rank_scalars, rank_rows, counts in results:
        assert rank_scalars == scalars
        assert counts == results[0][2]
        together += rank_rows
    assert sorted(together) == sorted(rows)


def test_the_tokens_of_a_group_that_share_prefixes_stay_together():
    """Two ranks together share at least three quarters of the tokens that one rank shares."""
    groups = make_groups(8, 4)

    def computed(ranks):
        samples, packing = prepared(groups, ranks, "always")
        batches = micro_batches(samples, packing, with_observation=False, device=CPU)
        return sum(batch.shared_tokens for batch in batches)

    on_one_rank = computed(Ranks())
    on_two_ranks = sum(on_all(make_ranks(2), computed))
    assert 0.75 * on_one_rank < on_two_ranks


def test_rows_that_are_away_have_a_length_and_say_how_to_get_them():
    groups = make_groups(3, 2)

    def read(ranks):
        samples = prepared(groups, ranks, "never")[0]
        own_indices = held(samples, ranks)
        remote = next(samples[i] for i in range(len(samples)) if i not in own_indices)
        assert len(remote.response_ids) > 0
        for reading in (list, np.asarray, lambda row: row[0]):
            with pytest.raises(AwayError, match=r"are on rank .* @estimator\(tokens=True\)"):
                reading(remote.prompt_ids)
        gathered = with_all_rows(samples, ranks)
        return [(list(s.prompt_ids), list(s.response_ids), list(s.old_logp)) for s in gathered]

    first_rank, second_rank = on_all(make_ranks(2), read)
    assert first_rank == second_rank
    expected = prepared(groups, Ranks(), "never")[0]
    assert first_rank == [
        (list(s.prompt_ids), list(s.response_ids), list(s.old_logp)) for s in expected
    ]


def test_callbacks_can_have_the_turns_of_all_ranks():
    groups = make_groups(3, 2)

    def gather(ranks):
        visible_groups = play_share(groups, ranks)
        with pytest.raises(AwayError):
            [
                turn
                for group in visible_groups
                for episode in group.trajectories
                for turn in episode.turns
            ]
        gathered = gather_turns(visible_groups, ranks)
        assert gather_turns(gathered, ranks) == gathered
        return gathered

    assert on_all(make_ranks(3), gather) == [groups] * 3


def test_a_rank_makes_objects_for_the_turns_it_holds_alone(monkeypatch):
    """Turns of other ranks are rows of numbers, so more ranks need less time and memory each."""
    groups = make_groups(16, 4)
    away_samples = []
    make_away_sample = SharedSamples._away_sample
    monkeypatch.setattr(
        SharedSamples,
        "_away_sample",
        lambda *arguments: away_samples.append(1) or make_away_sample(*arguments),
    )

    def count(ranks):
        samples, packing = prepared(groups, ranks, "never")
        for minibatch in minibatches(samples, size=len(samples), seed=0):
            micro_batches(minibatch, packing, with_observation=True, device=CPU)
        assert samples.here.keys() == set(held(samples, ranks))
        return len(samples)

    turn_count, *_ = on_all(make_ranks(4), count)
    # Only those that moved: if each rank made all of them, it would be 3 times the turns.
    assert len(away_samples) < turn_count / 2


def test_advantages_that_fail_on_one_rank_end_all():
    groups = make_groups(4, 2)

    def fails(samples):
        if samples[0].group > 0:
            raise UserError("not this group")
        return [0.0] * len(samples)

    def compute(ranks):
        samples = prepared(groups, ranks, "never")[0]
        with pytest.raises(UserError, match="not this group") as failure:
            compute_by_group(samples, fails, ranks)
        return type(failure.value)

    assert on_all(make_ranks(2), compute) == [PeerLostError, UserError]
