"""Training in two gloo ranks leads to the same weights as in one rank, with every engine."""

import json
import os

import pytest
import tomli_w
import torch
from forked import run_ranks
from jsonl import read_jsonl
from safetensors.torch import load_file
from toyworld import ENV, make_tokenizer, practised_model
from transformers import AutoConfig, AutoModelForCausalLM

from paw.build import join_ranks
from paw.checkpoint import restore
from paw.config.plugins import CALLBACKS
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
    """The arguments of `paw train` with a recipe that is written to `folder`. `optim_lr=1` changes
    optim.lr."""
    settings = {
        "run": {"dir": str(folder), "updates": 3, "save_every": 0},
        "model": {"path": str(start), "dtype": "float32", "device": "cpu"},
        "env": ENV.model_dump(exclude_none=True),
        "rollout": {
            "tasks": 3,
            "group_size": 3,
            "max_prompt_tokens": 256,
            "max_response_tokens": 3,
        },
        "policy": {"kl_coef": 0.01, "entropy_coef": 0.001},
        "optim": {"lr": 3e-3, "minibatch_samples": 16, "micro_batch_tokens": 300},
        "eval": {"every": 2, "games": 3, "temperature": 1.0},
    }
    for key, value in changes.items():
        section, _, field = key.partition("_")
        settings.setdefault(section, {})[field] = value
    recipe = folder / f"{name}.toml"
    recipe.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return ["train", str(recipe), "--run.name", name, *options]


BRIEF = {
    "env_max_turns": 2,
    "eval_games": 1,
    "optim_micro_batch_tokens": 2000,
    "policy_kl_coef": 0,
    "rollout_group_size": 2,
    "rollout_tasks": 2,
}
"""Changes for runs in which it does not matter what an update learns from."""


def train(folder, start, name, *options, gpus=1, on_host=0, **changes):
    """The directory of a finished run, with a forked process for each rank, and `on_host` of them
    per machine (0: all)."""
    words = words_of(folder, start, name, *options, **changes)
    ended = run_ranks([words] * gpus, [folder] * gpus, on_host=on_host or gpus)
    assert exit_codes(ended) == [0] * gpus, ended
    return folder / name


def exit_codes(ended):
    """The exit codes of ranks, for which `run_ranks` gives (exit code, standard error)."""
    return [code for code, _ in ended]


def last_metrics(run):
    return read_jsonl(run / "metrics.jsonl")[-1]


def two_machines(folder, recipe, *options, second=()):
    """Runs the recipe in two ranks, each on its own machine, which share `folder`/runs. Returns
    [(exit code, standard error)]."""
    folders = [folder / f"machine{rank}" for rank in range(2)]
    for machine in folders:
        machine.mkdir(exist_ok=True)
    words = ["train", str(recipe), "--run.dir", str(folder / "runs"), "--run.name", "run", *options]
    return run_ranks([words, [*words, *second]], folders, on_host=1)


@pytest.mark.slow
def test_ranks_that_were_started_apart_are_refused_in_one_line(start, tmp_path):
    words_of(tmp_path, start, "whole")  # writes the recipe
    recipe = tmp_path / "whole.toml"
    ended = two_machines(tmp_path, recipe, "--run.name", "new", second=["--optim.lr", "1e-3"])
    errors = same_line_of_all(ended)
    assert "rank 1 was started with different settings from rank 0" in errors

    own_folder = ["--run.dir", str(tmp_path / "machine1" / "runs")]
    ended = two_machines(tmp_path, recipe, "--run.name", "apart", second=own_folder)
    directory = tmp_path / "runs" / "apart"
    assert same_line_of_all(ended) == (
        f"paw: rank 1 does not see the run directory {directory} of rank 0: "
        "set --run.dir to a folder that all machines of the run share\n"
    )


def same_line_of_all(ended):
    """The single line of standard error with which all ranks have ended, with exit code 2."""
    assert set(exit_codes(ended)) == {2}, ended
    (errors,) = {errors for _, errors in ended}
    assert errors.count("\n") == 1
    return errors


def weights(run, file="model"):
    """The tensors in a file of the run's newest checkpoint."""
    return restore.load(max((run / "checkpoints").glob("step_*")))[0][file]


def flattened(tensors):
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def distance(tensors, expected):
    """The distance between two sets of tensors, relative to the norm of the second."""
    difference = flattened(tensors) - flattened(expected)
    return float(difference.norm() / flattened(expected).norm())


