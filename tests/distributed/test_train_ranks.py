"""Training in two gloo ranks: the weights of one rank, whatever the engine."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tomli_w
import torch
from forked import run_ranks
from safetensors.torch import load_file
from toyworld import ENV, make_tokenizer, practised_model
from transformers import AutoConfig, AutoModelForCausalLM

from paw.build import join_ranks
from paw.checkpoint import restore
from paw.distributed.launcher import launch
from paw.errors import UserError
from paw.processes import watcher
from paw.tools.warmup import quickstart


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    quickstart.save(practised_model(), make_tokenizer(), folder)
    return folder


def words_of(folder, start, name, *options, **changes):
    """`train` and a recipe, written to `folder`; `optim_lr=1` changes optim.lr."""
    tree = {
        "run": {"dir": str(folder), "updates": 3, "save_every": 0},
        "model": {"path": str(start), "dtype": "float32", "device": "cpu"},
        "env": ENV.model_dump(exclude_none=True),
        "rollout": {
            "tasks": 5,
            "group_size": 4,
            "max_prompt_tokens": 256,
            "max_response_tokens": 3,
        },
        "policy": {"kl_coef": 0.01, "entropy_coef": 0.001},
        "optim": {"lr": 3e-3, "minibatch_samples": 32, "micro_batch_tokens": 300},
        "eval": {"every": 2, "games": 5, "temperature": 1.0},
    }
    for key, value in changes.items():
        section, _, field = key.partition("_")
        tree.setdefault(section, {})[field] = value
    recipe = folder / f"{name}.toml"
    recipe.write_text(tomli_w.dumps(tree), encoding="utf-8")
    return ["train", str(recipe), "--run.name", name, *options]


def train(folder, start, name, *options, gpus=1, on_host=0, **changes):
    """The directory of a finished run, in a forked process for each rank; `on_host` of them a
    machine (0: all)."""
    words = words_of(folder, start, name, *options, **changes)
    found = run_ranks([words] * gpus, [folder] * gpus, on_host=on_host or gpus)
    assert [code for code, _ in found] == [0] * gpus, found
    return folder / name


def command(*words):
    """A command of this Python, as a user starts it."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=400, env=env
    )


def two_machines(folder, recipe, *options, second=()):
    """The recipe in two ranks of a machine each, with `folder`/runs in common: [(code, stderr)]."""
    folders = [folder / f"machine{rank}" for rank in range(2)]
    for machine in folders:
        machine.mkdir(exist_ok=True)
    words = ["train", str(recipe), "--run.dir", str(folder / "runs"), "--run.name", "run", *options]
    return run_ranks([words, [*words, *second]], folders, on_host=1)


