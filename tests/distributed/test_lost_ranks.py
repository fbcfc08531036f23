"""If a rank is killed or stopped, or loses its launcher, the others end, and a line says which rank
and why."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
from processes import children, is_alive, wait_until
from test_train_ranks import ENV, start  # noqa: F401

from paw.checkpoint import restore
from paw.distributed.launcher import _Rank, _report, _StopSignals

pytestmark = pytest.mark.slow
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
SUPPORT = Path(__file__).parents[1] / "support"
TWO_RANKS = ("--gpus", "2")

ENDS = """
import os, sys
sys.path.append("{folder}")
from deadly import Counter, Deadly
class End(Counter):
    def step(self, response):
        if os.environ["RANK"] == "1" and self.id.startswith("train"):
            os._exit(0)
        return super().step(response)
class Ends(Deadly):
    def make(self):
        return End()
"""

HOLDS = """
import os, sys
sys.path.append("{folder}")
from deadly import Counter, Deadly, holds_the_interpreter
class Hold(Counter):
    def step(self, response):
        if os.environ["RANK"] == "1" and self.id.startswith("train"):
            open("{once}", "w").close()
            holds_the_interpreter()
        return super().step(response)
class Holds(Deadly):
    def make(self):
        return Hold()
"""


OF_ITS_OWN_SESSION = """
import os
if "RANK" not in os.environ:
    os.setsid()
"""


@pytest.fixture
def recipe(start, tmp_path):
    """A recipe for a long run."""
    settings = {
        "run": {
            "dir": str(tmp_path),
            "name": "run",
            "updates": 5000,
            "save_every": 1,
            "peer_timeout_s": 5.0,
        },
        "model": {"path": str(start), "device": "cpu"},
        "env": ENV.model_dump(exclude_none=True) | {"max_turns": 2},
        "policy": {"kl_coef": 0},
        "rollout": {
            "tasks": 2,
            "group_size": 2,
            "max_prompt_tokens": 256,
            "max_response_tokens": 3,
        },
        "eval": {"every": 0, "games": 1},
    }
    (tmp_path / "long.toml").write_text(tomli_w.dumps(settings))
    return tmp_path / "long.toml"


def play(recipe, name, program):
    """Make the recipe play the environment `name` of a program."""
    module = recipe.with_name("mine.py")
    module.write_text(program)
    settings = tomllib.loads(recipe.read_text()) | {"env": {"name": f"{module}:{name}"}}
    recipe.write_text(tomli_w.dumps(settings))


def launched(recipe, *options):
    """`paw train`, starting with the interpreter, in its own session."""

    def set_handler():  # background jobs of a script ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "paw", "train", str(recipe), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=set_handler,
    )


@pytest.fixture
def forked_session(paw_start, paw_env, tmp_path, monkeypatch):
    """`forked_session(recipe, ...)` is `launched` without the seconds that three interpreters take
    to import torch. Its processes are killed at the end."""
    (tmp_path / "session.py").write_text(OF_ITS_OWN_SESSION)
    monkeypatch.setitem(paw_env, "FORKED_PATCH", str(tmp_path / "session.py"))
    started = []

    def start(recipe, *options):
        started.append(paw_start("train", recipe, *options))
        return started[-1]

    yield start
    for launcher in started:
        kill_session(launcher)


def kill_session(launcher):
    with suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)


def has_ended_or(launcher, condition):
    """Wait for the condition, or for the end of the launcher, after which it would never hold."""
    return lambda: launcher.poll() is not None or condition()


def ranks_of(launcher, folder):
    """The processes of the two ranks, once an update is done."""
    checkpoints = folder / "run" / "checkpoints"
    wait_until(has_ended_or(launcher, lambda: any(checkpoints.glob("step_*"))), 200)
    ranks = [rank for watched in children(launcher.pid) for rank in children(watched)]
    assert len(ranks) == 2, launcher.stderr.read()
    return ranks


@pytest.fixture
def running(recipe, paw_start, tmp_path):
    """(launcher, processes of the ranks) of a long run in two ranks, once an update is done. What
    is still running at the end is killed."""
    launcher = paw_start("train", recipe, *TWO_RANKS)
    ranks = ranks_of(launcher, tmp_path)
    yield launcher, ranks
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def listening(pid):
    """Local addresses of the sockets on which a process accepts connections, in /proc's format."""
    files = [file for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    sockets = {str(file.readlink()) for file in files}
    addresses = []
    for protocol in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            _, local_address, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                addresses.append(local_address.split(":")[0])
    return addresses


def test_nothing_listens_beyond_this_machine_and_ranks_die_with_their_launcher(running):
    launcher, ranks = running
    addresses = []
    for pid in (launcher.trainer, *ranks):
        addresses += listening(pid)
    assert addresses
    assert set(addresses) <= LOOPBACK
    launcher.kill()
    wait_until(lambda: not any(map(is_alive, ranks)), 20)


def test_a_killed_rank_is_named(running, tmp_path):
    """Rank 0, through which the others meet. The next test is about rank 1."""
    launcher, ranks = running
    os.kill(ranks[0], signal.SIGKILL)
    assert launcher.wait(60) in (1, 3)
    errors = launcher.stderr.read()
    assert "paw: rank 0 was killed by SIGKILL; checkpoints are kept (--resume auto)" in errors
    assert "Traceback" not in errors
    assert restore.read_newest(tmp_path / "run" / "checkpoints")


def test_a_rank_that_an_environment_ends_is_named(recipe, paw_start):
    play(recipe, "Ends", ENDS.format(folder=SUPPORT))
    launcher = paw_start("train", recipe, *TWO_RANKS)
    exit_code = launcher.wait(120)
    errors = launcher.stderr.read()
    assert exit_code == 1, errors
    vanished = "ended inside code that is not PaW's, with exit code 0 (os._exit? see env.processes)"
    assert f"paw: rank 1 {vanished}; checkpoints are kept (--resume auto)\n" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_rank_is_named_and_ends_the_run(running, lost):
    launcher, ranks = running
    os.kill(ranks[lost], signal.SIGSTOP)
    assert launcher.wait(60) == 3
    errors = launcher.stderr.read()
    assert f"paw: rank {lost} was stopped by SIGSTOP" in errors
    assert "Traceback" not in errors
    if lost == 1:  # rank 0, which says so, has the launcher's standard error
        silent = r"paw: rank 1 has been silent for \d+ s \(run\.peer_timeout_s = 5\), last in phase"
        assert re.search(silent, errors)


def test_two_sigterms_end_ranks_that_wait_for_a_stopped_one(running):
    launcher, ranks = running
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(1.0)  # the other one is waiting by now
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) != 0
    assert not any(map(is_alive, ranks))


