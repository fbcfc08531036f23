"""Whatever an environment does to a command's process, the exit code is true, a line says why, and
two signals end it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from processes import is_alive, wait_until

STOPPED_AT_ONCE = "paw: stopped at once by a second SIGTERM; checkpoints are kept (--resume auto)\n"
FILE = Path(__file__).parents[1] / "support" / "deadly.py"
LOOP = """
import ctypes, os, signal, sys, threading, time
from paw.processes import watcher
watcher.watch(["train"])
from paw.rundir.signals import StopSignal
def hold():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock
with StopSignal() as stop:
    print("ready", os.getpid(), flush=True)
    if sys.argv[1:] == ["hold"]:
        threading.Thread(target=hold).start()
    while not stop.requested:
        time.sleep(0.01)
    time.sleep(1.5)
print("saved")
watcher.say_ending(0)
"""


@pytest.fixture
def start(tmp_path):
    """`start("env", "check", deed="exits")` starts a command, in which a deadly environment does
    the deed. What still runs at the end is killed."""
    started = []

    def begin(*words, deed="", program=("-m", "paw"), ignores=()):
        def set_handlers():  # background jobs of a script ignore some signals
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN if number in ignores else signal.SIG_DFL)

        deadly = {"DEADLY": deed, "DEADLY_ONCE": str(tmp_path / "once")} if deed else {}
        child = subprocess.Popen(
            [sys.executable, *program, *map(str, words)],
            env=os.environ | deadly,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=set_handlers,
            start_new_session=True,
        )
        started.append(child)
        return child

    yield begin
    for child in started:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


@pytest.fixture
def loop(start):
    """The loop of a run that waits to be stopped: (its parent, its own id)."""

    def begin(*words, **options):
        child = start(*words, program=("-c", LOOP), **options)
        word, pid = child.stdout.readline().split()
        assert word == "ready"
        assert int(pid) != child.pid
        return child, int(pid)

    return begin


@pytest.mark.parametrize(
    ("deed", "code", "line"),
    [
        (
            "exits",
            1,
            "paw: env ended inside code that is not PaW's, with exit code 0 (os._exit? see env.processes)",
        ),
        ("crashes", -signal.SIGSEGV, "paw: env was killed by SIGSEGV"),
    ],
)
def test_a_command_that_an_environment_ends_has_failed_and_says_so(start, deed, code, line):
    child = start("env", "check", f"{FILE}:Deadly", deed=deed)
    errors = child.communicate(timeout=60)[1]
    assert (child.returncode, errors) == (code, f"{line}\n")


def test_a_command_that_ends_in_order_keeps_its_exit_code(start):
    assert start("env", "check", f"{FILE}:Nothing").wait(60) == 2
    child = start("env", "check", "--help")
    assert "check" in child.communicate(timeout=60)[0]
    assert child.returncode == 0


TIDIES = """
import os, sys, time
from paw.processes import watcher
watcher.watch(["play"])
import signal
signal.signal(signal.SIGINT, watcher.interrupt)
print("ready", os.getpid(), flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(watcher.ANSWER_S + 1)
watcher.say_ending(130)
sys.exit(130)
"""


def test_a_command_that_tidies_up_for_long_has_heard_ctrl_c(start):
    child = start(program=("-c", TIDIES))
    assert child.stdout.readline().startswith("ready")
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[1] == ""
    assert child.returncode == 130


LOADS = """
import sys, time, types
sys.argv = ["paw", "train"]
slow = types.ModuleType("paw.cli")
slow.entry = lambda: (print("ready", flush=True), time.sleep(60))
sys.modules["paw.cli"] = slow
from paw.__main__ import run
run()
"""


def test_ctrl_c_while_a_command_loads_is_said_in_one_line(start):
    child = start(program=("-c", LOADS))
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[1] == "\npaw: interrupted while loading\n"
    assert child.returncode == 130


def test_two_signals_end_a_command_whose_interpreter_is_held(start, tmp_path):
    """After the first one a line says that Python does not answer."""
    child = start("env", "check", f"{FILE}:Deadly", deed="holds the interpreter")
    wait_until((tmp_path / "once").exists)
    child.send_signal(signal.SIGINT)
    assert "SIGINT: Python does not answer" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130
    assert child.stderr.read() == "paw: stopped at once by a second SIGINT\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_counts_once_whether_it_is_sent_to_the_parent_or_to_both(loop, number, to_all):
    child, _ = loop()
    (os.killpg if to_all else os.kill)(child.pid, number)
    output, errors = child.communicate(timeout=30)
    assert (child.returncode, output) == (0, "saved\n")
    assert errors == f"\n{number.name}: finishing this update, then saving (again: stop now)\n"


def test_a_second_signal_stops_a_run_at_once(loop):
    child, _ = loop()
    for _ in range(2):
        child.send_signal(signal.SIGTERM)
        time.sleep(0.6)
    assert child.wait(20) == -signal.SIGTERM
    assert child.stderr.read().endswith(STOPPED_AT_ONCE)


def test_two_sigterms_end_a_run_whose_interpreter_is_held(loop):
    child, pid = loop("hold")
    for _ in range(2):
        child.send_signal(signal.SIGTERM)
        time.sleep(0.6)
    assert child.wait(20) == 143
    assert not is_alive(pid)
    assert child.stderr.read().endswith(STOPPED_AT_ONCE)


def test_an_ignored_signal_stays_ignored_and_the_run_dies_with_its_parent(loop):
    child, pid = loop("hold", ignores=[signal.SIGHUP])  # nohup
    os.killpg(child.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert child.poll() is None
    assert is_alive(pid)
    child.kill()
    wait_until(lambda: not is_alive(pid))


@pytest.fixture
def settings(tiny_llm, tmp_path):
    return {
        "model.path": tiny_llm(tmp_path / "model"), "model.dtype": "float32", "run.dir": tmp_path, "run.name": "run",
        "run.updates": 2, "run.threads": 1, "run.save_every": 1, "rollout.tasks": 2, "rollout.group_size": 2,
        "rollout.max_response_tokens": 4, "engine.type": "transformers", "policy.kl_coef": 0, "eval.every": 0,
        "eval.games": 2, "env.name": f"{FILE}:Deadly", "model.device": "cpu",
    }  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "attack.toml"
    path.write_text('[model]\npath = "-"\n')
    return path


@pytest.mark.slow
def test_a_run_that_an_environment_ends_goes_on_from_its_checkpoints(
    paw, paw_here, settings, recipe, read_metrics, tmp_path
):
    """With env.processes the run does not end."""
    deadly = {"DEADLY": "exits", "DEADLY_TASK": "train/0/3"}  # in the second update
    env = deadly | {"DEADLY_ONCE": str(tmp_path / "once")}
    failed = paw("train", recipe, settings, env=env, code=1)
    assert failed.stderr == (
        "paw: train ended inside code that is not PaW's, with exit code 0 (os._exit? see env.processes); "
        "checkpoints are kept (--resume auto)\n"
    )
    paw_here("train", recipe, settings, "--resume", "auto")
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2]

    in_processes = {"run.name": "processes", "env.processes": 2}
    env = deadly | {"DEADLY_ONCE": str(tmp_path / "once more")}
    finished = paw("train", recipe, settings, in_processes, env=env)
    assert "EnvironmentFailure: its process ended with exit code 0" in finished.stdout
    metrics = read_metrics(tmp_path / "processes")
    assert [line.get("health/processes_lost") for line in metrics] == [None, None, 1]


@pytest.mark.slow
def test_two_sigterms_end_a_run_whose_environment_holds_the_interpreter(
    paw_start, paw_env, settings, recipe, tmp_path, monkeypatch
):
    once = tmp_path / "once"
    monkeypatch.setitem(paw_env, "DEADLY", "holds the interpreter")
    monkeypatch.setitem(paw_env, "DEADLY_ONCE", str(once))
    child = paw_start("train", recipe, settings)
    wait_until(once.exists)
    child.send_signal(signal.SIGTERM)
    while "SIGTERM: Python does not answer" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 143
    assert STOPPED_AT_ONCE in child.stderr.read()
