"""One run, one directory: its lock, its name, and what a resumed run may change."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paw.config import Config
from paw.errors import UserError
from paw.recipe import dump
from paw.state.claim import InUseError, claim, holder, lock
from paw.state.resume import changes

HOLD = """
import os, sys, time
from pathlib import Path
from paw.state.claim import lock
held = lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def config(folder: Path, **sections) -> Config:
    tree = {"model": {"path": "m"}, "run": {"dir": str(folder)} | sections.pop("run", {})}
    return Config.model_validate(tree | sections)


def begin(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "metrics.jsonl").write_text('{"step": 0}\n')


def test_a_held_folder_names_who_holds_it_until_that_is_killed(tmp_path, paw_env):
    """And its child, which outlives it, holds nothing."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paw_env)
    assert child.stdout is not None
    orphan = int(child.stdout.readline())
    with pytest.raises(InUseError, match=rf"{tmp_path} is in use by process {child.pid}; wait for it or stop it"):
        lock(tmp_path)
    assert holder(tmp_path) == str(child.pid)
    child.kill()
    child.wait()
    try:
        assert holder(tmp_path) is None
        with lock(tmp_path):
            assert holder(tmp_path) == str(os.getpid())
        assert holder(tmp_path) is None
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_name_that_was_given_is_not_numbered(tmp_path):
    begin(tmp_path, "mine")
    mine = config(tmp_path, run={"name": "mine"})
    with pytest.raises(UserError, match="mine holds a run already; use --resume auto, or another"):
        claim(mine, resume="", numbered=False)
    (tmp_path / "mine" / ".tmp_123_config.toml").write_text("half")  # left over by a kill
    name, held = claim(mine, resume="auto", numbered=False)
    with held, pytest.raises(InUseError, match=f"in use by process {os.getpid()}"):
        claim(mine, resume="auto", numbered=False)
    assert name == "mine"
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [".lock", "metrics.jsonl"]


def test_a_name_without_a_run_is_free_unless_another_process_begins_one(tmp_path):
    names, held = zip(*(claim(config(tmp_path), resume="", numbered=True) for _ in range(3)), strict=True)
    assert names == ("run", "run-2", "run-3")
    for file in held:
        file.close()
    name, file = claim(config(tmp_path), resume="", numbered=True)
    file.close()
    assert name == "run"


FIXED = [
    ("run.seed", 1), ("model.path", "other"), ("lora.rank", 4), ("lora.alpha", 1.0), ("lora.targets", ["q_proj"]),
    ("env.name", "webshop"), ("optim.name", "flash-adamw"), ("advantage.type", "ppo"),
]  # fmt: skip


def test_what_gives_a_run_its_meaning_cannot_change(tmp_path):
    for key, value in FIXED:
        section, leaf = key.split(".")
        base = {"lora": {"rank": 2}} if section == "lora" else {}
        (tmp_path / "config.toml").write_text(dump(config(tmp_path, **base)))
        now = {**base.get(section, {}), **({"path": "m"} if section == "model" else {}), leaf: value}
        with pytest.raises(UserError, match=rf"--resume auto: .* was trained with {key} = .*, not .*: .*; keep it"):
            changes(tmp_path, config(tmp_path, **{section: now}))


def test_what_else_changes_is_told(tmp_path):
    (tmp_path / "config.toml").write_text(dump(config(tmp_path, env={"kinds": ["pick"]})))
    now = config(tmp_path / "moved", optim={"lr": 2e-6}, advantage={"type": "gigpo"}, env={"data": "games"})
    assert changes(tmp_path, now) == [
        "changed: advantage.type 'grpo' -> 'gigpo'",
        "changed: env.data none -> 'games'",
        "changed: env.kinds ['pick'] -> ['pick', 'look', 'clean', 'heat', 'cool', 'two']",
        "changed: optim.lr 1e-06 -> 2e-06",
    ]
    text = dump(config(tmp_path)).replace("[run]", "[run]\nfuture = 1").replace("save_every = 50\n", "")
    (tmp_path / "config.toml").write_text(text)  # of another version: what it lacks are defaults
    assert changes(tmp_path, config(tmp_path)) == ["changed: run.future 1 -> none"]
    assert "changed: run.save_every 50 -> 7" in changes(tmp_path, config(tmp_path, run={"save_every": 7}))
    for text in ("[run", "x = " + "[" * 5000, "x = " + "1" * 5000, "\0", None):
        (tmp_path / "config.toml").write_text(text) if text else (tmp_path / "config.toml").unlink()
        (line,) = changes(tmp_path, config(tmp_path))
        assert line.startswith(f"warning: {tmp_path}/config.toml cannot be read") and "\n" not in line


@pytest.mark.slow
def test_two_runs_of_one_recipe_at_the_same_moment(paw_here, paw_start, quick, quick_model, tmp_path):
    """Neither was given a name: both train, each in a directory of its own. A name that is in use is refused."""
    words = ["train", "quickstart", quick, {"run.dir": tmp_path, "model.path": quick_model}]
    children = [paw_start(*words) for _ in range(2)]
    names = ("quickstart", "quickstart-2")
    while not all((tmp_path / name / "metrics.jsonl").exists() for name in names):
        assert all(child.poll() is None for child in children), [child.stderr.read() for child in children]
        time.sleep(0.05)
    for child in children:
        child.send_signal(signal.SIGSTOP)  # at work, however long the next command takes to start
    done = paw_here(*words, {"run.name": "quickstart"}, "--resume", "auto", code=2)
    pid = (tmp_path / "quickstart" / ".lock").read_text().strip()
    assert int(pid) in [child.pid for child in children]
    assert done.stderr == f"paw: {tmp_path}/quickstart is in use by process {pid}; wait for it or stop it\n"
    for child in children:
        child.send_signal(signal.SIGCONT)
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    for name in names:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert f'name = "{name}"' in (tmp_path / name / "config.toml").read_text()


@pytest.mark.slow
def test_a_resume_tells_what_changed_and_refuses_another_seed(paw_here, quick, quick_run, tmp_path):
    shutil.copytree(quick_run, tmp_path / "run")
    words = ["train", "quickstart", quick, {"run.dir": tmp_path, "run.name": "run"}, "--resume", "auto"]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()}
    done = paw_here(*words, {"run.seed": 3}, code=2)
    assert f"{tmp_path}/run was trained with run.seed = 0, not 3: its tasks" in done.stderr
    assert before == {path: path.read_bytes() for path in before}
    done = paw_here(*words, {"optim.lr": 2e-3})
    assert "\nchanged: optim.lr 0.0005 -> 0.002\n" in done.stdout
    (resumed,) = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]
    assert resumed["update"] == 2 and resumed["notes"] == ["changed: optim.lr 0.0005 -> 0.002"]


def test_an_evaluation_has_its_folder_to_itself(paw_here, tmp_path, monkeypatch):
    """Two processes would write the same episodes down twice."""
    endpoint = {"endpoint.url": "http://127.0.0.1:9/v1", "endpoint.model": "m", "endpoint.retries": 0}
    monkeypatch.setattr("paw.agents.endpoint.Endpoint.check", lambda self: None)
    with lock(tmp_path):
        done = paw_here("eval", "--recipe", "quickstart", "--out", tmp_path, endpoint, code=2)
    assert f"{tmp_path} is in use by process {os.getpid()}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
