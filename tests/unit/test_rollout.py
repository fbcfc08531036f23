"""Episodes with the real engine and real households: reproducible, and a broken environment costs its episode alone."""

import itertools
import threading
import time

import pytest
import torch
from toyworld import make_chat, make_engine, make_factory, practised_model

from paw.config import Config, ModelConfig, RolloutConfig
from paw.envs.worker import Worker
from paw.errors import UserError
from paw.rollout.engines.base import Request
from paw.rollout.scheduler import Rollouts, derive_seed
from paw.types import Outcome, Task

CONFIG = Config(model=ModelConfig(path="-"), rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=3))


@pytest.fixture(autouse=True)
def one_thread():
    """With two, who is computed beside whom changes the last bits, and the order of arrival decides that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    return practised_model()


@pytest.fixture
def rollouts(model):
    return Rollouts(make_factory(), make_engine(model), make_chat(), CONFIG)


def play(rollouts, tasks=None, *, group_size=4, temperature=1.0, seed=0, stream="train/0", **options):
    tasks = rollouts.factory.train_tasks(0, 3, 0) if tasks is None else tasks
    return rollouts.play(tasks, group_size=group_size, temperature=temperature, seed=seed, stream=stream, **options)


def episodes_of(groups):
    return [episode for group in groups for episode in group.trajectories]


def turns_of(groups):
    return [turn for episode in episodes_of(groups) for turn in episode.turns]


class Scripted:
    """Counts to the task's payload, then wins; raises where it is told to."""

    def __init__(self, factory):
        self.factory = factory

    def _maybe_fail(self, where):
        if (where, self.made_for) in self.factory.failures or where == self.factory.always:
            raise self.factory.error(f"broken at {where}")

    def reset(self, task):
        self.length, self.n = task.payload, 0
        self.made_for = (task.id, next(self.factory.starts.setdefault(task.id, itertools.count())))
        self._maybe_fail("reset")
        return "start"

    def context(self):
        self._maybe_fail(f"prompt {self.n}")
        return f"task: put a mug in shelf 1.\nturn {self.n}"

    def anchor(self):
        return f"at {self.n}"

    def step(self, response):
        self.factory.on_step(self)
        self._maybe_fail(f"step {self.n}")
        self.n += 1
        done = self.n == self.length
        return Outcome(f"now {self.n}", float(done), done, done, response, valid=True)

    def close(self):
        self.factory.closed += 1
        if self.factory.close_raises:
            raise OSError("already gone")


class ScriptedFactory:
    """A real factory of the smallest environment; `failures` holds (where, (task id, nth start of the task))."""

    name, reward_max, invalid_penalty = "scripted", 1.0, 0.0

    def __init__(self, *failures, always="", error=RuntimeError, close_raises=False, on_step=None):
        self.failures, self.always, self.error, self.close_raises = set(failures), always, error, close_raises
        self.may_block, self.on_step = on_step is not None, on_step or (lambda environment: None)
        self.starts, self.closed, self.made = {}, 0, 0

    def train_tasks(self, step, count, seed):
        return [Task(f"task {i}", "count", 3) for i in range(count)]

    def make(self):
        self.made += 1
        return Scripted(self)


def scripted(model, *failures, **options):
    return Rollouts(ScriptedFactory(*failures, **options), make_engine(model), make_chat(), CONFIG)


def test_members_of_a_group_play_the_same_task(rollouts):
    tasks = rollouts.factory.train_tasks(0, 3, 0)
    groups, stats = play(rollouts, tasks)
    assert [group.task for group in groups] == tasks
    for group in groups:
        assert [episode.member for episode in group.trajectories] == [0, 1, 2, 3]
        assert {episode.task.id for episode in group.trajectories} == {group.task.id}
        assert len({episode.turns[0].prompt for episode in group.trajectories}) == 1
        assert len({tuple(t.response_ids[0] for t in episode.turns) for episode in group.trajectories}) > 1
    assert (stats.groups_dropped, stats.prompts_truncated, stats.failures) == (0, 0, [])


def test_turns_carry_what_engine_and_environment_said(rollouts):
    groups, stats = play(rollouts)
    chat, turns = make_chat(), turns_of(groups)
    for turn in turns:
        assert turn.prompt_ids == chat.prompt_ids(turn.prompt)
        assert len(turn.response_ids) == len(turn.sampled_logp) == len(turn.entropy) <= 3
        assert all(i not in chat.end_ids for i in turn.response_ids[:-1])
        assert len(turn.response_ids) == 3 or turn.response_ids[-1] in chat.end_ids
        assert turn.response == chat.decode(turn.response_ids)
        assert all(value <= 0 for value in turn.sampled_logp) and all(value >= 0 for value in turn.entropy)
    for episode in episodes_of(groups):
        assert [turn.outcome.done for turn in episode.turns] == [False] * (len(episode.turns) - 1) + [True]
        # What was answered to a turn is what the next one reacts to.
        for turn, following in zip(episode.turns, episode.turns[1:], strict=False):
            assert following.anchor == turn.outcome.observation
    assert stats.prompt_tokens == sum(len(turn.prompt_ids) for turn in turns)
    assert stats.response_tokens == sum(len(turn.response_ids) for turn in turns)


