"""Episodes with the real engine and real households: reproducible, and a broken environment costs its episode alone."""

import asyncio
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from environments import Game, Honest, factory, raises
from toyworld import make_chat, make_engine, make_factory, practised_model

from paw.algo.samples import sequences, to_samples
from paw.config import plugins
from paw.config.sections import Config, ModelConfig, RolloutConfig
from paw.distributed.parallel import DistributedRanks
from paw.envs.base import train_tasks
from paw.rollouts.engines.base import Request
from paw.rollouts.episode import derive_seed, plain
from paw.rollouts.scheduler import Rollouts
from paw.types import Outcome, Task

CONFIG = Config(
    model=ModelConfig(path="-"), rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=3)
)


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


def play(
    rollouts, tasks=None, *, group_size=4, temperature=1.0, seed=0, stream="train/0", **options
):
    tasks = train_tasks(rollouts.factory, 0, 3, 0) if tasks is None else tasks
    return rollouts.play_tasks(
        tasks, group_size=group_size, temperature=temperature, seed=seed, stream=stream, **options
    )


def episodes_of(groups):
    return [episode for group in groups for episode in group.trajectories]


def turns_of(groups):
    return [turn for episode in episodes_of(groups) for turn in episode.turns]


def scripted(model, made=Honest, *, agent=None, config=CONFIG, **wrong):
    """Of games that count to three; `wrong` is what the second of each four does."""
    made = factory(**wrong) if wrong else made
    return Rollouts(made(config.env), make_engine(model), make_chat(), config, agent=agent)


def changed(**sections):
    return CONFIG.model_copy(
        update={name: CONFIG.__dict__[name].model_copy(update=to) for name, to in sections.items()}
    )


def test_further_tasks_take_the_place_of_groups_whose_returns_are_all_equal(model):
    """The same ones each time, and not more than rollout.refill allows; what varies stays as it is without."""

    def some(trajectory):
        return float(sum(sum(turn.response_ids) for turn in trajectory.turns) % 4 == 0)

    def training(refill, step=0):
        config = changed(
            rollout={"refill": refill, "group_size": 3}, reward={"type": plugins.give(some)}
        )
        return Rollouts(make_factory(), make_engine(model), make_chat(), config).training(step, 6)

    def said(groups):
        return [
            (group.task.id, [turn.response_ids for turn in turns_of([group])]) for group in groups
        ]

    def returns(groups):
        return [len({episode.episode_return for episode in group.trajectories}) for group in groups]

    plain, _ = training(0)
    groups, stats = training(4)
    kept = [group for group, count in zip(plain, returns(plain), strict=True) if count > 1]
    assert (
        0 < len(kept) < 6 == len(groups)
        and said(groups)[: len(kept)] == said(kept)
        and min(returns(groups)) > 1
    )
    assert set(returns(stats.uniform)) == {1} and stats.metrics()["health/groups_refilled"] == len(
        stats.uniform
    )
    played = [group.task.id for group in groups + stats.uniform]
    assert len(set(played)) == len(played) and {group.task.id for group in plain} <= set(played)
    assert said(training(4)[0]) == said(groups)
    after, others = training(4, step=1)
    assert not set(played) & {group.task.id for group in after + others.uniform}
    few, stats = training(1)
    assert len(few) + len(stats.uniform) <= 12 and min(returns(few)) > 1


def test_an_update_keeps_its_groups_where_no_further_one_varies(model):
    config = changed(rollout={"refill": 2, "group_size": 4})
    played = []
    # All are won.
    groups, stats = scripted(model, config=config).training(0, 2, lambda *done: played.append(done))
    assert [group.task.id for group in groups] == ["train/0/0", "train/0/1"] and stats.uniform == []
    assert played[-1] == (8, 8) and len(played) == 3 * 8