PPO = {
    "run_updates": 1,
    "advantage_type": "ppo",
    "critic_lr": 3e-3,
    "wm_loss": "gce",
    # Two mini-batches of several micro-batches.
    "rollout_group_size": 2,
    "env_max_turns": 3,
    "optim_minibatch_samples": 9,
    "eval_games": 2,
}


@pytest.fixture(scope="module")
def one(start, tmp_path_factory):
    """The directory of a run of one rank and one update, with a critic. Read only."""
    return train(tmp_path_factory.mktemp("one"), start, "one", **PPO)


WITH_REPORT = """
from paw.config.plugins import CALLBACKS
CALLBACKS["report"] = {callback!r}
"""


@pytest.mark.slow
def test_two_ranks_train_to_the_weights_of_one(start, one, tmp_path, monkeypatch):
    """With policy and critic. The two ranks use everything that saves memory."""
    thrifty = {
        "model_checkpointing": "full",
        "model_offload_activations": True,
        "policy_offload_reference": True,
        "optim_grad_sync": "last",
    }
    (tmp_path / "patch.py").write_text(WITH_REPORT.format(callback=CALLBACKS["report"]))
    monkeypatch.setenv("FORKED_PATCH", str(tmp_path / "patch.py"))
    two = train(tmp_path, start, "two", gpus=2, **PPO, **thrifty)
    assert json.loads((two / "run.json").read_text())["ranks"] == 2
    for file in ("model", "critic_model"):
        assert weights(one, file).keys() == weights(two, file).keys()
        assert 0 < distance(weights(two, file), weights(one, file)) < 1e-5
    for file in ("metrics.jsonl", "samples.jsonl", "episodes.jsonl", "report.html"):
        assert (two / file).stat().st_size
    assert distance(load_file(two / "hf" / "model.safetensors"), weights(two)) == 0


