"""Coroutine environments on the event loop, and environments that are made while others play."""

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from environments import Game, Honest
from toyworld import Scripted, make_chat, make_engine, make_model

from paw.config.recipe import load
from paw.config.sections import Config, EnvConfig, ModelConfig, RolloutConfig
from paw.envs import make_factory
from paw.errors import UserError
from paw.rollouts import coroutine_env, loop
from paw.rollouts.scheduler import Rollouts
from paw.types import Task

DEADLY = Path(__file__).parents[1] / "support" / "deadly.py"


class AsyncGame(Game):
    """Counts to three. In every group of four, the second game runs `act` in its second step."""

    act = None
    made: list["AsyncGame"]

    def __init__(self):
        super().__init__({})
        self.made.append(self)
        self.misbehaves = self.act is not None and len(self.made) % 4 == 2
        self.closings = 0

    async def reset(self, task):
        await asyncio.sleep(0)
        return super().reset(task)

    async def step(self, response):
        if self.misbehaves and self.n == 1:
            await self.act()
        await asyncio.sleep(0)
        return super().step(response)

    async def close(self):
        await asyncio.sleep(0)
        self.closings += 1


def game(base=AsyncGame, **members):
    return type(base.__name__, (base,), {"made": [], **members})


class Own(Honest):
    """Makes games of the class `game`."""

    def __init__(self, config, game):
        super().__init__(config)
        self.game = game

    def make(self):
        return self.game()


def rollouts_of(factory, *, engine=None, agent=None, **env):
    config = Config(
        model=ModelConfig(path="-"),
        env=EnvConfig(name="attack", **env),
        rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=3),
    )
    if isinstance(factory, type) and issubclass(factory, Game):
        factory = Own(config.env, factory)
    chat = make_chat()
    engine = engine or Scripted(chat, lambda prompt: "go")
    return Rollouts(factory, engine, chat, config, agent=agent)


def play(rollouts, groups=2, size=4, **options):
    tasks = [Task(f"train/0/{i}", "count") for i in range(groups)]
    return rollouts.play_tasks(
        tasks, group_size=size, temperature=1.0, seed=0, stream="train/0", **options
    )


def episodes_of(groups):
    return [episode for group in groups for episode in group.trajectories]


def test_it_plays_as_plain_functions_do_in_the_threads_of_its_caller():
    """With a real model, bit for bit. Environments are reused."""
    idents = set()

    async def step(self, response):
        idents.add(threading.get_ident())
        return await AsyncGame.step(self, response)

    model = make_model()
    games = game(step=step)
    coroutines = rollouts_of(games, engine=make_engine(model))
    plain = rollouts_of(Honest(None), engine=make_engine(model))
    for _ in range(2):
        groups, stats = play(coroutines)
        wanted, _ = play(plain)
        assert stats.failures == []
        for episode, wanted_episode in zip(episodes_of(groups), episodes_of(wanted), strict=True):
            assert episode.turns == wanted_episode.turns
            assert len(episode.turns) == 3
    assert idents == {threading.get_ident()}
    assert len(games.made) == 8
    for rollouts in (coroutines, plain, coroutines):
        rollouts.close()
    assert [made.closings for made in games.made] == [1] * 8


def test_set_up_of_all_is_at_the_same_time_and_needs_no_threads():
    started_count = 0
    all_begun = asyncio.Event()

    async def reset(self, task):
        nonlocal started_count
        started_count += 1
        if started_count == 200:
            all_begun.set()
        await all_begun.wait()
        return Game.reset(self, task)

    rollouts = rollouts_of(game(reset=reset), threads=1)
    groups, stats = play(rollouts, groups=50)
    assert stats.failures == []
    assert len(episodes_of(groups)) == started_count == 200


def test_plain_environments_are_made_in_env_threads_threads():
    """All twelve are being made before the first is finished, and never more than twelve at
    once."""
    meeting = threading.Barrier(12)

    class Meeting(Honest):
        may_block = True

        def make(self):
            meeting.wait(timeout=60)
            return Game({})

    rollouts = rollouts_of(Meeting(None), threads=12)
    groups, stats = play(rollouts, groups=6)
    assert stats.failures == []
    assert len(episodes_of(groups)) == 24
    assert rollouts.pools[""].threads.count == 12


