"""Checkpoints: whole or absent, corruption and malice found and named, and put back bit for bit."""

import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import CONTEXT
from safetensors.torch import load_file, save_file

from paw.checkpoint import files as checkpoint
from paw.checkpoint import restore, train_state
from paw.checkpoint.files import CheckpointError
from paw.run import Run

FILES = [
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "state.json",
]


def tensors(seed: int, size: int = 64) -> checkpoint.Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "layer.weight": torch.randn(size, size, generator=generator),
            "layer.bias": torch.randn(size, generator=generator).bfloat16(),
        },
        "optimizer": {"layer.weight/step": torch.tensor(float(seed))},
        "rng": {"torch": torch.get_rng_state()},
    }


def latest(folder: Path, warn: Callable[[str], Any] = pytest.fail) -> Path | None:
    newest = restore.read_newest(folder, warn=warn)
    return newest and newest[0]


def reseal(path: Path, order: int = 1) -> None:
    """Writes a manifest that agrees with the files that are there, as an attacker or an editor
    always can."""
    files = {
        file.name: checkpoint.digest(file)
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    (path / "manifest.json").write_text(checkpoint.manifest_text(files, order))


def refused(checkpoint_path: Path, name: str, read: Callable[[Path], Any] = restore.load) -> None:
    """Reading it is refused in one line that names the checkpoint and the file."""
    with pytest.raises(CheckpointError) as caught:
        read(checkpoint_path)
    message = str(caught.value)
    assert name in message
    assert str(checkpoint_path) in message
    assert "\n" not in message
    assert len(message) < 500


def test_roundtrip_is_exact(tmp_path, monkeypatch):
    """What exceeds the size of a file goes on in the next one."""
    monkeypatch.setattr(checkpoint, "PART", 10_000)
    before = tensors(1)
    state = {"lr": 0.1 + 0.2, "cursor": [1, 2], "none": None}
    parts = {part: iter(named.items()) for part, named in before.items()}
    path = checkpoint.save(tmp_path / "checkpoints", 50, parts, state)
    assert path == tmp_path / "checkpoints" / "step_000050"
    assert sorted(file.name for file in path.iterdir()) == sorted([*FILES, "model-2.safetensors"])
    loaded, loaded_state = restore.load(path, like={"model": before["model"]})
    assert loaded_state == {**state, "step": 50, "version": checkpoint.VERSION}
    for part, named in before.items():
        assert loaded[part].keys() == named.keys()
        for name, tensor in named.items():
            assert loaded[part][name].dtype == tensor.dtype
            assert torch.equal(loaded[part][name], tensor)
    (path / "model-2.safetensors").unlink()
    refused(path, "model-2.safetensors")
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, 1, {}, {"loss": float("nan")})


@pytest.mark.parametrize("fused", [False, True])
def test_resume_through_a_checkpoint_is_bitwise(tmp_path, fused):
    """The fused optimizer of a GPU keeps its steps where the parameters are."""

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
        )
        groups = [
            {"params": list(model[0].parameters())},
            {"params": list(model[2].parameters()), "weight_decay": 0.0},
        ]
        return model, torch.optim.AdamW(groups, lr=1e-2, fused=fused)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()

    model, optimizer = build(0)
    train(model, optimizer)
    moments = train_state.optimizer_tensors(optimizer, model.named_parameters())
    random_states, state = train_state.capture_random_states()
    parts = {"model": dict(model.named_parameters()), "optimizer": moments, "rng": random_states}
    path = checkpoint.save(tmp_path, 3, parts, {"rng": state})
    train(model, optimizer)
    resumed, new_optimizer = build(1)
    loaded, state = restore.load(path, like={"model": dict(resumed.named_parameters())})
    resumed.load_state_dict(loaded["model"])
    restore.load_optimizer(new_optimizer, resumed.named_parameters(), loaded["optimizer"])
    restore.restore_random_states(loaded["rng"], state["rng"])
    shutil.rmtree(path)  # nothing loaded may still lean on the files
    train(resumed, new_optimizer)
    for parameter, resumed_parameter in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, resumed_parameter)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, new_optimizer.state[resumed_parameter][key]), key


