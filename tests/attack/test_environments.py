"""Environments that misbehave, in every way there is, cost their own episodes and nothing else."""

import asyncio
import concurrent.futures
import ctypes
import io
import math
import re
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from environments import FAKE, Honest, exits, factory, raises
from processes import wait_until
from toyworld import make_chat, make_engine, practised_model

from paw.config.sections import Config, EnvConfig, ModelConfig, RolloutConfig
from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.errors import UserError, clean, describe
from paw.io import threads
from paw.rollouts.rewards import Reward
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import kinds, success_metrics
from paw.tools.evaluate.results import kind_rows
from paw.tools.warmup.warmup import demonstrations
from paw.trainer import rollout_metrics
from paw.types import Task


@pytest.fixture(scope="module")
def model():
    return practised_model()


@pytest.fixture
def rollouts(model, monkeypatch):
    """`rollouts(max_turns=5, step=exits)` plays an environment whose games misbehave; settings of
    `env` may be among the options."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(environment=None, **wrong):
        settings = {}
        for key in ("step_timeout_s", "max_turns", "max_text"):
            if key in wrong:
                settings[key] = wrong.pop(key)
        config = Config(
            model=ModelConfig(path="-"),
            env=EnvConfig(name="attack", **settings),
            rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=3),
        )
        games = make_factory(config, environment or factory(**wrong))
        return Rollouts(games, make_engine(model), make_chat(), config)

    yield make
    torch.set_num_threads(count)


def play(rollouts, groups=2):
    return rollouts.play_tasks(
        train_tasks(rollouts.factory, 0, groups, 0),
        group_size=4,
        temperature=1.0,
        seed=0,
        stream="train/0",
    )


def episodes_of(groups):
    return [episode for group in groups for episode in group.trajectories]


def sizes_of(groups):
    return [len(group.trajectories) for group in groups]


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit("not even that")

    __repr__ = __str__


class OwnBase(BaseException):
    pass


def endless(game):
    endless(game)


def spins(_):
    while True:
        pass


def waits(_):
    threading.Event().wait()


def sleeps_in_c(_):
    ctypes.CDLL(None).sleep(3600)


UNPRINTABLE = "Unprintable: a Unprintable that cannot be printed"
NUMBER = "; it must be a number from -1e+06 to 1e+06"
FLAG = "; it must be True"
WRONG = [
    ({"make": exits}, "SystemExit: 0"),
    ({"reset": exits}, "SystemExit: 0"),
    ({"step": exits, "may_block": True}, "SystemExit: 0"),
    ({"step": raises(OSError("broken")), "close": exits}, "OSError: broken"),
    ({"step": raises(GeneratorExit())}, "GeneratorExit"),
    ({"step": raises(asyncio.CancelledError())}, "CancelledError"),
    ({"context": raises(OwnBase("mine"))}, "OwnBase: mine"),
    ({"step": raises(Unprintable())}, UNPRINTABLE),
    ({"step": raises(StopIteration())}, "StopIteration"),
    ({"anchor": endless}, "RecursionError: maximum recursion depth exceeded"),
    ({"reward": math.nan}, "Game: Outcome.reward is nan" + NUMBER),
    ({"reward": 10**400}, "Game: Outcome.reward is 1000"),
    ({"reward": "1"}, "Game: Outcome.reward is '1'" + NUMBER),
    ({"reward": torch.tensor(1.0)}, "Game: Outcome.reward is tensor(1.)" + NUMBER),
    ({"reward": np.float32("nan")}, "Game: Outcome.reward is np.float32(nan)" + NUMBER),
    ({"reward": Decimal("1")}, "Game: Outcome.reward is Decimal('1')" + NUMBER),
    ({"score": 2.0}, "Game: Outcome.score is 2.0; it must be a number from 0 to 1"),
    ({"done": 1}, "Game: Outcome.done is 1" + FLAG),
    ({"won": None}, "Game: Outcome.won is None" + FLAG),
    ({"valid": "yes"}, "Game: Outcome.valid is 'yes'" + FLAG),
    ({"observation": b"now"}, "Game: Outcome.observation is b'now'; it must be text"),
    ({"action": None}, "Game: Outcome.action is None; it must be text"),
    ({"context": lambda game: None}, "Game: context() is None; it must be text"),
    ({"anchor": lambda game: ["at", game.n]}, "Game: anchor() is ['at', 0]; it must be text"),
    (
        {"context": lambda game: [{"role": "user"}]},
        "Game: the content of context()[0] is None; it must be text",
    ),
    ({"reset": lambda game: None}, "Game: reset() is None; it must be text"),
    (
        {"step": lambda game: ("now", 1.0, True, {})},
        "Game: step() is ('now', 1.0, True, {}); it must be an Outcome",
    ),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONG)
def test_what_it_raises_or_returns_costs_its_own_episode(rollouts, wrong, reason):
    played = rollouts(**wrong)
    groups, stats = play(played)
    assert len(stats.failures) == 2, stats.failures
    assert all(f": {reason}" in failure for failure in stats.failures), stats.failures
    assert sizes_of(groups) == [3, 3]
    for episode in episodes_of(groups):
        assert [turn.outcome.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
    groups, _ = play(played)  # the run goes on
    assert len(groups) == 2
    played.close()


def test_a_task_without_a_kind_is_one_line(rollouts):
    class TasksWithoutKind(Honest):
        def tasks(self, split, seed):
            return [Task("a"), Task("b", None)]

    with pytest.raises(
        UserError,
        match=r"Task\(id='b', kind=None, env=''\) is among the tasks; each must be a Task",
    ):
        rollouts(TasksWithoutKind).training(0, 2)


@pytest.mark.parametrize("kind", ["all", "All", " all\x1b[2J", "Avg."])
def test_a_kind_of_task_that_means_all_of_them_is_one_line(rollouts, kind):
    """In training and in an evaluation: `success/all` is that of all kinds."""

    class Named(Honest):
        def tasks(self, split, seed):
            return [Task("a"), Task("b", kind)]

    message = r"attack: the task 'b' is of the kind '.+', a name that reports use for all kinds; give it another kind"
    for play_some in (lambda played: played.training(0, 2), lambda played: played.evaluation()):
        with pytest.raises(UserError) as error:
            play_some(rollouts(Named))
        assert re.fullmatch(message, str(error.value))
        assert str(error.value).isprintable()


def test_each_kind_of_task_has_its_own_metric_whatever_it_is_called(rollouts):
    """Kinds that look alike when printed share one metric."""
    names = ["games", "failures", "success", "a/b", "a_b", "ci_low", "mean", "alle", "x" * 900]

    class Named(Honest):
        def tasks(self, split, seed):
            listed = (*names, "a\x00_b")
            return [Task(f"{kind} {i}", kind) for i in range(2) for kind in listed]

    played = rollouts(Named)
    groups, _ = played.training(0, 20)
    for group in groups:
        if group.task.id.endswith("0"):
            lose(group)
    evaluated = success_metrics(groups)
    trained = rollout_metrics(groups)
    assert trained["success/all"] == 0.5
    assert evaluated["success"] == 0.5
    assert evaluated["games"] == 160.0
    assert evaluated["failures"] == 0.0

    printed = [*names[:-1], clean("x" * 900, 200)]
    of_kinds = {key: value for key, value in evaluated.items() if key.startswith("success_")}
    assert of_kinds == {f"success_{kind}": 0.5 for kind in printed}
    of_kinds = {key: value for key, value in trained.items() if key.startswith("success/")}
    assert of_kinds == {f"success/{kind}": 0.5 for kind in ("all", *printed)}
    rows = kind_rows(kinds(groups))
    assert rows["a/b"]["games"] == 16
    assert rows["a_b"]["games"] == 32


def lose(group):
    for episode in group.trajectories:
        episode.turns[-1].outcome = replace(episode.turns[-1].outcome, won=False)


def test_numbers_and_texts_of_numpy_become_pythons_own(rollouts):
    texts = {"observation": np.str_("now"), "results": (np.str_("a"), np.str_("b"))}
    flags = {"won": np.bool_(True), "valid": np.bool_(False)}
    groups, stats = play(rollouts(reward=np.float32(0.5), score=np.float64(0.25), **texts, **flags))
    assert stats.failures == []
    (odd,) = [episode for episode in groups[0].trajectories if not episode.turns[0].outcome.valid]
    outcome = vars(odd.turns[0].outcome)
    expected = {
        "observation": "now",
        "reward": 0.5,
        "done": False,
        "won": True,
        "action": outcome["action"],
        "valid": False,
        "score": 0.25,
        "results": ["a", "b"],
    }
    assert outcome == expected
    for name, value in expected.items():
        assert type(outcome[name]) is type(value)
    assert type(outcome["action"]) is str
    assert {type(text) for text in outcome["results"]} == {str}


@pytest.mark.parametrize("error", [UserError("my_game: set MY_KEY"), KeyboardInterrupt()])
@pytest.mark.parametrize("may_block", [False, True])
def test_what_the_user_can_fix_and_ctrl_c_end_the_run(rollouts, error, may_block):
    with pytest.raises(type(error)):
        play(rollouts(step=raises(error), may_block=may_block))


@pytest.mark.parametrize(
    "wrong",
    [{"step": spins}, {"make": waits}, {"reset": sleeps_in_c}, {"step": waits, "may_block": True}],
)
def test_an_environment_that_hangs_costs_its_episode_and_a_thread(rollouts, wrong):
    """Nothing waits for the call that hangs."""
    threads_before = threading.active_count()
    played = rollouts(step_timeout_s=0.3, **wrong)
    groups, stats = play(played)
    assert stats.failures == [
        f"train/0/{i}: TimeoutError: no answer within 0.3 s" for i in range(2)
    ]
    assert sizes_of(groups) == [3, 3]
    assert stats.threads_lost == 2
    assert stats.metrics()["health/threads_lost"] == 2
    groups, stats = play(played)  # no thread that hangs is used again
    assert len(groups) == 2
    assert stats.threads_lost <= 1
    played.close()
    if wrong == {"step": spins}:  # such a thread is stopped
        wait_until(lambda: threading.active_count() <= threads_before, seconds=5)


def test_an_agent_that_waits_for_ever_costs_its_episode(rollouts):
    """An agent whose environment is slow, or that asks the model twice at once, is left alone."""

    async def agent(env, model):
        await env.reset()
        while not env.done:
            if env.episode.trajectory.member == 2 and env.episode.trajectory.turns:
                await asyncio.Event().wait()
            response, _ = await asyncio.gather(
                model.generate(env.context()), model.generate("and?")
            )
            await env.step(response)

    played = rollouts(
        step_timeout_s=0.3, context=lambda game: time.sleep(0.05) or "go on", everywhere=True
    )
    played.agent = agent
    groups, stats = play(played)
    reason = (
        "the agent waited longer than env.step_timeout_s = 0.3 for something other than the "
        "model and the environment"
    )
    assert stats.failures == [f"train/0/{i}: TimeoutError: {reason}" for i in range(2)]
    assert sizes_of(groups) == [3, 3]
    assert stats.threads_lost == 0
    assert len(play(played)[0]) == 2  # the run goes on


def test_agents_do_not_wait_for_threads_of_others_nor_for_the_engine(rollouts):
    """One in four hangs in a thread of its own; the others' batches take longer than an agent may
    wait."""
    released = threading.Event()

    async def agent(env, model):
        await env.reset()
        while not env.done:
            if env.episode.trajectory.member == 2:
                await asyncio.to_thread(released.wait)
            await asyncio.gather(
                asyncio.to_thread(time.sleep, 0.1), model.generate("and?"), model.generate("and?")
            )
            await asyncio.to_thread(time.sleep, 0.1)
            await env.step(await model.generate(env.context()))

    played = rollouts(step_timeout_s=0.6)
    played.agent = agent
    step = played.engine.step
    played.engine.step = lambda: time.sleep(0.7) or step()
    groups, stats = play(played, groups=8)
    assert len(stats.failures) == 8
    assert all("the agent waited longer than env.ste" in failure for failure in stats.failures)
    assert sizes_of(groups) == [3] * 8
    hanging = [thread for thread in threading.enumerate() if "(work)" in thread.name]
    assert len(hanging) == 8
    assert all(thread.daemon for thread in hanging)  # the interpreter does not wait for them
    released.set()


async def stops_the_loop(env, model):
    asyncio.get_running_loop().stop()


async def stops_the_loop_later(env, model):
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await model.generate("go")


async def cancels_all(env, model):
    for task in asyncio.all_tasks():
        task.cancel()


async def cancels_all_and_ignores_what_comes(env, model):
    while not env.done:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            with suppress(Exception):
                task.cancel()
        await env.step(await model.generate(env.context()))


async def cancels_itself(env, model):
    asyncio.current_task().cancel()
    await model.generate("go")


async def stops_at_none(env, model):
    await model.generate("go", stop=[None])


async def stops_at_an_empty_text(env, model):
    await model.generate("go", stop=["end", ""])


async def empties_its_turns(env, model):
    await model.generate("go")
    env.episode.trajectory.turns[-1].response_ids = []
    while not env.done:
        await env.step("go")


async def has_no_outcome(env, model):
    response = await model.generate("go")
    while not env.done:
        await env.step("go")
    response.turn.outcome = None


STOPPED = "RuntimeError: the agent stopped the event loop, on which other episodes are played"
CANCELLED = "RuntimeError: the agent cancelled tasks that are not its own"


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        (stops_the_loop, STOPPED),
        (stops_the_loop_later, STOPPED),
        (cancels_all, CANCELLED),
        (cancels_all_and_ignores_what_comes, CANCELLED),
        (cancels_itself, "CancelledError"),
        (stops_at_none, "ValueError: stop contains None; each must be a non-empty string"),
        (stops_at_an_empty_text, "ValueError: stop contains ''; each must be a non-empty string"),
        (empties_its_turns, "RuntimeError: turn 0 has no response_ids"),
        (has_no_outcome, "RuntimeError: turn 0 has the outcome None"),
    ],
)
def test_what_an_agent_does_to_the_loop_or_to_its_turns_costs_its_own_episode(
    rollouts, capfd, act, failure
):
    async def agent(env, model):
        await env.reset()
        if env.episode.trajectory.member == 2:
            await act(env, model)
        while not env.done:
            response, _ = await asyncio.gather(model.generate(env.context()), asyncio.sleep(0.01))
            await env.step(response)

    played = rollouts()
    played.agent = agent
    groups, stats = play(played)
    assert stats.failures == [f"train/0/{i}: {failure}" for i in range(2)]
    assert sizes_of(groups) == [3, 3]
    assert all(len(episode.turns) == 3 for episode in episodes_of(groups))
    assert len(play(played)[0]) == 2  # the run goes on
    assert capfd.readouterr().err == ""


def test_what_episodes_share_any_of_them_may_cancel(rollouts):
    """For example a client's task, made for the first episode that asked."""
    shared = []

    async def agent(env, model):
        await env.reset()
        shared.append(shared[0] if shared else asyncio.create_task(asyncio.sleep(3600)))
        while not env.done:
            await env.step(await model.generate(env.context()))
        if env.episode.trajectory.member == 3:
            assert shared[0].cancel() or shared[0].cancelled()
            with pytest.raises(asyncio.CancelledError):
                await shared[0]

    played = rollouts()
    played.agent = agent
    _, stats = play(played)
    assert stats.failures == []
    assert shared[0].cancelled()


