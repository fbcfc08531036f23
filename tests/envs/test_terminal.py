"""The terminal: the sandbox keeps its promises, and tasks are generated or read from folders."""

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paw.envs.base import read_tasks
from paw.envs.terminal import folders, generated, sandbox
from paw.envs.terminal.environment import TerminalEnv, parse_score
from paw.envs.terminal.factory import TerminalFactory
from paw.envs.terminal.prompt import CompactStyle, PaperStyle, shown
from paw.envs.terminal.sandbox import Folder, Limits, Result, Shell, open_shell
from paw.envs.terminal.settings import TerminalConfig
from paw.errors import EnvironmentFailure, NoOracleError, UserError
from paw.tools.doctor.doctor import _sandbox

needs_bubblewrap = pytest.mark.skipif(
    sandbox.problem() != "", reason=f"no sandbox here: {sandbox.problem()}"
)
LIMITS = Limits(memory_mib=256, processes=24, disk_mib=8)
OTHER_USERS_CONTAINER = (
    "bwrap --unshare-all --die-with-parent --ro-bind /usr /usr --symlink usr/bin /bin "
    "--symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp "
    "--bind {folder} /task --setenv IMAGE {image}"
)


@pytest.fixture
def folder(tmp_path_factory):
    with sandbox.temporary_folder() as sandbox_folder:
        sandbox_folder.write("/task/a.txt", b"one\ntwo\n")
        sandbox_folder.path("/tmp").mkdir()
        sandbox_folder.hand_over()
        yield sandbox_folder


@pytest.fixture
def shell(folder):
    opened = open_shell(folder, workdir="/task", limits=LIMITS)
    yield opened
    opened.close()


def run(shell, command, seconds=20.0):
    result = shell.run(command, seconds)
    return result.output.decode(), result.status, result.stopped


# ---- the sandbox


@needs_bubblewrap
def test_a_command_goes_on_where_the_last_one_ended(shell):
    assert run(shell, "x='a\nb'; export Y=2; f() { echo \"$x$Y\"; }; cd /tmp") == ("", 0, "")
    assert run(shell, "pwd; f; exit 3") == ("/tmp\na\nb2\n", 3, "")
    output, status, _ = run(shell, "cd /; set -u; PATH=/none; exec true")
    assert output.endswith("exec: true: not found\n")
    assert status == 127
    assert run(shell, "/bin/pwd; echo $PATH") == ("/\n/none\n", 0, "")
    assert shell.run("pwd; echo $Y$x; declare -F", 20, new=True).output == b"/task\n\n"


