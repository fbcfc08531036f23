"""Training, evaluation, rollouts, export and report, as a user runs them."""

import asyncio
import hashlib
import json
import math
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch
from jsonl import read_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import paw
from paw.checkpoint import files as checkpoint
from paw.checkpoint import restore
from paw.config.plugins import CALLBACKS

pytestmark = pytest.mark.slow
STEP_METRICS = {
    "reward/mean", "success/all", "policy/loss", "policy/clip_frac", "policy/entropy", "wm/loss", "wm/token_loss",
    "wm/lambda", "wm/selected_frac", "wm/masked_frac", "optim/gradient_frac", "optim/lr", "optim/grad_norm",
    "optim/skipped", "time/rollout", "time/score", "time/update", "time/sync", "perf/tokens_per_s", "perf/peak_gib",
    "health/env_failures", "health/groups_dropped", "health/groups_mixed", "health/valid_actions",
}  # fmt: skip
EVAL_METRICS = {
    "eval/success", "eval/ci_low", "eval/ci_high", "eval/games", "eval/return", "eval/steps", "eval/valid_actions",
    "time/eval",
}  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    """The digest of each weights file."""
    files = folder.glob("*.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_a_run_leaves_everything_behind(quick_run):
    assert {path.name for path in quick_run.iterdir()} == {
        ".lock", "config.toml", "run.json", "metrics.jsonl", "samples.jsonl", "episodes.jsonl", "checkpoints", "hf",
        "plots", "report.html",
    }  # fmt: skip
    config = tomllib.loads((quick_run / "config.toml").read_text())
    assert config["rollout"]["tasks"] == 4
    assert config["optim"]["grad_clip"] == 1.0
    run_info = json.loads((quick_run / "run.json").read_text())
    assert run_info["games"].startswith("generated tiny")
    assert run_info["wall_s"] > 0
    assert run_info["parameters"] > 100_000
    restore.verify(quick_run / "checkpoints" / "step_000002")
    report = (quick_run / "report.html").read_text()
    assert "<svg" in report
    assert "http-equiv" in report
    assert any((quick_run / "plots").glob("*.png"))
    samples = read_jsonl(quick_run / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0, 0, 0, 2, 2, 2]
    for sample in samples:
        assert sample["turns"]
        assert sample["length"] == len(sample["turns"])
        for turn in sample["turns"]:
            assert turn["prompt"]
            assert turn["observation"]
            assert isinstance(turn["predicted"], str)
            assert len(turn["observation_token_p"]) == len(turn["observation_tokens"])
            assert "".join(turn["observation_tokens"]) == turn["observation"]


def test_metrics_are_complete_and_finite(quick_run):
    start, first_update, second_update = read_jsonl(quick_run / "metrics.jsonl")
    for step, metrics in enumerate((start, first_update, second_update)):
        assert metrics["step"] == step
        for value in metrics.values():
            assert type(value) in (int, float)
            assert math.isfinite(value)
    assert start.keys() >= EVAL_METRICS
    assert first_update.keys() >= STEP_METRICS
    assert not first_update.keys() & EVAL_METRICS
    assert second_update.keys() >= STEP_METRICS | EVAL_METRICS
    assert second_update["optim/grad_norm"] > 0
    assert second_update["policy/loss"] != 0
    assert 0 < second_update["optim/gradient_frac"] <= 1
    assert second_update["wm/selected_frac"] == 0.75
    assert second_update["eval/games"] == 4
    assert sum(key.startswith("success/") for key in second_update) > 1


def test_the_export_is_the_checkpoint(quick_run, quick_model):
    folder = quick_run / "hf"
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(exported.named_parameters())
    saved = load_file(quick_run / "checkpoints" / "step_000002" / "model.safetensors")
    assert parameters.keys() == saved.keys()
    for name in saved:
        assert torch.equal(parameters[name], saved[name])
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "task"}], tokenize=False, add_generation_prompt=True
    )
    assert text.count("task") == 1
    assert "2 updates" in (folder / "README.md").read_text()

    # AutoTokenizer picks classes by model type, so the phrase tokens must come back.
    sample = read_jsonl(quick_run / "samples.jsonl")[0]
    for model in (quick_model, folder):
        tokenizer = AutoTokenizer.from_pretrained(model)
        for turn in sample["turns"]:
            ids = tokenizer.encode(turn["prompt"], add_special_tokens=False)
            assert tokenizer.decode(ids) == turn["prompt"]
        assert len(tokenizer.encode("\ninventory", add_special_tokens=False)) == 1


