"""Environments in processes of their own: what no thread survives costs the episodes of one
process."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from deadly import Deadly
from test_servers import Peer, connected  # noqa: F401
from torch import nn
from toyworld import make_chat, make_engine, make_model

from paw.config.sections import (
    Config,
    EngineConfig,
    EnvConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.errors import NoOracleError, UserError
from paw.model.loading import load_tokenizer
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.rollouts.text.chat import Chat
from paw.types import Task

FILE = Path(__file__).parents[1] / "support" / "deadly.py"
SILENT = "TimeoutError: no answer within 1 s"
BESIDE = "EnvironmentFailure: another environment of its process gave no answer within 1 s"


@pytest.fixture(scope="module")
def model():
    return make_model()


def configured(name, processes, **env):
    return Config(
        model=ModelConfig(path="-"),
        env=EnvConfig(name=f"{FILE}:{name}", processes=processes, **env),
        rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=3),
    )


@pytest.fixture
def rollouts(model):
    """`rollouts("Deadly", processes=2, step_timeout_s=1.0)`: of an environment of deadly.py."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    made = []

    def make(name, processes=2, **env):
        config = configured(name, processes, **env)
        made.append(Rollouts(make_factory(config), make_engine(model), make_chat(), config))
        return made[-1]

    yield make
    for one in made:
        one.close()
    torch.set_num_threads(count)


def play(rollouts):
    return rollouts.play(
        train_tasks(rollouts.factory, 0, 4, 0),
        group_size=4,
        temperature=1.0,
        seed=0,
        stream="train/0",
    )


def episodes_of(groups):
    return {
        (episode.task.id, episode.member): episode
        for group in groups
        for episode in group.trajectories
    }


def children(pid):
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def workers():
    """Ids of the processes of environments that this process has started."""
    return [pid for pid in children(os.getpid()) if b"-m\0paw.rollouts.env_process" in command(pid)]


def alive(pid):
    try:
        return not re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("deed", "reasons"),
    [
        ("exits", {"EnvironmentFailure: its process ended with exit code 0"}),
        ("crashes", {"EnvironmentFailure: its process was killed by SIGSEGV"}),
        (
            "is killed with its connection held",
            {"EnvironmentFailure: its process was killed by SIGKILL"},
        ),
        ("is stopped", {SILENT, BESIDE}),
        ("holds the interpreter", {SILENT, BESIDE}),
        (
            "speaks out of turn",
            {"EnvironmentFailure: its process was ended: it answered what nobody had asked"},
        ),
    ],
)
def test_one_that_dies_or_is_silent_costs_the_episodes_of_its_process(
    rollouts, tmp_path, monkeypatch, deed, reasons
):
    monkeypatch.setenv("DEADLY_ONCE", str(tmp_path / "once"))
    wanted = episodes_of(play(rollouts("Deadly", processes=0))[0])
    monkeypatch.setenv("DEADLY", deed)
    played = rollouts("Deadly", step_timeout_s=1.0)
    groups, stats = play(played)
    assert len(stats.failures) == 8
    assert stats.metrics()["health/processes_lost"] == 1
    assert {failure.partition(": ")[2] for failure in stats.failures} == reasons
    found = episodes_of(groups)
    assert len(found) == 8
    assert all(found[key] == wanted[key] for key in found)
    groups, stats = play(played)  # another process has taken its place
    assert stats.failures == []
    assert stats.processes_lost == 0
    assert episodes_of(groups) == wanted
    played.close()


@pytest.mark.parametrize("name", ["Deadly", "Blocking", "Coroutines", "Wrongs"])
def test_processes_give_what_threads_give(rollouts, name):
    threads, processes = (play(rollouts(name, processes=count, max_text=1000)) for count in (0, 3))
    assert episodes_of(threads[0]) == episodes_of(processes[0])
    assert len(threads[0]) == (1 if name == "Wrongs" else 4)
    assert sorted(threads[1].failures) == sorted(processes[1].failures)
    assert len(threads[1].failures) == (12 if name == "Wrongs" else 0)
    assert threads[1].metrics() == processes[1].metrics()
    assert name != "Wrongs" or threads[1].texts_cut > 0