def test_a_thread_of_an_agent_that_stops_the_loop_stops_nothing(rollouts):
    async def agent(env, model):
        await env.reset()
        loop = asyncio.get_running_loop()
        # Nobody can tell whose thread it is.
        threading.Thread(target=lambda: loop.call_soon_threadsafe(loop.stop)).start()
        while not env.done:
            await env.step(await model.generate(env.context()))

    played = rollouts()
    played.agent = agent
    groups, stats = play(played)
    assert stats.failures == []
    assert sizes_of(groups) == [4, 4]


def empties_ids(trajectory):
    trajectory.turns[-1].response_ids = []
    return 1.0


def takes_log_probs(trajectory):
    trajectory.turns[0].sampled_logp = trajectory.turns[0].sampled_logp[:-1]
    return 1.0


def takes_turns(trajectory):
    trajectory.turns.clear()
    return 1.0


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        (empties_ids, "RuntimeError: turn 2 has no response_ids"),
        (takes_log_probs, r"RuntimeError: turn 0 has \d+ response_ids and \d+ of sampled_logp"),
        (takes_turns, "RuntimeError: its turns were taken away"),
        (exits, "SystemExit: 0"),
        (lambda trajectory: 10**400, "EnvironmentFailure: reward.type = '.*' is 1000.*"),
    ],
)
def test_a_reward_that_spoils_an_episode_costs_it(rollouts, act, failure):
    def reward(trajectory):
        return act(trajectory) if trajectory.member == 2 else 1.0

    played = rollouts()
    played._rewards = [Reward("", 1.0, "reward.type = 'mine'", reward)]
    groups, stats = play(played)
    assert len(stats.failures) == 2
    for line in stats.failures:
        assert re.fullmatch(rf"train/0/\d: {failure}", line)
    assert sizes_of(groups) == [3, 3]