@needs_bubblewrap
def test_nothing_of_the_machine_can_be_seen_or_changed(shell, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    commands = [
        f"cat {secret} /etc/shadow /etc/passwd /root/.bashrc ~root/.bashrc",
        f"ls {Path.home()} /home /root /sys /mnt",
        "touch /x /usr/x /dev/x /dev/shm/x /etc/x",
        "echo > /dev/tcp/127.0.0.1/22",
        "echo > /dev/udp/1.1.1.1/53",
        "unshare --user --map-root-user id",
        "mount -t tmpfs none /task",
        "kill -9 1",
    ]
    for command in commands:
        output, status, _ = run(shell, command)
        if command != "kill -9 1":  # the first process ignores signals
            assert status != 0, command
        assert "s3cret" not in output
    output, _, _ = run(shell, "env; ls /proc/self/fd; cat /proc/1/environ | tr '\\0' '\\n'")
    variable_names = {line.partition("=")[0] for line in output.splitlines() if "=" in line}
    assert variable_names <= {"PATH", "HOME", "LANG", "TERM", "PWD", "OLDPWD", "SHLVL", "_"}
    assert run(shell, "cat /proc/net/dev | grep -c :")[0] == "1\n"  # only the loopback interface
    assert run(shell, "ls -a /task; id -u")[0].split()[-2] == "a.txt"
    capabilities = run(shell, "grep CapEff /proc/self/status")[0].split()[1]
    assert int(capabilities, 16) == 0


@needs_bubblewrap
@pytest.mark.parametrize(
    ("command", "seconds", "why"),
    [
        ("yes", 20, "printed more than 1 MiB"),
        ("sleep 1e9", 0.3, "took longer than 0.3 s"),
        ("while :; do :; done", 0.3, "took longer"),
        ("trap '' TERM INT; sleep 1e9 & wait", 0.3, "took longer"),
        ("f() { f | f & }; f; sleep 9", 0.5, "took longer"),
    ],
)
def test_a_command_that_runs_into_a_limit_is_stopped_and_the_next_one_works(
    shell, command, seconds, why
):
    output, status, stopped = run(shell, command, seconds)
    assert status is None
    assert why in stopped
    assert len(output) <= sandbox.OUTPUT_MAX
    assert run(shell, "cat a.txt") == ("one\ntwo\n", 0, "")


@needs_bubblewrap
def test_the_memory_of_a_process_and_of_all_together_is_limited(folder):
    shell = open_shell(folder, workdir="/task", limits=LIMITS._replace(memory_mib=64))
    output, status, _ = run(shell, "head -c 100M /dev/zero | tail -c 100M | wc -c")
    assert int(output.split()[-1]) < 100 << 20
    assert status == 0
    hungry_command = "head -c 20M /dev/zero | tail -c 20M | sleep 20"
    _, status, stopped = run(shell, f"for i in 1 2 3 4 5; do ({hungry_command}) & done; wait")
    assert status is None
    assert stopped == "its processes held more than 64 MiB of memory"
    shell.close()


@needs_bubblewrap
def test_a_file_has_a_largest_size_and_a_full_folder_is_reported(shell, folder):
    assert run(shell, "head -c 100M /dev/zero > big")[1] != 0
    assert folder.path("/task/big").stat().st_size == 8 << 20
    assert "left more than 8 MiB" in run(shell, "head -c 1M /dev/zero > more")[2]
    endless = "for ((i=0;; i++)); do head -c 1M /dev/zero > f$i; done"
    assert "left more than 8 MiB" in run(shell, endless)[2]


@needs_bubblewrap
def test_nothing_outlives_its_command(shell, folder):
    command = "(setsid sh -c 'while :; do echo x >> /task/log; done' &) ; sleep 0.1"
    assert run(shell, command) == ("", 0, "")
    log_size = folder.path("/task/log").stat().st_size
    # The first process, the shell, ls and wc.
    assert run(shell, "ls -d /proc/[0-9]* | wc -l")[0] in ("3\n", "4\n")
    assert folder.path("/task/log").stat().st_size == log_size


@needs_bubblewrap
def test_a_shell_survives_what_a_command_does_to_it(shell):
    assert (
        run(shell, "kill -9 $PPID; kill -9 0; kill -9 -1; kill -9 $$; kill -9 $BASHPID")[1] == 137
    )
    assert run(shell, "chmod 000 /task; cd /; false")[1] == 1
    assert run(shell, "printf '\\0old-0123456789abcdef 0\\0'")[0] == "\0old-0123456789abcdef 0\0"
    assert (
        run(shell, "read() { :; }; printf() { :; }; kill() { :; }; trap 'echo bye' EXIT")[0]
        == "bye\n"
    )
    shell.close()
    # A new shell, whose folder is accessible again.
    assert run(shell, "cat a.txt")[0] == "one\ntwo\n"


@needs_bubblewrap
def test_a_sandbox_that_breaks_costs_its_episode_and_the_next_one_starts_another(shell, folder):
    run(shell, ":")
    shell._process.kill()
    shell._process.wait()
    with pytest.raises(EnvironmentFailure, match="the sandbox ended"):
        shell.run("echo", 5)
    assert run(shell, "echo fine")[0] == "fine\n"


@needs_bubblewrap
def test_a_sandbox_ends_with_a_process_that_is_killed(folder):
    program = f"""
from pathlib import Path
from paw.envs.terminal.sandbox import Folder, Limits, open_shell
folder = Folder(Path({str(folder.root)!r}))
shell = open_shell(folder, workdir="/task", limits=Limits(256, 16, 8))
shell.run(":", 60)
print(shell._process.pid, flush=True)
shell.run("sleep 1e9", 1e9)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        bubblewrap = int(process.stdout.readline())
        children = Path(f"/proc/{bubblewrap}/task/{bubblewrap}/children").read_text().split()
        assert len(children) == 1
        process.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_namespaces_nothing_is_killed_and_a_command_goes_on(tmp_path):
    bash_command = ["bash", "--norc", "--noprofile"]
    state_file = str(tmp_path / "state")
    shell = Shell(bash_command, workdir=str(tmp_path), state=state_file, limits=LIMITS, folder=None)
    try:
        assert run(shell, "x=1; sleep 5 & echo $!") != ""
        assert run(shell, "echo $x; kill %1 2>/dev/null; cd /; false") == ("1\n", 1, "")
        assert run(shell, "pwd") == ("/\n", 0, "")
    finally:
        shell.close()
    with pytest.raises(EnvironmentFailure, match="nosuch"):
        Shell(["nosuch"], workdir="/", state=state_file, limits=LIMITS, folder=None).run(":", 5)


def test_files_are_read_without_leaving_the_folder(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("secret")
    folder = Folder(tmp_path / "root")
    folder.write("/task/deep/file", b"content")
    (folder.root / "task" / "link").symlink_to(outside)
    (folder.root / "task" / "up").symlink_to(tmp_path)
    os.mkfifo(folder.root / "task" / "pipe")
    assert folder.read("/task/deep/file", limit=3) == b"con"
    unreadable = ("link", "up/outside", "nothing", "deep", "deep/file/x")
    assert [folder.read(f"/task/{name}") for name in unreadable] == [None] * 5
    assert folder.read("/task/pipe") in (b"", None)  # and does not wait for a writer

    (folder.root / "task" / "deep").chmod(0)
    folder.clear()
    assert list((folder.root / "task").iterdir()) == []
    assert outside.read_text() == "secret"
    assert folder.is_within(LIMITS)
    folder.write("/task/big", bytes(9 << 20))
    assert not folder.is_within(LIMITS)
    folder.clear()

    assert folder.is_within(LIMITS)
    inner_folder = os.open(folder.path("/task"), os.O_RDONLY)
    for _ in range(2100):  # deeper than the longest path and Python's stack
        os.mkdir("d", dir_fd=inner_folder)
        outer_folder = inner_folder
        inner_folder = os.open("d", os.O_RDONLY, dir_fd=outer_folder)
        os.close(outer_folder)
    os.close(inner_folder)
    assert not folder.is_within(LIMITS)
    sandbox.remove(folder.root)
    assert not folder.root.exists()


# ---- generated tasks and prompts


def test_tasks_of_different_splits_differ_whatever_their_seeds():
    contents = {}
    for split in generated.SHARES:
        for seed in range(3):
            for index in range(40):
                task = generated.generate(split, seed, index, ["find", "count", "edit", "fix"])
                assert task == generated.generate(
                    split, seed, index, ["find", "count", "edit", "fix"]
                )
                key = (task.instruction, *task.files.items())
                assert contents.setdefault(key, split) == split
                assert task.wanted != task.files
                assert task.change in generated.commands(task) or task.kind == "count"
    assert len(contents) > 300


def test_the_oracle_asks_before_it_answers():
    task = generated.generate("train", 0, 0, ["count"])
    first_command = generated.next_command(task, solved=False, last="", output="")
    assert first_command == task.question
    answer = generated.next_command(task, solved=False, last=first_command, output="3")
    assert answer == task.change
    assert generated.next_command(task, solved=False, last="ls", output="a") == first_command
    assert generated.next_command(task, solved=True, last=answer, output="") == "exit"


def test_output_is_shown_as_text():
    assert shown(Result(b"a\xff\x00b\n", 0), 100) == "a\ufffd\0b"
    assert shown(Result(b"", 0), 100) == "[no output]"
    assert shown(Result(b"no\n", 2), 100) == "no\n[exit status 2]"
    assert (
        shown(Result(b"", None, "it took longer than 1 s"), 9)
        == "[stopped: it took longer than 1 s]"
    )
    cut_output = shown(Result(b"x" * 500 + b"y" * 500, 0), 100)
    assert cut_output == "x" * 50 + "\n[900 characters left out]\n" + "y" * 50


def test_a_command_is_what_is_in_the_tags_in_its_own_letters():
    style = PaperStyle(history=2, think=True)
    parsed = style.parse_command("<think>x</think><ACTION>\nCat A\nls </action>")
    assert parsed == ("Cat A\nls", True)
    assert style.parse_command("<action>ls</action>") == ("ls", False)
    assert style.parse_command("rm -rf /") == ("", False)
    assert style.parse_command(style.format_action("ls")) == ("ls", True)
    prompt = style.prompt("count", [("[a new shell]", "ls")], "a b")
    assert "Your task is to: count" in prompt
    assert "Action 1: 'ls'" in prompt
    assert "terminal output is: a b" in prompt
    compact = CompactStyle(history=1, think=False)
    assert compact.prompt("do", [("o", "ls"), ("p", "cat a")], "1\n2") == "\n".join(
        ["task:", "do", "did:", "cat a", "see:", "1", "2"]
    )
    assert compact.parse_command("\n") == ("", False)


# ---- episodes


def terminal(**changes):
    return TerminalConfig.model_validate({"max_turns": 6, "threads": 1, **changes})


def play(environment, task):
    environment.reset(task)
    outcomes = []
    while not outcomes or not outcomes[-1].done:
        assert environment.context()
        outcomes.append(environment.step(environment.oracle()))
    return outcomes


@needs_bubblewrap
def test_the_oracle_solves_every_kind_in_one_sandbox_and_damage_is_noticed():
    factory = TerminalFactory(terminal(style="compact"))
    environment = factory.make()
    with read_tasks(factory, "test", 0) as tasks:
        for i in range(4):
            assert play(environment, tasks[i])[-1].won, tasks[i].kind
        root = environment._folder.root
        environment.reset(tasks[2])
        environment.step("\nx=1; cd /tmp; touch left; rm -rf /task/*; ln -s / /task/a")
        after_exit = environment.step("\nexit")
        assert after_exit.done
        assert not after_exit.won
        environment.reset(tasks[1])
        assert environment.step("\npwd; ls -x; ls /tmp; echo $x").observation == "/task\na  b  c"
        assert environment._folder.root == root
    environment.close()
    assert not root.exists()


@needs_bubblewrap
def test_files_beyond_the_limit_end_the_episode():
    factory = TerminalFactory(terminal(disk_mib=1))
    environment = factory.make()
    with read_tasks(factory, "train", 0) as tasks:
        environment.reset(tasks[0])
    outcome = environment.step(
        "<action>for i in 1 2 3; do head -c 1M /dev/zero > f$i; done</action>"
    )
    assert (outcome.done, outcome.won) == (True, False)
    assert "left more than 1 MiB" in outcome.observation
    environment.close()


# ---- task folders


def write(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".").replace("DASH", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture
def data(tmp_path):
    write(
        tmp_path / "own",
        instructionDOTmd="Write hello to greeting.",
        files__noteDOTtxt="note\n",
        checkDOTsh='[ "$(cat greeting)" = hello ] && [ ! -e /tests/other ]',
        solutionDOTsh="echo hello > greeting",
    )
    write(
        tmp_path / "harbor",
        taskDOTtoml='[metadata]\ncategory = "files"\n[verifier]\ntimeout_sec = 20.0',
        instructionDOTmd="Sum the numbers in /app/data/n.txt into /app/sum.",
        environment__Dockerfile="FROM ubuntu:24.04\n# data\nWORKDIR /app\nENV A=1 B='2 3'\n"
        "COPY --chown=root data ./data\nRUN mkdir -p \\\n /logs/agent",
        environment__data__nDOTtxt="1\n2\n",
        tests__testDOTsh='grep -qx "$(cat /tests/want)" /app/sum && r=1 || r=0.25\n'
        "echo $r > /logs/verifier/reward.txt\nexit 1",
        tests__want="3",
        solution__solveDOTsh="#!/bin/bash\nn=0\nwhile read -r x; do n=$((n + x)); done < data/n.txt\n"
        "echo $n > /app/sum",
    )
    write(
        tmp_path / "bench",
        taskDOTyaml="instruction: base\ncategory: text\nmax_test_timeout_sec: 20\n"
        "descriptions:\n  - key: base\n    description: |\n      Make /app/out.\n",
        Dockerfile='FROM x\nWORKDIR /app\nCOPY ["in.txt", "/app/"]',
        inDOTtxt="in",
        runDASHtestsDOTsh="test -s /app/out && test -f $TEST_DIR/t.txt && cmp /app/out /app/in.txt",
        tests__tDOTtxt="t",
        solutionDOTsh="cp in.txt out",
    )
    return tmp_path


def load_data(path, **changes):
    return TerminalFactory(terminal(data=path, **changes))


@pytest.mark.slow
@needs_bubblewrap
def test_folders_of_all_three_formats_are_played_and_checked(data):
    factory = load_data(data)
    with read_tasks(factory, "train", 0) as train_tasks, read_tasks(factory, "test", 0) as held_out:
        tasks = {task.id: task for task in [*train_tasks, *held_out]}
    assert {name: task.kind for name, task in tasks.items()} == {
        "own": "task",
        "harbor": "files",
        "bench": "text",
    }
    environment = factory.make()
    for name, task in tasks.items():
        assert play(environment, task)[-1].won, name
        environment.reset(task)
        after_exit = environment.step("<action>exit</action>")
        assert not after_exit.won
        assert after_exit.score == (0.25 if name == "harbor" else 0.0)
    environment.reset(tasks["harbor"])
    listing = environment.step('<action>ls /app /tests; echo "$A$B"; touch /logs/agent/x</action>')
    assert "data" in listing.observation
    assert "12 3" in listing.observation
    assert "want" not in listing.observation
    environment.close()
    fingerprint = factory.fingerprint()
    assert load_data(data).fingerprint() == fingerprint
    (data / "harbor" / "tests" / "want").write_text("4")
    assert load_data(data).fingerprint() != fingerprint


@needs_bubblewrap
@pytest.mark.parametrize(
    "end", ["sleep 1e9 & wait", "(setsid yes &) ; head -c 100M /dev/zero > big"]
)
def test_a_check_that_has_to_be_stopped_is_no_success(data, end):
    """Even if it has already written a reward."""
    path = data / "harbor" / "tests" / "test.sh"
    path.write_text(f"echo 1 > /logs/verifier/reward.txt\n{end}")
    config = data / "harbor" / "task.toml"
    config.write_text("[verifier]\ntimeout_sec = 0.5")
    factory = load_data(data)
    with read_tasks(factory, "train", 0) as train_tasks, read_tasks(factory, "test", 0) as held_out:
        tasks = {task.id: task for task in [*train_tasks, *held_out]}
    environment = factory.make()
    environment.reset(tasks["harbor"])
    outcome = environment.step("<action>exit</action>")
    assert (outcome.done, outcome.won, outcome.score) == (True, False, 0.0)
    environment.close()


@needs_bubblewrap
def test_a_container_of_the_users_is_one_sandbox_from_start_to_check(data, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # vLLM sets it in its own process
    factory = load_data(data, container=OTHER_USERS_CONTAINER)
    with read_tasks(factory, "test", 0) as tasks:
        task = tasks[0]
    assert task.id == "own"
    environment = factory.make()
    environment.reset(task)
    printed = environment.step("<action>echo $IMAGE; pwd; ls /tests; x=1</action>").observation
    assert printed.startswith("own\n/task\n")
    assert play(environment, task)[-1].won
    environment.reset(task)
    assert not environment.step("<action>exit</action>").won
    bench_factory = load_data(data, container=OTHER_USERS_CONTAINER.replace("/task", "/app"))
    with read_tasks(bench_factory, "train", 0) as tasks:
        task = tasks[0]
    environment.close()
    environment = bench_factory.make()
    assert play(environment, task)[-1].won  # its check reads TEST_DIR
    environment.close()


@needs_bubblewrap
def test_a_container_that_has_to_be_ended_loses_its_episode(data, tmp_path):
    stopped = tmp_path / "stopped"
    factory = load_data(
        data,
        container=OTHER_USERS_CONTAINER,
        container_stop=f"cp /dev/null {stopped}-{{image}}",
        command_timeout_s=0.5,
    )
    environment = factory.make()
    with read_tasks(factory, "test", 0) as tasks:
        environment.reset(tasks[0])
    outcome = environment.step("<action>echo hello > greeting; sleep 100</action>")
    assert (outcome.done, outcome.won) == (True, False)
    assert "took longer than 0.5 s" in outcome.observation
    assert Path(f"{stopped}-own").exists()
    environment.close()


@pytest.mark.parametrize(
    ("dockerfile", "script", "why"),
    [
        (
            "FROM a\nRUN apt-get update \\\n  && true",
            "",
            "line 2, has to be built: RUN apt-get update",
        ),
        ("FROM a\nCOPY x /usr/lib/x", "", "line 2, has to be built: COPY x /usr/lib/x"),
        ("FROM a\nCOPY --from=b x /app", "", "COPY --from=b"),
        ("FROM a\nADD http://x/y /app/y", "", "ADD http"),
        ("FROM a\nCOPY ../x /app/x", "", "COPY ../x"),
        ("FROM a\nWORKDIR /proc/x", "", "WORKDIR /proc"),
        ("FROM a", "set -e\npip install pytest", r"\(test.sh\) downloads: pip install"),
        (None, "", "no Dockerfile"),
    ],
)
def test_what_needs_an_image_is_refused_in_one_line(data, monkeypatch, dockerfile, script, why):
    monkeypatch.setattr(sandbox, "problem", lambda: "")
    shutil.rmtree(data / "own")
    shutil.rmtree(data / "bench")
    path = data / "harbor" / "environment" / "Dockerfile"
    path.unlink()
    if dockerfile is not None:
        path.write_text(dockerfile)
    if script:
        (data / "harbor" / "tests" / "test.sh").write_text(script)
    with pytest.raises(UserError, match=f"1 of 1 tasks cannot be played.*harbor.*{why}.*container"):
        load_data(data)
    image_factory = load_data(data, container="env run {image}")
    assert image_factory.tasks("train", 0)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("own/instruction.md", " ", "instruction.md is empty"),
        ("own/check.sh", None, "has no check.sh"),
        ("harbor/task.toml", "[verifier", "harbor"),
        ("harbor/task.toml", "verifier = 3", "verifier is 3"),
        ("harbor/task.toml", "[verifier]\ntimeout_sec = -1", "time limit of the check is -1"),
        ("bench/task.yaml", "a: [", "task.yaml"),
        ("bench/task.yaml", "- a", "task.yaml"),
        ("bench/task.yaml", "instruction: [1]", "no text as its instruction"),
    ],
)
def test_a_task_that_cannot_be_read_is_named(data, file, content, why):
    if content is None:
        (data / file).unlink()
    else:
        (data / file).write_text(content)
    with pytest.raises(UserError, match=why) as raised:
        folders.load(data / file.partition("/")[0])
    assert str(data) in str(raised.value)


def test_a_task_larger_than_the_limit_is_refused_and_names_may_be_any_bytes(data, monkeypatch):
    monkeypatch.setattr(sandbox, "problem", lambda: "")
    (data / "own" / "files" / os.fsdecode(b"\xff")).write_text("x")
    assert load_data(data).fingerprint()
    with (data / "own" / "files" / "big").open("wb") as file:
        file.truncate(9 << 20)
    with pytest.raises(UserError, match=r"own: its files hold 9 MiB, more than env\.disk_mib = 8"):
        load_data(data, disk_mib=8)


def test_scores_are_numbers_within_zero_and_one():
    scores = {b"1": 1.0, b"0.5\n": 0.5, b"7": 1.0, b"-1": 0.0, b"nan": 0.0, b"x": 0.0, b"\xff": 0.0}
    assert {content: parse_score(content) for content in scores} == scores
    assert parse_score(None) == 0.0


def test_executable_files_stay_executable(tmp_path):
    source = tmp_path / "run"
    source.write_text("x")
    source.chmod(0o755)
    folder = Folder(tmp_path / "root")
    folders.copy(folder, "/app/run", source)
    assert folder.path("/app/run").stat().st_mode & stat.S_IXUSR


# ---- settings


def test_without_a_sandbox_the_fix_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no bwrap here; install bubblewrap" in _sandbox().text
    with pytest.raises(UserError, match=r"no bwrap here; install bubblewrap.*env\.container"):
        TerminalFactory(terminal())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"eval_split": "valid"}, "no split 'valid'"),
        ({"kinds": []}, "env.kinds is empty"),
        ({"readable": ["/nosuch"]}, "env.readable: there is no folder /nosuch"),
        ({"container": "docker run x"}, "mount them: -v {folder}:/task"),
        ({"container": "docker 'run {folder}"}, "No closing quotation"),
        ({"container": "nosuch run {folder}"}, "env.container = .*there is no program 'nosuch'"),
        (
            {"container": "env -v {folder}", "container_stop": "nosuch kill"},
            "env.container_stop = 'nosuch kill': there is no program 'nosuch'",
        ),
        ({"container": ""}, "env.container is empty"),
        ({"data": "/nosuch"}, "there is no folder /nosuch"),
    ],
)
def test_settings_that_cannot_work_are_refused(monkeypatch, changes, why):
    monkeypatch.setattr(sandbox, "problem", lambda: "")
    with pytest.raises(UserError, match=why):
        TerminalFactory(terminal(**changes))


def test_a_task_without_a_solution_has_no_oracle(data):
    (data / "own" / "solution.sh").unlink()
    environment = TerminalEnv(terminal())
    environment._task = folders.load(data / "own")
    with pytest.raises(NoOracleError, match="own has no solution"):
        environment.oracle()
