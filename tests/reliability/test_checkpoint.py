"""Checkpoints: whole or absent, corruption found and named."""

import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from paw.errors import UserError
from paw.state import checkpoint
from paw.state.checkpoint import CheckpointError

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]


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


def reseal(path: Path) -> None:
    """A manifest that agrees with whatever files are there: what an attacker, or an editor, can always make."""
    files = {f.name: checkpoint._describe(f) for f in path.iterdir() if f.name != "manifest.json"}
    (path / "manifest.json").write_text(checkpoint._manifest(files, 1))


def test_roundtrip_is_exact(tmp_path):
    before = tensors(1)
    state = {"lr": 0.1 + 0.2, "cursor": [1, 2], "none": None}
    path = checkpoint.save(tmp_path / "checkpoints", 50, before, state)
    assert path == tmp_path / "checkpoints" / "step_000050"
    assert sorted(f.name for f in path.iterdir()) == FILES
    after, read = checkpoint.load(path, like={"model": before["model"]})
    assert read == {**state, "step": 50, "version": checkpoint.VERSION}
    for stem, named in before.items():
        assert after[stem].keys() == named.keys()
        for name, tensor in named.items():
            assert after[stem][name].dtype == tensor.dtype and torch.equal(after[stem][name], tensor)


def test_what_exceeds_a_file_goes_on_in_the_next(tmp_path, monkeypatch):
    """Taken one by one from an iterator, as a sharded model is gathered; each part is guarded as a file of its own."""
    monkeypatch.setattr(checkpoint, "PART", 100)
    named = {f"layer.{i}": torch.full((10,), float(i)) for i in range(5)}
    path = checkpoint.save(tmp_path, 1, {"model": iter(named.items()), "rng": {}}, {})
    assert sorted(f.stem for f in path.glob("*.safetensors")) == ["model", "model-2", "model-3", "rng"]
    after, _ = checkpoint.load(path, like={"model": named})
    assert all(torch.equal(after["model"][name], tensor) for name, tensor in named.items())
    (path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        checkpoint.load(path)


def test_same_content_has_the_same_manifest(tmp_path):
    one, two, other = (checkpoint.save(tmp_path / str(i), 1, tensors(seed), {}) for i, seed in enumerate([1, 1, 2]))
    files = [checkpoint._read_manifest(path)[0] for path in (one, two, other)]
    assert files[0] == files[1] != files[2]


def flip(file: Path, position: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


DAMAGE = {
    "first byte flipped": lambda file: flip(file, 0.0),
    "middle byte flipped": lambda file: flip(file, 0.5),
    "last byte flipped": lambda file: flip(file, 1.0),
    "truncated": truncate,
    "emptied": lambda file: os.truncate(file, 0),
    "deleted": lambda file: file.unlink(),
    "grown": lambda file: file.write_bytes(file.read_bytes() + b" "),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_named_and_stepped_over(tmp_path, capsys, name, damage):
    good = checkpoint.save(tmp_path, 1, tensors(1), {})
    bad = checkpoint.save(tmp_path, 2, tensors(2), {})
    DAMAGE[damage](bad / name)
    for read in (checkpoint.verify, checkpoint.load):
        with pytest.raises(CheckpointError) as caught:
            read(bad)
        assert name in str(caught.value) and str(bad) in str(caught.value) and "\n" not in str(caught.value)
    assert checkpoint.latest(tmp_path) == good
    said = capsys.readouterr().err
    assert f"{bad} is damaged ({name})" in said and "using step_000001" in said


def test_an_unexpected_file_is_found(tmp_path):
    path = checkpoint.save(tmp_path, 1, tensors(1), {})
    (path / "extra.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"extra\.safetensors"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer.bias": torch.zeros(65).bfloat16()}, "layer.bias"),
        ({"layer.bias": torch.zeros(64)}, "layer.bias"),
        ({"surplus": torch.zeros(1)}, "surplus"),
        ({"layer.bias": None}, "layer.bias"),
    ],
    ids=["shape", "dtype", "extra key", "missing key"],
)
def test_tensors_of_another_model_are_refused(tmp_path, change, named):
    expected = tensors(1)["model"]
    stored = {name: tensor for name, tensor in {**expected, **change}.items() if tensor is not None}
    path = checkpoint.save(tmp_path, 1, {"model": stored}, {})
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        checkpoint.load(path, like={"model": expected})
    assert f"'{named}'" in str(caught.value)


def test_a_whole_file_missing_from_like_is_named(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"model": tensors(1)["model"]}, {})
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        checkpoint.load(path, like={"optimizer": tensors(1)["optimizer"]})


