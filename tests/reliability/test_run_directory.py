"""One run, one directory: its lock, its name, and what a resumed run may change."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from paw.config.recipe import dump
from paw.config.sections import Config
from paw.errors import UserError
from paw.rundir.resume import changes
from paw.rundir.run_lock import InUseError, lock, take_run_directory


def config(folder: Path, **sections) -> Config:
    keys = {"model": {"path": "m"}, "run": {"dir": str(folder)} | sections.pop("run", {})}
    return Config.model_validate(keys | sections)


def test_a_held_folder_names_who_holds_it_and_a_child_holds_nothing(tmp_path):
    reading, writing = os.pipe()
    with lock(tmp_path):
        with pytest.raises(
            InUseError,
            match=rf"{tmp_path} is in use by process {os.getpid()}; wait for it or stop it",
        ):
            lock(tmp_path)
        orphan = os.fork()
        if not orphan:
            os.write(writing, b"started")
            signal.pause()
    try:
        assert os.read(reading, 7) == b"started"
        lock(tmp_path).close()
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.waitpid(orphan, 0)


def test_a_name_that_was_given_is_not_numbered(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"step": 0}\n')
    own_config = config(tmp_path, run={"name": "mine"})
    with pytest.raises(
        UserError, match="mine already holds a run; use --resume auto, or set another"
    ):
        take_run_directory(own_config, resume="", numbered=False)
    (tmp_path / "mine" / ".tmp_123_config.toml").write_text("half")  # left over by a kill
    name, lock_file = take_run_directory(own_config, resume="auto", numbered=False)
    with lock_file, pytest.raises(InUseError, match=f"in use by process {os.getpid()}"):
        take_run_directory(own_config, resume="auto", numbered=False)
    assert name == "mine"
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [".lock", "metrics.jsonl"]
    first_name, first_lock = take_run_directory(config(tmp_path), resume="", numbered=True)
    second_name, second_lock = take_run_directory(config(tmp_path), resume="", numbered=True)
    first_lock.close()
    second_lock.close()
    assert first_name == "run"
    assert second_name == "run-2"
    # One without a run is free.
    name, lock_file = take_run_directory(config(tmp_path), resume="", numbered=True)
    lock_file.close()
    assert name == "run"


FIXED = [
    ("run.seed", 1), ("model.path", "other"), ("lora.rank", 4), ("lora.alpha", 1.0), ("lora.targets", ["q_proj"]),
    ("env.name", "webshop"), ("optim.name", "flash-adamw"), ("advantage.type", "ppo"),
]  # fmt: skip


def test_what_changes_is_told_and_what_gives_a_run_its_meaning_cannot(tmp_path):
    for key, value in FIXED:
        section, last_key = key.split(".")
        kept_keys = {"lora": {"rank": 2}} if section == "lora" else {}
        (tmp_path / "config.toml").write_text(dump(config(tmp_path, **kept_keys)))
        changed = {
            **kept_keys.get(section, {}),
            **({"path": "m"} if section == "model" else {}),
            last_key: value,
        }
        with pytest.raises(UserError) as caught:
            changes(tmp_path, config(tmp_path, **{section: changed}))
        message = str(caught.value)
        assert message.startswith(f"--resume auto: {tmp_path} was trained with {key} = ")
        assert f", not {value!r}: " in message
        assert "; keep it" in message
    (tmp_path / "config.toml").write_text(dump(config(tmp_path, env={"kinds": ["pick"]})))
    changed = config(
        tmp_path / "moved", optim={"lr": 2e-6}, advantage={"type": "gigpo"}, env={"data": "games"}
    )
    assert changes(tmp_path, changed) == [
        "changed: advantage.type 'grpo' -> 'gigpo'",
        "changed: env.data none -> 'games'",
        "changed: env.kinds ['pick'] -> ['pick', 'look', 'clean', 'heat', 'cool', 'two']",
        "changed: optim.lr 1e-06 -> 2e-06",
    ]
    text = (
        dump(config(tmp_path))
        .replace("[run]", "[run]\nfuture = 1")
        .replace("save_every = 50\n", "")
    )
    (tmp_path / "config.toml").write_text(text)  # of another version: what it lacks are defaults
    changed = config(tmp_path, run={"save_every": 7})
    assert changes(tmp_path, changed) == [
        "changed: run.future 1 -> none",
        "changed: run.save_every 50 -> 7",
    ]
    for text in ("[run", "x = " + "[" * 5000, "x = " + "1" * 5000, "\0", None):
        if text is None:
            (tmp_path / "config.toml").unlink()
        else:
            (tmp_path / "config.toml").write_text(text)
        (line,) = changes(tmp_path, changed)
        assert line.startswith(
            f"warning: cannot read {tmp_path}/config.toml, so changes since then are"
        )
        assert "\n" not in line


@pytest.mark.slow
def test_two_runs_of_one_recipe_at_the_same_moment(
    paw_here, paw_start, quick, quick_model, tmp_path
):
    """Neither was given a name: both train, each in a directory of its own.

    A name that is in use is refused.
    """
    command = [
        "train",
        "quickstart",
        quick,
        # Neither is over before the other has begun, on a busy machine too.
        {"run.dir": tmp_path, "model.path": quick_model, "run.updates": 400, "eval.games": 2},
    ]
    children = [paw_start(*command), paw_start(*command)]
    names = ("quickstart", "quickstart-2")
    while not all((tmp_path / name / "metrics.jsonl").exists() for name in names):
        assert all(child.poll() is None for child in children), [
            child.stderr.read() for child in children
        ]
        time.sleep(0.05)
    trainers = [child.trainer for child in children]
    for trainer in trainers:
        os.kill(trainer, signal.SIGSTOP)  # at work, however long the next command takes to start
    finished = paw_here(*command, {"run.name": "quickstart"}, "--resume", "auto", code=2)
    pid = (tmp_path / "quickstart" / ".lock").read_text().strip()
    assert int(pid) in trainers
    assert (
        finished.stderr
        == f"paw: {tmp_path}/quickstart is in use by process {pid}; wait for it or stop it\n"
    )
    for trainer in trainers:
        os.kill(trainer, signal.SIGTERM)  # the update at work is the last one
        os.kill(trainer, signal.SIGCONT)
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    for name in names:
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines] == list(range(len(lines)))
        assert f'name = "{name}"' in (tmp_path / name / "config.toml").read_text()


@pytest.mark.slow
def test_a_resume_tells_what_changed_and_refuses_another_seed(paw_here, quick, quick_run, tmp_path):
    shutil.copytree(quick_run, tmp_path / "run")
    command = [
        "train",
        "quickstart",
        quick,
        {"run.dir": tmp_path, "run.name": "run"},
        "--resume",
        "auto",
    ]
    before = {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()
    }
    finished = paw_here(*command, {"run.seed": 3}, code=2)
    assert f"{tmp_path}/run was trained with run.seed = 0, not 3: its tasks" in finished.stderr
    assert before == {path: path.read_bytes() for path in before}
    finished = paw_here(*command, {"optim.lr": 2e-3})
    assert "\nchanged: optim.lr 0.001 -> 0.002\n" in finished.stdout
    first_info = json.loads((quick_run / "run.json").read_text())
    resumed_info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert resumed_info["started"] == first_info["started"]
    assert resumed_info["warmup_s"] == first_info["warmup_s"]
    (resumed,) = resumed_info["resumed"]
    assert resumed["update"] == 2
    assert resumed["notes"] == ["changed: optim.lr 0.001 -> 0.002"]


def test_an_evaluation_has_its_folder_to_itself(paw_here, tmp_path, monkeypatch):
    """Two processes would write the same episodes down twice."""
    endpoint = {
        "endpoint.url": "http://127.0.0.1:9/v1",
        "endpoint.model": "m",
        "endpoint.retries": 0,
    }
    monkeypatch.setattr("paw.agents.endpoint.Endpoint.check", lambda self: None)
    with lock(tmp_path):
        finished = paw_here("eval", "--recipe", "quickstart", "--out", tmp_path, endpoint, code=2)
    assert f"{tmp_path} is in use by process {os.getpid()}" in finished.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
