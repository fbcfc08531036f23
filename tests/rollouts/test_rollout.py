"""Episodes with the real engine and real households are reproducible. A broken environment costs
only its own episode."""

import asyncio
import itertools
import threading
from collections import Counter
from contextlib import suppress

import pytest
import torch
from environments import Game, Honest, factory, raises
from together import make_ranks, on_all
from toyworld import make_chat, make_engine, make_factory, practised_model

from paw.algo.samples import to_samples
from paw.algo.sequences import sequences
from paw.config import plugins
from paw.config.sections import Config, ModelConfig, RolloutConfig
from paw.envs.base import train_tasks
from paw.rollouts.engines.base import Request
from paw.rollouts.episode import derive_seed, plain
from paw.rollouts.exchange import gather_turns
from paw.rollouts.scheduler import Rollouts
from paw.types import Outcome, Task

CONFIG = Config(
    model=ModelConfig(path="-"), rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=3)
)


@pytest.fixture(autouse=True)
def one_thread():
    """With two threads, the last bits depend on which requests are computed together, and therefore
    on their order of arrival."""
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
    episodes = []
    for group in groups:
        episodes += group.trajectories
    return episodes


def turns_of(groups, *, except_member=None):
    turns = []
    for episode in episodes_of(groups):
        if episode.member != except_member:
            turns += episode.turns
    return turns


def responses_of(groups, **options):
    """The response ids of all turns."""
    return [turn.response_ids.tolist() for turn in turns_of(groups, **options)]


def members_of(group):
    return [episode.member for episode in group.trajectories]


def scripted(model, game_factory=Honest, *, agent=None, config=CONFIG, **faults):
    """Rollouts of games that count to three. In every group of four, the second game has these
    faults."""
    game_factory = factory(**faults) if faults else game_factory
    return Rollouts(game_factory(config.env), make_engine(model), make_chat(), config, agent=agent)


def changed(**sections):
    return CONFIG.model_copy(
        update={
            name: CONFIG.__dict__[name].model_copy(update=changes)
            for name, changes in sections.items()
        }
    )


def test_further_tasks_take_the_place_of_groups_whose_returns_are_all_equal(model):
    """Further tasks are the same each time, and at most rollout.refill allows. Groups with
    different returns stay."""

    def sometimes_rewarded(trajectory):
        return float(sum(sum(turn.response_ids) for turn in trajectory.turns) % 4 == 0)

    def training(refill, step=0):
        config = changed(
            rollout={"refill": refill, "group_size": 3},
            reward={"type": plugins.give(sometimes_rewarded)},
        )
        return Rollouts(make_factory(), make_engine(model), make_chat(), config).training(step, 6)

    def responses(groups):
        return [(group.task.id, responses_of([group])) for group in groups]

    def different_returns(group):
        return len({episode.episode_return for episode in group.trajectories})

    def returns(groups):
        return [different_returns(group) for group in groups]

    without_refill, _ = training(0)
    groups, statistics = training(4)
    varied = [group for group in without_refill if different_returns(group) > 1]
    assert 0 < len(varied) < 6 == len(groups)
    assert responses(groups)[: len(varied)] == responses(varied)
    assert min(returns(groups)) > 1
    assert set(returns(statistics.uniform)) == {1}
    assert statistics.metrics()["health/groups_refilled"] == len(statistics.uniform)
    played = [group.task.id for group in groups + statistics.uniform]
    assert len(set(played)) == len(played)
    assert {group.task.id for group in without_refill} <= set(played)
    assert responses(training(4)[0]) == responses(groups)
    later_groups, others = training(4, step=1)
    assert not set(played) & {group.task.id for group in later_groups + others.uniform}
    fewer_groups, statistics = training(1)
    assert len(fewer_groups) + len(statistics.uniform) <= 12
    assert min(returns(fewer_groups)) > 1


def test_an_update_keeps_its_groups_where_no_further_one_varies(model):
    config = changed(rollout={"refill": 2, "group_size": 4})
    played = []
    # All episodes are won.
    groups, statistics = scripted(model, config=config).training(
        0, 2, lambda *done: played.append(done)
    )
    assert [group.task.id for group in groups] == ["train/0/0", "train/0/1"]
    assert statistics.uniform == []
    assert played[-1] == (8, 8)
    assert len(played) == 3 * 8


