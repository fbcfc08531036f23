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
from paw.errors import UserError
from paw.rollout.chat import ContextFull
from paw.rollout.engines.base import Request
from paw.rollout.episode import derive_seed
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
            raise RuntimeError(f"broken at {where}")

    def reset(self, task):
        self.n = 0
        self.made_for = (task.id, next(self.factory.starts.setdefault(task.id, itertools.count())))
        self._maybe_fail("reset")
        return "start"

    def context(self):
        return f"task: put a mug in shelf 1.\nturn {self.n}"

    def step(self, response):
        self.factory.on_step(self)
        self._maybe_fail(f"step {self.n}")
        self.n += 1
        done = self.n == 3
        return Outcome(f"now {self.n}", float(done), done, done, response, valid=True)

    def close(self):
        self.factory.closed += 1
        if self.factory.always:
            raise OSError("already gone")


class ScriptedFactory:
    """`failures` holds (where, (task id, nth start of the task)); environments of class `game`."""

    name, reward_max, invalid_penalty, distinct_eval = "scripted", 1.0, 0.0, True

    def __init__(self, *failures, always="", on_step=None, game=Scripted):
        self.failures, self.always, self.game = set(failures), always, game
        self.may_block, self.on_step = on_step is not None, on_step or (lambda environment: None)
        self.starts, self.closed, self.made = {}, 0, 0

    def tasks(self, split, seed):
        return Endless(lambda i: Task(f"task {i}", "count"))

    def make(self):
        self.made += 1
        return self.game(self)


def scripted(model, *failures, agent=None, config=CONFIG, **options):
    return Rollouts(ScriptedFactory(*failures, **options), make_engine(model), make_chat(), config, agent=agent)


def changed(**sections):
    return CONFIG.model_copy(
        update={name: CONFIG.__dict__[name].model_copy(update=to) for name, to in sections.items()}
    )


def test_turns_carry_what_engine_and_environment_said(rollouts):
    """And the games replay to the same outcomes: nothing is lost between the response's ids and the environment."""
    tasks, seen = train_tasks(rollouts.factory, 0, 3, 0), []
    groups, stats = play(rollouts, tasks, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 12) for n in range(1, 13)]
    assert [group.task for group in groups] == tasks
    for group in groups:
        assert [(episode.member, episode.task) for episode in group.trajectories] == [(i, group.task) for i in range(4)]
        assert len({episode.turns[0].prompt for episode in group.trajectories}) == 1
        assert len({tuple(t.response_ids[0] for t in episode.turns) for episode in group.trajectories}) > 1
    assert (stats.groups_dropped, stats.prompts_truncated, stats.failures) == (0, 0, [])
    environment, chat, turns = rollouts.factory.make(), make_chat(), turns_of(groups)
    for episode in episodes_of(groups):
        environment.reset(episode.task)
        for turn in episode.turns:
            assert (environment.context(), environment.step(turn.response)) == (turn.prompt, turn.outcome)
        assert [turn.outcome.done for turn in episode.turns] == [False] * (len(episode.turns) - 1) + [True]
        for turn, following in itertools.pairwise(episode.turns):
            assert following.anchor == turn.outcome.observation
    for turn in turns:
        assert turn.prompt_ids == chat.prompt_ids(turn.prompt) and turn.version == 0
        assert len(turn.response_ids) == len(turn.sampled_logp) == len(turn.entropy) <= 3
        assert all(i not in chat.end_ids for i in turn.response_ids[:-1])
        assert len(turn.response_ids) == 3 or turn.response_ids[-1] in chat.end_ids
        assert turn.response == chat.decode(turn.response_ids)
        assert all(value <= 0 for value in turn.sampled_logp) and all(value >= 0 for value in turn.entropy)
    assert stats.prompt_tokens == sum(len(turn.prompt_ids) for turn in turns)
    assert stats.response_tokens == sum(len(turn.response_ids) for turn in turns)


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


def test_long_prompts_are_cut_and_counted_and_turns_carry_the_weight_version(rollouts):
    rollouts.config = changed(rollout={"max_prompt_tokens": 24})
    rollouts.engine.sync([], version=9)
    groups, stats = play(rollouts)
    assert all(len(turn.prompt_ids) <= 24 and turn.version == 9 for turn in turns_of(groups))
    assert stats.prompts_truncated == len(turns_of(groups))
    rollouts.config = changed(rollout={"max_prompt_tokens": 2})
    with pytest.raises(UserError, match="max_prompt_tokens = 2"):
        play(rollouts)


@pytest.mark.parametrize("think", [None, lambda environment: None])
def test_a_failing_episode_is_left_out_and_changes_no_other(model, think):
    whole = turns_of(play(scripted(model))[0])
    rollouts = scripted(model, ("step 1", ("task 0", 0)), on_step=think)
    groups, stats = play(rollouts)
    assert [len(group.trajectories) for group in groups] == [3, 4, 4]
    if not think:  # in threads, which episode is the first to start is not said
        assert [(t.response_ids, t.outcome) for t in turns_of(groups)] == [
            (t.response_ids, t.outcome) for t in whole[3:]
        ]
    assert stats.failures == ["task 0: RuntimeError: broken at step 1"] and stats.groups_dropped == 0
    assert rollouts.factory.closed == 1
    again, stats = play(rollouts)  # the broken environment was replaced, the others are kept
    assert len(episodes_of(again)) == 12 and stats.failures == [] and rollouts.factory.made == 13
    for _ in range(2):
        rollouts.close()
        assert rollouts.factory.closed == 13


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