@pytest.mark.slow
def test_buffers_of_the_model_reach_every_rank_and_the_export(tmp_path):
    """EXAONE's router has a bias that is not a parameter. It stays float32 even if weights are
    bf16."""
    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "exaone_moe",
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=512, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, num_experts=4, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config)
    for bias in (value for name, value in lm.named_buffers() if "correction_bias" in name):
        bias.normal_()
    quickstart.save(lm, tokenizer, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    biases = {name: value for name, value in stored.items() if "correction_bias" in name}
    frozen = {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj"], "model_dtype": "bfloat16"}
    settings = {"run_updates": 1, "eval_every": 0, **BRIEF, **frozen}
    run = train(tmp_path, tmp_path / "model", "run", gpus=2, **settings)
    assert biases
    exported = load_file(run / "hf" / "model.safetensors")
    for name, value in biases.items():
        assert torch.equal(exported[name], value)


WITH_VLLM = """
import os
# The launcher imports vLLM, which takes seven seconds, and the ranks are forked from it.
if "RANK" not in os.environ:
    from paw.rollouts.engines.vllm_library import import_vllm
    import_vllm().LLM
    import vllm.v1.worker.gpu_model_runner
"""


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_with_an_engine_each(start, tmp_path, paw):
    pytest.importorskip("vllm")
    options = {"engine_type": "vllm", "run_updates": 1, "eval_games": 2}
    copies = {"model_shard": "none", "optim_grad_sync": "last"}
    words = words_of(tmp_path, start, "two", **options, **copies)
    (tmp_path / "patch.py").write_text(WITH_VLLM)
    paw(*words, "--gpus", 2, env={"FORKED_PATCH": str(tmp_path / "patch.py")})
    metrics = last_metrics(tmp_path / "two")
    assert metrics["health/sampler_mismatch"] < 1e-4
    assert metrics["optim/grad_norm"] > 0


HELD = """
from pathlib import Path
class Held:
    def on_start(self, run):
        parameters = list(run.policy.parameters())
        held = sum(parameter.to_local().numel() for parameter in parameters)
        total = sum(parameter.numel() for parameter in parameters)
        Path(f"held-{run.ranks.rank}").write_text(str(held / total))
"""


@pytest.mark.slow
def test_four_ranks_as_two_machines_train_to_the_weights_of_one(start, one, tmp_path):
    """Policy and critic are sharded within a machine, with a copy on each machine. There are more
    ranks than tasks."""
    node = {"gpus": 4, "on_host": 2, "model_shard": "node", "run_callbacks": ["held.py:Held"]}
    (tmp_path / "held.py").write_text(HELD)
    four = train(tmp_path, start, "four", **PPO, **node)
    for rank in range(4):
        assert float((tmp_path / f"held-{rank}").read_text()) == pytest.approx(0.5, abs=0.02)
    for file in ("model", "critic_model", "optimizer", "critic_optimizer"):
        assert weights(one, file).keys() == weights(four, file).keys()
        assert distance(weights(four, file), weights(one, file)) < 1e-5
    assert distance(weights(four), weights(one)) > 0
    metrics_of_one = last_metrics(one)
    metrics_of_four = last_metrics(four)
    for key in (
        "policy/loss",
        "wm/loss",
        "critic/loss",
        "optim/grad_norm",
        "critic/grad_norm",
        "eval/success",
    ):
        assert metrics_of_four[key] == pytest.approx(metrics_of_one[key], rel=1e-4)
    assert distance(load_file(four / "hf" / "model.safetensors"), weights(four)) == 0


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
    words = words_of(tmp_path, start, "oom", "--gpus", "2", run_save_every=1, **BRIEF)
    errors = paw(*words, code=2, env={"FORKED_PATCH": str(tmp_path / "patch.py")}).stderr
    (message,) = [line for line in errors.splitlines() if line.startswith("rank 1: ")]
    assert "out of memory in phase 'update' of update 2 on rank 1, peak " in message
    assert "--optim.micro_batch_tokens" in message
    assert "the checkpoint of update 1 is intact (--resume auto)" in message
    assert "Traceback" not in errors
    assert restore.read_newest(tmp_path / "oom" / "checkpoints")[0].name == "step_000001"


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
    run = tmp_path / "nan"
    one_step = {"optim_minibatch_samples": 999, "run_save_every": 1, "run_max_skipped": 2, **BRIEF}
    words = words_of(tmp_path, start, "nan", **one_step, run_updates=5, eval_every=0)
    for code, errors in run_ranks([words] * 2, [tmp_path] * 2, on_host=2):
        assert code == 2
        assert "Traceback" not in errors
        assert "paw: stopped: 2 optimizer steps in a row had a non-finite loss (nan)" in errors

    folders = sorted((run / "checkpoints").glob("step_*"))
    assert [folder.name for folder in folders] == ["step_000001", "step_000002"]
    saved, saved_later = [restore.load(folder)[0] for folder in folders]
    for file in ("model", "optimizer"):  # gathered from all ranks to be saved
        for name in saved[file]:
            assert torch.equal(saved[file][name], saved_later[file][name])
    skipped = [metrics.get("optim/skipped") for metrics in read_jsonl(run / "metrics.jsonl")]
    assert skipped == [None, 0, 1]


@pytest.mark.slow
def test_a_mistake_is_one_line_however_many_ranks_there_are(paw, tmp_path):
    words = words_of(tmp_path, tmp_path / "nothing", "bad", "--gpus", "2")
    errors = paw(*words, code=2).stderr
    assert errors.startswith("paw: model.path = ")
    assert errors.count("\n") == 1


def test_ranks_share_the_cores_of_this_process(monkeypatch):
    """The machine may have more cores than a container or scheduler gives this process."""
    environments = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(
        "paw.distributed.launcher.subprocess.Popen",
        lambda words, env, **_: environments.append(env) or Done(env),
    )
    monkeypatch.setattr("paw.distributed.launcher.signal.signal", lambda *_: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(2, ["train", "quickstart"]) == 0
    assert [env["RANK"] for env in environments] == ["0", "1"]
    assert [env["LOCAL_WORLD_SIZE"] for env in environments] == ["2", "2"]
    assert [env["OMP_NUM_THREADS"] for env in environments] == ["4", "4"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(2, ["train", "quickstart"]) == 0
    assert environments[-1]["OMP_NUM_THREADS"] == "3"
    with pytest.raises(UserError, match=r"--gpus 99: this machine allows 1 to 64"):
        launch(99, [])
    monkeypatch.setattr("paw.distributed.launcher.GPU_FILES", [os.devnull])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"--gpus 2: this machine allows 1 to 1"):
        launch(2, [])
    assert launch(2, ["train", "quickstart"], device="cpu") == 0


class Done:
    """A child that has ended successfully and has said so."""

    pid = 1
    returncode = 0

    def __init__(self, env: dict[str, str]) -> None:
        os.write(int(env[watcher.PIPE]), b"end 0\n")

    poll = wait = kill = terminate = lambda self, *_: 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 and WORLD_SIZE = 2 do not match"),
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
        join_ranks(torch.device("cpu"))