def test_turns_carry_what_engine_and_environment_said(rollouts):
    """And the games replay to the same outcomes: nothing is lost between the response's ids and the environment."""
    tasks, seen = train_tasks(rollouts.factory, 0, 3, 0), []
    groups, stats = play(rollouts, tasks, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 12) for n in range(1, 13)]
    assert [group.task for group in groups] == tasks
    for group in groups:
        assert [(episode.member, episode.task) for episode in group.trajectories] == [
            (i, group.task) for i in range(4)
        ]
        assert len({episode.turns[0].prompt for episode in group.trajectories}) == 1
        assert (
            len({tuple(t.response_ids[0] for t in episode.turns) for episode in group.trajectories})
            > 1
        )
    assert (stats.groups_dropped, stats.prompts_truncated, stats.failures) == (0, 0, [])
    environment, chat, turns = rollouts.factory.make(), make_chat(), turns_of(groups)
    for episode in episodes_of(groups):
        environment.reset(episode.task)
        for turn in episode.turns:
            assert (environment.context(), environment.step(turn.response)) == (
                turn.prompt,
                turn.outcome,
            )
        assert [turn.outcome.done for turn in episode.turns] == [False] * (
            len(episode.turns) - 1
        ) + [True]
        for turn, following in itertools.pairwise(episode.turns):
            assert following.anchor == turn.outcome.observation
    for turn in turns:
        assert turn.prompt_ids == chat.prompt_ids(turn.prompt) and turn.response == chat.decode(
            turn.response_ids
        )
        assert len(turn.response_ids) == len(turn.sampled_logp) == len(turn.entropy) <= 3
        assert len(turn.response_ids) == 3 or turn.response_ids[-1] in chat.end_ids
        assert turn.version == 0 and not chat.end_ids.intersection(turn.response_ids[:-1])
        assert all(value <= 0 for value in turn.sampled_logp) and all(
            value >= 0 for value in turn.entropy
        )
    assert stats.prompt_tokens == sum(len(turn.prompt_ids) for turn in turns)
    assert stats.response_tokens == sum(len(turn.response_ids) for turn in turns)


def test_a_turns_tokens_follow_from_its_coordinates(rollouts):
    assert derive_seed(0, "train/0", 1, 2, 3) == 8473358073702443013  # on every machine
    groups, _ = play(rollouts, seed=5, stream="train/7")
    for g, group in enumerate(groups):
        for episode in group.trajectories:
            for t, turn in enumerate(episode.turns):
                seed = derive_seed(5, "train/7", g, episode.member, t)
                rollouts.engine.submit(
                    Request(0, turn.prompt_ids, seed, temperature=1.0, max_tokens=3)
                )
                assert rollouts.engine.step()[0].token_ids == turn.response_ids


def test_long_prompts_are_cut_and_counted_and_turns_carry_the_weight_version(rollouts):
    rollouts.config = changed(rollout={"max_prompt_tokens": 24})
    rollouts.engine.sync([], version=9)
    groups, stats = play(rollouts)
    assert all(len(turn.prompt_ids) <= 24 and turn.version == 9 for turn in turns_of(groups))
    assert stats.prompts_truncated == len(turns_of(groups))


def test_a_failing_episode_is_left_out_and_changes_no_other(model):
    """A group left with one member is dropped."""
    broken, closed = {"step": raises(RuntimeError("broken"))}, []
    whole, rollouts = play(scripted(model))[0], scripted(model, **broken, close=closed.append)
    groups, stats = play(rollouts)
    assert [[episode.member for episode in group.trajectories] for group in groups] == [
        [0, 2, 3]
    ] * 3
    others = [
        turn for episode in episodes_of(whole) if episode.member != 1 for turn in episode.turns
    ]
    assert [(t.response_ids, t.outcome) for t in turns_of(groups)] == [
        (t.response_ids, t.outcome) for t in others
    ]
    assert stats.failures == [f"train/0/{i}: RuntimeError: broken" for i in range(3)]
    assert stats.groups_dropped == 0 and len(closed) == 3
    # The broken environments were replaced, one by a broken one; the others are kept.
    again, stats = play(rollouts)
    assert (len(episodes_of(again)), len(stats.failures), rollouts.factory.made) == (11, 1, 15)
    for size, kept in ((1, [0, 2]), (2, [1])):
        groups, stats = play(scripted(model, **broken), group_size=size)
        assert [group.task.id for group in groups] == [f"train/0/{i}" for i in kept]
        assert stats.groups_dropped == 3 - len(kept)
    rollouts = scripted(model, everywhere=True, **broken, close=raises(OSError("already gone")))
    groups, stats = play(rollouts)
    assert (
        groups == []
        and (len(stats.failures), stats.groups_dropped) == (12, 3)
        and rollouts.engine.pending == 0
    )


class Together(DistributedRanks):
    """One of several ranks, each in a thread of this process."""

    def __init__(self, rank, table, meeting):
        self.rank, self.world_size, self.table, self.meeting = rank, len(table), table, meeting

    def gather_flat(self, own):
        self.table[self.rank] = own
        self.meeting.wait(10)
        found = list(self.table)
        self.meeting.wait(10)
        return found


async def one_fails(env, model):
    """The second episode of the second task."""
    if (env.task.id, env.episode.trajectory.member) == ("train/0/1", 1):
        raise RuntimeError("broken")
    await plain(env, model)