def test_closing_waits_no_longer_than_one_call(rollouts, monkeypatch):
    played = rollouts(step_timeout_s=0.3, close=waits, everywhere=True)
    play(played)
    waited_for: list[tuple[int, float]] = []

    def counting(calls, timeout):
        waited_for.append((len(calls), timeout))
        return concurrent.futures.wait(calls, timeout)

    monkeypatch.setattr(threads, "wait", counting)
    played.close()
    # All environments at once, then rewards, of which there are none: with our time limit, and with
    # their own.
    assert waited_for == [(8, 0.3), (0, 0.3), (0, None)]


def test_too_many_threads_that_hang_end_the_run_with_one_line(rollouts, monkeypatch):
    monkeypatch.setattr(threads, "MAX_LOST", 3)
    with pytest.raises(
        UserError, match=r"^stopped: 4 threads hang .* env\.step_timeout_s = 0\.3; set a time limit"
    ):
        play(rollouts(step_timeout_s=0.3, step=waits, may_block=True, everywhere=True))


def test_a_call_in_this_thread_costs_no_thread():
    assert threads.Threads(0).call(threading.get_ident) == threading.get_ident()


def test_an_episode_ends_after_max_turns(rollouts):
    groups, stats = play(rollouts(done=False, everywhere=True, max_turns=5))
    assert stats.failures == []
    assert {len(episode.turns) for episode in episodes_of(groups)} == {5}
    assert [turn.outcome.done for turn in episodes_of(groups)[0].turns] == [False] * 4 + [True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"context": lambda game: "x " * 1_000_000 + f"turn {game.n}"},
        {"observation": "x" * 20_000_000},
    ],
)
def test_long_texts_are_cut_before_they_are_tokenised(rollouts, capfd, wrong):
    played = rollouts(max_text=1000, everywhere=True, **wrong)
    longest = 0
    fit_prompt = played.chat.fit_prompt

    def measured(text, *limits):
        nonlocal longest
        longest = max(longest, len(text))
        return fit_prompt(text, *limits)

    played.chat.fit_prompt = measured
    play(played)
    groups, stats = play(played)
    assert stats.failures == []
    assert stats.texts_cut == 24
    assert 0 < longest <= 1000
    turn = episodes_of(groups)[0].turns[1]
    assert len(turn.outcome.observation) <= 1000
    if "context" in wrong:  # the end is what counts, as for rollout.max_prompt_tokens
        assert len(turn.prompt) == 1000
        assert turn.prompt.endswith("x turn 1")
    warning = "24 texts of the environment were cut to env.max_text = 1000 (reported once)"
    assert capfd.readouterr().err.count(warning) == 1


