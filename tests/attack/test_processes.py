"""Environments in processes of their own: what would end the whole trainer costs the episodes of
one process."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from types import SimpleNamespace

import pytest
import torch
from deadly import Deadly
from forked import Supervisor
from processes import children, command_of, is_alive, wait_until
from test_servers import Peer, connected, turns_of  # noqa: F401
from torch import nn
from toyworld import make_chat, make_engine, make_model

from paw.config.sections import (
    Config,
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
from paw.rollouts.background import ahead
from paw.rollouts.background.ahead import AsyncRollouts
from paw.rollouts.engines.settings import ServerConfig
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
    """`rollouts("Deadly", processes=2, step_timeout_s=1.0)` plays an environment of deadly.py."""
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    made = []

    def make(name, processes=2, **env):
        config = configured(name, processes, **env)
        made.append(Rollouts(make_factory(config), make_engine(model), make_chat(), config))
        return made[-1]

    yield make
    for rollouts_made in made:
        rollouts_made.close()
    torch.set_num_threads(thread_count)


def play(rollouts):
    return rollouts.play_tasks(
        train_tasks(rollouts.factory, 0, 4, 0),
        group_size=4,
        temperature=1.0,
        seed=0,
        stream="train/0",
    )


def episodes_of(groups):
    """Episodes by task and member."""
    episodes = {}
    for group in groups:
        for episode in group.trajectories:
            episodes[episode.task.id, episode.member] = episode
    return episodes


def children_that_run(module, pid):
    """Ids of the children of a process whose command names the module."""
    return [child for child in children(pid) if module.encode() in command_of(child)]


def workers():
    """Ids of the processes of environments that this process has started."""
    return children_that_run("paw.rollouts.env_process", os.getpid())


REASONS = {
    "exits": {"EnvironmentFailure: its process ended with exit code 0"},
    "crashes": {"EnvironmentFailure: its process was killed by SIGSEGV"},
    "is killed with its connection held": {"EnvironmentFailure: its process was killed by SIGKILL"},
    "is stopped": {SILENT, BESIDE},
    "holds the interpreter": {SILENT, BESIDE},
    "speaks out of turn": {
        "EnvironmentFailure: its process was ended: it answered a call that was never made"
    },
}
"""What each deed of deadly.py fails episodes with."""


def test_one_that_dies_or_is_silent_costs_the_episodes_of_its_process(
    rollouts, tmp_path, monkeypatch
):
    deed_file = tmp_path / "deed"
    monkeypatch.setenv("DEADLY", str(deed_file))
    wanted = episodes_of(play(rollouts("Deadly", processes=0))[0])
    played = rollouts("Deadly", step_timeout_s=1.0)
    for deed, reasons in REASONS.items():
        deed_file.write_text(deed)
        groups, stats = play(played)
        assert len(stats.failures) == 8, deed
        assert stats.metrics()["health/processes_lost"] == 1, deed
        assert {failure.partition(": ")[2] for failure in stats.failures} == reasons
        episodes = episodes_of(groups)
        # Environments are made at the same time, so a process may have had all of a group but one
        # member, which is dropped.
        assert 8 - stats.groups_dropped <= len(episodes) <= 8, deed
        assert all(episodes[key] == wanted[key] for key in episodes), deed

        groups, stats = play(played)  # another process has taken its place
        assert stats.failures == [], deed
        assert stats.processes_lost == 0, deed
        assert episodes_of(groups) == wanted, deed
    played.close()


@pytest.mark.parametrize(
    ("name", "group_count", "failure_count"),
    [("Blocking", 4, 0), ("Coroutines", 4, 0), ("Wrongs", 1, 12)],
)
def test_processes_give_what_threads_give(rollouts, name, group_count, failure_count):
    groups, stats = play(rollouts(name, processes=0, max_text=1000))
    groups_of_processes, stats_of_processes = play(rollouts(name, processes=2, max_text=1000))
    assert len(groups) == group_count
    assert episodes_of(groups) == episodes_of(groups_of_processes)
    assert len(stats.failures) == failure_count
    assert sorted(stats.failures) == sorted(stats_of_processes.failures)
    assert stats.metrics() == stats_of_processes.metrics()
    if name == "Wrongs":
        assert stats.texts_cut > 0


def test_every_member_of_an_environment_is_at_hand():
    """Tools and replies, the task in words, the oracle and its actions; those that it lacks have
    their defaults."""

    def members(processes, name):
        config = configured(name, processes)
        environment = CheckedEnv(make_factory(config).make(), config.env)
        values = {
            "reset": environment.reset(Task("x")),
            "tools": environment.tools,
            "task": getattr(environment, "task", None),
            "context": environment.context(),
            "anchor": environment.anchor(),
            "admissible_actions": environment.admissible_actions(),
        }
        try:
            answers = [environment.oracle(), environment.format_action("2")]
        except NoOracleError:
            answers = [environment.format_action("go")]
        else:
            values["calls"] = [(answer.content, answer.calls) for answer in answers]
        values["answers"] = answers
        values["outcomes"] = [environment.step(answer) for answer in answers]
        values["context at the end"] = environment.context()
        return values

    with_tools = members(1, "WithTools")
    assert with_tools == members(0, "WithTools")
    assert with_tools["task"] == "add to x"
    assert "calls" in with_tools
    without_tools = members(1, "Deadly")
    assert without_tools == members(0, "Deadly")
    assert "calls" not in without_tools


def test_an_environment_that_a_process_cannot_import_is_one_line():
    config = configured("Deadly", 2)
    # A process can import this class from its module.
    environment = CheckedEnv(make_factory(config, Deadly).make(), config.env)
    assert environment.reset(Task("x")) == "start"

    class Local(Deadly):
        pass

    for handed_over, name in ((Local, "Local"), (Deadly(), "Deadly")):
        message = (
            rf"^env\.processes = 2: \S*{name} was passed by a program, "
            r".*'module:name' or 'FILE\.py:name'; or"
        )
        with pytest.raises(UserError, match=message):
            make_factory(config, handed_over)


def test_what_cannot_run_in_a_process_is_one_line():
    ended = "its process ended with exit code 7"
    with pytest.raises(
        UserError, match=rf"^env\.processes = 2: env\.name = '{FILE}:EndsAtOnce': {ended}$"
    ):
        make_factory(configured("EndsAtOnce", 2))
    with pytest.raises(UserError, match="the file has no 'Nothing'"):
        make_factory(configured("Nothing", 2))

    alfworld = {"model": {"path": "-"}, "env": {"name": "alfworld", "processes": 2}}
    with pytest.raises(
        UserError, match=r"^env\.processes = 2: env\.name = 'alfworld' does not run in processes"
    ):
        make_factory(Config.model_validate(alfworld))

    config = configured("Unsendable", 1)
    factory = make_factory(config)
    environment = CheckedEnv(factory.make(), config.env)
    with pytest.raises(
        UserError,
        match=r"^env\.processes: the arguments of reset\(\) cannot be sent to a process \(",
    ):
        environment.reset(factory.tasks("train", 0)[0])


def test_tasks_that_hang_are_one_line_beside_processes_too(monkeypatch):
    """Tasks are listed in the trainer, in a thread with a deadline, as without processes."""
    monkeypatch.setenv("ATTACK", "tasks that hang")
    name = f"{Path(__file__).parents[1] / 'support' / 'environments.py'}:LaterTasks"
    env = {"name": name, "processes": 1, "step_timeout_s": 20.0}
    factory = make_factory(Config.model_validate({"model": {"path": "-"}, "env": env}))
    factory.config = factory.config.model_copy(update={"step_timeout_s": 0.3})
    with pytest.raises(
        UserError,
        match=r"^a task of env\.name cannot be read: TimeoutError: no answer within 0\.3 s",
    ):
        train_tasks(factory, 0, 4, 0)


def test_processes_and_what_they_started_end_with_the_factory():
    config = configured("Helpers", 2)
    workers_before = workers()  # those of earlier tests
    factory = make_factory(config)
    environments = [CheckedEnv(factory.make(), config.env) for _ in range(4)]
    helpers = [int(environment.reset(Task("x"))) for environment in environments]
    started = [pid for pid in workers() if pid not in workers_before]
    assert len(started) == 2
    assert all(map(is_alive, [*started, *helpers]))
    del factory, environments
    wait_until(lambda: not any(map(is_alive, [*started, *helpers])))


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
    """Even one that holds its interpreter. A signal of the terminal ends none of them."""
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
        wait_until(once.exists)
        started = children(trainer.pid)
        assert len(started) == 2
        for pid in started:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        assert all(map(is_alive, started))
        trainer.kill()
        wait_until(lambda: not any(map(is_alive, started)))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.communicate()


HELPED = f"""
import time
from paw.config.sections import Config, EnvConfig, ModelConfig
from paw.envs import make_factory
from paw.types import Task
config = Config(model=ModelConfig(path="-"), env=EnvConfig(name="{FILE}:Helpers", processes=2))
factory = make_factory(config)
environments = [factory.make() for _ in range(2)]
print(*(environment.reset(Task("x")) for environment in environments), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it needs pidfd_open")
def test_what_processes_started_ends_with_a_trainer_that_is_killed():
    trainer = subprocess.Popen(
        [sys.executable, "-c", HELPED], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert trainer.stdout
        helpers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(helpers) == 2 and all(map(is_alive, helpers))
        trainer.kill()
        wait_until(lambda: not any(map(is_alive, helpers)))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.communicate()


def test_a_check_goes_on_where_an_environment_ends_its_process(paw_here, tmp_path, monkeypatch):
    monkeypatch.setenv("DEADLY", "exits")
    monkeypatch.setenv("DEADLY_ONCE", str(tmp_path / "once"))
    report = paw_here("env", "check", f"{FILE}:Deadly", {"env.processes": 1}, code=1).stdout
    failure = "raised EnvironmentFailure: its process ended with exit code 0"
    assert re.search(rf"FAIL +[\d.]+ s  outcomes +{failure}\n", report)
    assert re.search(r"^1 of \d+ rules failed", report, re.MULTILINE)


def test_processes_play_ahead_too(connected, tiny_llm, tmp_path, monkeypatch):  # noqa: F811
    """The process of rollout.ahead has worker processes of its own, which end with it, even by kill
    -9."""
    module = SimpleNamespace(Popen=Supervisor, PIPE=PIPE, TimeoutExpired=TimeoutExpired)
    monkeypatch.setattr(ahead, "subprocess", module)
    engine = connected(Peer(), Peer())
    folder = str(tiny_llm(tmp_path))
    push_weights(nn.Linear(2, 3), engine, version=0)
    engine.positions = 512
    config = configured("Deadly", 2).model_copy(
        update={
            "engine": ServerConfig(type="server", urls=["http://127.0.0.1:1"]),
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
        assert [group.task for group in groups] == [group.task for group in expected]
        assert outcomes_of(groups) == outcomes_of(expected)
        supervisor = rollouts._player._process.pid
        workers_of = {
            child: children_that_run("paw.rollouts.env_process", child)
            for child in children(supervisor)
        }
        ((player, started),) = [(pid, found) for pid, found in workers_of.items() if found]
        assert len(started) == 2
        os.kill(player, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)))
    finally:
        rollouts.close()


def outcomes_of(groups):
    return [turn.outcome for turn in turns_of(groups)]