def test_turns_carry_what_engine_and_environment_said(rollouts):
    """Replaying the responses gives the same outcomes, so nothing is lost between ids and
    environment."""
    tasks = train_tasks(rollouts.factory, 0, 3, 0)
    progress = []
    groups, statistics = play(
        rollouts, tasks, progress=lambda done, total: progress.append((done, total))
    )
    assert progress == [(count, 12) for count in range(1, 13)]
    assert [group.task for group in groups] == tasks
    for group in groups:
        assert members_of(group) == [0, 1, 2, 3]
        first_tokens = set()
        for episode in group.trajectories:
            assert episode.task == group.task
            assert episode.turns[0].prompt == group.trajectories[0].turns[0].prompt
            first_tokens.add(tuple(turn.response_ids[0] for turn in episode.turns))
        assert len(first_tokens) > 1
    assert statistics.groups_dropped == 0
    assert statistics.prompts_truncated == 0
    assert statistics.failures == []
    environment = rollouts.factory.make()
    chat = make_chat()
    turns = turns_of(groups)
    for episode in episodes_of(groups):
        environment.reset(episode.task)
        for turn in episode.turns:
            assert environment.context() == turn.prompt
            assert environment.step(turn.response) == turn.outcome
        *earlier_turns, last_turn = episode.turns
        assert not any(turn.outcome.done for turn in earlier_turns)
        assert last_turn.outcome.done
        for turn, following in itertools.pairwise(episode.turns):
            assert following.anchor == turn.outcome.observation
    for turn in turns:
        assert turn.prompt_ids.tolist() == chat.prompt_ids(turn.prompt)
        assert turn.response == chat.decode(turn.response_ids)
        assert len(turn.response_ids) == len(turn.sampled_logp) == len(turn.entropy) <= 3
        assert len(turn.response_ids) == 3 or turn.response_ids[-1] in chat.end_ids
        assert turn.version == 0
        assert not chat.end_ids.intersection(turn.response_ids[:-1])
        assert all(value <= 0 for value in turn.sampled_logp)
        assert all(value >= 0 for value in turn.entropy)
    assert statistics.prompt_tokens == sum(len(turn.prompt_ids) for turn in turns)
    assert statistics.response_tokens == sum(len(turn.response_ids) for turn in turns)


def test_a_turns_tokens_follow_from_its_coordinates(rollouts):
    assert derive_seed(0, "train/0", 1, 2, 3) == 8473358073702443013  # on every machine
    groups, _ = play(rollouts, seed=5, stream="train/7")
    for place, group in enumerate(groups):
        for episode in group.trajectories:
            for number, turn in enumerate(episode.turns):
                seed = derive_seed(5, "train/7", place, episode.member, number)
                rollouts.engine.submit(
                    Request(0, turn.prompt_ids.tolist(), seed, temperature=1.0, max_tokens=3)
                )
                assert rollouts.engine.step()[0].token_ids == turn.response_ids.tolist()


def test_long_prompts_are_cut_and_counted_and_turns_carry_the_weight_version(rollouts):
    rollouts.config = changed(rollout={"max_prompt_tokens": 24})
    rollouts.engine.sync([], version=9)
    groups, statistics = play(rollouts)
    assert all(len(turn.prompt_ids) <= 24 and turn.version == 9 for turn in turns_of(groups))
    assert statistics.prompts_truncated == len(turns_of(groups))


def test_a_failing_episode_is_left_out_and_changes_no_other(model):
    """A group with only one member left is dropped."""
    broken = {"step": raises(RuntimeError("broken"))}
    closed = []
    unbroken = play(scripted(model))[0]
    rollouts = scripted(model, **broken, close=closed.append)
    groups, statistics = play(rollouts)
    assert [members_of(group) for group in groups] == [[0, 2, 3]] * 3
    assert responses_of(groups) == responses_of(unbroken, except_member=1)
    others = turns_of(unbroken, except_member=1)
    assert [turn.outcome for turn in turns_of(groups)] == [turn.outcome for turn in others]
    assert statistics.failures == [f"train/0/{number}: RuntimeError: broken" for number in range(3)]
    assert statistics.groups_dropped == 0
    assert len(closed) == 3
    # Broken environments were replaced, one by another broken one. The others are reused.
    next_groups, statistics = play(rollouts)
    assert len(episodes_of(next_groups)) == 11
    assert len(statistics.failures) == 1
    assert rollouts.factory.made == 15
    for group_size, members in ((1, [0, 2]), (2, [1])):
        groups, statistics = play(scripted(model, **broken), group_size=group_size)
        assert [group.task.id for group in groups] == [f"train/0/{number}" for number in members]
        assert statistics.groups_dropped == 3 - len(members)
    rollouts = scripted(model, everywhere=True, **broken, close=raises(OSError("already gone")))
    groups, statistics = play(rollouts)
    assert groups == []
    assert len(statistics.failures) == 12
    assert statistics.groups_dropped == 3
    assert rollouts.engine.pending == 0