def test_a_group_below_two_members_is_dropped_and_all_may_be(model):
    failures = [("step 1", ("task 0", i)) for i in range(3)] + [("reset", ("task 2", i)) for i in range(4)]
    groups, stats = play(scripted(model, *failures))
    assert [group.task.id for group in groups] == ["task 1"]
    assert (len(stats.failures), stats.groups_dropped) == (7, 2)
    groups, stats = play(scripted(model, ("step 0", ("task 1", 0))), group_size=1)
    assert [group.task.id for group in groups] == ["task 0", "task 2"]
    assert stats.groups_dropped == 1
    rollouts = scripted(model, always="step 0")  # closing them fails, too
    groups, stats = play(rollouts)
    assert groups == [] and (len(stats.failures), stats.groups_dropped) == (12, 3)
    assert rollouts.engine.pending == 0


def test_seeds_are_stable():
    assert derive_seed(0, "train/0", 1, 2, 3) == 8473358073702443013


# --- agents: what they see and what becomes of it ---------------------------------------------------------------------


def test_a_call_that_continues_another_has_its_ids_and_those_of_the_text(model):
    chat, texts = make_chat(), [" and so\n", "go on\n"]

    async def agent(env, model):
        await env.reset()
        response = None
        for text in (env.context(), *texts):
            response = await model.generate(text, continues=response)
            await env.step(response)

    short, ended = changed(rollout={"max_response_tokens": 1}), 0
    played = [play(scripted(model, agent=agent, config=config))[0] for config in (CONFIG, short)]
    for episode in episodes_of(played[0] + played[1]):
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

    whole, said = turns_of(play(scripted(model, agent=agent(())))[0]), []
    longest = max(whole, key=lambda turn: len(turn.response))
    stop = longest.response[2:5]
    turns = turns_of(play(scripted(model, agent=agent(("no such text", stop))))[0])
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

    groups, stats = play(scripted(model, agent=agent))
    assert stats.failures == []
    for episode in episodes_of(groups):
        thought, last = episode.turns
        assert (thought.prompt, thought.outcome.observation, thought.outcome.valid) == ("think", "", True)
        assert (last.outcome.reward, last.outcome.done, last.outcome.won) == (1.0, True, True)
        assert episode.episode_return == 1.0


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        ("SystemExit: 3", SystemExit(3)),
        ("RuntimeError: broken at step 0", "swallow"),
        ("RuntimeError: the agent ended without a call of the model", "silent"),
        ("RuntimeError: the agent does not end: 100 calls of the model", "endless"),
        ("RuntimeError: env.step() before env.reset() or after the end", "early"),
    ],
)
def test_an_agent_that_fails_costs_its_episode(model, reason, ends):
    config = changed(env={"max_turns": 1})

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

    groups, stats = play(scripted(model, agent=agent, always="step 0", config=config), [Task("a", "b")], group_size=2)
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

    groups, stats = play(scripted(model, agent=agent))
    assert stats.failures == [] and [len(episode.turns) for episode in episodes_of(groups)] == [1] * 12


class AsyncGame(Scripted):
    """Awaits between its methods' halves."""

    inside = most = 0

    async def reset(self, task):
        await asyncio.sleep(0.01)
        return super().reset(task)

    async def step(self, response):
        AsyncGame.inside += 1
        AsyncGame.most = max(self.most, self.inside)
        await asyncio.sleep(0.02)
        AsyncGame.inside -= 1
        return super().step(response)


def test_environments_may_be_async_and_need_no_anchor(model):
    groups, stats = play(scripted(model, ("step 1", ("task 1", 0)), game=AsyncGame))
    assert [len(group.trajectories) for group in groups] == [4, 3, 4] and len(stats.failures) == 1
    assert [turn.anchor for turn in groups[0].trajectories[0].turns] == ["start", "now 1", "now 2"]
    assert AsyncGame.most > 1


def test_a_play_inside_a_running_loop(model):
    """As in a cell of a notebook."""

    async def cell():
        groups, _ = play(scripted(model))
        await asyncio.sleep(0)
        return groups

    assert turns_of(asyncio.run(cell())) == turns_of(play(scripted(model))[0])


REWARDS = """
from paw.types import Trajectory

def brief(trajectory: Trajectory) -> float:
    return 2.0 - sum(len(turn.response_ids) for turn in trajectory.turns) / 10

def wrong(trajectory):
    return float("nan") if trajectory.member == 1 else 1

def absent(trajectory):
    raise KeyError("no judge")
"""


def rewarded(model, path, name):
    return scripted(model, config=changed(reward={"type": f"{path}:{name}"}))


def test_a_reward_over_the_trajectory_takes_the_place_of_the_environments(model, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
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


def test_a_conversation_goes_on_with_its_own_tokens(model):
    """Turns whose answer ended share a sequence, in which the observations stand already; none is encoded again."""
    chat, rollouts = make_chat(), scripted(model, game=Talk)
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
    monkeypatch.setattr(Talk, "context", lambda self: [{"role": "system", "content": "be brief"}, *self.messages])
    _, stats = play(scripted(model, game=Talk), [Task("task 0", "count")])
    assert "its roles are system, user" in stats.failures[0]
