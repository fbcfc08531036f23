"""LoRA runs from the command line save, export and resume, in one rank or two."""

import shutil

import pytest
import torch
from jsonl import read_jsonl
from safetensors.torch import load_file
from test_train_ranks import distance, start, train, weights  # noqa: F401
from transformers import AutoModelForCausalLM

from paw.checkpoint import files as checkpoint
from paw.tools.export import export_run

pytestmark = pytest.mark.slow
pytest.importorskip("peft")
LORA = ["--lora.rank", "4", "--lora.alpha", "8"]
SHORT = {
    "env_max_turns": 3,
    "eval_games": 1,
    "optim_lr": 1e-2,
    "optim_minibatch_samples": 999,
    "rollout_group_size": 2,
    "run_save_every": 1,
    "run_updates": 2,
}


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), start, "one", *LORA, **SHORT)


def updates_of(run):
    """The metrics of each update."""
    return read_jsonl(run / "metrics.jsonl")[1:]


def test_a_checkpoint_holds_the_adapters_alone_and_the_reference_is_the_base(run):
    folder = max((run / "checkpoints").glob("step_*"))
    adapters = load_file(folder / "model.safetensors")
    assert adapters
    for name, adapter in adapters.items():
        assert ".lora_" in name
        assert adapter.dtype == torch.float32
    moments = load_file(folder / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == adapters.keys()
    first, second = updates_of(run)
    assert abs(first["policy/kl"]) < 1e-6 < second["policy/kl"]
    assert first["health/sampler_mismatch"] < 1e-4
    assert second["health/sampler_mismatch"] < 1e-4


def test_the_export_holds_merged_weights(run, start, tmp_path):
    merged = load_file(run / "hf" / "model.safetensors")
    base = load_file(start / "model.safetensors")
    adapters = weights(run)
    assert merged.keys() == base.keys()
    for name in merged:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" not in adapters:
            assert torch.equal(merged[name], base[name])
            continue
        factor_a = adapters[f"{layer}.lora_A.default.weight"].double()
        factor_b = adapters[f"{layer}.lora_B.default.weight"].double()
        expected = base[name].double() + 2.0 * factor_b @ factor_a
        assert torch.allclose(merged[name].double(), expected, atol=1e-6)
        assert not torch.equal(merged[name], base[name])
    lm, info = AutoModelForCausalLM.from_pretrained(run / "hf", output_loading_info=True)
    assert lm.num_parameters() == sum(tensor.numel() for tensor in base.values())
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    exported = export_run(run, out=tmp_path / "out") / "model.safetensors"
    assert exported.read_bytes() == (run / "hf" / "model.safetensors").read_bytes()


def test_resuming_is_exact(run, start, tmp_path):
    copied = shutil.copytree(run, tmp_path / "one")
    resaved = copied / "checkpoints" / "step_000002"
    shutil.rmtree(resaved)
    train(tmp_path, start, "one", *LORA, "--resume", "auto", **SHORT)
    manifest, _ = checkpoint.read_manifest(resaved)
    expected, _ = checkpoint.read_manifest(run / "checkpoints" / "step_000002")
    assert manifest == expected


def test_two_ranks_train_to_the_adapters_of_one(run, start, tmp_path):
    two = train(tmp_path, start, "two", *LORA, gpus=2, **SHORT)
    assert weights(two).keys() == weights(run).keys()
    assert 0 < distance(weights(two), weights(run)) < 1e-5
    exported = load_file(two / "hf" / "model.safetensors")
    assert distance(exported, load_file(run / "hf" / "model.safetensors")) < 1e-5
    for metrics in updates_of(two):
        assert metrics["health/sampler_mismatch"] < 1e-4