async def one_fails(env, model):
    """Fails in the second episode of the second task."""
    if (env.task.id, env.episode.trajectory.member) == ("train/0/1", 1):
        raise RuntimeError("broken")
    await plain(env, model)


def pretend_other_weights(episode):
    """Change turns as if the weights had changed meanwhile and the engine gave no entropies."""
    for turn in episode.turns:
        turn.versions = [7] * len(turn.response_ids)
        turn.entropy = None


def assert_blocks(played_by_rank, size):
    """Each rank played consecutive episodes, about as many as the others. Together they played all
    but the failed one."""
    played = []
    counts = []
    for groups, statistics in played_by_rank:
        coordinates = []
        for group in groups:
            coordinates += [(group.index, episode.member) for episode in group.trajectories]
        played.append(coordinates)
        counts.append(len(coordinates) + len(statistics.failed))
    expected = list(itertools.product(range(3), range(size)))
    if size > 1:
        expected.remove((1, 1))
    assert sorted(itertools.chain(*played)) == expected
    assert all(earlier < later for earlier, later in itertools.pairwise(filter(None, played)))
    assert max(counts) - min(counts) <= 1


def assert_same_turns(groups, wanted):
    """The turns equal those of one process, apart from what `pretend_other_weights` changed."""
    members = [episode.member for episode in episodes_of(groups) for _ in episode.turns]
    for member, our_turn, their_turn in zip(
        members, turns_of(groups), turns_of(wanted), strict=True
    ):
        assert our_turn.prompt_ids.tolist() == their_turn.prompt_ids.tolist()
        assert our_turn.response_ids.tolist() == their_turn.response_ids.tolist()
        assert our_turn.outcome == their_turn.outcome
        assert our_turn.version == their_turn.version
        assert our_turn.sampled_logp == pytest.approx(their_turn.sampled_logp, abs=1e-5)
        if member:
            assert our_turn.versions is None
            assert our_turn.entropy == pytest.approx(their_turn.entropy, abs=1e-5)
        else:
            assert our_turn.versions.tolist() == [7] * len(our_turn.response_ids)
            assert our_turn.entropy is None


@pytest.mark.parametrize(("size", "world"), [(4, 2), (2, 4), (2, 5), (4, 12), (1, 3)])
def test_ranks_play_blocks_of_the_episodes_and_put_groups_together(model, size, world):
    """The result does not depend on the number of ranks. Whether a group is too small is known only
    after all ranks have reported."""
    one_rank = Rollouts(
        Honest(CONFIG.env), make_engine(model), make_chat(), CONFIG, agent=one_fails
    )

    def make_rank(rank):
        return Rollouts(
            one_rank.factory,
            make_engine(model),
            make_chat(),
            CONFIG,
            ranks=rank,
            agent=one_fails,
        )

    ranks = [make_rank(rank) for rank in make_ranks(world)]
    tasks = train_tasks(one_rank.factory, 0, 3, 0)
    options = {"group_size": size, "temperature": 1.0, "seed": 0, "stream": "train/0"}
    played_by_rank = [rank.play_share(tasks, **options) for rank in ranks]

    assert_blocks(played_by_rank, size)
    for groups, _ in played_by_rank:
        for episode in episodes_of(groups):
            if episode.member == 0:
                pretend_other_weights(episode)

    def share(rank):
        groups, rank_statistics = ranks[rank.rank].gather_groups(
            played_by_rank[rank.rank], tasks, size
        )
        returns = [episode.episode_return for episode in episodes_of(groups)]
        return gather_turns(groups, rank), rank_statistics, returns

    shared = on_all([rank.ranks for rank in ranks], share)
    wanted, statistics = play(one_rank, tasks, group_size=size)
    assert statistics.groups_dropped == (size == 2)
    assert len(statistics.failed) == (size > 1)
    wanted_returns = [episode.episode_return for episode in episodes_of(wanted)]
    for groups, rank_statistics, returns in shared:
        assert returns == wanted_returns
        assert [group.task for group in groups] == [group.task for group in wanted]
        assert [group.index for group in groups] == [group.index for group in wanted]
        assert vars(rank_statistics).keys() == vars(statistics).keys()
        assert rank_statistics.metrics() == statistics.metrics()
        assert rank_statistics.failures == statistics.failures
        assert_same_turns(groups, wanted)


