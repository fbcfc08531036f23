"""model.dtype = "auto" on machines with and without instructions for bfloat16, which the tests
pretend to be."""

import json
from pathlib import Path

import pytest
import torch

from paw.config.recipe import load
from paw.config.sections import Config
from paw.model import dtype
from paw.model.dtype import pick_dtype, training_dtype, with_dtype
from paw.rundir.resume import recorded_dtype
from paw.tools.plan.plan import Plan
from paw.tools.plan.shapes import SHAPES

FILE = Path(__file__).parents[1] / "support" / "environments.py"
CPU = torch.device("cpu")
GPU = torch.device("cuda")
WITHOUT = {
    "avx2",
    "avx512_f",
    "avx512_fp16",
    "avx512_vnni",
    "amx_tile",
    "amx_int8",
    "fma3",
    "neon",
    "i8mm",
}
SAPPHIRE_RAPIDS = {"avx512_f", "avx512_bf16", "amx_bf16"}
GRAVITON_3 = {"neon", "bf16", "sve"}
NAMES = {"float32": frozenset(WITHOUT), "bfloat16": frozenset(WITHOUT | SAPPHIRE_RAPIDS)}


@pytest.fixture
def machine(monkeypatch):
    """`machine("bfloat16")` makes this CPU one for which "auto" is bfloat16."""

    def make(name):
        monkeypatch.setattr(dtype, "cpu_features", lambda: NAMES[name])

    return make


