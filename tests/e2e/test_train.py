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


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digests(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.glob("*.safetensors"))
    }


def test_a_run_leaves_everything_behind(quick_run):
    assert {path.name for path in quick_run.iterdir()} == {
        ".lock", "config.toml", "run.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "hf", "plots",
        "report.html",
    }  # fmt: skip
    config = tomllib.loads((quick_run / "config.toml").read_text())
    assert config["rollout"]["tasks"] == 4
    assert config["optim"]["grad_clip"] == 1.0
    info = json.loads((quick_run / "run.json").read_text())
    assert info["games"].startswith("generated tiny")
    assert info["wall_s"] > 0
    assert info["parameters"] > 100_000
    restore.verify(quick_run / "checkpoints" / "step_000002")
    report = (quick_run / "report.html").read_text()
    assert "<svg" in report
    assert "http-equiv" in report
    assert any((quick_run / "plots").glob("*.png"))
    for sample in (samples := lines(quick_run / "samples.jsonl")):
        assert sample["length"] == len(sample["turns"]) > 0
        for turn in sample["turns"]:
            assert turn["prompt"]
            assert turn["observation"]
            assert isinstance(turn["predicted"], str)
            assert len(turn["observation_token_p"]) == len(turn["observation_tokens"]) > 0
            assert "".join(turn["observation_tokens"]) == turn["observation"]
    assert [sample["step"] for sample in samples] == [0, 0, 0, 2, 2, 2]


def test_metrics_are_complete_and_finite(quick_run):
    start, first, last = found = lines(quick_run / "metrics.jsonl")
    assert [line["step"] for line in found] == [0, 1, 2]
    assert start.keys() >= EVAL_METRICS
    assert last.keys() >= STEP_METRICS | EVAL_METRICS
    assert first.keys() >= STEP_METRICS
    assert not first.keys() & EVAL_METRICS
    assert all(
        type(v) in (int, float) and math.isfinite(v) for line in found for v in line.values()
    )
    assert last["optim/grad_norm"] > 0
    assert last["policy/loss"] != 0
    assert 0 < last["optim/gradient_frac"] <= 1
    assert last["wm/selected_frac"] == 0.75
    assert last["eval/games"] == 8
    assert sum(key.startswith("success/") for key in last) > 1


def test_the_export_is_the_checkpoint(quick_run, quick_model):
    folder = quick_run / "hf"
    named = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
    saved = load_file(quick_run / "checkpoints" / "step_000002" / "model.safetensors")
    assert named.keys() == saved.keys()
    assert all(torch.equal(named[name], saved[name]) for name in saved)
    chat = [{"role": "user", "content": "task"}]
    told = {"tokenize": False, "add_generation_prompt": True}
    assert (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, **told).count("task") == 1
    )
    assert "2 updates" in (folder / "README.md").read_text()
    (sample, *_) = lines(quick_run / "samples.jsonl")
    for place in (
        quick_model,
        folder,
    ):  # AutoTokenizer picks classes by model type: the phrase tokens must come back
        tokenizer = AutoTokenizer.from_pretrained(place)
        for turn in sample["turns"]:
            ids = tokenizer.encode(turn["prompt"], add_special_tokens=False)
            assert tokenizer.decode(ids) == turn["prompt"]
        assert len(tokenizer.encode("\ninventory", add_special_tokens=False)) == 1


