"""Trajectories become rows: one a turn, in order, with the engine's own ids."""

from paw.algo.samples import to_samples
from paw.types import Group, Outcome, Task, Trajectory, Turn


def make_turn(n, *, observation="you see a mug", reward=0.0, valid=True, done=False):
    return Turn(
        prompt_ids=[10 + n],
        response_ids=[20 + n, 2],
        sampled_logp=[-0.5, -0.25],
        entropy=[0.3, 0.1],
        prompt="p",
        response="r",
        outcome=Outcome(observation, reward, done, won=reward > 0, action="look", valid=valid),
        anchor=f"anchor {n}",
        version=0,
    )


def make_groups():
    won = Trajectory(Task("a", "pick"), 0, [make_turn(0), make_turn(1, reward=10.0, observation="", done=True)])
    lost = Trajectory(Task("a", "pick"), 1, [make_turn(2, valid=False)])
    other = Trajectory(Task("b", "heat"), 0, [make_turn(3), make_turn(4), make_turn(5, valid=False)])
    return [Group(won.task, [won, lost]), Group(other.task, [other])]


def rows_of(groups, *, encode=lambda text: [ord(c) for c in text], penalty=0.1):
    return to_samples(groups, separator_ids=[7, 8], encode_observation=encode, invalid_penalty=penalty)


def test_one_row_a_turn_in_group_trajectory_step_order():
    rows = rows_of(make_groups())
    places = [(row.group, row.trajectory, row.step) for row in rows]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 2, 0), (1, 2, 1), (1, 2, 2)]
    assert [r.anchor for r in rows] == [f"anchor {n}" for n in range(6)]


def test_ids_and_log_probs_are_the_engines_own():
    groups = make_groups()
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    for row, turn in zip(rows_of(groups), turns, strict=True):
        assert (row.prompt_ids, row.response_ids) == (turn.prompt_ids, turn.response_ids)
        assert (row.sampled_logp, row.sampled_entropy) == (turn.sampled_logp, turn.entropy)


def test_the_score_is_the_return_less_the_rows_own_penalty():
    rows = rows_of(make_groups())
    assert [r.score for r in rows] == [10.0, 10.0, -0.1, 0.0, 0.0, -0.1]
    assert [r.episode_return for r in rows] == [10.0, 10.0, 0.0, 0.0, 0.0, 0.0]
    assert [r.reward for r in rows] == [0.0, 10.0, 0.0, 0.0, 0.0, 0.0]
    assert [r.penalty for r in rows] == [0.0, 0.0, 0.1, 0.0, 0.0, 0.1]


def test_an_empty_observation_gives_neither_target_nor_separator():
    rows = rows_of(make_groups())
    assert rows[0].observation_ids == [ord(c) for c in "you see a mug"]
    assert rows[0].separator_ids == [7, 8]
    assert (rows[1].observation_ids, rows[1].separator_ids) == ([], [])


def test_without_world_model_no_row_has_a_target():
    rows = rows_of(make_groups(), encode=None)
    assert all(not row.observation_ids and not row.separator_ids for row in rows)
    assert all(row.wm_weight == 0.0 for row in rows)


def test_no_groups_no_rows():
    assert rows_of([]) == []