@pytest.mark.parametrize(("size", "world"), [(4, 2), (2, 4), (2, 5), (4, 12), (1, 3)])
def test_ranks_play_blocks_of_the_episodes_and_put_groups_together(model, size, world):
    """What comes of it does not depend on their number; a group is too small only when all have said what they have."""
    alone = Rollouts(Honest(CONFIG.env), make_engine(model), make_chat(), CONFIG, agent=one_fails)
    table, meeting = [None] * world, threading.Barrier(world)
    encode = {"encode_observation": lambda text: [len(text), 1]}
    ranks = [Rollouts(alone.factory, make_engine(model), make_chat(), CONFIG, ranks=Together(rank, table, meeting),
                      agent=one_fails, **encode) for rank in range(world)]  # fmt: skip
    tasks = train_tasks(alone.factory, 0, 3, 0)
    options = {"group_size": size, "temperature": 1.0, "seed": 0, "stream": "train/0"}
    own = [rank.play_share(tasks, **options) for rank in ranks]
    played = [
        [(group.index, t.member) for group in groups for t in group.trajectories]
        for groups, _ in own
    ]
    assert sorted(itertools.chain(*played)) == [
        (p, m) for p in range(3) for m in range(size) if (p, m) != (1, 1)
    ]
    assert all(a < b for a, b in itertools.pairwise(filter(None, played)))
    sizes = [
        len(members) + len(stats.failed) for members, (_, stats) in zip(played, own, strict=True)
    ]
    assert max(sizes) - min(sizes) <= 1
    firsts = [
        episode for groups, _ in own for episode in episodes_of(groups) if episode.member == 0
    ]
    # No entropies, and other weights meanwhile.
    for turn in (turn for episode in firsts for turn in episode.turns):
        turn.versions, turn.entropy = [7] * len(turn.response_ids), None
    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(lambda rank, its: rank.gather_groups(its, tasks, size), ranks, own))
    wanted, stats = play(alone, tasks, group_size=size)
    assert stats.groups_dropped == (size == 2) and len(stats.failed) == (size > 1)
    for groups, its in found:
        assert [(g.task, g.index) for g in groups] == [(g.task, g.index) for g in wanted]
        assert vars(its).keys() == vars(stats).keys() and its.metrics() == stats.metrics()
        assert its.failures == stats.failures
        members = [episode.member for episode in episodes_of(groups) for _ in episode.turns]
        for member, ours, theirs in zip(members, turns_of(groups), turns_of(wanted), strict=True):
            assert (ours.prompt_ids, ours.response_ids) == (theirs.prompt_ids, theirs.response_ids)
            assert (ours.outcome, ours.version) == (theirs.outcome, theirs.version)
            assert ours.sampled_logp == pytest.approx(theirs.sampled_logp, abs=1e-5)
            assert ours.observation_ids == [len(ours.outcome.observation), 1]
            if member:
                assert ours.versions is None and ours.entropy == pytest.approx(
                    theirs.entropy, abs=1e-5
                )
            else:
                assert ours.versions == [7] * len(ours.response_ids) and ours.entropy is None


def test_environments_are_closed_once(model):
    closed = []
    rollouts = scripted(model, close=closed.append, everywhere=True)
    play(rollouts)
    for _ in range(2):
        rollouts.close()
        assert len(closed) == 12


def test_environments_that_may_block_step_at_the_same_time(model):
    """Each step of an environment returns only when all twelve are in theirs."""
    meeting = threading.Barrier(12)

    def meet(game):
        meeting.wait(timeout=10)
        return Outcome(f"now {game.n}", float(game.n == 3), game.n == 3, game.n == 3)

    groups, stats = play(scripted(model, step=meet, may_block=True, everywhere=True))
    whole = turns_of(play(scripted(model))[0])
    assert stats.failures == [] and [t.response_ids for t in turns_of(groups)] == [
        t.response_ids for t in whole
    ]


def test_a_continuous_engine_works_on_while_an_environment_steps(model):
    """One environment's steps last until all that do not wait so have finished."""
    others_finished = threading.Event()

    def wait(game):
        assert others_finished.wait(timeout=10)
        return Outcome("at last", 1.0, done=True, won=True)

    rollouts = scripted(model, step=wait, may_block=True)
    rollouts.engine.continuous = True
    groups, stats = play(
        rollouts, progress=lambda done, total: done == total - 3 and others_finished.set()
    )
    assert (
        stats.failures == []
        and [turn.outcome.observation for turn in turns_of(groups)].count("at last") == 3
    )
    played, whole = (
        [
            turn.response_ids
            for episode in episodes_of(found)
            if episode.member != 1
            for turn in episode.turns
        ]
        for found in (groups, play(scripted(model))[0])
    )
    assert played == whole