def test_rollout_lines_hold_what_the_exported_model_would_say(paw_here, quick_run, tmp_path):
    out = tmp_path / "episodes.jsonl"
    done = paw_here("rollout", quick_run, "--tasks", 2, "--out", out)
    assert done.stdout == ""
    assert "8 episodes" in done.stderr
    turns = lines(out)
    assert {(t["task"], t["member"]) for t in turns} == {
        (t["task"], m) for t in turns for m in range(4)
    }
    assert len({t["task"] for t in turns}) == 2
    model = AutoModelForCausalLM.from_pretrained(quick_run / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(quick_run / "hf")
    for turn in turns[::7]:
        ids = torch.tensor([turn["prompt_ids"] + turn["response_ids"]])
        start = len(turn["prompt_ids"])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        logp = logp.gather(-1, ids[0, start:, None])[:, 0]
        assert torch.allclose(logp, torch.tensor(turn["sampled_logp"]), atol=1e-4)
        assert turn["response"] in tokenizer.decode(turn["response_ids"])
        assert turn["outcome"].keys() == {
            "observation",
            "reward",
            "done",
            "won",
            "action",
            "valid",
            "score",
            "results",
        }


def test_commands_work_on_a_run_without_export(paw_here, quick_run, tmp_path):
    """A run that was killed has checkpoints and no hf/; what a program reads on stdout stays
    clean."""
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((quick_run / name).read_bytes())
    (tmp_path / "checkpoints").symlink_to(quick_run / "checkpoints")
    result = json.loads(paw_here("eval", tmp_path, "--json").stdout)
    assert result["games"] == 8
    assert result["source"].startswith("generated tiny")
    for key in (
        "success",
        "ci_low",
        "ci_high",
        "return",
        "steps",
        "valid_actions",
    ):  # the run's last evaluation
        assert result[key] == lines(quick_run / "metrics.jsonl")[-1][f"eval/{key}"]
    assert digests(tmp_path / "hf") == digests(quick_run / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"of an earlier checkpoint")
    os.utime(tmp_path / "hf" / "config.json", (0, 0))
    text = paw_here("eval", tmp_path, {"eval.games": 5}).stdout
    assert "of 5 games" in text
    assert "95 % interval" in text
    assert "generated tiny" in text
    assert digests(tmp_path / "hf") == digests(quick_run / "hf")
    out = paw_here(
        "export", tmp_path, "--checkpoint", "step_000002", "--out", tmp_path / "other"
    ).stdout
    assert out.strip() == str(tmp_path / "other")
    assert digests(tmp_path / "other") == digests(quick_run / "hf")
    assert paw_here("report", tmp_path).stdout.strip() == str(tmp_path / "report.html")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


def test_the_seed_decides_everything(paw, quick, quick_run, read_metrics, tmp_path):
    for name, changes in (
        ("again", {}),
        ("other", {"run.seed": 1, "run.updates": 1, "eval.games": 2}),
    ):
        paw("train", "quickstart", quick | changes, {"run.dir": tmp_path, "run.name": name})
    first, again = (run / "checkpoints" / "step_000002" for run in (quick_run, tmp_path / "again"))
    assert digests(first) == digests(again)
    assert checkpoint.read_manifest(first)[0] == checkpoint.read_manifest(again)[0]
    assert read_metrics(quick_run) == read_metrics(tmp_path / "again")
    assert (quick_run / "samples.jsonl").read_bytes() == (
        tmp_path / "again" / "samples.jsonl"
    ).read_bytes()
    ours, theirs = (read_metrics(run)[1]["policy/loss"] for run in (quick_run, tmp_path / "other"))
    assert ours != theirs  # of the first update, before anything is learnt


@pytest.mark.parametrize(("kind", "think"), [("llama", "false"), ("qwen3", "true")])
def test_any_causal_lm_and_what_is_not_measured_is_absent(
    paw_here, tiny_llm, tmp_path, kind, think
):
    """The paper's prompt on a model that is no quickstart; KL without a reference is in no log,
    line, page or plot, and appears once there is one."""
    model = tiny_llm(tmp_path / "model", kind)
    run = tmp_path / "byte"
    settings = {
        "run.dir": tmp_path, "run.name": "byte", "run.updates": 1, "run.threads": 1, "model.path": model,
        "model.dtype": "float32", "env.difficulty": "tiny", "env.style": "paper", "env.think": think,
        "env.max_turns": 3, "rollout.tasks": 2, "rollout.group_size": 3, "rollout.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 12, "wm.loss": "ce", "wm.max_tokens": 40, "policy.kl_coef": 0,
        "policy.entropy_coef": 0.01, "policy.old_logp": "trainer", "optim.lr": 1e-2, "optim.epochs": 2,
        "optim.minibatch_samples": 8, "eval.games": 2,
    }  # fmt: skip
    recipe = tmp_path / "empty.toml"
    recipe.write_text('[model]\npath = "-"\n')
    done = paw_here("train", recipe, settings)
    paw_here("report", run)
    # KL without a reference, the mask of a loss without one, an engine without a cache
    absent = {"policy/kl", "wm/masked_frac", "perf/cached_frac"}
    page = (run / "report.html").read_text()
    assert not lines(run / "metrics.jsonl")[-1].keys() & absent
    assert "  kl " not in done.stdout
    assert "policy/entropy" in page
    assert not any(key in page for key in absent)
    assert not (run / "plots" / "policy_kl.png").exists()
    assert (run / "plots" / "policy_entropy.png").exists()

    done = paw_here(
        "train", recipe, settings | {"policy.kl_coef": 0.1, "run.updates": 2}, "--resume", "auto"
    )
    _, first, second = lines(run / "metrics.jsonl")
    assert all(math.isfinite(v) for line in (first, second) for v in line.values())
    assert first["health/sampler_mismatch"] < 1e-4
    assert second["health/sampler_mismatch"] < 1e-4
    assert "policy/kl" not in first
    assert second["policy/kl"] > 0
    assert "  kl " in done.stdout
    assert second["policy/entropy"] > 1
    assert second["wm/loss"] > 0
    before = load_file(model / "model.safetensors")
    after = load_file(run / "hf" / "model.safetensors")
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert moved == list(before), "every weight gets a gradient"
    paw_here(
        "rollout", run, "--tasks", 1, "--out", tmp_path / "out.jsonl", {"rollout.group_size": 2}
    )
    turns = lines(tmp_path / "out.jsonl")
    assert max(len(turn["response_ids"]) for turn in turns) == 12
    assert ("<think>" in turns[0]["prompt"]) == (think == "true")
    assert all(len(t["sampled_logp"]) == len(t["entropy"]) == len(t["response_ids"]) for t in turns)
    names = AutoTokenizer.from_pretrained(run / "hf").decode(turns[0]["prompt_ids"])
    assert names.startswith("<|im_start|>user\n")
    assert names.endswith("<|im_start|>assistant\n")


def test_the_python_page_runs_as_a_notebook(quick, paw_env, tmp_path, monkeypatch, capfd):
    """Its blocks in their order, in one process and one namespace, inside a running event loop;
    fewer updates."""
    brief = quick | {"run.updates": 1, "eval.games": 2}
    load = paw.load

    def brief_load(recipe, **changes):
        own_model = "model.path" in changes  # which has no warm-up
        return load(
            recipe,
            **changes
            | {key: brief[key] for key in brief if not (own_model and key[:7] == "warmup.")},
        )

    async def run_cells(cells, names):
        for number, cell in enumerate(cells, start=1):
            exec(compile(cell, f"docs/python.md, block {number}", "exec"), names)  # noqa: S102
            await asyncio.sleep(0)
            # The first is enough: one takes seconds.
            monkeypatch.setitem(CALLBACKS, "report", "builtins:object")

    monkeypatch.setenv("PAW_CACHE", paw_env["PAW_CACHE"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paw, "load", brief_load)
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {"__name__": "__main__"}
    asyncio.run(run_cells(cells, names))

    assert names["report"] == tmp_path / "runs" / "quickstart" / "report.html"
    assert names["report"].is_file()
    assert names["table"].index.tolist() == [0, 1]
    assert names["table"]["policy/loss"].notna().tolist() == [False, True]
    assert (names["result"]["games"], names["result"]["failures"]) == (32, 0)
    assert [len(group.trajectories) for group in names["groups"]] == [2, 2]
    episodes = lines(tmp_path / "episodes.jsonl")
    assert len(episodes) == sum(
        len(t.turns) for group in names["groups"] for t in group.trajectories
    )
    assert (tmp_path / "tuned" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "further" / "hf").is_dir()
    assert names["plan"].fits
    assert names["plan"].config.lora.rank == 32
    assert digests(tmp_path / "model") == digests(tmp_path / "runs" / "quickstart" / "hf")
    assert names["watched"].parent.name == "watched"
    assert paw.train(names["config"]).parent.name == "centred"
    assert "32 games" in capfd.readouterr().out