def test_processes_make_several_environments_at_the_same_time(tmp_path, monkeypatch):
    """No environment is finished before all eight are being made, four in each process."""
    monkeypatch.setenv("DEADLY_MEETING", str(tmp_path))
    config = EnvConfig(name=f"{DEADLY}:Meeting", processes=2, threads=8, step_timeout_s=120)
    factory = make_factory(Config(model=ModelConfig(path="-"), env=config))
    rollouts = rollouts_of(factory, threads=8)
    groups, stats = play(rollouts)
    rollouts.close()
    assert stats.failures == []
    assert len(episodes_of(groups)) == 8
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize("kind", ["constructor", "reset"])
def test_the_engine_works_while_an_environment_is_made(kind):
    """One environment is finished only after all other episodes have ended."""
    others_ended = threading.Event()

    class Late(Honest):
        may_block = True

        def make(self):
            self.made += 1
            if kind == "reset":
                return waiting() if self.made == 2 else Game({})
            if self.made == 2:
                assert others_ended.wait(timeout=60)
            return Game({})

    async def reset(self, task):
        while not others_ended.is_set():
            await asyncio.sleep(0.001)
        return Game.reset(self, task)

    waiting = game(reset=reset)
    groups, stats = play(
        rollouts_of(Late(None)),
        progress=lambda done, total: done == total - 1 and others_ended.set(),
    )
    assert stats.failures == []
    assert len(episodes_of(groups)) == 8


class OwnBase(BaseException):
    pass


def raising(error):
    async def act(self):
        await asyncio.sleep(0)
        raise error

    return act


async def waits(self):
    await asyncio.Event().wait()


async def ignores_its_end(self):
    while not self.released.is_set():
        with suppress(asyncio.CancelledError):
            await self.released.wait()


async def cancels_itself(self):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def stops_the_loop(self):
    asyncio.get_running_loop().stop()


async def cancels_all(self):
    for task in asyncio.all_tasks():
        task.cancel()


SILENT = "TimeoutError: no answer within 0.3 s"


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (raising(OSError("broken")), "OSError: broken"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (raising(OwnBase("mine")), "OwnBase: mine"),
        (raising(GeneratorExit()), "GeneratorExit"),
        (raising(asyncio.CancelledError()), "EnvironmentFailure: CancelledError"),
        (cancels_itself, "EnvironmentFailure: CancelledError"),
        (waits, SILENT),
        (ignores_its_end, SILENT),
        (stops_the_loop, "RuntimeError: the agent stopped the event loop"),
        (cancels_all, "RuntimeError: the agent cancelled tasks that are not its own"),
    ],
)
def test_what_it_does_costs_its_own_episode_and_closes_it(capfd, act, reason):
    games = game(act=act, released=asyncio.Event())
    rollouts = rollouts_of(games, step_timeout_s=0.3)
    groups, stats = play(rollouts)
    assert len(stats.failures) == 2
    assert all(f": {reason}" in failure for failure in stats.failures), stats.failures
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert stats.threads_lost == 0

    games.act = None
    assert len(episodes_of(play(rollouts)[0])) == 8  # the run goes on
    games.released.set()
    rollouts.close()
    assert [made.closings for made in games.made] == [1] * 10
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("whose", ["its own", "all"])
def test_one_that_cancels_tasks_when_it_is_closed_costs_no_other_episode(whose):
    """It is closed after a failure, and at the end of the run."""

    async def close(self):
        current = asyncio.current_task()
        with suppress(RuntimeError):  # tasks of others cannot be cancelled
            for task in asyncio.all_tasks() - {current}:
                if whose == "all" or task.trajectory is current.trajectory:
                    task.cancel()
        await AsyncGame.close(self)

    games = game(act=raising(OSError("broken")), close=close)
    rollouts = rollouts_of(games)
    groups, stats = play(rollouts)
    assert len(stats.failures) == 2
    assert all(": OSError: broken" in failure for failure in stats.failures), stats.failures
    assert [len(group.trajectories) for group in groups] == [3, 3]
    rollouts.close()
    assert [made.closings for made in games.made] == [1] * 8


