"""Checkpoints of several ranks: a file each, read on any number, written while training goes on."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import forked
import pytest
import torch
from forked import Child, call_in_ranks, run_ranks
from test_train_ranks import start, train, two_machines, words_of  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toyworld import practised_model

from paw.checkpoint import files as checkpoint
from paw.checkpoint import restore
from paw.checkpoint.train_state import Learner, rng_tensors, start_saving
from paw.distributed.parallel import DistributedRanks
from paw.distributed.ranks import full_tensor
from paw.guards import UpdateGuard
from paw.model.host import available_memory
from paw.model.policy import Policy

pytestmark = pytest.mark.slow
PPO = {"advantage_type": "ppo", "critic_lr": 3e-3, "eval_every": 0, "run_keep": 9}
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


def files(run, step):
    return {path.name for path in (run / "checkpoints" / f"step_{step:06d}").iterdir()}


def lines(run):
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_equal(run, first, second, but=()):
    """Two checkpoints hold the same tensors, whatever their files."""
    (ours, _), (theirs, _) = (
        restore.load(run / "checkpoints" / f"step_{step:06d}") for step in (first, second)
    )
    for stem in ("model", "critic_model", "optimizer", "critic_optimizer", *ours.keys() - set(but)):
        assert ours[stem].keys() == theirs[stem].keys(), stem
        assert ours[stem], stem
        assert all(torch.equal(ours[stem][name], theirs[stem][name]) for name in ours[stem]), stem


def test_what_two_ranks_saved_one_and_three_go_on_with_and_back(start, tmp_path, monkeypatch):
    run = train(tmp_path, start, "run", gpus=2, run_updates=1, **PPO)
    stems = ("model", "optimizer", "critic_model", "critic_optimizer")
    shards = {f"{stem}.rank_{rank}.safetensors" for stem in stems for rank in range(2)}
    others = {"rng.safetensors", "rng_1.safetensors", "state.json", "manifest.json"}
    assert files(run, 1) == shards | others
    sizes = [sum((run / "checkpoints/step_000001" / name).stat().st_size for name in shards if part in name)
             for part in ("rank_0", "rank_1")]  # fmt: skip
    assert 0.9 < sizes[0] / sizes[1] < 1.1
    patched(monkeypatch, tmp_path, SAVE_ALONE)
    randoms = ("rng", "rng_1", "rng_2")
    for step, ranks in ((2, 1), (3, 3), (4, 2)):
        if ranks == 2:
            patched(monkeypatch, tmp_path, IN_FOREGROUND)
        train(tmp_path, start, "run", "--resume", "auto", gpus=ranks, run_updates=step, **PPO)
        assert_equal(run, 1, step, but=randoms)
        assert ("model.safetensors" in files(run, step)) == (ranks == 1)
    assert len(files(run, 3)) == 4 * 3 + 3 + 2


def test_a_file_that_is_missing_or_damaged_is_refused_by_all_ranks_in_one_line(start, tmp_path):
    train(tmp_path, start, "whole", run_updates=1, **PPO)  # for its recipe
    recipe = tmp_path / "whole.toml"
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    saving = ("--run.updates", "2", "--run.save_every", "1")
    assert [code for code, _ in two_machines(tmp_path, recipe, *saving)] == [0, 0]

    def resumed(*options):
        return two_machines(tmp_path, recipe, *saving, "--resume", "auto", *options)

    shard = checkpoints / "step_000002" / "model.rank_1.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert [code for code, _ in resumed("--run.updates", "3")] == [0, 0]  # from step 1
    for path in checkpoints.iterdir():
        (path / "model.rank_1.safetensors").unlink()
    (code, line), (other, its) = resumed("--run.updates", "4")
    assert code == other == 2
    assert line == its
    assert line.count("\n") == 1
    assert "step_000003 is damaged (model.rank_1.safetensors): the file is missing" in line
    assert "no other checkpoint in" in line


@contextmanager
def started(commands, folder):
    """`paw` in a rank for each command, killed in the end."""
    with ThreadPoolExecutor(1) as waiting, pytest.MonkeyPatch.context() as patch:
        ranks = []
        patch.setattr(
            forked,
            "Child",
            lambda *words, **options: ranks.append(Child(*words, **options)) or ranks[-1],
        )
        ended = waiting.submit(run_ranks, commands, [folder] * len(commands), on_host=len(commands))
        yield ended
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_9_while_it_is_written_leaves_the_older_one(start, tmp_path, monkeypatch, ranks):
    """Training goes on meanwhile, changes nothing of it, and nothing counts as saved before all
    ranks are through."""
    patched(monkeypatch, tmp_path, SLOW.format(what="time.sleep(600)"))
    words = words_of(tmp_path, start, "run", run_updates=3, run_save_every=1, **PPO)
    run = tmp_path / "run"
    with started([words] * ranks, tmp_path) as ended:
        # After the third update it waits for the checkpoint of the second.
        while len(lines(run)) < 4:
            assert not ended.done(), ended.result()
            time.sleep(0.05)
        assert {path.name for path in (run / "checkpoints").iterdir()} == {
            "step_000001",
            ".tmp_step_000002",
        }
    assert [code for code, _ in ended.result()] == [-signal.SIGKILL] * ranks
    monkeypatch.delenv("FORKED_PATCH")
    assert restore.newest(run / "checkpoints", warn=pytest.fail)[0].name == "step_000001"
    train(
        tmp_path,
        start,
        "run",
        "--resume",
        "auto",
        gpus=ranks,
        run_updates=3,
        run_save_every=1,
        **PPO,
    )
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step_00000{i}" for i in (1, 2, 3)
    ]
    assert [line["step"] for line in lines(run)] == [0, 1, 2, 3]
    assert lines(run)[-1]["time/save"] > 0

    # It holds what was there when it began.
    patched(monkeypatch, tmp_path, SLOW.format(what="time.sleep(2)"))
    slow = train(tmp_path, start, "slow", gpus=ranks, run_updates=3, run_save_every=1, **PPO)
    ours, theirs = (
        checkpoint.read_manifest(folder / "checkpoints/step_000002")[0] for folder in (slow, run)
    )
    assert ours == theirs


def test_a_full_disk_of_one_rank_is_one_line_and_costs_no_older_checkpoint(
    start,
    tmp_path,
    monkeypatch,
):
    patched(monkeypatch, tmp_path, SLOW.format(what='raise OSError(28, "full")'))
    words = words_of(tmp_path, start, "run", run_updates=4, run_save_every=1, **PPO)
    run = tmp_path / "run"
    (code, line), (other, its) = run_ranks([words] * 2, [tmp_path] * 2, on_host=2)
    assert (code, other) == (3, 2)
    cause = f"cannot write checkpoint {run}/checkpoints/step_000002: No space left on device: free some space"
    assert its == f"paw: {cause}; earlier checkpoints are intact\n"
    assert line == f"paw: rank 1: {its[5:]}"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    restore.verify(run / "checkpoints" / "step_000001")


def trained(mesh, slope):
    policy = Policy(practised_model())
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = parameter.detach() + slope
    optimizer.step()
    return Learner("", policy, optimizer, UpdateGuard(1))


def replicas(rank, folder):
    """Of four ranks, on two machines: shards within one, replicas across."""
    ranks = DistributedRanks.join(rank, 4, 2, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "ranks"))
    saved = trained(mesh, 0)
    other = trained(mesh, 1)
    pending = start_saving(
        [saved], ranks, step=1, folder=folder, random_states=rng_tensors(), background=True
    )
    pending.publish(1)
    assert restore.restore([other], ranks, folder, warn=pytest.fail) == (folder / "step_000001", 1)
    for one, two in zip(saved.model.parameters(), other.model.parameters(), strict=True):
        for a, b in (
            (one, two),
            *((saved.optimizer.state[one][k], v) for k, v in other.optimizer.state[two].items()),
        ):
            assert torch.equal(full_tensor(a.detach()), full_tensor(b.detach()))


def test_replicas_write_nothing_and_read_what_the_first_wrote(tmp_path):
    call_in_ranks(replicas, 4, tmp_path, on_host=2)
    found = {path.name for path in (tmp_path / "step_000001").glob("model.*")}
    assert found == {"model.rank_0.safetensors", "model.rank_1.safetensors"}


def test_memory_that_is_available_is_the_containers_where_it_has_a_limit(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert available_memory(tmp_path) == 0 < available_memory()
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