def test_two_ctrl_cs_end_ranks_whose_environment_holds_the_interpreter(
    recipe, forked_session, tmp_path
):
    once = tmp_path / "once"
    play(recipe, "Holds", HOLDS.format(folder=SUPPORT, once=once))
    launcher = forked_session(recipe, *TWO_RANKS)
    wait_until(has_ended_or(launcher, once.exists), 200)
    os.killpg(launcher.pid, signal.SIGINT)
    lines = iter(launcher.stderr.readline, "")
    assert any("SIGINT: Python does not answer" in line for line in lines)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(20) == 130
    assert (
        "paw: stopped at once by a second SIGINT; checkpoints are kept (--resume auto)\n"
        in launcher.stderr.read()
    )


def test_a_closed_terminal_lets_ranks_save(recipe, forked_session, tmp_path):
    """It sends SIGHUP to all processes, including the launcher, as Ctrl-C sends SIGINT."""
    launcher = forked_session(recipe, *TWO_RANKS, "--run.save_every", "0")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def has_updated():
        return metrics.exists() and metrics.read_text().count("\n") > 1

    wait_until(has_ended_or(launcher, has_updated), 200)
    os.killpg(launcher.pid, signal.SIGHUP)
    exit_code = launcher.wait(60)
    errors = launcher.stderr.read()
    assert exit_code == 0, errors
    assert "SIGHUP: finishing this update, then saving" in errors
    assert restore.read_newest(tmp_path / "run" / "checkpoints")


def test_ranks_that_ctrl_c_ended_before_python_could_handle_it(capsys):
    ranks = []
    for _ in range(2):
        words, words_end = os.pipe()
        process = subprocess.Popen(["sh", "-c", "kill -INT $$"])
        os.close(words_end)
        process.wait()
        ranks.append(_Rank(process, words, None))
        ranks[-1].poll()
        os.close(words)
    stops = _StopSignals()
    assert _report(stops, ranks, ["", ""]) == 130
    assert capsys.readouterr().err == "paw: interrupted while loading\n"


@pytest.mark.parametrize(
    ("delay", "options"),
    [(0.2, ()), (1.6, ()), (2.5, TWO_RANKS)],
)
def test_ctrl_c_while_it_loads_ends_it_without_an_abort(recipe, delay, options):
    """At several moments, from the interpreter's start to the first episodes. The terminal sends
    the signal to all processes."""
    child = launched(recipe, *options)
    time.sleep(delay)
    pids = children(child.pid)
    os.killpg(child.pid, signal.SIGINT)
    try:
        errors = child.communicate(timeout=60)[1]
    finally:
        kill_session(child)
    if "finishing this update" in errors:  # it had already loaded
        assert child.returncode == 0
        return
    assert child.returncode in (130, -signal.SIGINT), errors
    assert "SIGABRT" not in errors
    assert "terminate called" not in errors
    wait_until(lambda: not any(map(is_alive, pids)), 20)