def test_the_games_replay_to_the_same_outcomes(rollouts):
    """Nothing is lost between the response's ids and the environment."""
    groups, _ = play(rollouts)
    environment = rollouts.factory.make()
    for episode in episodes_of(groups):
        environment.reset(episode.task)
        for turn in episode.turns:
            assert environment.context() == turn.prompt
            assert environment.step(turn.response) == turn.outcome


def test_same_seed_same_episodes_another_seed_or_stream_others(rollouts):
    first, again = turns_of(play(rollouts)[0]), turns_of(play(rollouts)[0])
    assert first == again
    assert turns_of(play(rollouts, seed=1)[0]) != first
    assert turns_of(play(rollouts, stream="train/1")[0]) != first


def test_tokens_do_not_depend_on_what_else_is_played(rollouts, model):
    tasks = rollouts.factory.train_tasks(0, 6, 0)
    many = play(rollouts, tasks)[0]
    few = play(rollouts, tasks[:2])[0]
    small_batches = Rollouts(make_factory(), make_engine(model, max_batch_tokens=100), make_chat(), CONFIG)
    for a, b in ((few, many[:2]), (play(small_batches, tasks)[0], many)):
        assert [t.response_ids for t in turns_of(a)] == [t.response_ids for t in turns_of(b)]
        logps = [value for turn in turns_of(b) for value in turn.sampled_logp]
        assert [value for turn in turns_of(a) for value in turn.sampled_logp] == pytest.approx(logps, abs=1e-4)


def test_a_turns_tokens_follow_from_its_coordinates(rollouts):
    groups, _ = play(rollouts, seed=5, stream="train/7")
    turns = {}
    for g, group in enumerate(groups):
        for episode in group.trajectories:
            for t, turn in enumerate(episode.turns):
                seed = derive_seed(5, "train/7", g, episode.member, t)
                turns[len(turns)] = turn
                rollouts.engine.submit(Request(len(turns) - 1, turn.prompt_ids, seed, temperature=1.0, max_tokens=3))
    assert {c.key: c.token_ids for c in rollouts.engine.step()} == {k: turn.response_ids for k, turn in turns.items()}


def test_every_turn_carries_the_weight_version(rollouts):
    assert {turn.version for turn in turns_of(play(rollouts)[0])} == {0}
    rollouts.engine.sync([], version=9)
    assert {turn.version for turn in turns_of(play(rollouts)[0])} == {9}


def test_long_prompts_are_cut_and_counted(rollouts):
    rollouts.config = CONFIG.model_copy(update={"rollout": RolloutConfig(max_prompt_tokens=24, max_response_tokens=3)})
    groups, stats = play(rollouts)
    assert all(len(turn.prompt_ids) <= 24 for turn in turns_of(groups))
    assert stats.prompts_truncated == len(turns_of(groups))


def test_progress_counts_episodes_to_the_end(rollouts):
    seen = []
    play(rollouts, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 12) for n in range(1, 13)]


def test_environments_are_kept_and_closed_once(model):
    rollouts = scripted(model)
    for _ in range(3):
        play(rollouts)
    assert rollouts.factory.made == 12
    rollouts.close()
    rollouts.close()
    assert rollouts.factory.closed == 12


@pytest.mark.parametrize("where", ["reset", "prompt 0", "prompt 1", "step 0", "step 2"])
def test_a_failing_episode_is_left_out_and_counted(model, where):
    rollouts = scripted(model, (where, ("task 1", 2)))
    groups, stats = play(rollouts)
    assert [len(group.trajectories) for group in groups] == [4, 3, 4]
    assert [episode.member for episode in groups[1].trajectories] == [0, 1, 3]
    assert all(episode.episode_return == 1.0 and episode.failure is None for episode in episodes_of(groups))
    assert (len(stats.failures), stats.groups_dropped) == (1, 0)
    assert stats.failures == [f"task 1: RuntimeError: broken at {where}"]
    assert rollouts.factory.closed == 1
    again, stats = play(rollouts)  # the broken environment was replaced
    assert len(episodes_of(again)) == 12 and len(stats.failures) == 0


def test_failures_do_not_change_the_other_episodes(model):
    whole = turns_of(play(scripted(model))[0])
    broken = turns_of(play(scripted(model, ("step 1", ("task 0", 0))))[0])
    assert [(t.response_ids, t.outcome) for t in broken] == [(t.response_ids, t.outcome) for t in whole[3:]]


