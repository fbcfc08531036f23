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
    found = restore.read_newest(folder, warn=warn)
    return found and found[0]


def reseal(path: Path, order: int = 1) -> None:
    """A manifest that agrees with whatever files are there: what an attacker, or an editor, can always make."""
    files = {f.name: checkpoint.digest(f) for f in path.iterdir() if f.name != "manifest.json"}
    (path / "manifest.json").write_text(checkpoint.manifest_text(files, order))


def refused(path: Path, name: str, read: Callable[[Path], Any] = restore.load) -> None:
    """It is refused in one line that names the checkpoint and the file."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert name in message and str(path) in message and "\n" not in message and len(message) < 500


def test_roundtrip_is_exact(tmp_path, monkeypatch):
    """What exceeds a file goes on in the next."""
    monkeypatch.setattr(checkpoint, "PART", 10_000)
    before, state = tensors(1), {"lr": 0.1 + 0.2, "cursor": [1, 2], "none": None}
    pairs = {stem: iter(named.items()) for stem, named in before.items()}
    path = checkpoint.save(tmp_path / "checkpoints", 50, pairs, state)
    assert path == tmp_path / "checkpoints" / "step_000050"
    assert sorted(f.name for f in path.iterdir()) == sorted([*FILES, "model-2.safetensors"])
    after, read = restore.load(path, like={"model": before["model"]})
    assert read == {**state, "step": 50, "version": checkpoint.VERSION}
    for stem, named in before.items():
        assert after[stem].keys() == named.keys()
        for name, tensor in named.items():
            assert after[stem][name].dtype == tensor.dtype and torch.equal(
                after[stem][name], tensor
            )
    (path / "model-2.safetensors").unlink()
    refused(path, "model-2.safetensors")
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, 1, {}, {"loss": float("nan")})


@pytest.mark.parametrize("fused", [False, True])
def test_resume_through_a_checkpoint_is_bitwise(tmp_path, fused):
    """The one of a GPU keeps its steps where the parameters are."""

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
    moments, (rng, state) = (
        train_state.optimizer_tensors(optimizer, model.named_parameters()),
        train_state.capture_random_states(),
    )
    parts = {"model": dict(model.named_parameters()), "optimizer": moments, "rng": rng}
    path = checkpoint.save(tmp_path, 3, parts, {"rng": state})
    train(model, optimizer)
    resumed, fresh = build(1)
    loaded, state = restore.load(path, like={"model": dict(resumed.named_parameters())})
    resumed.load_state_dict(loaded["model"])
    restore.load_optimizer(fresh, resumed.named_parameters(), loaded["optimizer"])
    restore.restore_random_states(loaded["rng"], state["rng"])
    shutil.rmtree(path)  # nothing loaded may still lean on the files
    train(resumed, fresh)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, fresh.state[b][key]), key


def test_random_states_return_mid_pair(tmp_path):
    """Gaussians come in pairs: one odd draw leaves a cached half that must travel too.

    A trial changes nothing.
    """

    def draw() -> list[float]:
        gauss = random.gauss(0, 1), np.random.standard_normal(), torch.randn(1).item()
        return [*gauss, random.random(), np.random.rand()]

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    draw()
    rng, state = train_state.capture_random_states()
    path = checkpoint.save(tmp_path, 1, {"rng": rng}, {"rng": state})
    expected = [draw() for _ in range(5)]
    loaded, state = restore.load(path)
    restore.restore_random_states(loaded["rng"], state["rng"], trial=True)
    assert draw() not in expected
    restore.restore_random_states(loaded["rng"], state["rng"])
    assert [draw() for _ in range(5)] == expected


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
        good, bad = (checkpoint.save(folder, step, tensors(step), {}) for step in (1, 2))
        DAMAGE[damage](bad / name)
        refused(bad, name)
        said: list[str] = []
        assert latest(folder, said.append) == good
        assert f"{bad} is damaged ({name})" in said[0] and "using step_000001" in said[0]
    (good / "extra.safetensors").write_bytes(b"")
    refused(good, "extra.safetensors")
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
    proof, buffer = tmp_path / "proof", io.BytesIO()
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


DEEP, LONG = "[" * 100_000, "1" * 5000
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
    good, bad = (checkpoint.save(tmp_path, step, tensors(step), {}) for step in (1, 2))
    for text in STATES:
        (bad / "state.json").write_text(text)
        reseal(bad)
        refused(bad, "state.json")
    for body in MANIFESTS:
        own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        signed = {**body, "sha256": own} if isinstance(body, dict) else body
        (bad / "manifest.json").write_text(json.dumps(signed, indent=1, sort_keys=True) + "\n")
        said: list[str] = []
        assert latest(tmp_path, said.append) == good
        assert said == [
            f"checkpoint {bad} is damaged (manifest.json): not a manifest: using step_000001"
        ]
    checkpoint.prune(tmp_path, 1)
    assert latest(tmp_path) == good and not bad.exists()


def test_prune_keeps_the_last_saves_even_after_a_rewind(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, tensors(step), {})
    flip(tmp_path / "step_000030" / "model.safetensors")
    kept = latest(tmp_path, warn=lambda message: None)
    assert kept is not None and kept.name == "step_000020"
    saved = checkpoint.save(tmp_path, 25, tensors(25), {})  # the run goes on from 20
    checkpoint.prune(tmp_path, keep=2)
    assert saved.exists() and latest(tmp_path) == saved
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_000025"]
    restore.verify(saved)


def test_what_is_in_the_way_of_a_save_goes(tmp_path):
    assert latest(tmp_path / "absent") is None
    (tmp_path / ".tmp_step_000009").mkdir()  # of a save that was killed
    os.mkfifo(tmp_path / ".tmp_step_000001")
    assert latest(tmp_path) is None
    os.mkfifo(tmp_path / "step_000009")
    good = checkpoint.save(tmp_path, 1, tensors(1), {})
    assert latest(tmp_path, warn=lambda _: None) == good
    checkpoint.save(tmp_path, 9, tensors(2), {})
    flip(good / "model.safetensors")
    again = checkpoint.save(tmp_path, 1, tensors(2), {"second": True})  # over a damaged one
    assert restore.load(again)[1]["second"] is True
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_000001", "step_000009"]


# --- a save that is cut short
# ----------------------------------------------------------------------------------------


def save_forever(folder: Path) -> None:
    step = 0
    while True:
        step += 1
        checkpoint.save(folder, step, tensors(step, size=512), {"expected": step})
        checkpoint.prune(folder, keep=2)


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_whole_checkpoints(tmp_path):
    folder, moments, interrupted = tmp_path / "c", random.Random(0), 0
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
# -----------------------------------------------------------------------------------------------------


def change_tensors(path: Path, stem: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    found = {
        name: tensor.clone() for name, tensor in load_file(path / f"{stem}.safetensors").items()
    }
    change(found)
    save_file(found, path / f"{stem}.safetensors")


def first(found: dict[str, torch.Tensor], part: str) -> str:
    return next(name for name in found if part in name)


STATE_CHANGES = [
    lambda state: state.pop("guard"),
    lambda state: state.update(guard=[]),
    lambda state: state["guard"].update(skipped="none"),
    lambda state: state.pop("rng"),
    lambda state: state["rng"].update(python=[3]),
]
TENSOR_CHANGES = [  # random words of another length, none; moments of nothing, of another shape or dtype, left out
    ("rng", lambda found: found.update(torch=found["torch"][:-1])),
    ("rng", lambda found: found.pop("numpy")),
    ("optimizer", lambda found: found.update(nothing=torch.zeros(1))),
    ("optimizer", lambda found: found.update({first(found, "exp_avg"): torch.zeros(3)})),
    (
        "optimizer",
        lambda found: found.update({k: v.double() for k, v in found.items() if "exp_avg_sq" in k}),
    ),
    ("optimizer", lambda found: found.pop(first(found, "exp_avg_sq"))),
    ("model", lambda found: found.pop("model.norm.weight")),
    ("model", lambda found: found.update(surplus=torch.zeros(1))),
    ("model", lambda found: found.update({"model.norm.weight": torch.zeros(65)})),
    (
        "model",
        lambda found: found.update({"model.norm.weight": found["model.norm.weight"].double()}),
    ),
]


@pytest.mark.slow
def test_a_run_falls_back_from_whatever_does_not_fit(
    paw_here, quick, quick_run, tmp_path, monkeypatch
):
    """One run whose newer checkpoints are each spoilt in its own way, under manifests that agree; then its last too."""
    from paw.run import Run

    class Loaded(Exception):
        """Far enough."""

    def stop(self, *_):
        raise Loaded

    shutil.copytree(quick_run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    good, step = folder / "step_000002", 2
    kept = json.loads((good / "state.json").read_text())
    for change in [*STATE_CHANGES, *TENSOR_CHANGES]:
        step += 1
        bad = folder / f"step_{step:06d}"
        shutil.copytree(good, bad)
        state = json.loads(json.dumps(kept | {"step": step}))
        change_tensors(bad, *change) if isinstance(change, tuple) else change(state)
        (bad / "state.json").write_text(json.dumps(state))
        reseal(bad, order=step)
    words = [
        "train",
        "quickstart",
        quick,
        {"run.dir": tmp_path, "run.name": "run"},
        "--resume",
        "auto",
    ]
    said: list[str] = []
    monkeypatch.setattr(Run, "catch_up", stop)
    monkeypatch.setattr(Run, "say", lambda self, line: said.append(line))
    with pytest.raises(Loaded):
        paw_here(*words)
    passed = [line for line in said if line.endswith(": using step_000002")]
    assert (
        len({line.split(":")[0] for line in passed}) == len(passed) == step - 2
        and f"resumed from {good}" in said
    )
    # The newest first.
    named = [re.search(r"/(\w+)\.safetensors: '(\S+)' is ", line) for line in passed[:8]]
    assert [found and found[1] for found in named] == ["model"] * 4 + ["optimizer"] * 4
    assert [found[2] for found in named[:4]] == [
        "model.norm.weight",
        "model.norm.weight",
        "surplus",
        "model.norm.weight",
    ]
    (good / "state.json").write_text(json.dumps(kept | {"guard": 0}))
    reseal(good)
    done = paw_here(*words, code=2)
    assert done.stderr.startswith("paw: ") and done.stderr.count("\n") == 1
    assert "no other checkpoint in" in done.stderr