def test_a_result_of_the_wrong_kind_costs_its_episode():
    async def step(self, response):
        return "won" if len(self.made) else None

    _, stats = play(rollouts_of(game(step=step)))
    assert len(stats.failures) == 8
    assert "AsyncGame: step() is 'won'; it must be an Outcome" in stats.failures[0]


@pytest.mark.parametrize("error", [UserError("my_game: set MY_KEY"), KeyboardInterrupt()])
def test_what_the_user_can_fix_and_ctrl_c_end_the_run_and_all_are_closed(error):
    """The other environments wait in their steps. Their steps are cancelled before they are
    closed."""
    cancelled = []

    async def step(self, response):
        try:
            if self is self.made[5]:
                await asyncio.sleep(0.01)
                raise error
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(self)
            raise

    games = game(step=step)
    rollouts = rollouts_of(games)
    with pytest.raises(type(error)):
        play(rollouts)
    assert len(cancelled) == 7
    rollouts.close()
    assert [made.closings for made in games.made] == [1] * 8


@pytest.mark.parametrize("base", [AsyncGame, Game])
def test_an_agent_that_fails_closes_its_environment(base):
    closed = []

    async def agent(env, model):
        await env.reset()
        raise RuntimeError("lost")

    def close(self):
        closed.append(self)

    members = {"close": close}
    if base is Game:
        members["__init__"] = lambda self: Game.__init__(self, {})
    rollouts = rollouts_of(game(base, **members), agent=agent)
    _, stats = play(rollouts)
    assert len(stats.failures) == 8
    assert len({id(environment) for environment in closed}) == 8
    rollouts.close()
    assert len(closed) == 8


def test_one_that_blocks_the_loop_is_named_once(capfd, monkeypatch):
    """A long batch of the engine is not the environment's fault."""
    monkeypatch.setattr(coroutine_env, "BLOCKED_S", 0.05)

    async def blocks(self):
        time.sleep(0.1)

    warnings = []
    for act in (None, blocks):
        rollouts = rollouts_of(game(act=act))
        engine_step = rollouts.engine.step
        monkeypatch.setattr(
            rollouts.engine, "step", lambda step=engine_step: time.sleep(0.06) or step()
        )
        groups, stats = play(rollouts)
        assert stats.failures == []
        assert len(episodes_of(groups)) == 8
        warnings.append(capfd.readouterr().err)
    assert warnings[0] == ""
    assert warnings[1].startswith("AsyncGame.step() blocked the event loop for 0.")
    assert warnings[1].count("\n") == 1


def test_what_holds_the_loop_does_not_count_as_its_waiting(monkeypatch):
    """A batch of the engine takes longer than a step may."""
    monkeypatch.setattr(loop, "HOLD_S", 0.001)

    async def step(self, response):
        for _ in range(3):
            await asyncio.sleep(0.001)
        return Game.step(self, response)

    rollouts = rollouts_of(game(step=step), step_timeout_s=0.1)
    engine_step = rollouts.engine.step
    monkeypatch.setattr(rollouts.engine, "step", lambda: time.sleep(0.12) or engine_step())
    _, stats = play(rollouts)
    assert stats.failures == []


def test_a_plain_method_that_may_block_runs_in_a_thread():
    """The environment's steps are awaited, but its reset is a plain function."""
    idents = set()

    def reset(self, task):
        idents.add(threading.get_ident())
        return Game.reset(self, task)

    groups, stats = play(rollouts_of(game(reset=reset)))
    assert stats.failures == []
    assert len(episodes_of(groups)) == 8
    assert threading.get_ident() not in idents


def test_make_may_not_be_a_coroutine_function():
    class Awaited(Honest):
        async def make(self):
            return AsyncGame()

    config = Config(model=ModelConfig(path="-"), env=EnvConfig(name="attack"))
    with pytest.raises(UserError, match=r"make\(\) is a coroutine function; make it a plain one"):
        make_factory(config, Awaited)


@pytest.mark.parametrize("value", ["0", "1001", "many"])
def test_a_number_of_threads_that_is_none_is_one_line(value):
    with pytest.raises(UserError, match=r"env\.threads") as error:
        load("quickstart", {"env.threads": value})
    assert "\n" not in str(error.value)