# --- agents: what they see and what becomes of it
# ---------------------------------------------------------------------


def test_a_call_that_continues_another_has_its_ids_and_those_of_the_text(model):
    """One that does not fit ends the episode, which counts with what it has."""
    chat, texts = make_chat(), [" and so\n", "go on\n", "x" * 300]

    async def agent(env, model):
        await env.reset()
        response = None
        for text in (env.context(), *texts):
            response = await model.generate(text, continues=response)
            if not env.done:
                await env.step(response)

    short, ended = changed(rollout={"max_response_tokens": 1}), 0
    played = [play(scripted(model, agent=agent, config=config)) for config in (CONFIG, short)]
    assert [stats.failures for _, stats in played] == [[], []]
    for episode in episodes_of(played[0][0] + played[1][0]):
        assert len(episode.turns) == 3
        for text, before, turn in zip(texts, episode.turns, episode.turns[1:], strict=False):
            ids = chat.observation_ids(text, 99)
            # It had ended its turn: the text is the user's.
            if before.response_ids[-1] in chat.end_ids:
                ended += 1
                ids = chat.separator_ids + ids + chat.reply_ids
            assert turn.prompt_ids == before.prompt_ids + before.response_ids + ids
            assert turn.prompt == before.prompt + before.response + text
    assert 0 < ended < 48


def test_a_response_ends_at_the_first_token_that_completes_a_stop_string(model):
    chat, said = make_chat(), []

    def played(*stop):
        async def agent(env, model):
            await env.reset()
            while not env.done:
                said.append(await model.generate(env.context(), stop=stop))
                await env.step(said[-1])

        said.clear()
        return turns_of(play(scripted(model, agent=agent))[0])

    whole = played()
    stop = max((turn.response for turn in whole), key=len)[2:5]
    turns = played("no such text", stop)
    cut = [
        (before, turn) for before, turn in zip(whole, turns, strict=True) if stop in before.response
    ]
    assert cut
    for before, turn in cut:
        n = len(turn.response_ids)
        assert turn.response_ids == before.response_ids[:n]
        assert turn.sampled_logp == pytest.approx(before.sampled_logp[:n], abs=1e-5)
        assert turn.entropy == pytest.approx(before.entropy[:n], abs=1e-5)
        assert stop in chat.decode(turn.response_ids) and stop not in chat.decode(
            turn.response_ids[:-1]
        )
    assert sum(response.stop == stop for response in said) == len(cut)
    assert all(stop not in response and response.stop in ("", stop) for response in said)


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
        assert (thought.prompt, thought.outcome.observation, thought.outcome.valid) == (
            "think",
            "",
            True,
        )
        assert (last.outcome.reward, last.outcome.done, last.outcome.won) == (1.0, True, True)
        assert episode.episode_return == 1.0


async def exits(env, model):
    raise SystemExit(3)


async def says_nothing(env, model):
    await env.reset()


async def never_ends(env, model):
    await env.reset()
    while True:
        await model.generate("on and on")


async def begins_early(env, model):
    await env.step("now")


async def swallows(env, model):
    await env.reset()
    response = await model.generate(env.context())
    with suppress(Exception):
        await env.step(response)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (exits, "SystemExit: 3"),
        (swallows, "RuntimeError: broken"),
        (says_nothing, "RuntimeError: the agent ended without a call of the model"),
        (never_ends, "RuntimeError: the agent does not end: 100 calls of the model"),
        (begins_early, "RuntimeError: env.step() before env.reset() or after the end"),
    ],
)
def test_an_agent_that_fails_costs_its_episode(model, agent, reason):
    broken, config = (
        {"step": raises(RuntimeError("broken")), "everywhere": True},
        changed(env={"max_turns": 1}),
    )
    groups, stats = play(
        scripted(model, agent=agent, config=config, **broken), [Task("a", "b")], group_size=2
    )
    assert (
        groups == [] and [failure.partition(": ")[2] for failure in stats.failures] == [reason] * 2
    )


class AsyncGame(Game):
    """Awaits between its methods' halves, and has no anchor."""

    inside = most = 0
    anchor = None

    async def step(self, response):
        AsyncGame.inside += 1
        AsyncGame.most = max(self.most, self.inside)
        await asyncio.sleep(0.02)
        AsyncGame.inside -= 1
        return super().step(response)


