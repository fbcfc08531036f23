"""Episodes with the real engine and real households: reproducible, and a broken environment costs its episode alone."""

import asyncio
import itertools
import threading

import pytest
import torch
from toyworld import make_chat, make_engine, make_factory, practised_model

from paw.algo.samples import sequences, to_samples
from paw.config import Config, ModelConfig, RolloutConfig
from paw.envs.base import Endless, train_tasks
from paw.envs.worker import Worker
from paw.errors import UserError
from paw.rollout.engines.base import Request
from paw.rollout.episode import ContextFull, derive_seed
from paw.rollout.scheduler import Rollouts
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
    tasks = train_tasks(rollouts.factory, 0, 3, 0) if tasks is None else tasks
    return rollouts.play(tasks, group_size=group_size, temperature=temperature, seed=seed, stream=stream, **options)


def episodes_of(groups):
    return [episode for group in groups for episode in group.trajectories]


def turns_of(groups):
    return [turn for episode in episodes_of(groups) for turn in episode.turns]


class Scripted:
    """Counts to three, then wins; raises where it is told to."""

    def __init__(self, factory):
        self.factory = factory

    def _maybe_fail(self, where):
        if (where, self.made_for) in self.factory.failures or where == self.factory.always:
            raise self.factory.error(f"broken at {where}")

    def reset(self, task):
        self.n = 0
        self.made_for = (task.id, next(self.factory.starts.setdefault(task.id, itertools.count())))
        self._maybe_fail("reset")
        return "start"

    def context(self):
        self._maybe_fail(f"context {self.n}")
        return f"task: put a mug in shelf 1.\nturn {self.n}"

    def anchor(self):
        return f"at {self.n}"

    def step(self, response):
        self.factory.on_step(self)
        self._maybe_fail(f"step {self.n}")
        self.n += 1
        done = self.n == 3
        return Outcome(f"now {self.n}", float(done), done, done, response, valid=True)

    def close(self):
        self.factory.closed += 1
        if self.factory.close_raises:
            raise OSError("already gone")


class ScriptedFactory:
    """A real factory of the smallest environment; `failures` holds (where, (task id, nth start of the task))."""

    name, reward_max, invalid_penalty, distinct_eval = "scripted", 1.0, 0.0, True

    def __init__(self, *failures, always="", error=RuntimeError, close_raises=False, on_step=None):
        self.failures, self.always, self.error, self.close_raises = set(failures), always, error, close_raises
        self.may_block, self.on_step = on_step is not None, on_step or (lambda environment: None)
        self.starts, self.closed, self.made = {}, 0, 0

    def tasks(self, split, seed):
        return Endless(lambda i: Task(f"task {i}", "count"))

    def make(self):
        self.made += 1
        return Scripted(self)


def scripted(model, *failures, **options):
    return Rollouts(ScriptedFactory(*failures, **options), make_engine(model), make_chat(), CONFIG)


def test_members_of_a_group_play_the_same_task(rollouts):
    tasks = train_tasks(rollouts.factory, 0, 3, 0)
    groups, stats = play(rollouts, tasks)
    assert [group.task for group in groups] == tasks
    for group in groups:
        assert [episode.member for episode in group.trajectories] == [0, 1, 2, 3]
        assert {episode.task.id for episode in group.trajectories} == {group.task.id}
        assert len({episode.turns[0].prompt for episode in group.trajectories}) == 1
        assert len({tuple(t.response_ids[0] for t in episode.turns) for episode in group.trajectories}) > 1
    assert (stats.groups_dropped, stats.prompts_truncated, stats.failures) == (0, 0, [])


def test_turns_carry_what_engine_and_environment_said(rollouts):
    """And the games replay to the same outcomes: nothing is lost between the response's ids and the environment."""
    groups, stats = play(rollouts)
    environment = rollouts.factory.make()
    for episode in episodes_of(groups):
        environment.reset(episode.task)
        for turn in episode.turns:
            assert (environment.context(), environment.step(turn.response)) == (turn.prompt, turn.outcome)
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