def test_every_text_is_unicode_and_a_failure_one_short_printable_line(rollouts):
    groups, stats = play(rollouts(observation=FAKE, context=lambda game: FAKE, everywhere=True))
    assert stats.failures == []
    for episode in episodes_of(groups):
        for turn in episode.turns:
            (turn.prompt + turn.anchor + turn.outcome.observation).encode()

    _, stats = play(rollouts(step=raises(RuntimeError(FAKE + "x" * 10_000_000))))
    assert stats.failures
    for failure in stats.failures:
        assert failure.isprintable()
        assert len(failure) < 600
        assert failure.startswith("train/0/")
        assert "RuntimeError: $_{update 99/99  reward 9e9 update 100" in failure


@pytest.mark.parametrize(
    "wrong", [{"oracle": exits, "admissible_actions": lambda game: []}, {"step": waits}]
)
def test_the_warm_up_leaves_a_game_that_breaks(rollouts, wrong):
    factory = rollouts(step_timeout_s=0.3, **wrong).factory
    turns = demonstrations(factory, factory.config, seed=0, random_actions=0.0)
    assert [next(turns).observation for _ in range(30)] == ["now 1", "now 2", "now 3"] * 10


def test_a_warm_up_where_all_breaks_ends_with_one_line(rollouts):
    factory = rollouts(oracle=exits, admissible_actions=lambda game: [], everywhere=True).factory
    with pytest.raises(
        UserError, match=r"^expert play: 101 games in a row failed \(SystemExit: 0\)$"
    ):
        next(demonstrations(factory, factory.config, seed=0, random_actions=0.0))