@pytest.mark.parametrize("where", ["reset", "prompt 1", "step 0"])
def test_a_failure_in_a_thread_costs_its_episode_and_a_users_mistake_the_run(model, where):
    touch = threading.get_ident  # no more than saying that it may block
    groups, stats = play(scripted(model, (where, ("task 1", 2)), on_step=lambda _: touch()))
    assert sorted(len(group.trajectories) for group in groups) == [3, 4, 4]
    assert [group.task.id for group in groups] == ["task 0", "task 1", "task 2"]
    assert stats.failures == [f"task 1: RuntimeError: broken at {where}"]
    with pytest.raises(UserError, match=f"broken at {where}"):
        play(scripted(model, always=where, error=UserError, on_step=lambda _: touch()))


GAME = """
import os

class Game:
    admissible, won = [], False

    def reset(self):
        return "here"

    def step(self, command):
        return os._exit(3) if command == "die" else command
"""


def test_a_worker_process_that_dies_costs_its_own_episode(model, tmp_path, monkeypatch):
    (tmp_path / "mortal.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)
    workers = [Worker("mortal:Game", timeout_s=30) for _ in range(3)]

    def wait(environment):
        worker = workers[environment.made_for[1]]
        if environment.n == 0:
            worker.start()
        worker.step("die" if (worker, environment.n) == (workers[1], 1) else "look")

    rollouts = scripted(model, on_step=wait)
    groups, stats = play(rollouts, rollouts.factory.train_tasks(0, 1, 0), group_size=3)
    assert [len(episode.turns) for episode in episodes_of(groups)] == [3, 3]
    assert stats.failures == ["task 0: EnvironmentFailure: worker mortal:Game: exited with code 3 during step"]
    for worker in workers:
        worker.close()


def test_environments_that_may_block_step_at_the_same_time(model):
    """Each step of an environment returns only when all twelve are in theirs."""
    meeting = threading.Barrier(12)
    whole = turns_of(play(scripted(model))[0])
    groups, stats = play(scripted(model, on_step=lambda _: meeting.wait(timeout=10)))
    assert turns_of(groups) == whole and stats.failures == []


def test_a_continuous_engine_works_on_while_an_environment_steps(model):
    """One environment's first step lasts until all other episodes have finished."""
    others_finished = threading.Event()

    def wait(environment):
        if environment.made_for == ("task 0", 0) and environment.n == 0:
            assert others_finished.wait(timeout=10)

    rollouts = scripted(model, on_step=wait)
    rollouts.engine.continuous = True
    groups, stats = play(rollouts, progress=lambda done, total: done == total - 1 and others_finished.set())
    assert stats.failures == []
    assert [turn.response_ids for turn in turns_of(groups)] == [t.response_ids for t in turns_of(play(rollouts)[0])]


def test_lock_step_waits_for_every_live_episode_and_changes_nothing(model):
    want = play(scripted(model))
    slow = ("task 0", 0)
    rollouts = scripted(model, on_step=lambda environment: time.sleep(0.05 * (environment.made_for == slow)))
    engine, step, batches = rollouts.engine, rollouts.engine.step, []

    def counted():
        batches.append(engine.pending)
        return step()

    engine.continuous, engine.step = True, counted
    assert play(rollouts, lock_step=True) == want
    assert batches == [12, 12, 12, 0]


def test_a_group_below_two_members_is_dropped(model):
    failures = [("step 1", ("task 0", i)) for i in range(3)] + [("reset", ("task 2", i)) for i in range(4)]
    groups, stats = play(scripted(model, *failures))
    assert [group.task.id for group in groups] == ["task 1"]
    assert (len(stats.failures), stats.groups_dropped) == (7, 2)


def test_a_single_member_group_stands_unless_it_fails(model):
    groups, stats = play(scripted(model, ("step 0", ("task 1", 0))), group_size=1)
    assert [group.task.id for group in groups] == ["task 0", "task 2"]
    assert stats.groups_dropped == 1


@pytest.mark.parametrize("where", ["reset", "prompt 0", "step 0"])
def test_nothing_is_left_when_everything_fails_even_closing(model, where):
    rollouts = scripted(model, always=where, close_raises=True)
    groups, stats = play(rollouts)
    assert groups == []
    assert (len(stats.failures), stats.groups_dropped) == (12, 3)
    assert rollouts.engine.pending == 0


@pytest.mark.parametrize("where", ["reset", "prompt 0", "step 0"])
def test_a_users_mistake_stops_the_run(model, where):
    with pytest.raises(UserError, match=f"broken at {where}"):
        play(scripted(model, always=where, error=UserError))


def test_a_prompt_limit_without_room_stops_the_run(rollouts):
    rollouts.config = CONFIG.model_copy(update={"rollout": RolloutConfig(max_prompt_tokens=2)})
    with pytest.raises(UserError, match="max_prompt_tokens = 2"):
        play(rollouts)


def test_seeds_are_stable_and_apart():
    assert derive_seed(0, "train/0", 1, 2, 3) == 8473358073702443013
    draws = list(itertools.product((0, 1), ("train/0", "eval"), range(8), range(8), range(8)))
    seeds = {derive_seed(*draw) for draw in draws}
    assert len(seeds) == len(draws)
    assert all(0 <= seed < 2**63 for seed in seeds)