def test_same_seed_same_episodes_another_seed_or_stream_others(rollouts):
    first, again = turns_of(play(rollouts)[0]), turns_of(play(rollouts)[0])
    assert first == again
    assert turns_of(play(rollouts, seed=1)[0]) != first
    assert turns_of(play(rollouts, stream="train/1")[0]) != first


def test_tokens_do_not_depend_on_what_else_is_played(rollouts, model):
    tasks = train_tasks(rollouts.factory, 0, 6, 0)
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


@pytest.mark.parametrize("where", ["reset", "context 0", "context 1", "step 0", "step 2"])
@pytest.mark.parametrize("think", [None, lambda environment: None])
def test_a_failing_episode_is_left_out_and_counted(model, where, think):
    rollouts = scripted(model, (where, ("task 1", 2)), on_step=think)
    groups, stats = play(rollouts)
    assert [len(group.trajectories) for group in groups] == [4, 3, 4]
    assert think or [episode.member for episode in groups[1].trajectories] == [0, 1, 3]
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
    groups, stats = play(rollouts, train_tasks(rollouts.factory, 0, 1, 0), group_size=3)
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


def test_a_group_below_two_members_is_dropped(model):
    failures = [("step 1", ("task 0", i)) for i in range(3)] + [("reset", ("task 2", i)) for i in range(4)]
    groups, stats = play(scripted(model, *failures))
    assert [group.task.id for group in groups] == ["task 1"]
    assert (len(stats.failures), stats.groups_dropped) == (7, 2)
    groups, stats = play(scripted(model, ("step 0", ("task 1", 0))), group_size=1)
    assert [group.task.id for group in groups] == ["task 0", "task 2"]
    assert stats.groups_dropped == 1


@pytest.mark.parametrize("where", ["reset", "context 0", "step 0"])
def test_nothing_is_left_when_everything_fails_even_closing(model, where):
    rollouts = scripted(model, always=where, close_raises=True)
    groups, stats = play(rollouts)
    assert groups == []
    assert (len(stats.failures), stats.groups_dropped) == (12, 3)
    assert rollouts.engine.pending == 0


@pytest.mark.parametrize("where", ["reset", "context 0", "step 0"])
@pytest.mark.parametrize("think", [None, lambda environment: None])  # in the trainer's thread, and in others
def test_a_users_mistake_stops_the_run(model, where, think):
    with pytest.raises(UserError, match=f"broken at {where}"):
        play(scripted(model, always=where, error=UserError, on_step=think))


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


# --- agents: what they see and what becomes of it ---------------------------------------------------------------------


def by(model, agent, *failures, factory=None, config=CONFIG, **options):
    return Rollouts(
        factory or ScriptedFactory(*failures, **options), make_engine(model), make_chat(), config, agent=agent
    )


def test_a_call_that_continues_another_has_its_ids_and_those_of_the_text(model):
    chat, texts = make_chat(), [" and so\n", "go on\n"]

    async def agent(env, model):
        await env.reset()
        response = None
        for text in (env.context(), *texts):
            response = await model.generate(text, continues=response)
            await env.step(response)

    config = CONFIG.model_copy(update={"rollout": RolloutConfig(max_prompt_tokens=256, max_response_tokens=1)})
    ended = 0
    for episode in episodes_of(play(by(model, agent))[0] + play(by(model, agent, config=config))[0]):
        for text, before, turn in zip(texts, episode.turns, episode.turns[1:], strict=False):
            ids = chat.observation_ids(text, 99)
            if before.response_ids[-1] in chat.end_ids:  # it had ended its turn: the text is the user's
                ended += 1
                ids = chat.separator_ids + ids + chat.reply_ids
            assert turn.prompt_ids == before.prompt_ids + before.response_ids + ids
            assert turn.prompt == before.prompt + before.response + text
    assert 0 < ended < 48