def test_every_member_of_an_environment_is_at_hand():
    """Tools and replies, the task in words, the oracle and its actions; those that it lacks have
    their defaults."""

    def seen(processes, name):
        config = configured(name, processes)
        environment = CheckedEnv(make_factory(config).make(), config.env)
        found = [
            environment.reset(Task("x")),
            environment.tools,
            getattr(environment, "task", None),
        ]
        found += [environment.context(), environment.anchor(), environment.admissible_actions()]
        try:
            answers = [environment.oracle(), environment.format_action("2")]
        except NoOracleError:
            return [*found, "no oracle", environment.step(environment.format_action("go"))]
        found += [(answer, answer.content, answer.calls) for answer in answers]
        return [*found, *map(environment.step, answers), environment.context()]

    for name in ("WithTools", "Deadly"):
        assert seen(1, name) == seen(0, name)
    assert seen(1, "WithTools")[2] == "add to x"


def test_an_environment_that_a_process_cannot_import_is_one_line():
    config = configured("Deadly", 2)
    # A class of a module that can be.
    environment = CheckedEnv(make_factory(config, Deadly).make(), config.env)
    assert environment.reset(Task("x")) == "start"

    class Local(Deadly):
        pass

    for given, name in ((Local, "Local"), (Deadly(), "Deadly")):
        wanted = rf"^env\.processes = 2: \S*{name} was handed over by a program, .*'module:name' or 'FILE\.py:name'; or"
        with pytest.raises(UserError, match=wanted):
            make_factory(config, given)


def test_what_cannot_run_in_a_process_is_one_line():
    for name, why in (
        (
            "EndsAtOnce",
            rf"^env\.processes = 2: env\.name = '{FILE}:EndsAtOnce': its process ended with exit code 7$",
        ),
        ("Nothing", "the file has no 'Nothing'"),
    ):
        with pytest.raises(UserError, match=why):
            make_factory(configured(name, 2))
    with pytest.raises(
        UserError, match=r"^env\.processes = 2: env\.name = 'alfworld' does not run in processes"
    ):
        make_factory(
            Config.model_validate(
                {"model": {"path": "-"}, "env": {"name": "alfworld", "processes": 2}}
            )
        )
    config = configured("Unsendable", 1)
    with pytest.raises(
        UserError, match=r"^env\.processes: what reset\(\) takes cannot be sent to a process \("
    ):
        CheckedEnv(make_factory(config).make(), config.env).reset(
            make_factory(config).tasks("train", 0)[0]
        )


def test_tasks_that_hang_are_one_line_beside_processes_too(monkeypatch):
    """They are listed in the trainer, in a thread with a deadline, as without processes."""
    monkeypatch.setenv("ATTACK", "tasks that hang")
    name = f"{Path(__file__).parents[1] / 'support' / 'environments.py'}:LaterTasks"
    env = {"name": name, "processes": 1, "step_timeout_s": 20.0}
    factory = make_factory(Config.model_validate({"model": {"path": "-"}, "env": env}))
    factory.config = factory.config.model_copy(update={"step_timeout_s": 0.3})
    with pytest.raises(
        UserError,
        match=r"^a task of env\.name cannot be had: TimeoutError: no answer within 0\.3 s",
    ):
        train_tasks(factory, 0, 4, 0)


def test_processes_and_what_they_started_end_with_the_factory():
    config = configured("Helpers", 2)
    others = workers()  # of tests before
    factory = make_factory(config)
    environments = [CheckedEnv(factory.make(), config.env) for _ in range(4)]
    helpers = [int(environment.reset(Task("x"))) for environment in environments]
    started = [pid for pid in workers() if pid not in others]
    assert len(started) == 2
    assert all(map(alive, [*started, *helpers]))
    del factory, environments
    until(lambda: not any(map(alive, [*started, *helpers])))


