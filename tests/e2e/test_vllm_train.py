"""Training with the engines that users install: vLLM's sampler and ALFWorld's own game engine."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
needs_alfworld = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("alfworld", "textworld"))), reason="alfworld is not installed"
)
GUESS = Path(__file__).parents[2] / "docs" / "example_environment.py"
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", max_model_len=512, enforce_eager=True, enable_chunked_prefill=False)
chats = [[{"role": "user", "content": text}] for text in json.load(sys.stdin)]
outputs = llm.chat(chats, SamplingParams(max_tokens=6, logprobs=0, seed=0), use_tqdm=False)
answers = []
for output in outputs:
    ids = list(output.outputs[0].token_ids)
    answers.append([output.prompt_token_ids, ids, [p[i].logprob for p, i in zip(output.outputs[0].logprobs, ids)]])
print(json.dumps(answers))
"""
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def vllm_run(paw, quick, quick_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    engine = {"rollout.engine": "vllm", "policy.old_logp": "trainer", "run.updates": 2, "optim.lr": 3e-3}
    paw("train", "quickstart", quick | engine, {"run.dir": folder, "run.name": "run"}, env=VLLM)
    return folder / "run"


@needs_vllm
def test_the_sampler_has_the_trainers_weights_at_every_update(vllm_run, quick_run):
    start, *updates = lines(vllm_run / "metrics.jsonl")
    ours = lines(quick_run / "metrics.jsonl")[1]  # same weights and games, other random numbers
    assert updates[0].keys() ^ ours.keys() == {"perf/cached_frac"}
    assert updates[0]["policy/entropy"] == pytest.approx(ours["policy/entropy"], rel=0.2)
    assert start["eval/games"] == 8 and updates[-1]["eval/games"] == 8 and len(updates) == 2
    for line in updates:
        assert all(math.isfinite(value) for value in line.values())
        assert line["health/sampler_mismatch"] < 1e-4
        assert line["optim/grad_norm"] > 0 and line["policy/loss"] != 0 and line["time/sync"] > 0
    assert json.loads((vllm_run / "run.json").read_text())["engine"] == "vllm"


@needs_vllm
def test_a_mixture_of_experts_trains_as_a_dense_model_does(paw, tiny_llm, tmp_path):
    """Weights reach the engine's fused experts; the export holds them one by one, as the model's files did."""
    model = tiny_llm(tmp_path / "model", "qwen3_moe")
    sizes = {"rollout.tasks": 4, "rollout.group_size": 4, "eval.games": 4, "rollout.max_response_tokens": 16}
    engine = {"rollout.engine": "vllm", "model.dtype": "float32", "optim.lr": 1e-2, "run.updates": 2, "run.threads": 1}
    where = {"model.path": model, "env.name": f"{GUESS}:Guess", "run.dir": tmp_path, "run.name": "run"}
    paw("train", "quickstart", sizes, engine, where, env=VLLM)
    for line in lines(tmp_path / "run" / "metrics.jsonl")[1:]:
        assert line["health/sampler_mismatch"] < 1e-4 and line["optim/grad_norm"] > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "hf"))
    assert before.keys() == after.keys() and "model.layers.1.mlp.experts.3.down_proj.weight" in after
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert any("experts" in name for name in moved) and any("mlp.gate" in name for name in moved)


@needs_vllm
def test_the_export_serves_in_vllm_as_in_transformers(paw_env, vllm_run):
    """vLLM alone, with its own loader and the exported tokenizer; its log-probs re-read by transformers."""
    folder = vllm_run / "hf"
    prompts = [turn["prompt"] for sample in lines(vllm_run / "samples.jsonl")[:2] for turn in sample["turns"]]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, folder],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=300,
        env=paw_env | VLLM | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == len(prompts) > 10
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, (prompt_ids, token_ids, logps) in zip(prompts, answers, strict=True):
        assert prompt_ids == tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        assert torch.allclose(logp, torch.tensor(logps), atol=1e-4)


@needs_alfworld
def test_training_on_the_real_game_engine(paw, quick, quick_model, tmp_path):
    small = {"run.updates": 1, "rollout.tasks": 2, "rollout.group_size": 2, "eval.games": 1, "env.max_turns": 4}
    where = {"model.path": quick_model, "run.dir": tmp_path, "run.name": "run", "env.backend": "textworld"}
    paw("train", "quickstart", quick | small, where)
    line = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert line["health/env_failures"] == 0 and line["health/groups_dropped"] == 0 and line["eval/games"] == 1
    assert line["optim/grad_norm"] > 0 and line["wm/loss"] > 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["games"].startswith("textworld 1.")