def test_a_response_ends_at_the_first_token_that_completes_a_stop_string(model):
    chat, said = make_chat(), []

    def agent(stop):
        async def agent(env, model):
            await env.reset()
            while not env.done:
                response = await model.generate(env.context(), stop=stop)
                said.append((response, response.stop))
                await env.step(response)

        return agent

    whole, said = turns_of(play(by(model, agent(())))[0]), []
    longest = max(whole, key=lambda turn: len(turn.response))
    stop = longest.response[2:5]
    turns = turns_of(play(by(model, agent(("no such text", stop))))[0])
    assert [text for text, _ in said].count("") < len(said)
    cut = [(before, turn) for before, turn in zip(whole, turns, strict=True) if stop in before.response]
    assert cut
    for before, turn in cut:
        n = len(turn.response_ids)
        assert turn.response_ids == before.response_ids[:n]
        assert turn.sampled_logp == pytest.approx(before.sampled_logp[:n], abs=1e-5)
        assert turn.entropy == pytest.approx(before.entropy[:n], abs=1e-5)
        assert stop in chat.decode(turn.response_ids) and stop not in chat.decode(turn.response_ids[:-1])
    assert all((stop not in text) and found in ("", stop) for text, found in said)


def test_turns_without_a_step_and_steps_without_a_turn(model):
    """A thought has an empty outcome; an action that no model was asked for adds its reward to the turn before."""

    async def agent(env, model):
        await env.reset()
        await env.step("before")
        await model.generate("think")
        await env.step(await model.generate(env.context()))
        await env.step("by itself")

    factory = ScriptedFactory()
    groups, stats = play(by(model, agent, factory=factory))
    assert stats.failures == []
    for episode in episodes_of(groups):
        thought, last = episode.turns
        assert (thought.prompt, thought.outcome.observation, thought.outcome.valid) == ("think", "", True)
        assert (last.outcome.reward, last.outcome.done, last.outcome.won) == (1.0, True, True)
        assert episode.episode_return == 1.0


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        ("TypeError: oh", TypeError("oh")),
        ("SystemExit: 3", SystemExit(3)),
        ("RuntimeError: broken at step 0", "swallow"),
        ("RuntimeError: the agent ended without a call of the model", "silent"),
        ("RuntimeError: the agent does not end: 100 calls of the model", "endless"),
        ("RuntimeError: env.step() before env.reset() or after the end", "early"),
    ],
)
def test_an_agent_that_fails_costs_its_episode(model, reason, ends):
    config = CONFIG.model_copy(update={"env": CONFIG.env.model_copy(update={"max_turns": 1})})

    async def agent(env, model):
        if ends == "early":
            await env.step("now")
        await env.reset()
        if isinstance(ends, BaseException):
            raise ends
        while ends == "endless":
            await model.generate("on and on")
        if ends == "swallow":
            response = await model.generate(env.context())
            try:
                await env.step(response)
            except Exception:
                await model.generate("never mind")

    groups, stats = play(by(model, agent, always="step 0", config=config), [Task("a", "b")], group_size=2)
    assert groups == [] and [failure.partition(": ")[2] for failure in stats.failures] == [reason] * 2


def test_a_full_context_ends_the_episode_with_what_it_has(model):
    async def agent(env, model):
        await env.reset()
        response = await model.generate(env.context())
        await env.step(response)
        try:
            await model.generate("x" * 300, continues=response)
        except ContextFull:
            await model.generate("y" * 300, continues=response)

    groups, stats = play(by(model, agent))
    assert stats.failures == [] and [len(episode.turns) for episode in episodes_of(groups)] == [1] * 12


class AsyncGame(Scripted):
    """Awaits between its methods' halves, and has no anchor of its own."""

    anchor = property()

    async def reset(self, task):
        await asyncio.sleep(0.01)
        return super().reset(task)

    async def step(self, response):
        self.factory.inside += 1
        self.factory.most = max(self.factory.most, self.factory.inside)
        await asyncio.sleep(0.02)
        self.factory.inside -= 1
        return super().step(response)


def test_environments_may_be_async_and_need_no_anchor(model):
    class AsyncFactory(ScriptedFactory):
        inside = most = 0

        def make(self):
            self.made += 1
            return AsyncGame(self)

    factory = AsyncFactory(("step 1", ("task 1", 0)))
    groups, stats = play(by(model, None, factory=factory))
    assert [len(group.trajectories) for group in groups] == [4, 3, 4] and len(stats.failures) == 1
    assert [turn.anchor for turn in groups[0].trajectories[0].turns] == ["start", "now 1", "now 2"]
    assert factory.most > 1