def playing(game):
    return type("Own", (Honest,), {"make": lambda self: game({})})


def test_environments_may_be_async_inside_a_running_loop(model):
    """As in a cell of a notebook."""

    async def cell():
        played = play(scripted(model, playing(AsyncGame)))
        await asyncio.sleep(0)
        return played

    groups, stats = asyncio.run(cell())
    assert (
        stats.failures == [] and [len(episode.turns) for episode in episodes_of(groups)] == [3] * 12
    )
    assert [turn.anchor for turn in groups[0].trajectories[0].turns] == ["start", "now 1", "now 2"]
    whole = turns_of(play(scripted(model))[0])
    assert AsyncGame.most > 1 and [t.response_ids for t in turns_of(groups)] == [
        t.response_ids for t in whole
    ]


REWARDS = """
def odd(trajectory):
    if trajectory.member == 2:
        raise KeyError("no judge")
    return float("nan") if trajectory.member == 1 else 2.0 - len(trajectory.turns[0].response_ids) / 10
"""


def test_a_reward_over_the_trajectory_takes_the_place_of_the_environments(model, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    groups, stats = play(scripted(model, config=changed(reward={"type": f"{path}:odd"})))
    assert [[episode.member for episode in group.trajectories] for group in groups] == [[0, 3]] * 3
    for episode in episodes_of(groups):
        value = 2.0 - len(episode.turns[0].response_ids) / 10
        assert [turn.outcome.reward for turn in episode.turns] == [0.0, 0.0, value]
        assert episode.episode_return == value and episode.won
    assert "rewards.py:odd' is nan; it must be a number from -1e+06 to 1e+06" in stats.failures[0]
    assert "KeyError: 'no judge'" in stats.failures[1]


class Talk(Game):
    """The same as a conversation: the user says what is new, the model's answers stay."""

    def reset(self, task):
        self.messages = [{"role": "user", "content": "task: put a mug in shelf 1."}]
        return super().reset(task)

    def context(self):
        return list(self.messages)

    def step(self, response):
        outcome = super().step(response)
        self.messages += [
            {"role": "assistant", "content": str(response)},
            {"role": "user", "content": f"now {self.n}"},
        ]
        return outcome


def test_a_conversation_goes_on_with_its_own_tokens(model):
    """Its turns share a sequence, in which the observations stand already; none is encoded again.
    After an answer that was cut at rollout.max_response_tokens comes its end token."""
    chat, counts = make_chat(), Counter()
    (end,) = chat.response_ids("")
    played = [
        play(scripted(model, playing(Talk), config=changed(rollout={"max_response_tokens": n})))
        for n in (3, 1)
    ]
    assert [stats.failures for _, stats in played] == [[], []]
    groups = played[0][0] + played[1][0]
    for before, after in (
        pair for episode in episodes_of(groups) for pair in itertools.pairwise(episode.turns)
    ):
        cut = before.response_ids[-1] not in chat.end_ids
        user = chat.observation_ids(before.outcome.observation, 99)
        said = before.prompt_ids + before.response_ids + [end] * cut + chat.separator_ids + user
        assert after.prompt_ids == said + chat.reply_ids
        counts[cut] += 1
    assert counts[True] > 4 and counts[False] > 4
    samples = to_samples(
        groups,
        separator_ids=chat.separator_ids,
        encode_observation=lambda text: chat.observation_ids(text, 99),
        invalid_penalty=0.0,
    )
    for sample in samples:
        sample.wm_weight = 1.0
    assert len(sequences(samples, with_observation=True)) == len(episodes_of(groups)) == 24


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"role": "developer", "content": "hi"},
            "the role of context()[1] is 'developer'; it must be one of system, user",
        ),
        ({"role": "tool", "content": None}, "the content of context()[1] is None; it must be text"),
        (
            {"role": "assistant", "content": "I do."},
            "it must be a conversation that ends before the model's answer",
        ),
        (
            {
                "role": "user",
                "content": "",
                "tool_calls": [{"function": {"name": "x", "arguments": {}}}],
            },
            "those of an ass",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "[1"}}]},
            '"arguments": a JSON obj',
        ),
    ],
)
def test_a_message_that_is_none_costs_its_episode(model, monkeypatch, message, problem):
    monkeypatch.setattr(Talk, "context", lambda self: [*self.messages, message])
    _, stats = play(scripted(model, playing(Talk)), [Task("task 0", "count")])
    assert problem in stats.failures[0]
