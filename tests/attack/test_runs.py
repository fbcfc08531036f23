"""Whole runs on environments that misbehave: an outage costs nothing but time, a liar fakes
nothing, and so on."""

import json
import re
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonl import read_jsonl

from paw import trainer
from paw.checkpoint.train_state import PendingCheckpoint

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[1] / "support" / "environments.py"


BREAKS = {
    "env.name": f"{FILE}:Breaks", "run.callbacks": [f"{FILE}:Callback"], "eval.every": 1,
    "advantage.type": f"{FILE}:advantages",
}  # fmt: skip


def settings_of(folder, model):
    return {
        "model.path": model, "model.dtype": "float32", "run.dir": folder, "run.updates": 2,
        "run.threads": 1, "run.save_every": 0, "rollout.tasks": 2, "rollout.group_size": 2, "eval.games": 2,
        "engine.type": "transformers", "rollout.max_response_tokens": 4, "policy.kl_coef": 0, "eval.every": 0,
        "env.name": f"{FILE}:DownInTraining",
    }  # fmt: skip


@pytest.fixture
def settings(tiny_llm, tmp_path):
    return settings_of(tmp_path, tiny_llm(tmp_path / "model"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "attack.toml"
    path.write_text('[model]\npath = "-"\n')
    return path


@pytest.fixture(scope="module")
def calm(recipe, run_here, tiny_llm, tmp_path_factory):
    """The directory of a run that nothing disturbs; read only."""
    folder = tmp_path_factory.mktemp("calm")
    settings = settings_of(folder, tiny_llm(folder / "model"))
    assert run_here("train", recipe, settings | BREAKS, {"run.name": "calm"}) == 0
    return folder / "calm"


@pytest.mark.parametrize(
    "attack", ["tasks", "tasks that exit", "play", "score", "evaluation", "update"]
)
def test_an_update_that_is_over_is_saved_when_something_fails_then(
    paw_here, settings, recipe, calm, read_metrics, tmp_path, monkeypatch, attack
):
    settings |= BREAKS
    monkeypatch.setenv("ATTACK", attack)
    failed = paw_here("train", recipe, settings, {"run.name": "run"}, code=2)
    assert re.fullmatch("paw: .*broken.*\n", failed.stderr)
    monkeypatch.delenv("ATTACK")
    paw_here("train", recipe, settings, {"run.name": "run"}, "--resume", "auto")
    assert read_metrics(tmp_path / "run") == read_metrics(calm)
    assert weights_of(tmp_path / "run") == weights_of(calm)


def weights_of(run):
    return (run / "hf" / "model.safetensors").read_bytes()


def steps_of(metrics):
    return [line["step"] for line in metrics]


MINE = r"\(environments\.py, line \d+\)"
TASK = "a task of env.name cannot be read"
STOPS = [
    ("tasks that exit", f"{TASK}: SystemExit: broken {MINE}"),
    ("tasks that hang", f"{TASK}: TimeoutError: no answer within 0.5 s; .*env.step_timeout_s"),
    ("on_update that exits", f"run.callbacks: Callback.on_update: SystemExit: broken {MINE}"),
    ("on_update that recurs", f"run.callbacks: Callback.on_update: RecursionError: .* {MINE}"),
    (
        "on_evaluation that exits",
        f"run.callbacks: Callback.on_evaluation: SystemExit: broken {MINE}",
    ),
    ("advantages that exit", f"advantage.type = '.*:advantages': SystemExit: broken {MINE}"),
    ("a loss that exits", f"policy.loss = '.*:loss': SystemExit: broken {MINE}"),
    (
        "a huge metric",
        r"run.callbacks: Callback.on_evaluation: metrics\['mine'\] is 1000.*; it must be a number that ",
    ),
    (
        "a metric without end",
        r"run.callbacks: Callback.on_evaluation: metrics\['mine'\] is {'itself': .*",
    ),
    ("a metric of many", r"run.callbacks: Callback.on_evaluation: metrics\['mine'\] is array.*"),
    (
        "a metric that has no name",
        r"run.callbacks: Callback.on_evaluation: metrics\[None\]: .* must be a string",
    ),
    (
        "a time in words",
        r"run.callbacks: Callback.on_evaluation: metrics\['time/eval'\] is 'soon'.*number.*",
    ),
]


@pytest.mark.parametrize(("attack", "line"), STOPS, ids=[attack for attack, _ in STOPS])
def test_whatever_stops_a_part_of_ones_own_is_one_line_and_the_update_is_saved(
    paw_here, settings, recipe, read_metrics, tmp_path, monkeypatch, attack, line
):
    """Even if the newest checkpoint is still being written in the background."""
    settings |= {
        "env.name": f"{FILE}:Breaks",
        "env.step_timeout_s": 0.5,
        "run.callbacks": [f"{FILE}:Callback"],
    }
    settings |= {"eval.every": 1, "run.save_every": 1, "run.name": "run"}
    settings |= {"advantage.type": f"{FILE}:advantages", "policy.loss": f"{FILE}:loss"}
    # As on a slow disk: nothing is published before something waits for it.
    monkeypatch.setattr(PendingCheckpoint, "done", False)
    monkeypatch.setenv("ATTACK", attack)
    failed = paw_here("train", recipe, settings, code=2)
    assert re.fullmatch(f"paw: {line}.*\n", failed.stderr), failed.stderr
    saved = "failed after update 1 of 2: the checkpoint of update 1 is intact (--resume auto)"
    assert failed.stdout.splitlines()[-1] == saved
    run = tmp_path / "run"
    assert steps_of(read_metrics(run)) == [0, 1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    assert json.loads((run / "run.json").read_text())["ended"]["how"] == "failed"


@pytest.mark.parametrize(
    ("attack", "line"),
    [
        (
            "a callback that exits when it is made",
            "run.callbacks = '.*:Callback': SystemExit: broken",
        ),
        ("on_start that exits", "run.callbacks: Callback.on_start: SystemExit: broken"),
        (
            "a fingerprint that exits",
            r"env.name = '.*:Breaks': Breaks.fingerprint\(\): SystemExit: broken",
        ),
    ],
)
def test_what_exits_before_the_first_update_is_one_line(
    paw_here, settings, recipe, monkeypatch, attack, line
):
    settings |= {"env.name": f"{FILE}:Breaks", "run.callbacks": [f"{FILE}:Callback"]}
    monkeypatch.setenv("ATTACK", attack)
    assert re.fullmatch(f"paw: {line}.*\n", paw_here("train", recipe, settings, code=2).stderr)


def test_a_callback_that_exits_at_the_end_is_a_line_of_a_run_that_finished(
    paw_here, settings, recipe, monkeypatch
):
    settings |= {
        "env.name": f"{FILE}:Breaks",
        "run.callbacks": [f"{FILE}:Callback"],
        "run.updates": 1,
    }
    monkeypatch.setenv("ATTACK", "on_end that exits")
    finished = paw_here("train", recipe, settings)
    assert "run.callbacks: Callback.on_end: SystemExit: broken" in finished.stdout
    assert finished.stderr == ""


@pytest.mark.parametrize(
    ("attack", "save_every"),
    [
        ("renamed", 1),
        ("renamed", 0),
        ("renamed, and another made", 1),
        ("deleted", 1),
        ("deleted, and another made", 0),
    ],
)
def test_a_run_whose_directory_is_gone_ends_with_one_line_and_writes_no_half_one(
    paw_here, settings, recipe, read_metrics, tmp_path, monkeypatch, attack, save_every
):
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    settings |= {
        "env.name": f"{FILE}:Breaks",
        "run.callbacks": [f"{FILE}:Callback"],
        "run.name": "run",
    }
    settings |= {"run.updates": 4, "run.save_every": save_every}
    monkeypatch.setenv("ATTACK", attack)
    errors = paw_here("train", recipe, settings, code=2).stderr
    if attack.endswith("made"):
        assert list(run.iterdir()) == []
    else:
        assert not run.exists()
    if attack.startswith("deleted"):
        assert errors == (
            f"paw: the run directory {run} was deleted with everything saved in it: the run has ended\n"
        )
        assert not elsewhere.exists()
        return

    saved = "it has the checkpoint of update 1" if save_every else "it has no checkpoint yet"
    assert errors == (
        f"paw: the run directory {run} was renamed to {elsewhere}, so the run has ended; {saved}: rename it back, then "
        "--resume auto\n"
    )
    assert json.loads((elsewhere / "run.json").read_text())["ended"]["how"] == "failed"
    if run.exists():
        run.rmdir()
    elsewhere.rename(run)
    monkeypatch.delenv("ATTACK")
    paw_here("train", recipe, settings, "--resume", "auto")
    assert steps_of(read_metrics(run)) == [0, 1, 2, 3, 4]


def test_logs_that_are_deleted_are_written_anew(
    paw_here, settings, recipe, read_metrics, tmp_path, monkeypatch
):
    settings |= {
        "env.name": f"{FILE}:Breaks",
        "run.callbacks": [f"{FILE}:Callback"],
        "run.updates": 3,
    }
    paw_here("train", recipe, settings, {"run.name": "calm"})
    monkeypatch.setenv("ATTACK", "logs deleted")
    printed = paw_here("train", recipe, settings, {"run.name": "run"}).stdout.splitlines()
    run = tmp_path / "run"
    replaced = "was deleted or replaced"
    assert (
        printed.count(f"{run / 'metrics.jsonl'} {replaced}: all its lines were written again") == 1
    )
    assert (
        printed.count(
            f"{run / 'samples.jsonl'} {replaced}: new lines are added to what is there now"
        )
        == 1
    )
    assert read_metrics(run) == read_metrics(tmp_path / "calm")
    assert steps_of(read_jsonl(run / "samples.jsonl")) == [3, 3]


def test_an_outage_costs_nothing_but_time(
    paw_here, settings, recipe, read_metrics, tmp_path, monkeypatch
):
    """A long outage ends the run with one line, and the run is saved."""
    assert sum(trainer.PAUSES_S) > 120
    assert list(trainer.PAUSES_S) == sorted(trainer.PAUSES_S)
    paw_here("train", recipe, settings, {"run.name": "calm"})
    calm = read_metrics(tmp_path / "calm")
    monkeypatch.setattr(trainer, "PAUSES_S", (1, 1, 1, 1, 1))
    monkeypatch.setenv("ATTACK_DOWN_FOR_S", "1.5")
    printed = paw_here("train", recipe, settings, {"run.name": "outage"}).stdout
    assert "environment failed: train/0/2: ConnectionError: connection refused" in printed
    again = "update 2: no group has two episodes left; playing them again in 1 s"
    assert 1 <= printed.count(again) <= 3

    outage = read_metrics(tmp_path / "outage")
    failures = outage[2]["health/env_failures"]
    assert failures > 0
    assert failures % 4 == 0
    assert outage[2]["health/groups_dropped"] == failures / 2
    assert without_failures(outage) == without_failures(calm)
    assert weights_of(tmp_path / "outage") == weights_of(tmp_path / "calm")

    monkeypatch.setattr(trainer, "PAUSES_S", (1, 1))
    monkeypatch.setenv("ATTACK_DOWN_FOR_S", "1000")
    failed = paw_here("train", recipe, settings, {"run.name": "run"}, code=2)
    assert failed.stderr == (
        "paw: stopped at update 2: no group has two episodes left in 3 tries (train/0/2: ConnectionError: connection "
        "refused); the checkpoint of update 1 is intact (--resume auto)\n"
    )
    assert steps_of(read_metrics(tmp_path / "run")) == [0, 1]
    monkeypatch.delenv("ATTACK_DOWN_FOR_S")
    paw_here("train", recipe, settings, {"run.name": "run"}, "--resume", "auto")
    assert read_metrics(tmp_path / "run") == calm


def without_failures(metrics):
    return [line | {"health/env_failures": 0, "health/groups_dropped": 0} for line in metrics]


def test_a_run_that_waits_can_be_stopped(
    paw_here, settings, recipe, read_metrics, tmp_path, monkeypatch
):
    monkeypatch.setenv("ATTACK_DOWN_FOR_S", "1000")
    pauses = SimpleNamespace(sleep=lambda seconds: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(trainer, "time", pauses)
    paw_here("train", recipe, settings, {"run.name": "run"})
    assert steps_of(read_metrics(tmp_path / "run")) == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()


def test_a_liar_moves_no_cursor_and_fakes_no_progress(
    paw_here, settings, recipe, read_metrics, tmp_path
):
    settings |= {
        "env.name": f"{FILE}:Liar",
        "rollout.group_size": 4,
        "rollout.max_prompt_tokens": 512,
    }
    run = tmp_path / "lied"
    trained = paw_here("train", recipe, settings, {"run.name": "lied"})
    printed = trained.stdout + trained.stderr
    assert re.search(r"environment failed: \d\$_\{update 99/99  reward 9e9 update 100/100", printed)
    assert all(line.isprintable() for line in printed.splitlines())
    progress = re.findall(r"^update +(\S+/\S+)", printed, re.MULTILINE)
    assert progress == ["0/2", "1/2", "2/2"]

    metrics = read_metrics(run)
    assert steps_of(metrics) == [0, 1, 2]
    for line in metrics:
        assert all(key.isprintable() for key in line)
    first_turn = read_jsonl(run / "samples.jsonl")[0]["turns"][0]
    assert "\x1b[2J" in first_turn["observation"]  # a record keeps what was said
    paw_here("report", run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "reward 9e9" in page
    assert not set(page) & set("\x1b\u202e\u200b\x00")

    for options in ([], ["--out", tmp_path / "agent"]):
        evaluated = paw_here("eval", run, *options, code=None)
        lines = (evaluated.stdout + evaluated.stderr).splitlines()
        assert all(line.isprintable() for line in lines)
    assert "update 99/99" in (tmp_path / "agent" / "results.md").read_text(encoding="utf-8")


def test_an_environment_that_changes_the_working_folder_moves_no_file(
    paw_here, settings, recipe, tmp_path, monkeypatch
):
    wandered = tmp_path / "wandered"
    wandered.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(wandered))
    settings |= {
        "env.name": f"{FILE}:ChangesDirectory",
        "run.dir": "runs",
        "model.path": "model",
        "run.save_every": 1,
    }
    paw_here("train", recipe, settings, {"run.name": "run"}, cwd=tmp_path)
    run = tmp_path / "runs" / "run"
    assert {path.name for path in run.iterdir()} >= {"metrics.jsonl", "checkpoints", "hf"}
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"step_000001", "step_000002"}
    paw_here("eval", "runs/run", "--out", "agent", cwd=tmp_path)
    assert (tmp_path / "agent" / "results.json").exists()
    assert [path for path in wandered.rglob("*") if path.is_file()] == []
