"""Checkpoints of several ranks: one file per rank, written while training goes on, and readable by
any number of ranks."""

import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import forked
import pytest
import torch
from forked import Child, call_in_ranks, run_ranks
from joint import make_lm
from jsonl import read_jsonl
from test_train_ranks import (  # noqa: F401
    BRIEF,
    exit_codes,
    same_line_of_all,
    start,
    train,
    two_machines,
    words_of,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paw.checkpoint import files as checkpoint
from paw.checkpoint import restore
from paw.checkpoint.train_state import Learner, capture_random_states, start_saving
from paw.distributed.parallel import DistributedRanks
from paw.distributed.ranks import full_tensor
from paw.guards import UpdateGuard
from paw.model.host import available_memory
from paw.model.policy import Policy

pytestmark = pytest.mark.slow
PPO = {
    "advantage_type": "ppo",
    "critic_lr": 3e-3,
    "eval_every": 0,
    "run_keep": 9,
    "run_save_every": 1,
    "optim_minibatch_samples": 999,
    **BRIEF,
}
SAVE_ALONE = """
import paw.checkpoint.train_state
import paw.trainer
def update(run, rollouts):
    run.step += 1
    run.save(wait=False)
paw.trainer.update = update
"""
IN_FOREGROUND = SAVE_ALONE + "paw.checkpoint.train_state.available_memory = lambda: 0\n"
SLOW = """
import os, time
from paw.checkpoint import files as checkpoint
write = checkpoint.save_file
def held_up(part, file):
    if "step_000002" in str(file) and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        {what}
    write(part, file)
checkpoint.save_file = held_up
"""


def patched(monkeypatch, folder, code):
    (folder / "patch.py").write_text(code)
    monkeypatch.setenv("FORKED_PATCH", str(folder / "patch.py"))


def checkpoint_of(run, step):
    return run / "checkpoints" / f"step_{step:06d}"


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def metrics_of(run):
    path = run / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def assert_equal(first, second, but=()):
    """Two checkpoints hold the same tensors, even if their files differ."""
    expected, _ = restore.load(first)
    tensors, _ = restore.load(second)
    stems = expected.keys() - set(but)
    assert stems >= {"model", "critic_model", "optimizer", "critic_optimizer"}
    for stem in stems:
        assert expected[stem], stem
        assert expected[stem].keys() == tensors[stem].keys(), stem
        for name in expected[stem]:
            assert torch.equal(expected[stem][name], tensors[stem][name]), (stem, name)


def manifest_of(run, step):
    """The digests of a checkpoint's files."""
    return checkpoint.read_manifest(checkpoint_of(run, step))[0]


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The directory of an undisturbed run of two ranks and three updates. Read only."""
    return train(tmp_path_factory.mktemp("whole"), start, "run", gpus=2, run_updates=3, **PPO)


def begun(whole, folder, step):
    """A copy of that run in `folder`, as it was after some updates."""
    run = shutil.copytree(whole, folder / "run")
    for later in range(step + 1, 4):
        shutil.rmtree(checkpoint_of(run, later))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[: step + 1]))
    return run


def test_what_two_ranks_saved_one_and_three_go_on_with_and_back(
    start, whole, tmp_path, monkeypatch
):
    run = begun(whole, tmp_path, 1)
    stems = ("model", "optimizer", "critic_model", "critic_optimizer")
    shards = {f"{stem}.rank_{rank}.safetensors" for stem in stems for rank in range(2)}
    others = {"rng.safetensors", "rng_1.safetensors", "state.json", "manifest.json"}
    saved = checkpoint_of(run, 1)
    assert names_in(saved) == shards | others

    def bytes_of(rank):
        return sum(file.stat().st_size for file in saved.glob(f"*.rank_{rank}.safetensors"))

    assert 0.9 < bytes_of(0) / bytes_of(1) < 1.1
    patched(monkeypatch, tmp_path, SAVE_ALONE)
    for step, ranks in ((2, 1), (3, 3), (4, 2)):
        if ranks == 2:
            patched(monkeypatch, tmp_path, IN_FOREGROUND)
        train(tmp_path, start, "run", "--resume", "auto", gpus=ranks, run_updates=step, **PPO)
        resaved = checkpoint_of(run, step)
        assert_equal(saved, resaved, but=("rng", "rng_1", "rng_2"))
        assert ("model.safetensors" in names_in(resaved)) == (ranks == 1)
    assert len(names_in(checkpoint_of(run, 3))) == 4 * 3 + 3 + 2


def test_a_file_that_is_missing_or_damaged_is_refused_by_all_ranks_in_one_line(
    start, whole, tmp_path
):
    run = begun(whole, tmp_path, 2)
    shard = checkpoint_of(run, 2) / "model.rank_1.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    train(tmp_path, start, "run", "--resume", "auto", gpus=2, run_updates=2, **PPO)  # from step 1
    assert manifest_of(run, 2) == manifest_of(whole, 2)
    restore.verify(checkpoint_of(run, 2))
    for path in (run / "checkpoints").iterdir():
        (path / "model.rank_1.safetensors").unlink()
    words = words_of(tmp_path, start, "run", "--resume", "auto", run_updates=3, **PPO)
    errors = same_line_of_all(run_ranks([words] * 2, [tmp_path] * 2, on_host=2))
    assert "step_000002 is damaged (model.rank_1.safetensors): the file is missing" in errors
    assert "no other checkpoint in" in errors


@contextmanager
def started(commands, folder):
    """A future of `run_ranks`, with a rank for each command. The ranks are killed at the end."""
    ranks = []

    def remembered(*words, **options):
        ranks.append(Child(*words, **options))
        return ranks[-1]

    with ThreadPoolExecutor(1) as waiting, pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "Child", remembered)
        ended = waiting.submit(run_ranks, commands, [folder] * len(commands), on_host=len(commands))
        yield ended
        for rank in ranks:
            rank.kill()


def test_kill_9_while_it_is_written_leaves_the_older_one(start, whole, tmp_path, monkeypatch):
    """A checkpoint only counts as saved when all ranks have written their files. Two machines that
    share the run's folder resume from the older one, and reach the weights of an undisturbed
    run."""
    patched(monkeypatch, tmp_path, SLOW.format(what="time.sleep(600)"))
    folder = tmp_path / "runs"
    run = begun(whole, folder, 1)
    words = words_of(folder, start, "run", "--resume", "auto", run_updates=3, **PPO)
    checkpoints = run / "checkpoints"
    with started([words] * 2, tmp_path) as ended:
        # After the third update, it waits for the second one's checkpoint.
        while len(metrics_of(run)) < 4:
            assert not ended.done(), ended.result()
            time.sleep(0.05)
        assert names_in(checkpoints) == {"step_000001", ".tmp_step_000002"}
    assert exit_codes(ended.result()) == [-signal.SIGKILL] * 2

    monkeypatch.delenv("FORKED_PATCH")
    assert restore.read_newest(checkpoints, warn=pytest.fail)[0].name == "step_000001"
    resumed = two_machines(tmp_path, folder / "run.toml", "--resume", "auto")
    assert exit_codes(resumed) == [0, 0], resumed
    assert names_in(checkpoints) == {"step_000001", "step_000002", "step_000003"}
    metrics = metrics_of(run)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert metrics[-1]["time/save"] > 0
    for step in (2, 3):
        assert manifest_of(run, step) == manifest_of(whole, step)


def test_a_full_disk_of_one_rank_is_one_line_and_costs_no_older_checkpoint(
    start, whole, tmp_path, monkeypatch
):
    patched(monkeypatch, tmp_path, SLOW.format(what='raise OSError(28, "full")'))
    run = begun(whole, tmp_path, 1)
    words = words_of(tmp_path, start, "run", "--resume", "auto", run_updates=4, **PPO)
    ended = run_ranks([words] * 2, [tmp_path] * 2, on_host=2)
    problem = (
        f"cannot write checkpoint {run}/checkpoints/step_000002: No space left on device: "
        "free some space; earlier checkpoints are intact"
    )
    assert ended == [(3, f"paw: rank 1: {problem}\n"), (2, f"paw: {problem}\n")]
    assert names_in(run / "checkpoints") == {"step_000001"}
    restore.verify(checkpoint_of(run, 1))


CALLBACK = """
import os
from pathlib import Path
class Fails:
    def on_update(self, run, metrics):
        if run.step == 3 and os.environ["RANK"] in {ranks!r}:
            Path({failed!r}).touch()
            raise ValueError("broken")
"""
UNTIL_FAILED = "any(os.path.exists({failed!r}) or time.sleep(0.1) for _ in range(900))"


@pytest.mark.parametrize("failing", ["1", "01"])
def test_a_checkpoint_that_is_being_written_outlives_a_failing_callback(
    start, whole, tmp_path, monkeypatch, failing
):
    """Whichever ranks writing fails on, before rank 1 has written its files. The files hold the
    state from when writing began, although another update has followed."""
    run = begun(whole, tmp_path, 1)
    failed = str(tmp_path / "failed")
    patched(monkeypatch, tmp_path, SLOW.format(what=UNTIL_FAILED.format(failed=failed)))
    callback = tmp_path / "callback.py"
    callback.write_text(CALLBACK.format(ranks=failing, failed=failed))
    changes = {"run_updates": 4, "run_callbacks": [f"{callback}:Fails"]}
    words = words_of(tmp_path, start, "run", "--resume", "auto", **changes, **PPO)
    ended = run_ranks([words] * 2, [tmp_path] * 2, on_host=2)
    assert [code for code, _ in ended] == [2 if str(rank) in failing else 3 for rank in range(2)]
    assert names_in(run / "checkpoints") == {"step_000001", "step_000002"}
    restore.verify(checkpoint_of(run, 2))
    assert manifest_of(run, 2) == manifest_of(whole, 2)
    assert names_in(checkpoint_of(run, 2)) == names_in(checkpoint_of(whole, 2))
    newest = restore.read_newest(run / "checkpoints", warn=pytest.fail)[0]
    assert newest.name == "step_000002"


def trained(mesh, slope):
    policy = Policy(make_lm("qwen3"))
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = parameter.detach() + slope
    optimizer.step()
    return Learner("", policy, optimizer, UpdateGuard(1))


def replicas(rank, folder):
    """One of four ranks on two machines, with shards within a machine and replicas across them."""
    ranks = DistributedRanks.join(rank, 4, 2, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "ranks"))
    saved = trained(mesh, 0)
    other = trained(mesh, 1)
    pending = start_saving(
        [saved],
        ranks,
        step=1,
        folder=folder,
        random_states=capture_random_states(),
        background=True,
    )
    pending.publish(1)
    assert restore.restore([other], ranks, folder, warn=pytest.fail) == (
        folder / "step_000001",
        1,
        None,
    )
    parameters = zip(saved.model.parameters(), other.model.parameters(), strict=True)
    for expected, parameter in parameters:
        assert torch.equal(full_tensor(expected.detach()), full_tensor(parameter.detach()))
        moments = saved.optimizer.state[expected]
        for name, moment in other.optimizer.state[parameter].items():
            assert torch.equal(full_tensor(moments[name]), full_tensor(moment))


def test_replicas_write_nothing_and_read_what_the_first_wrote(tmp_path):
    call_in_ranks(replicas, 4, tmp_path, on_host=2)
    written = {path.name for path in (tmp_path / "step_000001").glob("model.*")}
    assert written == {"model.rank_0.safetensors", "model.rank_1.safetensors"}


def test_available_memory_is_the_containers_if_it_has_a_limit(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert available_memory() > 0
    assert available_memory(tmp_path) == 0
    write(
        "proc/meminfo",
        "MemTotal:        900 kB\nMemFree:     100 kB\nMemAvailable:    700 kB\nActive(anon):  1 kB\n",
    )
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "5000\n")
    assert available_memory(tmp_path) == 700 * 1024
    write("sys/fs/cgroup/memory.stat", "anon 4000\nfile 1000\ninactive_file 300\nactive_file 700\n")
    write("sys/fs/cgroup/memory.max", "9000\n")
    assert available_memory(tmp_path) == 9000 - 5000 + 300
    write("sys/fs/cgroup/memory.max", "4000\n")
    assert available_memory(tmp_path) == 0
