"""LoRA runs from the command line: what they save, export and resume, in one rank or two."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_train_ranks import distance, start, train, weights  # noqa: F401
from transformers import AutoModelForCausalLM

from paw.checkpoint import files as checkpoint
from paw.tools.export import export_run

pytestmark = pytest.mark.slow
pytest.importorskip("peft")
LORA = ["--lora.rank", "4", "--lora.alpha", "8"]
SHORT = {"optim_lr": 1e-2, "optim_minibatch_samples": 999, "run_save_every": 1, "run_updates": 2}


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), start, "one", *LORA, **SHORT)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]


def test_a_checkpoint_holds_the_adapters_alone_and_the_reference_is_the_base(run):
    folder = max((run / "checkpoints").glob("step_*"))
    adapters = load_file(folder / "model.safetensors")
    assert adapters
    assert all(".lora_" in name and t.dtype == torch.float32 for name, t in adapters.items())
    moments = load_file(folder / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == adapters.keys()
    first, second = lines(run)
    assert abs(first["policy/kl"]) < 1e-6 < second["policy/kl"]
    assert max(first["health/sampler_mismatch"], second["health/sampler_mismatch"]) < 1e-4


def test_the_export_holds_merged_weights(run, start, tmp_path):
    merged = load_file(run / "hf" / "model.safetensors")
    base = load_file(start / "model.safetensors")
    adapters = weights(run)
    assert merged.keys() == base.keys()
    for name in merged:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in adapters:
            a, b = (adapters[f"{layer}.lora_{part}.default.weight"].double() for part in "AB")
            assert torch.allclose(
                merged[name].double(), base[name].double() + 2.0 * b @ a, atol=1e-6
            )
            assert not torch.equal(merged[name], base[name])
        else:
            assert torch.equal(merged[name], base[name])
    lm, info = AutoModelForCausalLM.from_pretrained(run / "hf", output_loading_info=True)
    assert lm.num_parameters() == sum(t.numel() for t in base.values())
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    again = export_run(run, out=tmp_path / "out")
    assert (again / "model.safetensors").read_bytes() == (
        run / "hf" / "model.safetensors"
    ).read_bytes()


def test_resuming_is_exact(run, start, tmp_path):
    again = tmp_path / "one"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step_000002")
    train(tmp_path, start, "one", *LORA, "--resume", "auto", **SHORT)
    ours, theirs = (
        checkpoint.read_manifest(r / "checkpoints" / "step_000002")[0] for r in (again, run)
    )
    assert ours == theirs


def test_two_ranks_train_to_the_adapters_of_one(run, start, tmp_path):
    two = train(tmp_path, start, "two", *LORA, gpus=2, **SHORT)
    assert weights(two).keys() == weights(run).keys()
    assert 0 < distance(weights(two), weights(run)) < 1e-5
    assert distance(*(load_file(r / "hf" / "model.safetensors") for r in (two, run))) < 1e-5
    assert max(line["health/sampler_mismatch"] for line in lines(two)) < 1e-4
