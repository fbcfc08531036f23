"""Each turn of a trajectory becomes a sample. Turns that continue one another share a sequence, and
learn the same as if they did not."""

import random
from dataclasses import replace

import pytest
import torch
from joint import (
    VOCAB,
    Objective,
    dense,
    fill,
    make_lm,
    make_row,
    packed,
    packed_in_ranks,
    relative,
    tiny_policy,
)

from paw.algo.batches import collate, micro_batches
from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw.algo.samples import to_samples
from paw.algo.sequences import minibatches, sequences
from paw.algo.token_sums import token_sums
from paw.model.policy import Policy
from paw.types import Group, Outcome, Task, Trajectory, Turn

END = [5]
SEPARATOR = [7, 8]
REPLY = [9, 6]
CPU = torch.device("cpu")


def make_turn(number, *, observation="you see a mug", reward=0.0, valid=True, done=False):
    return Turn(
        prompt_ids=[10 + number],
        response_ids=[20 + number, 2],
        sampled_logp=[-0.5, -0.25],
        entropy=[0.3, 0.1],
        prompt="p",
        response="r",
        outcome=Outcome(observation, reward, done, won=reward > 0, action="look", valid=valid),
        anchor=f"anchor {number}",
        version=0,
    )


def make_groups():
    won_episode = Trajectory(
        Task("a", "pick"), 0, [make_turn(0), make_turn(1, reward=10.0, observation="", done=True)]
    )
    lost_episode = Trajectory(Task("a", "pick"), 1, [make_turn(2, valid=False)])
    other_episode = Trajectory(
        Task("b", "heat"), 0, [make_turn(3), make_turn(4), make_turn(5, valid=False)]
    )
    return [
        Group(won_episode.task, [won_episode, lost_episode]),
        Group(other_episode.task, [other_episode]),
    ]


def samples_of(groups, *, encode=lambda text: [ord(c) for c in text], penalty=0.1):
    return to_samples(
        groups, separator_ids=SEPARATOR, encode_observation=encode, invalid_penalty=penalty
    )


def test_one_sample_a_turn_in_order_with_the_engines_own_ids_and_the_return_less_its_own_penalty():
    groups = make_groups()
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    samples = samples_of(groups)
    places = [(sample.group, sample.trajectory, sample.step) for sample in samples]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 2, 0), (1, 2, 1), (1, 2, 2)]
    for sample, turn in zip(samples, turns, strict=True):
        assert sample.prompt_ids.tolist() == turn.prompt_ids.tolist()
        assert sample.response_ids.tolist() == turn.response_ids.tolist()
        assert sample.sampled_logp.tolist() == turn.sampled_logp.tolist()
        assert sample.sampled_entropy.tolist() == turn.entropy.tolist()
        assert sample.anchor == turn.anchor
    assert [s.score for s in samples] == [10.0, 10.0, -0.1, 0.0, 0.0, -0.1]
    assert [s.episode_return for s in samples] == [10.0, 10.0, 0.0, 0.0, 0.0, 0.0]
    assert [s.reward for s in samples] == [0.0, 10.0, 0.0, 0.0, 0.0, 0.0]
    assert [s.penalty for s in samples] == [0.0, 0.0, 0.1, 0.0, 0.0, 0.1]
    assert samples_of([]) == []


def test_an_empty_observation_and_no_world_model_give_neither_target_nor_separator():
    samples = samples_of(make_groups())
    assert samples[0].observation_ids.tolist() == [ord(c) for c in "you see a mug"]
    assert samples[0].separator_ids.tolist() == SEPARATOR
    assert len(samples[1].observation_ids) == 0
    assert len(samples[1].separator_ids) == 0
    for sample in samples_of(make_groups(), encode=None):
        assert len(sample.observation_ids) == 0
        assert len(sample.separator_ids) == 0
        assert sample.wm_weight == 0.0