def test_environments_are_closed_once(model):
    closed = []
    rollouts = scripted(model, close=closed.append, everywhere=True)
    play(rollouts)
    for _ in range(2):
        rollouts.close()
        assert len(closed) == 12


def test_environments_that_may_block_step_at_the_same_time(model):
    """A step returns only after all twelve environments are in their steps."""
    meeting = threading.Barrier(12)

    def meet(game):
        meeting.wait(timeout=10)
        return Outcome(f"now {game.n}", float(game.n == 3), game.n == 3, game.n == 3)

    groups, statistics = play(scripted(model, step=meet, may_block=True, everywhere=True))
    assert statistics.failures == []
    assert responses_of(groups) == responses_of(play(scripted(model))[0])


def test_a_continuous_engine_works_on_while_an_environment_steps(model):
    """The steps of one environment last until all other environments have finished."""
    others_finished = threading.Event()

    def wait(game):
        assert others_finished.wait(timeout=10)
        return Outcome("at last", 1.0, done=True, won=True)

    rollouts = scripted(model, step=wait, may_block=True)
    rollouts.engine.continuous = True
    groups, statistics = play(
        rollouts, progress=lambda done, total: done == total - 3 and others_finished.set()
    )
    assert statistics.failures == []
    assert [turn.outcome.observation for turn in turns_of(groups)].count("at last") == 3
    undisturbed = play(scripted(model))[0]
    assert responses_of(groups, except_member=1) == responses_of(undisturbed, except_member=1)


# --- agents: their input, and what becomes of their output


def test_a_call_that_continues_another_has_its_ids_and_those_of_the_text(model):
    """A call that does not fit ends the episode. The turns so far count."""
    chat = make_chat()
    texts = [" and so\n", "go on\n", "x" * 300]

    async def agent(env, model):
        await env.reset()
        response = None
        for text in (env.context(), *texts):
            response = await model.generate(text, continues=response)
            if not env.done:
                await env.step(response)

    short_answers = changed(rollout={"max_response_tokens": 1})
    ended_count = 0
    played = [
        play(scripted(model, agent=agent, config=config)) for config in (CONFIG, short_answers)
    ]
    assert [statistics.failures for _, statistics in played] == [[], []]
    for episode in episodes_of(played[0][0] + played[1][0]):
        assert len(episode.turns) == 3
        for text, before, turn in zip(texts, episode.turns, episode.turns[1:], strict=False):
            ids = chat.observation_ids(text, 99)
            # The answer had ended its turn, so the text becomes the user's.
            if before.response_ids[-1] in chat.end_ids:
                ended_count += 1
                ids = chat.separator_ids + ids + chat.reply_ids
            assert turn.prompt_ids.tolist() == [*before.prompt_ids, *before.response_ids, *ids]
            assert turn.prompt == before.prompt + before.response + text
    assert 0 < ended_count < 48


def test_a_response_ends_at_the_first_token_that_completes_a_stop_string(model):
    chat = make_chat()
    responses = []

    def played(*stop_strings):
        async def agent(env, model):
            await env.reset()
            while not env.done:
                responses.append(await model.generate(env.context(), stop=stop_strings))
                await env.step(responses[-1])

        responses.clear()
        return turns_of(play(scripted(model, agent=agent))[0])

    full_turns = played()
    stop_string = max((turn.response for turn in full_turns), key=len)[2:5]
    turns = played("no such text", stop_string)
    cut_pairs = [
        (before, turn)
        for before, turn in zip(full_turns, turns, strict=True)
        if stop_string in before.response
    ]
    assert cut_pairs
    for before, turn in cut_pairs:
        length = len(turn.response_ids)
        assert turn.response_ids.tolist() == before.response_ids[:length].tolist()
        assert turn.sampled_logp == pytest.approx(before.sampled_logp[:length], abs=1e-5)
        assert turn.entropy == pytest.approx(before.entropy[:length], abs=1e-5)
        assert stop_string in chat.decode(turn.response_ids)
        assert stop_string not in chat.decode(turn.response_ids[:-1])
    assert sum(response.stop == stop_string for response in responses) == len(cut_pairs)
    assert all(
        stop_string not in response and response.stop in ("", stop_string) for response in responses
    )