ATTACKS = f"{Path(__file__).parents[1] / 'support' / 'environments.py'}:"
KEYS = {
    "envs": "env.name",
    "advantages": "advantage.type",
    "losses": "policy.loss",
    "agents": "agent.type",
    "rewards": "reward.type",
    "callbacks": "run.callbacks",
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_part_that_exits_on_import_is_one_line_that_names_it(paw_here, tmp_path, kind):
    module = tmp_path / "mine.py"
    module.write_text("import sys\nsys.exit(0)\n")
    # All of a model that is looked at before a callback is loaded.
    (tmp_path / "config.json").write_text("{}")
    key = KEYS[kind]
    value = "['mine.py:Mine']" if kind == "callbacks" else "mine.py:Mine"
    failed = paw_here(
        "train", "quickstart", f"--{key}", value, "--model.path", ".", code=2, cwd=tmp_path
    )
    message = rf"paw: .*{key}.* '?mine\.py:Mine'.*: {module}, line 2: SystemExit: 0\n"
    assert re.fullmatch(message, failed.stderr)


@pytest.mark.parametrize("kind", ["agents", "rewards", "losses"])
def test_a_part_that_exits_when_it_is_made_is_one_line_that_names_it(
    paw_here, tmp_path, tiny_llm, kind
):
    (tmp_path / "mine.py").write_text(
        "import sys\n\n\nclass Mine:\n    def __init__(self):\n        sys.exit(0)\n"
    )
    key = KEYS[kind]
    settings = {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.dir": tmp_path, "run.updates": 1,
        "rollout.tasks": 1, "rollout.group_size": 2, "rollout.max_response_tokens": 2, "eval.games": 1,
        "env.name": f"{ATTACKS}Honest", key: "mine.py:Mine",
    }  # fmt: skip
    (tmp_path / "mine.toml").write_text('[model]\npath = "-"\n')
    failed = paw_here("train", "mine.toml", settings, code=2, cwd=tmp_path)
    message = rf"paw: .*{key} = 'mine\.py:Mine'.*: SystemExit: 0 \(mine\.py, line 6\)\n"
    assert re.fullmatch(message, failed.stderr)


STEPS = [("ExitsInStep", "SystemExit: 0"), ("HangsInStep", "TimeoutError: no answer within 0.3 s")]


@pytest.mark.parametrize(("name", "failure"), STEPS)
def test_a_game_that_exits_or_hangs_is_one_line_of_play_and_of_the_check(
    paw_here, monkeypatch, name, failure
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    played = paw_here("play", ATTACKS + name, {"env.step_timeout_s": 0.3}, code=1)
    assert re.fullmatch(rf"paw play: {failure}( \(environments\.py, line \d+\))?\n", played.stderr)
    checked = paw_here("env", "check", ATTACKS + name, {"env.step_timeout_s": 0.3}, code=1)
    assert re.search(rf"^FAIL +[\d.]+ s  outcomes +raised {failure}", checked.stdout, re.M)
    assert checked.stderr == ""


@pytest.mark.parametrize(
    ("attack", "failure"),
    [
        ("tasks that exit", r"SystemExit: broken \(.*\)"),
        ("tasks that hang", r"TimeoutError: no answer within 0.3 s; .*"),
    ],
)
def test_tasks_that_exit_or_hang_are_one_line_of_each_command(
    paw_here, monkeypatch, tmp_path, tiny_llm, attack, failure
):
    model = tiny_llm(tmp_path / "model")
    message = f"a task of env.name cannot be read: {failure}"
    name = f"{ATTACKS}LaterTasks"
    impatient = {"env.step_timeout_s": 0.3}
    settings = impatient | {"env.name": name, "model.dtype": "float32"}
    monkeypatch.setenv("ATTACK", attack)
    for command in (
        ("eval", model, settings, {"eval.games": 4}),
        ("rollout", model, settings, "--tasks", 4),
        ("play", name, "--seed", 1, impatient),
        ("sft", model, "--out", tmp_path / "tuned", settings),
    ):
        assert re.fullmatch(f"paw: {message}\n", paw_here(*command, code=2).stderr), command
    checked = paw_here("env", "check", name, impatient, code=1)
    assert re.search(rf"^FAIL +[\d.]+ s  tasks +{message}$", checked.stdout, re.M)


def test_clean_survives_anything_and_keeps_lines_where_asked():
    text = "plain, 日本語 and é \x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b(B \x9b2Jc\x1bc a\r\nb\u2028e\x00\u200b"
    assert clean(text) == "plain, 日本語 and é link c a  b e"
    assert (
        clean("\x1b[31mred\x1b[0m a\tb\u0085c\x08 \u202e\u2066d\u200d\ufeff\u00ad \ud83d\ude00")
        == "red a b c d ??"
    )
    assert clean("x" * 3000) == "x" * 500 + "..."
    assert clean("one\n\x1b[2Jtwo\tthree\r", 100, lines=True) == "one\ntwo\tthree "
    assert describe(Unprintable()) == UNPRINTABLE
    assert describe(SystemExit()) == "SystemExit"