class Exploit:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "model.pt"])
def test_a_pickle_never_runs(tmp_path, name):
    """Even under a manifest made to match it."""
    path = checkpoint.save(tmp_path / "c", 1, tensors(1), {})
    proof = tmp_path / "proof"
    buffer = io.BytesIO()
    torch.save(Exploit(proof), buffer)
    for payload in (pickle.dumps(Exploit(proof)), buffer.getvalue()):
        (path / name).write_bytes(payload)
        reseal(path)
        if name == "model.pt":  # no code path reads it
            assert "model" in checkpoint.load(path)[0]
        else:
            with pytest.raises(CheckpointError, match=name):
                checkpoint.load(path)
        assert not proof.exists()


def test_latest_of_nothing_and_of_only_damaged(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None
    flip(checkpoint.save(tmp_path, 1, tensors(1), {}) / "model.safetensors", 0.5)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.latest(tmp_path)


def test_another_version_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, tensors(1), {})
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "version": 99}))
    reseal(path)
    with pytest.raises(CheckpointError, match="99"):
        checkpoint.load(path)


def test_prune_keeps_the_last_saves_even_after_a_rewind(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, tensors(step), {})
    flip(tmp_path / "step_000030" / "model.safetensors", 0.5)
    kept = checkpoint.latest(tmp_path, warn=lambda message: None)
    assert kept is not None and kept.name == "step_000020"
    saved = checkpoint.save(tmp_path, 25, tensors(25), {})  # the run goes on from 20
    checkpoint.prune(tmp_path, keep=2)
    assert saved.exists() and checkpoint.latest(tmp_path) == saved
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_000025"]
    checkpoint.verify(saved)


def test_a_step_can_be_saved_again(tmp_path):
    flip(checkpoint.save(tmp_path, 1, tensors(1), {}) / "model.safetensors", 0.5)
    again = checkpoint.save(tmp_path, 1, tensors(2), {"second": True})
    assert checkpoint.load(again)[1]["second"] is True
    assert [f.name for f in tmp_path.iterdir()] == ["step_000001"]


def test_leftovers_of_killed_saves_go_with_the_next(tmp_path):
    leftover = tmp_path / ".tmp_step_000009"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, 10, tensors(1), {})
    assert [f.name for f in tmp_path.iterdir()] == ["step_000010"]


def test_tied_weights_are_saved_once(tmp_path):
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    path = checkpoint.save(tmp_path, 1, {"model": dict(model.named_parameters())}, {})
    assert list(checkpoint.load(path)[0]["model"]) == ["embed.weight"]


def test_state_must_be_exact_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, 1, {}, {"loss": float("nan")})
    with pytest.raises(ValueError, match="stem"):
        checkpoint.save(tmp_path, 1, {"../model": {}}, {})


# --- the disk refuses ----------------------------------------------------------------------------------------------


def in_child(target, *args) -> multiprocessing.Process:
    """A forked-server child: torch is imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "safetensors.torch", "paw.state.checkpoint"])
    child = context.Process(target=target, args=args)
    child.start()
    return child


def save_under_limit(folder: Path, report: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        checkpoint.save(folder, 2, tensors(2, size=256), {})
    except UserError as error:
        report.write_text(str(error))


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    good = checkpoint.save(tmp_path / "c", 1, tensors(1), {})
    child = in_child(save_under_limit, tmp_path / "c", tmp_path / "report")
    child.join(60)
    assert child.exitcode == 0
    message = (tmp_path / "report").read_text()
    assert "step_000002" in message and "File too large" in message and "\n" not in message
    assert [f.name for f in (tmp_path / "c").iterdir()] == [good.name]
    checkpoint.verify(good)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/checkpoints/step_000001: Not a directory") as caught:
        checkpoint.save(tmp_path / "file" / "checkpoints", 1, tensors(1), {})
    assert "\n" not in str(caught.value)


def test_a_read_only_folder_is_one_line(tmp_path):
    good = checkpoint.save(tmp_path / "c", 1, tensors(1), {})
    (tmp_path / "c").chmod(0o500)
    if os.access(tmp_path / "c", os.W_OK):
        pytest.skip("this user (root) writes to read-only folders")
    try:
        with pytest.raises(UserError, match="Permission denied"):
            checkpoint.save(tmp_path / "c", 2, tensors(2), {})
        checkpoint.verify(good)
    finally:
        (tmp_path / "c").chmod(0o700)


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
        child = in_child(save_forever, folder)
        deadline = time.monotonic() + 60
        while not list(folder.glob("step_*")) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.08))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
        interrupted += bool(list(folder.glob(".tmp_*")))
        for path in folder.glob("step_*"):  # not only the newest
            loaded, state = checkpoint.load(path)
            assert state["expected"] == state["step"]
            assert torch.equal(loaded["model"]["layer.weight"], tensors(state["step"], 512)["model"]["layer.weight"])
        newest = checkpoint.latest(folder, warn=pytest.fail)
        assert newest is not None
        checkpoint.save(folder, 10**6, tensors(0), {})
        assert not list(folder.glob(".tmp_*"))
    assert interrupted, "no kill fell inside a save: the test shows nothing"
