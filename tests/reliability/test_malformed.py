"""Checkpoints and logs that say what they should not, under manifests that agree with them."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paw.state import checkpoint
from paw.state.checkpoint import CheckpointError
from paw.tools.rundir import load_run


def tensors(seed: int) -> checkpoint.Tensors:
    return {"model": {"weight": torch.full((4,), float(seed))}}


def reseal(path: Path, order: int = 1) -> None:
    """A manifest that agrees with whatever files are there."""
    files = {f.name: checkpoint._describe(f) for f in path.iterdir() if f.name != "manifest.json"}
    (path / "manifest.json").write_text(checkpoint._manifest(files, order))


DEEP, LONG = "[" * 100_000, "1" * 5000


def sign(path: Path, body: Any) -> None:
    """A manifest with this body and the sha256 that goes with it."""
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    body = {**body, "sha256": own} if isinstance(body, dict) else body
    (path / "manifest.json").write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


MANIFESTS = {
    "files are a list": {"files": ["model.safetensors"], "order": 2},
    "files are numbers": {"files": {"state.json": 3}, "order": 2},
    "an entry lacks its size": {"files": {"state.json": {"sha256": "0"}}, "order": 2},
    "order is text": {"files": {}, "order": "2"},
    "order is nothing": {"files": {}, "order": None},
    "order is negative": {"files": {}, "order": -1},
    "order is a float": {"files": {}, "order": 1e400},
    "no order": {"files": {}},
    "a list": [],
    "a number": 7,
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_of_another_shape_is_stepped_over(tmp_path, capsys, name):
    good = checkpoint.save(tmp_path, 1, tensors(1), {})
    bad = checkpoint.save(tmp_path, 2, tensors(2), {})
    sign(bad, MANIFESTS[name])
    assert checkpoint.latest(tmp_path) == good
    assert f"{bad} is damaged (manifest.json): not a manifest: using step_000001\n" in capsys.readouterr().err
    checkpoint.prune(tmp_path, 1)
    checkpoint.save(tmp_path, 3, tensors(3), {})
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000003"


STATES = {
    "a list": "[]",
    "a number": "1",
    "deep": DEEP,
    "a long number": f'{{"version": 1, "step": {LONG}}}',
    "another version": '{"version": [1], "step": 2}',
    "no step": '{"version": 1}',
    "a negative step": '{"version": 1, "step": -1}',
    "a step beyond all": f'{{"version": 1, "step": 1{"0" * 300}}}',
    "text for a step": '{"version": 1, "step": "2"}',
    "nothing": "",
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_shape_is_one_line(tmp_path, name):
    path = checkpoint.save(tmp_path, 2, tensors(2), {})
    (path / "state.json").write_text(STATES[name])
    reseal(path)
    with pytest.raises(CheckpointError, match=r"state\.json") as told:
        checkpoint.load(path)
    assert "\n" not in str(told.value) and len(str(told.value)) < 500


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to nothing"])
@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "manifest.json"])
def test_what_is_no_file_is_named_at_once(tmp_path, kind, name):
    good = checkpoint.save(tmp_path, 1, tensors(1), {})
    path = checkpoint.save(tmp_path, 2, tensors(2), {})
    (path / name).unlink()
    put(path / name, kind)
    with pytest.raises(CheckpointError, match=f"({name})"):
        checkpoint.verify(path)
    assert checkpoint.latest(tmp_path, warn=lambda _: None) == good


def put(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to nothing"])
def test_what_is_no_checkpoint_is_in_nobodys_way(tmp_path, kind):
    put(tmp_path / "step_000009", kind)
    put(tmp_path / ".tmp_step_000001", kind)
    good = checkpoint.save(tmp_path, 1, tensors(1), {})
    assert checkpoint.latest(tmp_path, warn=lambda _: None) == good
    checkpoint.prune(tmp_path, 1)
    checkpoint.save(tmp_path, 9, tensors(2), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000009"]


def change_state(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))


def change_tensors(path: Path, stem: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    found = {name: tensor.clone() for name, tensor in load_file(path / f"{stem}.safetensors").items()}
    change(found)
    save_file(found, path / f"{stem}.safetensors")


TRAINING_STATES = {
    "no optimizer": lambda path: change_state(path, lambda state: state.pop("optimizer")),
    "an optimizer that is a list": lambda path: change_state(path, lambda state: state.update(optimizer=[])),
    "another optimizer": lambda path: change_state(path, lambda state: state["optimizer"].update({"class": "SGD"})),
    "a rate that is text": lambda path: change_state(path, lambda state: state["optimizer"].update(lr=["fast"])),
    "no number as a rate": lambda path: change_state(path, lambda state: state["optimizer"].update(lr=[float("nan")])),
    "two rates": lambda path: change_state(path, lambda state: state["optimizer"].update(lr=[1e-3, 1e-3])),
    "no guard": lambda path: change_state(path, lambda state: state.pop("guard")),
    "a guard of text": lambda path: change_state(path, lambda state: state["guard"].update(skipped="none")),
    "no random state": lambda path: change_state(path, lambda state: state.pop("rng")),
    "half a random state": lambda path: change_state(path, lambda state: state["rng"].update(python=[3])),
    "random words of another length": lambda path: change_tensors(
        path, "rng", lambda found: found.update(torch=found["torch"][:-1])
    ),
    "no random words": lambda path: change_tensors(path, "rng", lambda found: found.pop("numpy")),
    "moments of nothing": lambda path: change_tensors(
        path, "optimizer", lambda found: found.update(nothing=torch.zeros(1))
    ),
    "moments of another shape": lambda path: change_tensors(
        path, "optimizer", lambda found: found.update({next(k for k in found if "exp_avg" in k): torch.zeros(3)})
    ),
    "moments of another dtype": lambda path: change_tensors(
        path, "optimizer", lambda found: found.update({k: v.double() for k, v in found.items() if "exp_avg_sq" in k})
    ),
    "moments left out": lambda path: change_tensors(
        path, "optimizer", lambda found: found.pop(next(k for k in found if "exp_avg_sq" in k))
    ),
    "weights of another model": lambda path: change_tensors(
        path, "model", lambda found: found.pop("model.norm.weight")
    ),
}  # fmt: skip


@pytest.mark.slow
def test_a_run_falls_back_from_whatever_does_not_fit(paw_here, quick, quick_run, tmp_path, monkeypatch):
    """Each as the newest of a run's checkpoints; and one after another, until there is none left."""
    from paw.run import Run

    class Loaded(Exception):
        """Far enough."""

    def stop(self, *_):
        raise Loaded

    monkeypatch.setattr(Run, "catch_up", stop)
    run = tmp_path / "run"
    shutil.copytree(quick_run, run)
    folder = run / "checkpoints"
    good = folder / "step_000002"
    words = ["train", "quickstart", quick, {"run.dir": tmp_path, "run.name": "run"}, "--resume", "auto"]
    for spoil in TRAINING_STATES.values():
        bad = folder / "step_000003"
        shutil.copytree(good, bad)
        change_state(bad, lambda state: state.update(step=3))
        spoil(bad)
        reseal(bad, order=2)
        with pytest.raises(Loaded):
            paw_here(*words)
        shutil.rmtree(bad)
    for spoil in TRAINING_STATES.values():
        shutil.copytree(good, tmp_path / "kept")
        spoil(good)
        reseal(good)
        done = paw_here(*words, code=2)
        assert done.stderr.startswith("paw: ") and str(good) in done.stderr and done.stderr.count("\n") == 1
        assert "no other checkpoint in" in done.stderr
        shutil.rmtree(good)
        (tmp_path / "kept").rename(good)


LINES = [
    "[]", "1", "{}", '{"step": null}', '{"step": 1.5}', '{"reward/mean": 1}', DEEP, LONG, "\xff",
    '{"step": 1, "a": 1e999}', '{"step": 1, "a": ' + "9" * 400 + "}", '{"step": -1, "a": {"b": 1}}',
]  # fmt: skip


def test_a_report_reads_what_can_be_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        "\n".join(['{"step": 0, "reward/mean": 0.5}', *LINES, ""]).encode("latin-1")
    )
    os.mkfifo(tmp_path / "samples.jsonl")
    os.mkfifo(tmp_path / "config.toml")
    (tmp_path / "run.json").write_text(DEEP)
    run = load_run(tmp_path)
    assert run.metrics == {"reward/mean": {0: 0.5}} and run.config == {} and run.info == {}