def test_collate_as_documented():
    row = replace(
        make_row(random.Random(0)), prompt_ids=[1, 5, 6], response_ids=[7, 2], separator_ids=[1]
    )
    selected = replace(row, observation_ids=[8, 9], wm_weight=0.5)
    batch = collate(
        [selected, replace(selected, wm_weight=0.0)], [[0], [1]], with_observation=True, device=CPU
    )
    assert batch.input_ids.tolist() == [1, 5, 6, 7, 2, 1, 8, 9, 1, 5, 6, 7, 2]
    assert batch.lengths == [8, 5]
    assert batch.target.tolist() == [7, 2, 8, 9, 7, 2]
    assert batch.position.tolist() == [2, 3, 5, 6, 10, 11]
    assert batch.observation.tolist() == [False, False, True, True, False, False]


def conversation(*, turns=5, seed=0, mangled_steps=(), cut_steps=()):
    """Three groups of two trajectories, each a conversation: the next prompt is this one, the
    response, the observation as a user's message, and the template's way to the next response.
    At `mangled_steps` the next prompt shows another text than the turn returned. At `cut_steps` the
    response has no end token; the token stands before the user's message instead.
    """
    rng = random.Random(seed)
    groups = []

    def ids(length):
        return [rng.randrange(10, VOCAB) for _ in range(length)]

    for group_index in range(3):
        group = Group(Task(str(group_index), "pick"), [])
        for member in range(2):
            prompt = ids(4)
            played = []
            for step in range(turns):
                response = ids(rng.randint(1, 4))
                observation = ids(5) if step < turns - 1 else []
                reward = 10.0 * (step == turns - 1 and member == 0)
                turn = make_turn(
                    step,
                    observation=" ".join(map(str, observation)),
                    reward=reward,
                    valid=step != 1,
                )
                turn = replace(
                    turn,
                    prompt_ids=prompt,
                    response_ids=response,
                    sampled_logp=[-1.0] * len(response),
                )
                end_ids = END if step in cut_steps else []
                turn.separator_ids = END + SEPARATOR if step in cut_steps else None
                played.append(turn)
                shown_ids = ids(5) if step in mangled_steps else observation
                prompt = prompt + response + end_ids + SEPARATOR + shown_ids + REPLY
            group.trajectories.append(Trajectory(group.task, member, played))
        groups.append(group)
    return groups


def prepared(policy, groups, *, wm):
    encode = (lambda text: [int(i) for i in text.split()]) if wm else None
    return fill(policy, samples_of(groups, encode=encode), n_groups=len(groups), alpha=0.75)


@pytest.mark.parametrize("wm", [False, True], ids=["GRPO", "PaW"])
@pytest.mark.parametrize("norm", ["token", "sample", "group"])
def test_turns_in_one_sequence_learn_as_they_do_one_by_one(wm, norm):
    policy = tiny_policy()
    samples = prepared(policy, conversation(), wm=wm)
    separate = [replace(sample, continues=False) for sample in samples]
    assert len(sequences(samples, with_observation=wm)) == 6
    assert len(sequences(separate, with_observation=wm)) == 30
    policy.double()  # the body's rounding depends on what a sequence is batched with
    objective = Objective(norm=norm, kl_coef=0.1, entropy_coef=0.01, rho=0.05)
    loss, gradient = packed(policy, samples, objective, update_samples=40, with_observation=wm)
    loss_alone, gradient_alone = packed(
        policy, separate, objective, update_samples=40, with_observation=wm
    )
    assert loss == pytest.approx(loss_alone, rel=1e-6)
    assert relative(gradient, gradient_alone) < 1e-6
    assert gradient.norm() > 0
    scored = log_probs(policy, samples, Packing(budget=60), temperature=0.7)
    for index, (logp_alone, entropy_alone) in log_probs(
        policy, separate, Packing(budget=60), temperature=0.7
    ).items():
        logp, entropy = scored[index]
        assert logp == pytest.approx(logp_alone, abs=1e-6)
        assert entropy == pytest.approx(entropy_alone, abs=1e-6)


def test_a_conversation_takes_less_than_half_the_tokens_and_the_world_model_adds_none():
    samples = prepared(tiny_policy(), conversation(), wm=True)
    separate = [replace(sample, continues=False) for sample in samples]
    assert any(sample.wm_weight for sample in samples)

    def tokens(rows, *, wm):
        batches = micro_batches(rows, Packing(budget=10**6), with_observation=wm, device=CPU)
        return sum(sum(batch.lengths) for batch in batches)

    joined = tokens(samples, wm=False)
    assert joined < tokens(separate, wm=False) / 2
    assert tokens(samples, wm=True) == joined