def test_a_play_inside_a_running_loop(model):
    """As in a cell of a notebook."""

    async def cell():
        groups, _ = play(scripted(model))
        await asyncio.sleep(0)
        return groups

    assert turns_of(asyncio.run(cell())) == turns_of(play(scripted(model))[0])


REWARDS = """
from paw.types import Trajectory

def brief(trajectory: Trajectory, *, bonus: float = 2.0) -> float:
    return bonus - sum(len(turn.response_ids) for turn in trajectory.turns) / 10

def wrong(trajectory):
    return float("nan") if trajectory.member == 1 else 1

def absent(trajectory):
    raise KeyError("no judge")
"""


def rewarded(model, path, name):
    config = CONFIG.model_copy(update={"reward": CONFIG.reward.model_copy(update={"type": f"{path}:{name}"})})
    return by(model, None, config=config)


def test_a_reward_over_the_trajectory_takes_the_place_of_the_environments(model, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS.replace(", *, bonus: float = 2.0", "").replace("bonus", "2.0"))
    groups, _ = play(rewarded(model, path, "brief"))
    for episode in episodes_of(groups):
        tokens = sum(len(turn.response_ids) for turn in episode.turns)
        assert [turn.outcome.reward for turn in episode.turns] == [0.0, 0.0, 2.0 - tokens / 10]
        assert episode.episode_return == 2.0 - tokens / 10 and episode.won
    groups, stats = play(rewarded(model, path, "wrong"))
    assert [len(group.trajectories) for group in groups] == [3, 3, 3]
    assert "rewards.py:wrong' is nan; it must be a number from -1e+06 to 1e+06" in stats.failures[0]
    assert "KeyError: 'no judge'" in play(rewarded(model, path, "absent"))[1].failures[0]


class Talk(Scripted):
    """The same as a conversation: the user says what is new, the model's answers stay."""

    def reset(self, task):
        self.messages = [{"role": "user", "content": "task: put a mug in shelf 1."}]
        return super().reset(task)

    def context(self):
        return list(self.messages)

    def step(self, response):
        outcome = super().step(response)
        self.messages += [{"role": "assistant", "content": str(response)}, {"role": "user", "content": f"now {self.n}"}]
        return outcome


def test_a_conversation_goes_on_with_its_own_tokens(model, monkeypatch):
    """Turns whose answer ended share a sequence, in which the observations stand already; none is encoded again."""
    monkeypatch.setattr(ScriptedFactory, "make", lambda self: Talk(self))
    chat = make_chat()
    rollouts = Rollouts(ScriptedFactory(), make_engine(model), chat, CONFIG)
    groups, stats = play(rollouts, [Task(f"task {i}", "count") for i in range(4)])
    assert not stats.failed
    ended = 0
    for episode in episodes_of(groups):
        for before, after in itertools.pairwise(episode.turns):
            whole = before.prompt_ids + before.response_ids
            if before.response_ids[-1] in chat.end_ids:
                user = chat.observation_ids(before.outcome.observation, 99)
                assert after.prompt_ids == whole + chat.separator_ids + user + chat.reply_ids
                ended += 1
            else:  # cut at max_tokens: the template's own end of turn is put after the text
                assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    assert ended > 4
    samples = to_samples(
        groups,
        separator_ids=chat.separator_ids,
        encode_observation=lambda text: chat.observation_ids(text, 99),
        invalid_penalty=0.0,
    )
    for sample in samples:
        sample.wm_weight = 1.0
    assert len(sequences(samples, with_observation=True)) == len(samples) - ended


def test_a_conversation_must_alternate(model, monkeypatch):
    monkeypatch.setattr(ScriptedFactory, "make", lambda self: Talk(self))
    monkeypatch.setattr(Talk, "context", lambda self: [{"role": "system", "content": "be brief"}, *self.messages])
    _, stats = play(Rollouts(ScriptedFactory(), make_engine(model), make_chat(), CONFIG), [Task("task 0", "count")])
    assert "its roles are system, user" in stats.failures[0]
