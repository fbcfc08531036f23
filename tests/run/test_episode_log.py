"""Training episodes in episodes.jsonl: which ones are written, and the numbers of their tokens."""

import math

import numpy as np
import pytest
import torch

from paw.algo.batches import Batch
from paw.episode_log import EpisodeLog, rounded
from paw.rollouts.text.pieces import TokenTexts
from paw.types import AwayTrajectory, Group, Outcome, Sample, Task, Trajectory, Turn

WORDS = {1: "go", 2: "east", 3: "<end>", 4: "You", 5: "see", 6: "a", 7: "mug"}


def decode(ids):
    return " ".join(WORDS[i] for i in ids)


def make_turn(*, won=False, observation_ids=(4, 5, 6, 7)):
    outcome = Outcome("You see a mug", float(won), won, won, action="go east")
    return Turn(
        prompt_ids=[1],
        response_ids=[1, 2, 3],
        sampled_logp=[-0.5, -0.25, -math.inf],
        entropy=[1.0, 0.5, 0.0],
        prompt="where to?",
        response="go east",
        outcome=outcome,
        anchor="a",
        version=0,
        observation_ids=list(observation_ids),
    )


def make_groups():
    groups = []
    for index in range(2):
        task = Task(f"t{index}", "pick")
        won_turns = [make_turn(), make_turn(won=True)]
        trajectories = [Trajectory(task, 0, [make_turn()]), Trajectory(task, 1, won_turns)]
        groups.append(Group(task, trajectories, index))
    return groups


def make_log(count):
    return EpisodeLog(count=count, texts=TokenTexts(decode))


def sample_of(trajectory, step, **values):
    values = {"response_ids": [1, 2, 3], "observation_ids": [4, 5, 6, 7]} | values
    return Sample(trajectory // 2, trajectory, step, prompt_ids=[1], **values)


def batch_of(indices, target_count):
    nothing = torch.zeros(0)
    no_observation = torch.zeros(target_count, dtype=torch.bool)
    return Batch(nothing, [], nothing, nothing, no_observation, nothing, nothing, indices)


def test_each_episode_is_of_another_task_if_possible():
    episode_log = make_log(3)
    episode_log.start(make_groups())
    assert [chosen.index for chosen in episode_log.chosen] == [0, 2, 1]
    assert episode_log.chosen[0].group == {"size": 2, "won": 1, "return": 0.5}


def test_episodes_of_other_ranks_are_left_out():
    groups = make_groups()
    away_episode = groups[0].trajectories[0]
    groups[0].trajectories[0] = AwayTrajectory(
        away_episode.task, 0, away_episode.summary, rank=1, failure=None
    )
    episode_log = make_log(9)
    episode_log.start(groups)
    assert [chosen.index for chosen in episode_log.chosen] == [1, 2, 3]
    assert episode_log.chosen[0].group["won"] == 1, "of all ranks"


def test_tokens_have_their_numbers_and_targets_those_of_their_first_step():
    episode_log = make_log(1)
    episode_log.start(make_groups())
    selected = sample_of(0, 0, advantage=-0.70711, wm_weight=0.25)
    second_sample = sample_of(3, 1, wm_weight=0.5)
    logp = torch.arange(-14.0, 0.0)  # for 2 samples, each with 3 + 4 targets
    episode_log.observe(logp, batch_of([1, 0], 14), [selected, second_sample])
    episode_log.observe(logp * 0, batch_of([0], 7), [selected])  # a second epoch
    episode_log.finish([selected, second_sample])

    (record,) = episode_log.take()
    assert episode_log.take() == []
    (turn,) = record["turns"]
    assert record["won"] is False
    assert record["prompt"] == "where to?"
    assert turn == {
        "action": "go east",
        "valid": True,
        "reward": 0.0,
        "tokens": ["go", " east", " <end>"],
        "logp": [-0.5, -0.25, None],
        "observation": "You see a mug",
        "entropy": [1.0, 0.5, 0.0],
        "advantage": -0.7071,
        "selected": True,
        "observation_tokens": ["You", " see", " a", " mug"],
        "observation_logp": [-4.0, -3.0, -2.0, -1.0],
    }


def test_only_the_results_of_calls_are_targets_and_ppo_has_an_advantage_for_each_token():
    episode_log = make_log(1)
    episode_log.by_token = True
    episode_log.start(make_groups())
    sample = sample_of(0, 0, wm_weight=1.0, token_advantage=[0.5, 0.0, -0.5], spans=[(1, 3)])
    episode_log.observe(torch.tensor([0.0, 0.0, 0.0, -1.5, -2.5]), batch_of([0], 5), [sample])
    episode_log.finish([sample])
    (turn,) = episode_log.take()[0]["turns"]
    assert turn["observation_logp"] == [None, -1.5, -2.5, None]
    assert turn["advantage"] == [0.5, 0.0, -0.5]


def test_a_turn_without_a_sample_or_a_gradient_keeps_what_is_known():
    episode_log = make_log(4)
    episode_log.start(make_groups())
    episode_log.finish([sample_of(0, 0)])
    records = episode_log.take()
    assert records[0]["turns"][0]["selected"] is False
    assert "observation_logp" not in records[0]["turns"][0]
    assert "advantage" not in records[1]["turns"][0]


def test_characters_of_several_tokens_stand_at_the_first():
    encoded = "é✓a".encode()

    def decode_bytes(ids):
        return bytes(encoded[i] for i in ids).decode(errors="replace")

    texts = TokenTexts(decode_bytes)
    assert texts.of(range(6)) == ["é", "", "✓", "", "", "a"]
    assert texts.of([0]) == ["\ufffd"]
    assert texts.of([]) == []


def test_numbers_that_json_lacks_are_none():
    values = np.array([0.12345, math.nan, -math.inf, -0.0001])
    assert rounded(values, digits=3) == [0.123, None, None, 0.0]
    assert math.copysign(1, rounded([-0.0001], digits=3)[0]) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_starting_again_forgets_the_update_before(count):
    episode_log = make_log(count)
    episode_log.start(make_groups())
    episode_log.finish([])
    episode_log.start(make_groups())
    assert episode_log.take() == []