def test_a_target_that_is_not_in_the_next_prompt_is_appended():
    """The next prompt shows another observation than turn 2 returned. If that observation is a
    target, the sequence ends after it."""
    policy = tiny_policy()
    samples = prepared(policy, conversation(mangled_steps={2}), wm=True)
    for sample in samples:
        sample.wm_weight = 0.1 * (sample.step < 4)
    joined = sequences(samples, with_observation=True)
    assert [len(members) for members in joined] == [3, 2] * 6
    assert [len(members) for members in sequences(samples, with_observation=False)] == [5] * 6
    objective = Objective(wm="ce")
    loss, gradient = packed(policy, samples, objective, update_samples=30)
    expected, expected_gradient, *_ = dense(policy, samples, objective, update_samples=30)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative(gradient, expected_gradient) < 1e-5


OBJECTIVES = {
    "ppo": Objective(kl_coef=0.1, entropy_coef=0.01, rho=0.05),
    "gspo": Objective(policy="gspo", norm="sample", wm="ce"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_end_of_an_answer_that_was_cut_is_seen_and_has_no_loss(name, dtype):
    """Cut answers share their sequence with what follows. Loss and gradient equal those of each row
    alone and those of full logits in float64. Only the response's own tokens count as response
    tokens."""
    policy = Policy(make_lm(), dtype=dtype)
    objective = OBJECTIVES[name]
    samples = prepared(policy, conversation(cut_steps={0, 1, 3}), wm=True)
    separate = [replace(sample, continues=False) for sample in samples]
    assert len(sequences(samples, with_observation=True)) == 6
    assert len(sequences(separate, with_observation=True)) == 30
    assert {sample.step for sample in samples if sample.separator_ids[:1].tolist() == END} == {
        0,
        1,
        3,
    }
    expected, expected_gradient, *_ = dense(policy, samples, objective, update_samples=30)
    loss, gradient = packed(policy, samples, objective, update_samples=30)
    separate_loss, separate_gradient = packed(policy, separate, objective, update_samples=30)
    error = relative(gradient, expected_gradient)
    if dtype == "float32":
        assert error < 1e-5
        assert loss == pytest.approx(expected, rel=1e-5)
    else:
        assert error < 2 * relative(separate_gradient, expected_gradient) + 1e-4
        assert loss == pytest.approx(expected, abs=2 * abs(separate_loss - expected) + 1e-3)

    (batch,) = micro_batches(samples, Packing(budget=10**6), with_observation=True, device=CPU)
    output, tokens = objective.forward(policy, batch, samples, 30)
    policy_loss, wm_loss = objective.terms
    token_totals = token_sums(output, tokens, batch, policy=policy_loss, wm=wm_loss)
    assert token_totals["response_tokens"] == sum(len(sample.response_ids) for sample in samples)
    selected = [sample for sample in samples if sample.wm_weight]
    assert token_totals["observation_tokens"] == sum(
        len(sample.observation_ids) for sample in selected
    )
    scored = log_probs(policy, samples, Packing(budget=10**6), temperature=1.0).values()
    for sample, (logp, _) in zip(samples, scored, strict=True):
        assert len(logp) == len(sample.response_ids)


def test_minibatches_keep_sequences_together_and_ranks_share_them():
    policy = tiny_policy()
    samples = prepared(policy, conversation(), wm=True)
    sample_batches = minibatches(samples, size=10, seed=3)
    assert [len(sample_batch) for sample_batch in sample_batches] == [10, 10, 10]
    assert all(
        len(sequences(sample_batch, with_observation=False)) == 2 for sample_batch in sample_batches
    )
    of_all = packed(policy, samples, Objective(), update_samples=30)
    shares = packed_in_ranks(policy, samples, Objective(), 4, update_samples=30, budget=60)
    assert sum(loss for loss, _ in shares) == pytest.approx(of_all[0], rel=1e-6)
    assert relative(sum(gradient for _, gradient in shares), of_all[1]) < 1e-6