def test_random_states_return_mid_pair(tmp_path):
    """Gaussians come in pairs: one odd draw leaves a cached half that must travel too.

    A trial changes nothing.
    """

    def draw() -> list[float]:
        numbers = random.gauss(0, 1), np.random.standard_normal(), torch.randn(1).item()
        return [*numbers, random.random(), np.random.rand()]

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    draw()
    random_states, state = train_state.capture_random_states()
    path = checkpoint.save(tmp_path, 1, {"rng": random_states}, {"rng": state})
    expected = [draw() for number in range(5)]
    loaded, state = restore.load(path)
    restore.restore_random_states(loaded["rng"], state["rng"], trial=True)
    assert draw() not in expected
    restore.restore_random_states(loaded["rng"], state["rng"])
    assert [draw() for number in range(5)] == expected


def flip(file: Path, position: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def replace(file: Path, make: Callable[[Path], Any]) -> None:
    file.unlink()
    make(file)


DAMAGE = {
    "first byte flipped": lambda file: flip(file, 0.0),
    "middle byte flipped": flip,
    "last byte flipped": lambda file: flip(file, 1.0),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "emptied": lambda file: os.truncate(file, 0),
    "grown": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "deleted": lambda file: file.unlink(),
    "a pipe": lambda file: replace(file, os.mkfifo),
    "a device": lambda file: replace(file, lambda path: path.symlink_to("/dev/zero")),
    "a folder": lambda file: replace(file, Path.mkdir),
    "a link to nothing": lambda file: replace(file, lambda path: path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_named_and_stepped_over(tmp_path, damage):
    for name in FILES:
        folder = tmp_path / name
        intact, damaged = (checkpoint.save(folder, step, tensors(step), {}) for step in (1, 2))
        DAMAGE[damage](damaged / name)
        refused(damaged, name)
        warnings: list[str] = []
        assert latest(folder, warnings.append) == intact
        assert f"{damaged} is damaged ({name})" in warnings[0]
        assert "using step_000001" in warnings[0]
    (intact / "extra.safetensors").write_bytes(b"")
    refused(intact, "extra.safetensors")
    # Rather than starting over.
    with pytest.raises(CheckpointError, match="no other checkpoint in"):
        latest(folder)


class Exploit:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_pickle_never_runs(tmp_path):
    """Even under a manifest made to match it."""
    proof = tmp_path / "proof"
    buffer = io.BytesIO()
    torch.save(Exploit(proof), buffer)
    for payload in (pickle.dumps(Exploit(proof)), buffer.getvalue()):
        for name in ("model.pt", "state.json", "model.safetensors"):
            path = checkpoint.save(tmp_path / "c", 1, tensors(1), {})
            (path / name).write_bytes(payload)
            reseal(path)
            if name == "model.pt":  # no code path reads it
                assert "model" in restore.load(path)[0]
            else:
                refused(path, name)
    assert not proof.exists()


DEEP = "[" * 100_000
LONG = "1" * 5000
MANIFESTS = [
    {"files": ["model.safetensors"], "order": 2}, {"files": {"state.json": 3}, "order": 2},
    {"files": {"state.json": {"sha256": "0"}}, "order": 2}, {"files": {}, "order": "2"}, {"files": {}, "order": -1},
    {"files": {}, "order": 1e400}, {"files": {}}, [], 7,
]  # fmt: skip
STATES = [
    "[]", DEEP, f'{{"version": 1, "step": {LONG}}}', '{"version": [1], "step": 2}', '{"version": 99, "step": 2}',
    '{"version": 1}', '{"version": 1, "step": -1}', f'{{"version": 1, "step": 1{"0" * 300}}}',
    '{"version": 1, "step": "2"}', "",
]  # fmt: skip


def test_a_manifest_or_a_state_of_another_shape_is_stepped_over(tmp_path):
    intact, damaged = (checkpoint.save(tmp_path, step, tensors(step), {}) for step in (1, 2))
    for text in STATES:
        (damaged / "state.json").write_text(text)
        reseal(damaged)
        refused(damaged, "state.json")
    for body in MANIFESTS:
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        signed = {**body, "sha256": digest} if isinstance(body, dict) else body
        (damaged / "manifest.json").write_text(json.dumps(signed, indent=1, sort_keys=True) + "\n")
        warnings: list[str] = []
        assert latest(tmp_path, warnings.append) == intact
        assert warnings == [
            f"checkpoint {damaged} is damaged (manifest.json): not a manifest: using step_000001"
        ]
    checkpoint.prune(tmp_path, 1)
    assert latest(tmp_path) == intact
    assert not damaged.exists()


def test_prune_keeps_the_last_saves_even_after_a_rewind(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, tensors(step), {})
    flip(tmp_path / "step_000030" / "model.safetensors")
    newest = latest(tmp_path, warn=lambda message: None)
    assert newest is not None
    assert newest.name == "step_000020"
    saved = checkpoint.save(tmp_path, 25, tensors(25), {})  # the run goes on from 20
    checkpoint.prune(tmp_path, keep=2)
    assert saved.exists()
    assert latest(tmp_path) == saved
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step_000025"]
    restore.verify(saved)


def test_what_is_in_the_way_of_a_save_goes(tmp_path):
    assert latest(tmp_path / "absent") is None
    (tmp_path / ".tmp_step_000009").mkdir()  # of a save that was killed
    os.mkfifo(tmp_path / ".tmp_step_000001")
    assert latest(tmp_path) is None
    os.mkfifo(tmp_path / "step_000009")
    intact = checkpoint.save(tmp_path, 1, tensors(1), {})
    assert latest(tmp_path, warn=lambda _: None) == intact
    checkpoint.save(tmp_path, 9, tensors(2), {})
    flip(intact / "model.safetensors")
    replaced = checkpoint.save(tmp_path, 1, tensors(2), {"second": True})  # over a damaged one
    assert restore.load(replaced)[1]["second"] is True
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step_000001", "step_000009"]


# --- a save that is cut short


def save_forever(folder: Path) -> None:
    step = 0
    while True:
        step += 1
        checkpoint.save(folder, step, tensors(step, size=512), {"expected": step})
        checkpoint.prune(folder, keep=2)


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_whole_checkpoints(tmp_path):
    folder = tmp_path / "c"
    moments = random.Random(0)
    interrupted = 0
    for _ in range(12):
        shutil.rmtree(folder, ignore_errors=True)
        child = CONTEXT.Process(target=save_forever, args=(folder,))
        child.start()
        deadline = time.monotonic() + 60
        while not list(folder.glob("step_*")) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.08))
        child.kill()
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
        interrupted += bool(list(folder.glob(".tmp_*")))
        for path in folder.glob("step_*"):  # not only the newest
            loaded, state = restore.load(path)
            assert state["expected"] == state["step"]
            assert torch.equal(
                loaded["model"]["layer.weight"],
                tensors(state["step"], 512)["model"]["layer.weight"],
            )
        assert latest(folder) is not None
        checkpoint.save(folder, 10**6, tensors(0), {})
        assert not list(folder.glob(".tmp_*"))
    assert interrupted, "no kill fell inside a save: the test shows nothing"


# --- a whole run


def change_tensors(path: Path, stem: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    changed = {
        name: tensor.clone() for name, tensor in load_file(path / f"{stem}.safetensors").items()
    }
    change(changed)
    save_file(changed, path / f"{stem}.safetensors")


def first(named: dict[str, torch.Tensor], word: str) -> str:
    return next(name for name in named if word in name)


def doubled(named: dict[str, torch.Tensor], word: str) -> dict[str, torch.Tensor]:
    """The tensors whose name has this word, in float64."""
    return {name: tensor.double() for name, tensor in named.items() if word in name}


STATE_CHANGES = [
    lambda state: state.pop("guard"),
    lambda state: state.update(guard=[]),
    lambda state: state["guard"].update(skipped="none"),
    lambda state: state.pop("rng"),
    lambda state: state["rng"].update(python=[3]),
]
# Random words of another length, none; moments of nothing, of another shape or dtype, left out
TENSOR_CHANGES = [
    ("rng", lambda named: named.update(torch=named["torch"][:-1])),
    ("rng", lambda named: named.pop("numpy")),
    ("optimizer", lambda named: named.update(nothing=torch.zeros(1))),
    ("optimizer", lambda named: named.update({first(named, "exp_avg"): torch.zeros(3)})),
    (
        "optimizer",
        lambda named: named.update(doubled(named, "exp_avg_sq")),
    ),
    ("optimizer", lambda named: named.pop(first(named, "exp_avg_sq"))),
    ("model", lambda named: named.pop("model.norm.weight")),
    ("model", lambda named: named.update(surplus=torch.zeros(1))),
    ("model", lambda named: named.update({"model.norm.weight": torch.zeros(65)})),
    (
        "model",
        lambda named: named.update({"model.norm.weight": named["model.norm.weight"].double()}),
    ),
]


def add_spoilt(intact: Path, step: int, change: Any) -> None:
    """A later checkpoint beside an intact one, with this change, under a manifest that agrees."""
    spoilt = intact.with_name(f"step_{step:06d}")
    shutil.copytree(intact, spoilt)
    state = json.loads((intact / "state.json").read_text()) | {"step": step}
    if isinstance(change, tuple):
        change_tensors(spoilt, *change)
    else:
        change(state)
    (spoilt / "state.json").write_text(json.dumps(state))
    reseal(spoilt, order=step)


@pytest.mark.slow
def test_a_run_falls_back_from_whatever_does_not_fit(
    paw_here, quick, quick_run, tmp_path, monkeypatch
):
    """A run whose newer checkpoints are each spoilt in another way, under manifests that agree;
    then the last one too."""

    class Loaded(Exception):
        """The run got as far as this test needs."""

    def stop(self, *_):
        raise Loaded

    shutil.copytree(quick_run, tmp_path / "run")
    intact = tmp_path / "run" / "checkpoints" / "step_000002"
    changes = [*STATE_CHANGES, *TENSOR_CHANGES]
    for step, change in enumerate(changes, start=3):
        add_spoilt(intact, step, change)
    command = [
        "train",
        "quickstart",
        quick,
        {"run.dir": tmp_path, "run.name": "run"},
        "--resume",
        "auto",
    ]
    messages: list[str] = []
    monkeypatch.setattr(Run, "catch_up_on_evaluation", stop)
    monkeypatch.setattr(Run, "say", lambda self, line: messages.append(line))
    with pytest.raises(Loaded):
        paw_here(*command)
    passed = [line for line in messages if line.endswith(": using step_000002")]
    assert len(passed) == len(changes)
    assert len({line.split(":")[0] for line in passed}) == len(passed)
    assert f"resumed from {intact}" in messages
    # The newest first.
    named = [re.search(r"/(\w+)\.safetensors: '(\S+)' is ", line) for line in passed[:8]]
    assert [match and match[1] for match in named] == ["model"] * 4 + ["optimizer"] * 4
    assert [match[2] for match in named[:4]] == [
        "model.norm.weight",
        "model.norm.weight",
        "surplus",
        "model.norm.weight",
    ]
    intact_state = json.loads((intact / "state.json").read_text())
    (intact / "state.json").write_text(json.dumps(intact_state | {"guard": 0}))
    reseal(intact)
    finished = paw_here(*command, code=2)
    assert finished.stderr.startswith("paw: ")
    assert finished.stderr.count("\n") == 1
    assert "no other checkpoint in" in finished.stderr