@pytest.mark.slow
def test_two_machines_resume_what_they_saved(start, tmp_path):
    ppo = {"advantage_type": "ppo", "critic_lr": 3e-3}
    whole = train(tmp_path, start, "whole", gpus=2, run_updates=2, **ppo)
    recipe = tmp_path / "whole.toml"
    first = two_machines(tmp_path, recipe, "--run.updates", "1", "--eval.every", "0")
    assert [code for code, _ in first] == [0, 0], first
    again = two_machines(tmp_path, recipe, "--resume", "auto")
    assert [code for code, _ in again] == [0, 0], again
    for file in ("model", "critic_model", "optimizer", "rng", "rng_1"):
        ours = weights(tmp_path / "runs" / "run", file)
        theirs = weights(whole, file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file

    (code, line), (other, its) = two_machines(
        tmp_path, recipe, "--run.name", "new", second=["--optim.lr", "1e-3"]
    )
    assert code == other == 2
    assert line == its
    assert "rank 1 was started with other settings than rank 0" in line
    assert line.count("\n") == 1

    own_folder = ["--run.dir", str(tmp_path / "machine1" / "runs")]
    (code, line), (other, its) = two_machines(
        tmp_path, recipe, "--run.name", "apart", second=own_folder
    )
    assert code == other == 2
    assert line == its
    directory = tmp_path / "runs" / "apart"
    assert line == (
        f"paw: rank 1 does not see the run directory {directory} of rank 0: "
        "set --run.dir to a folder that all machines of the run share\n"
    )


def weights(run, file="model"):
    return restore.load(max((run / "checkpoints").glob("step_*")))[0][file]


def distance(a, b):
    first, second = (torch.cat([w[name].double().flatten() for name in sorted(w)]) for w in (a, b))
    return float((first - second).norm() / second.norm())


@pytest.mark.slow
def test_two_ranks_train_to_the_weights_of_one(start, tmp_path):
    """Policy and critic; with everything that saves memory in two ranks, which torchrun starts."""
    ppo = {"advantage_type": "ppo", "critic_lr": 3e-3, "wm_loss": "gce"}
    thrifty = {
        "model_checkpointing": "full",
        "model_offload_activations": True,
        "policy_offload_reference": True,
        "optim_grad_sync": "last",
    }
    one = train(tmp_path, start, "one", run_updates=1, **ppo)
    words = words_of(tmp_path, start, "two", run_updates=1, **ppo, **thrifty)
    done = command(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paw", *words
    )
    assert done.returncode == 0, done.stderr[-4000:]
    two = tmp_path / "two"
    assert json.loads((two / "run.json").read_text())["ranks"] == 2
    for file in ("model", "critic_model"):
        assert weights(one, file).keys() == weights(two, file).keys()
        assert 0 < distance(weights(two, file), weights(one, file)) < 1e-5
    for file in ("metrics.jsonl", "samples.jsonl", "report.html"):
        assert (two / file).stat().st_size
    assert distance(load_file(two / "hf" / "model.safetensors"), weights(two)) == 0

    # Checkpoints fit any number of ranks.
    one, two = (
        train(tmp_path, start, name, "--resume", "auto", run_updates=2, **ppo)
        for name in ("one", "two")
    )
    assert 0 < distance(weights(two), weights(one)) < 1e-5


FROZEN = {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj"], "model_dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("glm4_moe", {}), ("exaone_moe", FROZEN)])
def test_buffers_of_the_model_reach_every_rank_and_the_export(tmp_path, kind, options):
    """Of both the router has a bias that is no parameter; EXAONE's stays float32 where weights are
    bf16."""
    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=8, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=512, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, num_experts=8, layer_types=["full_attention"] * 3,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config)
    for bias in (value for name, value in lm.named_buffers() if "correction_bias" in name):
        bias.normal_()
    quickstart.save(lm, tokenizer, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    biases = {name: value for name, value in stored.items() if "correction_bias" in name}
    settings = {"run_updates": 1, "eval_every": 0, **options}
    one, two = (train(tmp_path, tmp_path / "model", f"run{n}", gpus=n, **settings) for n in (1, 2))
    if not options:  # routers choose other experts where sums in bf16 have another order
        assert distance(weights(two), weights(one)) < 1e-5
    for run in (one, two):
        exported = load_file(run / "hf" / "model.safetensors")
        assert biases
        assert all(torch.equal(exported[name], value) for name, value in biases.items())


ONE_BY_ONE = """
import os, sys
if "RANK" not in os.environ:  # the launcher: it imports vLLM, in seven seconds, and all runs are forked from it
    from paw.rollouts.engines.vllm import import_vllm
    import_vllm().LLM
    import vllm.v1.worker.gpu_model_runner
    if alone := os.fork():
        assert os.waitpid(alone, 0)[1] == 0
    else:
        sys.argv = {alone}
"""


@pytest.mark.slow
def test_two_ranks_with_an_engine_each(start, tmp_path, paw):
    pytest.importorskip("vllm")
    options = {"engine_type": "vllm", "run_updates": 1, "eval_games": 2}
    copies = {"model_shard": "none", "optim_grad_sync": "last"}
    one, two = (
        words_of(tmp_path, start, name, **options, **how)
        for name, how in (("one", {}), ("two", copies))
    )
    (tmp_path / "patch.py").write_text(ONE_BY_ONE.format(alone=["paw", *one]))
    paw(*two, "--gpus", 2, env={"FORKED_PATCH": str(tmp_path / "patch.py")})
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert 0 < distance(weights(two), weights(one)) < 1e-5
    last = json.loads((two / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["health/sampler_mismatch"] < 1e-4
    assert last["optim/grad_norm"] > 0


HELD = """
from pathlib import Path
class Held:
    def on_start(self, run):
        parameters = list(run.policy.parameters())
        here, whole = sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)
        Path(f"held-{run.ranks.rank}").write_text(str(here / whole))
"""


@pytest.mark.slow
def test_four_ranks_as_two_machines_train_to_the_weights_of_one(start, tmp_path):
    """Policy and critic sharded within a machine, a copy on each; and more ranks than tasks."""
    ppo = {
        "advantage_type": "ppo",
        "critic_lr": 3e-3,
        "rollout_tasks": 3,
        "optim_minibatch_samples": 16,
    }
    node = {"gpus": 4, "on_host": 2, "model_shard": "node", "run_callbacks": ["held.py:Held"]}
    (tmp_path / "held.py").write_text(HELD)
    one = train(tmp_path, start, "one", run_updates=1, **ppo)
    four = train(tmp_path, start, "four", run_updates=1, **ppo, **node)
    assert [float((tmp_path / f"held-{rank}").read_text()) for rank in range(4)] == pytest.approx(
        [0.5] * 4, abs=0.02
    )
    for file in ("model", "critic_model", "optimizer", "critic_optimizer"):
        assert weights(one, file).keys() == weights(four, file).keys()
        assert distance(weights(four, file), weights(one, file)) < 1e-5
    assert distance(weights(four), weights(one)) > 0
    lines = [
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (one, four)
    ]
    for key in (
        "policy/loss",
        "wm/loss",
        "critic/loss",
        "optim/grad_norm",
        "critic/grad_norm",
        "eval/success",
    ):
        assert lines[1][key] == pytest.approx(lines[0][key], rel=1e-4)
    assert distance(load_file(four / "hf" / "model.safetensors"), weights(four)) == 0

    # What either saved the other resumes.
    shutil.copytree(one, tmp_path / "one-as-four")
    shutil.copytree(four, tmp_path / "four-as-one")
    later = [train(tmp_path, start, name, "--resume", "auto", run_updates=2, **ppo, **how)
             for name, how in (("one", {}), ("one-as-four", node), ("four-as-one", {}))]  # fmt: skip
    apart = [
        distance(weights(run, file), weights(later[0], file))
        for run in later
        for file in ("model", "critic_model")
    ]
    assert max(apart) < 1e-5, apart


OUT_OF_MEMORY = """
import os
if os.environ.get("RANK") == "1":
    import torch
    import paw.trainer
    optimize = paw.trainer.optimize
    def starved(run, rows):
        if run.step == 1:
            torch.empty(2**60, dtype=torch.uint8)
        return optimize(run, rows)
    paw.trainer.optimize = starved
"""


@pytest.mark.slow
def test_out_of_memory_on_one_rank_ends_all_and_says_what_to_turn(start, tmp_path, paw):
    (tmp_path / "patch.py").write_text(OUT_OF_MEMORY)
    words = words_of(tmp_path, start, "oom", "--gpus", "2", run_save_every=1)
    failed = paw(*words, code=2, env={"FORKED_PATCH": str(tmp_path / "patch.py")})
    (line,) = (line for line in failed.stderr.splitlines() if line.startswith("rank 1: "))
    assert "out of memory in phase 'update' of update 2 on rank 1, peak " in line
    assert "--optim.micro_batch_tokens" in line
    assert "the checkpoint of update 1 is intact (--resume auto)" in line
    assert "Traceback" not in failed.stderr
    assert restore.newest(tmp_path / "oom" / "checkpoints")[0].name == "step_000001"


NOT_A_NUMBER = """
import os
if os.environ["RANK"] == "1":
    import paw.trainer
    from paw.algo import loss
    joint_loss, optimize, step = loss.joint_loss, paw.trainer.optimize, [0]
    def learned(run, rows):
        step[0] = run.step
        return optimize(run, rows)
    def poisoned(*args, **options):
        out = joint_loss(*args, **options)
        return out._replace(loss=out.loss * float("nan")) if step[0] >= 1 else out
    paw.trainer.optimize, loss.joint_loss = learned, poisoned
"""


@pytest.mark.slow
def test_a_nan_on_one_rank_is_skipped_by_both_and_stops_the_run_in_the_end(
    start, tmp_path, monkeypatch
):
    (tmp_path / "patch.py").write_text(NOT_A_NUMBER)
    monkeypatch.setenv("FORKED_PATCH", str(tmp_path / "patch.py"))
    once = {"optim_minibatch_samples": 999, "run_save_every": 1, "run_updates": 5, "run_keep": 9}
    words = words_of(tmp_path, start, "nan", **once)
    for code, errors in run_ranks([words] * 2, [tmp_path] * 2, on_host=2):
        assert code == 2
        assert "Traceback" not in errors
        assert "paw: stopped: 3 optimizer steps in a row had a non-finite loss (nan)" in errors
    folders = sorted((tmp_path / "nan" / "checkpoints").glob("step_*"))
    assert [folder.name for folder in folders] == ["step_000001", "step_000002", "step_000003"]
    for file in ("model", "optimizer"):  # of all ranks: gathered to be saved
        first, *others = (restore.load(folder)[0][file] for folder in folders)
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    lines = [
        json.loads(line) for line in (tmp_path / "nan" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["optim/skipped"] for line in lines if "optim/skipped" in line] == [0, 1, 2]


@pytest.mark.slow
def test_mistakes_are_told_once(start, tmp_path):
    failed = command("paw", *words_of(tmp_path, tmp_path / "nothing", "bad", "--gpus", "2"))
    assert failed.returncode == 2
    assert failed.stderr.startswith("paw: model.path = ")
    assert failed.stderr.count("\n") == 1


def test_ranks_share_the_cores_of_this_process(monkeypatch):
    """Not those of the machine, of which a container or a scheduler may leave it few."""
    seen = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(
        "paw.distributed.launcher.subprocess.Popen",
        lambda words, env, **_: seen.append(env) or Done(env),
    )
    monkeypatch.setattr("paw.distributed.launcher.signal.signal", lambda *_: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(2, ["train", "quickstart"]) == 0
    found = [(env["RANK"], env["LOCAL_WORLD_SIZE"], env["OMP_NUM_THREADS"]) for env in seen]
    assert found == [("0", "2", "4"), ("1", "2", "4")]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(2, ["train", "quickstart"]) == 0
    assert seen[-1]["OMP_NUM_THREADS"] == "3"
    with pytest.raises(UserError, match=r"--gpus 99: from 1 to 64 on this machine"):
        launch(99, [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"--gpus 2: from 1 to 1 on this machine"):
        launch(2, [])
    assert launch(2, ["train", "quickstart"], device="cpu") == 0


class Done:
    """A child that has ended well, and said so."""

    pid = 1
    returncode = 0

    def __init__(self, env: dict[str, str]) -> None:
        os.write(int(env[watcher.PIPE]), b"end 0\n")

    poll = wait = kill = terminate = lambda self, *_: 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "4"},
            r"group_size = 3 episodes on 4 ranks leaves some without one; lower --gpus",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 and WORLD_SIZE = 2 do not fit"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK = 'zero' in the environment is not a number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"},
            "LOCAL_WORLD_SIZE = 3 and WORLD_SIZE = 2 do not",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        join_ranks(torch.device("cpu"), episodes=3)
