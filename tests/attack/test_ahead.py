"""The process that plays ahead. However it ends or stops, the trainer continues, and no process
that it started keeps running."""

import copy
import json
import math
import os
import signal
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from types import SimpleNamespace

import ahead_games
import numpy as np
import pytest
from ahead_games import living, logged, make_rollouts
from forked import CONTEXT, Supervisor
from processes import wait_until
from test_servers import Peer, turns_of

from paw.config.sections import (
    AgentConfig,
    Config,
    EnvConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from paw.errors import UserError
from paw.rollouts.background import ahead
from paw.rollouts.background.ahead import AsyncRollouts
from paw.rollouts.background.messages import (
    Alive,
    Channel,
    FromPlayer,
    FromTrainer,
    PlayUpdate,
    UpdatePlayed,
)
from paw.rollouts.background.player import Player
from paw.rollouts.base import RolloutStats
from paw.rollouts.engines.settings import ServerConfig
from paw.rundir.signals import StopSignal
from paw.types import Group, Outcome, Task, Trajectory, Turn

GAMES = Path(__file__).parents[1] / "support" / "ahead_games.py"
AGAIN = "playing its episodes again"
STEP_S = 30.0


def configured(game, *, agent="plain"):
    return Config(
        model=ModelConfig(path="-"),
        env=EnvConfig(name=f"{GAMES}:{game}", step_timeout_s=STEP_S),
        agent=AgentConfig(type=agent),
        engine=ServerConfig(type="server", urls=["http://127.0.0.1:1"]),
        rollout=RolloutConfig(
            tasks=2, group_size=2, max_prompt_tokens=400, max_response_tokens=3, ahead=1
        ),
        run=RunConfig(updates=2),
    )


@pytest.fixture
def played_ahead(tiny_llm, tmp_path, monkeypatch):
    """`played_ahead(game, patience_s=...)` returns AsyncRollouts of that game. All are closed at
    the end."""
    monkeypatch.setenv("AHEAD_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("AHEAD_TRAINER", str(os.getpid()))
    monkeypatch.setattr(Supervisor, "constants", {"LINGER_S": 0.2})
    module = SimpleNamespace(Popen=Supervisor, PIPE=PIPE, TimeoutExpired=TimeoutExpired)
    monkeypatch.setattr(ahead, "subprocess", module)
    model = str(tiny_llm(tmp_path))
    opened = []

    def play(game, *, patience_s=60.0, agent="plain"):
        monkeypatch.setattr(ahead, "SILENT_S", patience_s - STEP_S)
        rollouts = AsyncRollouts(
            make_rollouts(configured(game, agent=agent), Peer().url, model), model
        )
        opened.append(rollouts)
        return rollouts

    yield play
    for rollouts in opened:
        if not rollouts._rollouts.loop.is_closed():
            rollouts.close()


def player():
    """The id of the process, as soon as it plays."""
    wait_until(lambda: logged("player"))
    return int(logged("player")[-1])


def test_a_users_error_of_any_class_is_its_line(played_ahead):
    rollouts = played_ahead("Refusing")
    with pytest.raises(UserError, match=r"^the licence: it has expired$") as refused:
        rollouts.training(0, 2)
    assert type(refused.value) is UserError
    assert refused.value.exit_code == 5
    assert player() != os.getpid()


def as_lists(groups):
    """The groups as JSON, which compares outcomes of any class by their fields."""

    def convert(value):
        return value.tolist() if isinstance(value, np.ndarray) else repr(value)

    return json.dumps([asdict(group) for group in groups], default=convert)


def test_outcomes_of_any_class_arrive_bit_for_bit(played_ahead, capfd):
    rollouts = played_ahead("Odd")
    groups, stats = rollouts.training(0, 2)
    expected, expected_stats = rollouts._rollouts.training(0, 2)
    assert as_lists(groups) == as_lists(expected)
    assert stats == expected_stats
    assert len(turns_of(groups)) == 12
    assert player()
    assert AGAIN not in capfd.readouterr().err


def as_text(result):
    """The repr of episodes, with the type and bits of each array."""
    groups, stats = result
    groups = copy.deepcopy(groups)
    for turn in turns_of(groups):
        for name in (*Turn.IDS, *Turn.VALUES):
            numbers = getattr(turn, name)
            if numbers is not None:
                vars(turn)[name] = (str(numbers.dtype), numbers.tobytes())
    return repr((groups, stats))


def test_numbers_of_an_update_arrive_bit_for_bit_and_are_small():
    numbers = [0.1, -0.0, 5e-324, -1.7976931348623157e308, math.inf, math.nan]
    ids = [0, 1, 2**31 - 1, 50_000, 128_000, 7]
    outcome = Outcome("seen", reward=0.1 + 0.2, done=True, won=False, score=1 / 3)
    # Any text, including what JSON cannot represent.
    task = Task("train/\ud800/1", payload=object())
    full_turn = Turn(
        ids,
        ids,
        numbers,
        numbers,
        "asked",
        "said",
        outcome,
        "anchor",
        version=3,
        versions=ids,
        observation_ids=[],
    )
    bare_turn = Turn(
        [],
        ids,
        numbers,
        None,
        "asked",
        "said",
        outcome,
        "anchor",
        version=3,
        spans=[(1, 2)],
        separator_ids=[4],
    )
    long_turn = Turn(ids * 5000, ids, numbers, None, "asked", "said", outcome, "anchor", version=3)
    groups = [Group(task, [Trajectory(task, 1, [full_turn, bare_turn, long_turn])], index=0)]
    stats = RolloutStats(texts_cut=2, failed=[Trajectory(task, 0, failure="it broke")])
    expected = as_text((groups, stats))

    our_socket, their_socket = socket.socketpair()
    message = UpdatePlayed.pack(4, (groups, stats), [task])
    threading.Thread(
        target=Channel(their_socket, FromPlayer).send, args=(message,), daemon=True
    ).start()
    arrived = Channel(our_socket, FromPlayer).receive(10).unpack([task])
    assert len(message.model_dump_json()) < 6 * len(ids) * 5000
    assert as_text(arrived) == expected
    assert arrived[0][0].task is task


def test_a_killed_process_is_noticed_though_one_that_it_forked_holds_its_socket(
    played_ahead, capfd
):
    rollouts = played_ahead("Forking")

    def kill():
        wait_until(lambda: living("forked"))
        os.kill(player(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    groups, _ = rollouts.training(0, 2)
    assert len(turns_of(groups)) == 12
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert f"has ended (killed by SIGKILL); {AGAIN}" in errors
    assert not living("forked")


def test_one_that_is_stopped_is_ended_and_a_stop_of_the_run_is_heard_meanwhile(played_ahead, capfd):
    rollouts = played_ahead("PlainHelped", patience_s=2.0)

    def stop():
        os.kill(player(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    with StopSignal() as told_to_stop:
        threading.Thread(target=stop, daemon=True).start()
        groups, _ = rollouts.training(0, 2)
        assert told_to_stop.requested
    assert len(turns_of(groups)) == 12
    (message,) = [line for line in capfd.readouterr().err.splitlines() if AGAIN in line]
    assert "gave no sign of life for 2 s" in message
    stopped = logged("player")[0]
    assert not Path(f"/proc/{stopped}").exists()
    helpers = set(logged("helper"))
    rollouts.close()
    assert helpers
    assert not living("helper")


def test_one_whose_event_loop_an_agent_holds_is_ended(played_ahead, capfd):
    rollouts = played_ahead("Plain", agent=f"{GAMES}:blocks", patience_s=2.0)
    groups, _ = rollouts.training(0, 2)
    assert len(turns_of(groups)) == 12
    assert f"held by a call that never returns) and was ended; {AGAIN}" in capfd.readouterr().err


def test_one_whose_environment_is_slow_is_left_alone(played_ahead, capfd):
    rollouts = played_ahead("Slow", patience_s=1.5)
    groups, _ = rollouts.training(0, 2)
    assert len(turns_of(groups)) == 12
    assert player()
    assert AGAIN not in capfd.readouterr().err


def test_an_environment_that_lists_other_tasks_each_time_is_named(played_ahead):
    rollouts = played_ahead("OtherTasks")
    with pytest.raises(UserError, match="has different tasks from the trainer"):
        rollouts.training(0, 2)


def test_programs_of_environments_can_be_ended_and_end_with_the_run(played_ahead):
    rollouts = played_ahead("Helped")
    rollouts.training(0, 2)
    wait_until(lambda: len(living("left")) == 2)
    assert logged("ended")
    assert set(logged("ended")) == {"-15 -15"}
    process = rollouts._player._process
    rollouts.close()
    assert process.poll() == 0
    assert not living("helper")
    assert not living("left")
    assert len(logged("closed")) >= 4
    assert set(logged("closed")) == {"-15"}


def test_a_trainer_that_has_ended_is_no_failure_of_an_update(capfd):
    """Progress is reported from the loop that plays. That it reaches nobody is not worth a
    traceback."""
    trainer_end, player_end = socket.socketpair()
    trainer_end.close()
    channel = Channel(player_end, FromTrainer)
    playing = SimpleNamespace(_channel=channel, _report=lambda *counts: channel.send(Alive()))
    rollouts = SimpleNamespace(
        tasks=lambda step, count: [],
        play_share_of_update=lambda step, tasks, report: report(1, 2),
    )
    Player._play(playing, rollouts, PlayUpdate(step=0, count=1))
    assert capfd.readouterr().err == ""
    channel.close()


def test_when_the_trainer_is_killed_it_ends_with_all_that_it_started(
    tiny_llm, tmp_path, monkeypatch
):
    monkeypatch.setenv("AHEAD_LOG", str(tmp_path / "log"))
    arguments = (
        configured("Helped").model_dump_json(),
        Peer().url,
        str(tiny_llm(tmp_path)),
        str(tmp_path / "log"),
    )
    trainer = CONTEXT.Process(target=ahead_games.trainer, args=arguments)
    trainer.start()
    try:
        wait_until(lambda: logged("forked") and len(living("left")) == 2)
        trainer.kill()
        wait_until(lambda: not (living("player") or living("helper") or living("left")))
        assert living("forked")  # it keeps the trainer's end of the socket open
    finally:
        trainer.kill()
        for pid in living("forked"):
            os.kill(pid, signal.SIGKILL)