TRAINER = f"""
import os, sys, threading, time
from paw.config.sections import Config, EnvConfig, ModelConfig
from paw.envs import make_factory
from paw.types import Task
config = Config(model=ModelConfig(path="-"), env=EnvConfig(name="{FILE}:Deadly", processes=2))
factory = make_factory(config)
environments = [factory.make() for _ in range(2)]
def hold(environment):
    environment.reset(Task("train/0/1"))
    for _ in range(2):
        environment.step("go")
for environment in environments:
    threading.Thread(target=hold, args=(environment,), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def test_processes_end_with_a_trainer_that_is_killed(tmp_path):
    """One of them holds its interpreter; a signal of the terminal ends none."""
    once = tmp_path / "once"
    variables = os.environ | {"DEADLY": "holds the interpreter", "DEADLY_ONCE": str(once)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        env=variables,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert trainer.stdout
        assert trainer.stdout.readline() == b"ready\n"
        until(once.exists)
        started = children(trainer.pid)
        assert len(started) == 2
        for pid in started:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        assert all(map(alive, started))
        trainer.kill()
        until(lambda: not any(map(alive, started)))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.communicate()


def test_a_check_goes_on_where_an_environment_ends_its_process(paw_here, tmp_path, monkeypatch):
    monkeypatch.setenv("DEADLY", "exits")
    monkeypatch.setenv("DEADLY_ONCE", str(tmp_path / "once"))
    done = paw_here("env", "check", f"{FILE}:Deadly", {"env.processes": 1}, code=1)
    assert re.search(
        r"FAIL +[\d.]+ s  outcomes +raised EnvironmentFailure: its process ended with exit code 0\n",
        done.stdout,
    )
    assert re.search(r"^1 of \d+ rules failed", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_processes_play_ahead_too(connected, tiny_llm, tmp_path):  # noqa: F811
    """The process of rollout.ahead has its own, which end with it, by kill -9 too."""
    from paw.rollouts.background.ahead import AsyncRollouts

    engine = connected(Peer(), Peer())
    folder = str(tiny_llm(tmp_path))
    push_weights(nn.Linear(2, 3), engine, version=0)
    engine.positions = 512
    config = configured("Deadly", 2).model_copy(
        update={
            "engine": EngineConfig(type="server", urls=["http://127.0.0.1:1"]),
            "rollout": RolloutConfig(
                tasks=2, group_size=4, max_prompt_tokens=400, max_response_tokens=3, ahead=1
            ),
            "run": RunConfig(updates=4),
        }
    )
    plain = Rollouts(make_factory(config), engine, Chat(load_tokenizer(folder)), config, Ranks())
    rollouts = AsyncRollouts(plain, folder)
    try:
        expected, _ = plain.training(1, 2)
        rollouts.training(0, 2)
        groups, stats = rollouts.training(1, 2)
        assert stats.failures == []
        assert [g.task for g in groups] == [g.task for g in expected]
        outcomes = [[t.outcome for t in e.turns] for group in groups for e in group.trajectories]
        assert outcomes == [
            [t.outcome for t in e.turns] for group in expected for e in group.trajectories
        ]
        (supervisor,) = [
            pid
            for pid in children(os.getpid())
            if b"paw.rollouts.background.supervisor" in command(pid)
        ]
        (player,) = [
            pid for pid in children(supervisor) if b"paw.rollouts.background.player" in command(pid)
        ]
        started = [pid for pid in children(player) if b"paw.rollouts.env_process" in command(pid)]
        assert len(started) == 2
        os.kill(player, signal.SIGKILL)
        until(lambda: not any(map(alive, started)))
    finally:
        rollouts.close()