def test_rollout_lines_hold_what_the_exported_model_would_say(paw_here, quick_run, tmp_path):
    episodes_file = tmp_path / "episodes.jsonl"
    printed = paw_here("rollout", quick_run, "--tasks", 2, "--out", episodes_file)
    assert printed.stdout == ""
    assert "8 episodes" in printed.stderr
    turns = read_jsonl(episodes_file)
    members: dict[str, set[int]] = {}
    for turn in turns:
        members.setdefault(turn["task"], set()).add(turn["member"])
    assert list(members.values()) == [{0, 1, 2, 3}] * 2
    model = AutoModelForCausalLM.from_pretrained(quick_run / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(quick_run / "hf")
    for turn in turns[::7]:
        ids = torch.tensor([turn["prompt_ids"] + turn["response_ids"]])
        start = len(turn["prompt_ids"])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, start - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
        assert torch.allclose(log_probs, torch.tensor(turn["sampled_logp"]), atol=1e-4)
        assert turn["response"] in tokenizer.decode(turn["response_ids"])
        assert turn["outcome"].keys() == {
            "observation", "reward", "done", "won", "action", "valid", "score", "results",
        }  # fmt: skip


def test_commands_work_on_a_run_without_export(paw_here, quick_run, tmp_path):
    """A run that was killed has checkpoints but no hf/. What a program reads on stdout stays
    clean."""
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((quick_run / name).read_bytes())
    (tmp_path / "checkpoints").symlink_to(quick_run / "checkpoints")
    result = json.loads(paw_here("eval", tmp_path, "--json").stdout)
    assert result["games"] == 4
    assert result["source"].startswith("generated tiny")
    last_metrics = read_jsonl(quick_run / "metrics.jsonl")[-1]
    for key in ("success", "ci_low", "ci_high", "return", "steps", "valid_actions"):
        assert result[key] == last_metrics[f"eval/{key}"]
    assert digests(tmp_path / "hf") == digests(quick_run / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"of an earlier checkpoint")
    os.utime(tmp_path / "hf" / "config.json", (0, 0))
    text = paw_here("eval", tmp_path, {"eval.games": 5}).stdout
    assert "of 5 games" in text
    assert "95 % interval" in text
    assert "generated tiny" in text
    assert digests(tmp_path / "hf") == digests(quick_run / "hf")
    copied_run = tmp_path / "other"
    printed = paw_here(
        "export", tmp_path, "--checkpoint", "step_000002", "--out", copied_run
    ).stdout
    assert printed.strip() == str(copied_run)
    assert digests(copied_run) == digests(quick_run / "hf")
    assert paw_here("report", tmp_path).stdout.strip() == str(tmp_path / "report.html")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


def test_the_seed_decides_everything(paw, quick, quick_run, read_metrics, tmp_path):
    repeated = tmp_path / "again"
    paw("train", "quickstart", quick, {"run.dir": tmp_path, "run.name": "again"})
    checkpoints = [run / "checkpoints" / "step_000002" for run in (quick_run, repeated)]
    assert digests(checkpoints[0]) == digests(checkpoints[1])
    manifest, _ = checkpoint.read_manifest(checkpoints[0])
    assert manifest == checkpoint.read_manifest(checkpoints[1])[0]
    assert read_metrics(quick_run) == read_metrics(repeated)
    samples = (quick_run / "samples.jsonl").read_bytes()
    assert samples == (repeated / "samples.jsonl").read_bytes()

    other_seed = {"run.seed": 1, "run.updates": 1, "eval.games": 2, "run.name": "other"}
    paw("train", "quickstart", quick | other_seed, {"run.dir": tmp_path})
    _, first_update, _ = read_metrics(quick_run)
    _, first_of_other = read_metrics(tmp_path / "other")
    assert first_update["policy/loss"] != first_of_other["policy/loss"]


def test_any_causal_lm_and_what_is_not_measured_is_absent(paw_here, tiny_llm, tmp_path):
    """The paper's prompt on a model other than the quickstart's. Without a reference, no log, line,
    page or plot shows KL. With one, they do."""
    model = tiny_llm(tmp_path / "model", "qwen3")
    run = tmp_path / "byte"
    settings = {
        "run.dir": tmp_path, "run.name": "byte", "run.updates": 1, "run.threads": 1, "model.path": model,
        "model.dtype": "float32", "env.difficulty": "tiny", "env.style": "paper", "env.think": "true",
        "env.max_turns": 2, "rollout.tasks": 1, "rollout.group_size": 3, "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 12, "wm.loss": "ce", "wm.max_tokens": 40, "policy.kl_coef": 0,
        "policy.entropy_coef": 0.01, "policy.old_logp": "trainer", "optim.lr": 1e-2, "optim.epochs": 2,
        "optim.minibatch_samples": 4, "eval.games": 1,
    }  # fmt: skip
    recipe = tmp_path / "empty.toml"
    recipe.write_text('[model]\npath = "-"\n')
    printed = paw_here("train", recipe, settings).stdout
    paw_here("report", run)
    assert "  kl " not in printed
    check_absent_metrics(run)

    with_reference = settings | {"policy.kl_coef": 0.1, "run.updates": 2}
    printed = paw_here("train", recipe, with_reference, "--resume", "auto").stdout
    _, first_update, second_update = read_jsonl(run / "metrics.jsonl")
    for metrics in (first_update, second_update):
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["health/sampler_mismatch"] < 1e-4
    assert "policy/kl" not in first_update
    assert second_update["policy/kl"] > 0
    assert "  kl " in printed
    assert second_update["policy/entropy"] > 1
    assert second_update["wm/loss"] > 0
    initial_weights = load_file(model / "model.safetensors")
    trained_weights = load_file(run / "hf" / "model.safetensors")
    changed_names = [
        name
        for name in trained_weights
        if not torch.equal(initial_weights[name], trained_weights[name])
    ]
    assert changed_names == list(initial_weights), "every weight gets a gradient"

    episodes_file = tmp_path / "out.jsonl"
    paw_here("rollout", run, "--tasks", 1, "--out", episodes_file, {"rollout.group_size": 2})
    check_turns_in_paper_style(read_jsonl(episodes_file), run)


def check_absent_metrics(run):
    """Metrics that were not measured are in no file of the run."""
    # KL without a reference, the mask of a loss without one, the cache of an engine without one
    absent = {"policy/kl", "wm/masked_frac", "perf/cached_frac"}
    assert not read_jsonl(run / "metrics.jsonl")[-1].keys() & absent
    page = (run / "report.html").read_text()
    assert "policy/entropy" in page
    assert not any(key in page for key in absent)
    assert not (run / "plots" / "policy_kl.png").exists()
    assert (run / "plots" / "policy_entropy.png").exists()


def check_turns_in_paper_style(turns, run):
    assert max(len(turn["response_ids"]) for turn in turns) == 12
    assert "<think>" in turns[0]["prompt"]
    for turn in turns:
        assert len(turn["sampled_logp"]) == len(turn["response_ids"])
        assert len(turn["entropy"]) == len(turn["response_ids"])
    prompt = AutoTokenizer.from_pretrained(run / "hf").decode(turns[0]["prompt_ids"])
    assert prompt.startswith("<|im_start|>user\n")
    assert prompt.endswith("<|im_start|>assistant\n")


def test_the_python_page_runs_as_a_notebook(quick, paw_env, tmp_path, monkeypatch, capfd):
    """The blocks of docs/python.md run in order, in one process and one namespace, inside a running
    event loop, with fewer updates."""
    brief_settings = quick | {"run.updates": 1, "eval.games": 2}
    original_load = paw.load

    def brief_load(recipe, **changes):
        for key, value in brief_settings.items():
            if key.startswith("warmup.") and "model.path" in changes:
                continue  # a user's own model has no warm-up
            changes[key] = value
        return original_load(recipe, **changes)

    async def run_cells(cells, variables):
        for number, cell in enumerate(cells, start=1):
            exec(compile(cell, f"docs/python.md, block {number}", "exec"), variables)  # noqa: S102
            await asyncio.sleep(0)
            # One report is enough, since each takes seconds.
            monkeypatch.setitem(CALLBACKS, "report", "builtins:object")

    monkeypatch.setenv("PAW_CACHE", paw_env["PAW_CACHE"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paw, "load", brief_load)
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    variables = {"__name__": "__main__"}
    asyncio.run(run_cells(cells, variables))

    assert variables["report"] == tmp_path / "runs" / "quickstart" / "report.html"
    assert variables["report"].is_file()
    assert variables["table"].index.tolist() == [0, 1]
    assert variables["table"]["policy/loss"].notna().tolist() == [False, True]
    assert variables["result"]["games"] == 32
    assert variables["result"]["failures"] == 0
    groups = variables["groups"]
    assert [len(group.trajectories) for group in groups] == [2, 2]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turn_count = sum(len(trajectory.turns) for trajectory in trajectories)
    assert len(read_jsonl(tmp_path / "episodes.jsonl")) == turn_count
    assert (tmp_path / "tuned" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "further" / "hf").is_dir()
    assert variables["plan"].fits
    assert variables["plan"].config.lora.rank == 32
    assert digests(tmp_path / "model") == digests(tmp_path / "runs" / "quickstart" / "hf")
    assert variables["watched"].parent.name == "watched"
    assert paw.train(variables["config"]).parent.name == "centred"
    assert "32 games" in capfd.readouterr().out