def test_turns_without_a_step_and_steps_without_a_turn(model):
    """A thought has an empty outcome. An action without a model call adds its reward to the turn
    before."""

    async def agent(env, model):
        await env.reset()
        await env.step("before")
        await model.generate("think")
        await env.step(await model.generate(env.context()))
        await env.step("by itself")

    groups, statistics = play(scripted(model, agent=agent))
    assert statistics.failures == []
    for episode in episodes_of(groups):
        thought, played = episode.turns
        assert thought.prompt == "think"
        assert thought.outcome.observation == ""
        assert thought.outcome.valid is True
        assert played.outcome.reward == 1.0
        assert played.outcome.done is True
        assert played.outcome.won is True
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
    broken = {"step": raises(RuntimeError("broken")), "everywhere": True}
    config = changed(env={"max_turns": 1})
    groups, statistics = play(
        scripted(model, agent=agent, config=config, **broken), [Task("a", "b")], group_size=2
    )
    assert groups == []
    assert [failure.partition(": ")[2] for failure in statistics.failures] == [reason] * 2


class AsyncGame(Game):
    """Awaits within its steps, and has no anchor."""

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
    """As in a notebook cell, where a loop is already running."""

    async def cell():
        played = play(scripted(model, playing(AsyncGame)))
        await asyncio.sleep(0)
        return played

    groups, statistics = asyncio.run(cell())
    assert statistics.failures == []
    assert [len(episode.turns) for episode in episodes_of(groups)] == [3] * 12
    assert [turn.anchor for turn in groups[0].trajectories[0].turns] == ["start", "now 1", "now 2"]
    assert AsyncGame.most > 1
    assert responses_of(groups) == responses_of(play(scripted(model))[0])


REWARDS = """
def odd(trajectory):
    if trajectory.member == 2:
        raise KeyError("no judge")
    return float("nan") if trajectory.member == 1 else 2.0 - len(trajectory.turns[0].response_ids) / 10
"""


def test_a_reward_over_the_trajectory_takes_the_place_of_the_environments(model, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    groups, statistics = play(scripted(model, config=changed(reward={"type": f"{path}:odd"})))
    assert [members_of(group) for group in groups] == [[0, 3]] * 3
    for episode in episodes_of(groups):
        expected_return = 2.0 - len(episode.turns[0].response_ids) / 10
        assert [turn.outcome.reward for turn in episode.turns] == [0.0, 0.0, expected_return]
        assert episode.episode_return == expected_return
        assert episode.won
    assert (
        "rewards.py:odd' is nan; it must be a number from -1e+06 to 1e+06" in statistics.failures[0]
    )
    assert "KeyError: 'no judge'" in statistics.failures[1]


class Talk(Game):
    """The same game as a conversation: the user says what is new, and the model's answers stay."""

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
    """The turns share a sequence that already contains the observations, so none is encoded again.
    A cut answer (rollout.max_response_tokens) is followed by its end token."""
    chat = make_chat()
    counts = Counter()
    (end_id,) = chat.response_ids("")
    groups = []
    for length in (3, 1):
        config = changed(rollout={"max_response_tokens": length})
        played, statistics = play(scripted(model, playing(Talk), config=config))
        assert statistics.failures == []
        groups += played
    for episode in episodes_of(groups):
        for earlier, following in itertools.pairwise(episode.turns):
            was_cut = earlier.response_ids[-1] not in chat.end_ids
            answer = [*earlier.response_ids, *[end_id] * was_cut]
            user_ids = chat.observation_ids(earlier.outcome.observation, 99)
            so_far = [*earlier.prompt_ids, *answer, *chat.separator_ids, *user_ids]
            assert following.prompt_ids.tolist() == so_far + chat.reply_ids
            counts[was_cut] += 1
    assert counts[True] > 4
    assert counts[False] > 4
    samples = to_samples(
        groups,
        separator_ids=chat.separator_ids,
        encode_observation=lambda text: chat.observation_ids(text, 99),
        invalid_penalty=0.0,
    )
    for sample in samples:
        sample.wm_weight = 1.0
    assert len(sequences(samples, with_observation=True)) == 24
    assert len(episodes_of(groups)) == 24


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
    _, statistics = play(scripted(model, playing(Talk)), [Task("task 0", "count")])
    assert problem in statistics.failures[0]