@pytest.fixture
def settings(tiny_llm, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text('[model]\npath = "-"\n')
    return recipe, {
        "model.path": tiny_llm(tmp_path / "model"), "run.dir": tmp_path, "run.name": "run", "run.updates": 1,
        "run.threads": 1, "rollout.tasks": 2, "rollout.group_size": 2, "eval.games": 2, "policy.kl_coef": 0,
        "engine.type": "transformers", "rollout.max_response_tokens": 4, "env.name": f"{FILE}:Breaks",
    }  # fmt: skip


def dtypes_of(run):
    """The dtype that a run's configuration asks for, and the one that the run has."""
    recorded = json.loads((run / "run.json").read_text())
    return load(run / "config.toml").model.dtype, recorded["dtype"]


@pytest.mark.parametrize(
    "features", [SAPPHIRE_RAPIDS, {"avx512_bf16"}, {"amx_bf16"}, GRAVITON_3, {"svebf16"}]
)
def test_a_cpu_with_instructions_for_bfloat16_computes_in_it(features):
    assert pick_dtype(CPU, WITHOUT | features) == "bfloat16"


def test_a_cpu_without_computes_in_float32_and_a_gpu_in_bfloat16():
    assert pick_dtype(CPU, WITHOUT) == pick_dtype(CPU, ()) == "float32"
    assert pick_dtype(GPU, WITHOUT) == pick_dtype(GPU) == "bfloat16"


def test_what_this_cpu_has_is_found(monkeypatch):
    flags = Path("/proc/cpuinfo").read_text().split()
    assert dtype.BFLOAT16.intersection(dtype.cpu_features()) == dtype.BFLOAT16.intersection(flags)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # as in torch 2.10
    assert dtype.BFLOAT16.intersection(dtype.cpu_features()) == dtype.BFLOAT16.intersection(flags)


@pytest.mark.parametrize("name", NAMES)
def test_auto_is_the_default_and_what_is_named_is_taken(machine, name):
    machine(name)
    assert Config.model_validate({"model": {"path": "m"}}).model.dtype == "auto"
    assert load("quickstart").model.dtype == "float32"
    assert training_dtype(load("alfworld-grpo-paw"), CPU) == name
    assert training_dtype(load("alfworld-grpo-paw"), GPU) == "bfloat16"
    for named in NAMES:
        config = load("alfworld-grpo-paw", {"model.dtype": named})
        assert training_dtype(config, CPU) == with_dtype(config, name).model.dtype == named
    flash = load("alfworld-grpo-paw", {"optim.name": "flash-adamw"})  # its weights are bfloat16
    assert training_dtype(flash, CPU) == "bfloat16"


def test_a_plan_is_made_for_the_dtype_of_a_card():
    def activations(**model):
        plan = Plan(load("alfworld-grpo-paw", model), SHAPES["Qwen2.5-1.5B"], gpus=1, gpu_gib=80.0)
        return plan.phases["update"]["activations"]

    bfloat16 = activations(**{"model.dtype": "bfloat16"})
    assert activations() == bfloat16
    assert bfloat16 < activations(**{"model.dtype": "float32"})


@pytest.mark.parametrize(("began", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_names_its_dtype_and_goes_on_in_it_on_another_machine(
    machine, settings, paw_here, read_metrics, tmp_path, began, other
):
    recipe, keys = settings
    machine(began)
    output = paw_here("train", recipe, keys).stdout
    assert f", {began}, engine transformers, head backend" in output
    assert other not in output
    assert dtypes_of(tmp_path / "run") == ("auto", began)
    metrics = read_metrics(tmp_path / "run")

    machine(other)  # the run goes on, on another machine
    output = paw_here("train", recipe, keys, {"run.updates": 2}, "--resume", "auto").stdout
    assert f"the run began in {began} and continues in it (--model.dtype {other}" in output
    assert f", {began}, engine transformers" in output
    assert dtypes_of(tmp_path / "run") == ("auto", began)
    assert read_metrics(tmp_path / "run")[:2] == metrics

    changes = {"run.updates": 3, "model.dtype": other}
    output = paw_here("train", recipe, keys, changes, "--resume", "auto").stdout
    assert f"changed: model.dtype 'auto' -> '{other}'" in output
    assert f", {other}, engine transformers" in output
    assert dtypes_of(tmp_path / "run") == (other, other)


def test_the_dtype_of_a_run_of_an_older_version_is_that_of_its_config(tmp_path):
    assert recorded_dtype(tmp_path) == ""
    (tmp_path / "config.toml").write_text('[model]\npath = "m"\ndtype = "bfloat16"\n')
    (tmp_path / "run.json").write_text('{"paw": "0.9.0"}')
    assert recorded_dtype(tmp_path) == "bfloat16"
    (tmp_path / "run.json").write_text('{"dtype": "float32"}')
    assert recorded_dtype(tmp_path) == "float32"
    for nonsense in ("[model", "model = 3", '[model]\ndtype = "auto"'):
        (tmp_path / "config.toml").write_text(nonsense)
        (tmp_path / "run.json").write_text("{")
        assert recorded_dtype(tmp_path) == ""


@pytest.mark.parametrize("name", NAMES)
def test_other_commands_take_and_name_what_suits_the_machine(
    machine, settings, paw_here, tmp_path, name
):
    recipe, keys = settings
    machine(name)
    model = keys["model.path"]
    tuned = tmp_path / "tuned"
    assert f"model.dtype = 'auto' on cpu: {name}" in paw_here("doctor").stdout
    examined = json.loads(paw_here("doctor", "--model", model, "--json").stdout)
    assert examined["dtype"] == name
    assert examined["difference_bfloat16"] < 0.25
    assert not examined["problems"]
    brief_evaluation = {
        "env.name": keys["env.name"], "engine.type": "transformers", "eval.games": 2,
        "rollout.max_response_tokens": 4, "run.threads": 1,
    }  # fmt: skip
    paw_here("eval", model, "--recipe", recipe, brief_evaluation)
    brief_tuning = {
        "sft.turns": 4, "optim.minibatch_samples": 2, "env.data": "none", "run.threads": 1,
    }  # fmt: skip
    printed = paw_here("sft", model, "--recipe", "alfworld-grpo-paw", "--out", tuned, brief_tuning)
    assert f"1 epochs, in {name}\n" in printed.stderr
    assert load(tuned / "paw.toml").model.dtype == "auto"


def test_adapters_are_merged_into_the_base_model_that_the_run_had(
    machine, settings, paw_here, tmp_path
):
    """LoRA's base weights are stored in the run's dtype, so `paw export` on another machine takes
    that."""
    recipe, keys = settings
    machine("bfloat16")
    paw_here("train", recipe, keys, {"lora.rank": 2, "optim.lr": 1e-2})
    machine("float32")
    exported = tmp_path / "exported"
    paw_here("export", tmp_path / "run", "--out", exported)
    weights = (exported / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "run" / "hf" / "model.safetensors").read_bytes()
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
