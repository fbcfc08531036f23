"""A training run with users' engines: vLLM as the sampler, and ALFWorld's own games. vLLM's server
then serves the export as the model of an evaluation, of ReAct with its authors' examples, and as
ZeroSearch's search engine."""

import asyncio
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.request import Request, urlopen

import pytest
import torch
from jsonl import read_jsonl, write_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from paw.agents.endpoint import Endpoint
from paw.agents.zerosearch import PROMPT
from paw.config.sections import Config, EndpointConfig
from paw.envs import make_factory
from paw.errors import UserError
from paw.rollouts.episode import derive_seed
from paw.rollouts.text.chat import ContextFull

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
pytest.importorskip("openai")
BACKEND = "textworld" if all(map(importlib.util.find_spec, ("alfworld", "textworld"))) else "native"
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
POSITIONS = 4096
START_S = 400
"""Enough on a busy machine. The server imports torch and vLLM in two processes."""


@pytest.fixture(scope="module")
def trained(run_here, vllm_here, quick, tiny_llm, tmp_path_factory):
    """(folder of a mixture-of-experts model, directory of the run that trained it)."""
    folder = tmp_path_factory.mktemp("vllm")
    model = tiny_llm(folder / "model", "qwen3_moe")
    (folder / "mine.py").write_text(
        "def second(trajectory):\n    return float(trajectory.member == 1)\n"
    )
    settings = {
        "model.path": model, "model.dtype": "auto", "engine.type": "vllm", "policy.old_logp": "trainer",
        "optim.lr": 1e-2, "rollout.tasks": 1, "rollout.group_size": 2, "rollout.max_response_tokens": 16,
        "env.max_turns": 2, "env.backend": BACKEND, "eval.games": 1, "run.dir": folder, "run.name": "run",
        # The model wins no game, and there is no gradient if all rewards are 0.
        "reward.type": f"{folder / 'mine.py'}:second",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        # "auto" is float32 here, also for vLLM.
        patch.setattr("paw.model.dtype.cpu_features", frozenset)
        assert run_here("train", "quickstart", quick | settings) == 0
    return model, folder / "run"


def test_the_sampler_has_the_trainers_weights_at_every_update(trained, quick_run):
    """Weights reach the engine's fused experts. The export stores experts one by one, as the
    model's files did."""
    model, run = trained
    start, *updates = read_jsonl(run / "metrics.jsonl")
    assert len(updates) == 2
    assert start["eval/games"] == 1
    assert updates[-1]["eval/games"] == 1
    for metrics in updates:
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["policy/loss"] != 0
        assert metrics["health/sampler_mismatch"] < 1e-4
        assert metrics["perf/cached_frac"] > 0
        assert metrics["health/env_failures"] == 0
        assert metrics["health/groups_dropped"] == 0
        assert metrics["optim/grad_norm"] > 0
        assert metrics["wm/loss"] > 0
        assert metrics["time/sync"] > 0

    # The metrics are those of the transformers engine, except for success by kinds of games: that
    # run plays other kinds.
    _, metrics_there, _ = read_jsonl(quick_run / "metrics.jsonl")
    differing = updates[0].keys() ^ metrics_there.keys()
    assert {key for key in differing if not key.startswith("success/")} == {"perf/cached_frac"}

    info = json.loads((run / "run.json").read_text())
    assert info["engine"] == "vllm"
    assert info["games"].startswith("textworld 1.") is (BACKEND == "textworld")
    before = load_file(model / "model.safetensors")
    after = load_file(run / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in after
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert any("experts" in name for name in moved)
    assert any("mlp.gate" in name for name in moved)


@pytest.fixture(scope="module")
def url(trained, tmp_path_factory):
    """Address of a server of the exported model, which it names "tiny"."""
    log = tmp_path_factory.mktemp("served") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, **QUIET}
    # With chunked prefill, seeds crash the CPU engine.
    options = (
        f"--served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32 "
        f"--max-model-len {POSITIONS} --enforce-eager --block-size 32 --no-enable-chunked-prefill"
    )
    # This form works with both packages, vllm and vllm-cpu.
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*serve, "--model", trained[1] / "hf", *options.split()]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    try:
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() - started < START_S, log.read_text()[-3000:]
            try:
                urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.long
def test_what_the_endpoint_relies_on(url):
    endpoint = Endpoint(EndpointConfig(url=url, model="tiny", retries=0))
    endpoint.check()
    loop = asyncio.Runner()

    def ask(endpoint, prompt, **options):
        return loop.run(endpoint.complete(prompt, **options))

    sampling = {"temperature": 1.0, "max_tokens": 24, "seed": 2**63 - 1}
    reply = ask(endpoint, "hello", **sampling)
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert reply.prompt_tokens == len(prompt) - len("<|im_start|>") * 2 - len("<|im_end|>") + 3
    assert reply.completion_tokens == 24
    assert ask(endpoint, "hello", **sampling) == reply
    stopped = ask(endpoint, "hello", stop=[reply.text[5]], **sampling)
    assert stopped.text == reply.text.partition(reply.text[5])[0]
    continued = ask(endpoint, "hello", start="Well, ", **sampling)
    assert continued.prompt_tokens == reply.prompt_tokens + len(
        "Well, "
    )  # no end of turn, no new one
    with pytest.raises(ContextFull):
        ask(endpoint, "x" * POSITIONS, **sampling)
    with pytest.raises(UserError, match=r"no model .none.; it serves: tiny$"):
        ask(Endpoint(EndpointConfig(url=url, model="none")), "hello", **sampling)
    loop.close()


@pytest.mark.long
def test_an_evaluation(url, paw_here, tmp_path):
    words = {
        "env": "alfworld", "env.data": "none", "env.difficulty": "tiny", "env.style": "compact", "env.max_turns": 4,
        "rollout.max_response_tokens": 16, "endpoint": url, "model": "tiny", "eval.games": 4, "out": tmp_path / "out",
    }  # fmt: skip
    assert "| tiny | plain |" in paw_here("eval", words).stdout
    episodes = read_jsonl(tmp_path / "out" / "episodes.jsonl")
    assert sorted(episode["place"] for episode in episodes) == [0, 1, 2, 3]
    for episode in episodes:
        assert episode["failure"] is None
        assert episode["prompt_tokens"] > 0
        assert episode["turns"]


@pytest.mark.long
def test_the_react_authors_examples_on_an_official_game(url, paw_here, official_games, tmp_path):
    """The server bills exactly the tokens of the expected prompt, one per byte."""
    ((name, game),) = official_games(1)
    split = name.partition("/")[0]
    (tmp_path / "json_2.1.1" / name).mkdir(parents=True)
    (tmp_path / "json_2.1.1" / name / "game.tw-pddl").write_text(json.dumps(game))

    def example(kind, number, action):
        return (
            "You are in a room.\nYour task is to: put some mug on desk.\n"
            f"> think: To solve {kind} {number}, I need a mug.\nOK.\n> {action}\n"
        )

    examples = {}
    for kind in ("put", "examine", "clean", "heat", "cool", "puttwo"):
        for number in range(3):
            text = example(kind, number, "put mug 1 in/on desk 2")
            examples[f"react_{kind}_{number}"] = text
    (tmp_path / "alfworld_3prompts.json").write_text(json.dumps(examples))
    words = {
        "env": "alfworld", "env.data": tmp_path, "env.eval_split": split, "env.max_turns": 1,
        "agent": "react", "agent.examples": tmp_path / "alfworld_3prompts.json", "endpoint": url, "model": "tiny",
        "rollout.max_response_tokens": 16, "eval.games": 1, "out": tmp_path / "out",
    }  # fmt: skip
    assert "| tiny | react |" in paw_here("eval", words).stdout
    (episode,) = read_jsonl(tmp_path / "out" / "episodes.jsonl")
    env = {"name": "alfworld", "data": tmp_path, "eval_split": split}
    factory = make_factory(Config.model_validate({"model": {"path": "-"}, "env": env}))
    task = factory.tasks(split, 0)[0]
    assert episode["task"] == task.id
    assert episode["failure"] is None
    assert episode["calls"] == 1
    assert episode["steps"] == 1

    kind = {"look": "examine", "two": "puttwo", "pick": "put"}.get(task.kind, task.kind)
    shown = [example(kind, number, "move mug 1 to desk 2") for number in (1, 0)]
    room = factory.make().reset(task).partition("\n\n")[2].replace("\n\n", "\n")
    head = (
        "Interact with a household to solve a task. After each '>' stands a thought, 'think: ...', or an action. Write "
        "what comes after the last '>', in one line. Here are two examples.\n"
    )
    prompt = head + "\n".join(shown) + f"\nHere is the task.\n{room}\n>"
    assert episode["prompt_tokens"] == len("_user\n_\n_assistant\n") + len(prompt)


@pytest.mark.long
def test_zerosearch_trains_on_what_a_real_model_makes_up(
    url, paw_here, read_metrics, tiny_llm, says_only, tmp_path
):
    """With ZeroSearch's recipe, the server gets the paper's prompt, and its answer is the
    observation."""
    query = "where is it"
    questions = []
    for number in range(8):
        question = {"question": f"Where is {number}?", "golden_answers": ["Tuk"]}
        questions.append(question | {"data_source": "nq"})
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", questions)
    model = says_only(
        tiny_llm(tmp_path / "model"), f"<search>{query}</search>", "<answer>Tuk</answer>"
    )
    settings = {
        "model.path": model, "model.dtype": "float32", "model.checkpointing": "none", "env.data": tmp_path,
        "env.max_turns": 2, "env.simulator.url": url, "env.simulator.model": "tiny", "rollout.tasks": 2,
        "rollout.group_size": 4, "rollout.max_prompt_tokens": 4000, "rollout.max_response_tokens": 8,
        "engine.type": "transformers", "run.updates": 1, "run.threads": 1, "eval.games": 8, "run.dir": tmp_path,
        "run.name": "run",
    }  # fmt: skip
    paw_here("train", "search-zerosearch", settings)
    *_, metrics = read_metrics(tmp_path / "run")
    assert metrics["health/env_failures"] == 0
    assert metrics["optim/grad_norm"] > 0
    assert math.isfinite(metrics["policy/loss"])

    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    observations = {turn["observation"] for sample in samples for turn in sample["turns"]} - {""}
    (made_up,) = {observation.partition("Doc 1: ")[2] for observation in observations}
    endpoint = Endpoint(EndpointConfig(url=url, model="tiny"))
    seed = derive_seed(0, "zerosearch", query)
    beginnings = []
    with asyncio.Runner() as loop:
        for quality in ("useful", "noisy"):
            prompt = PROMPT.format(
                count=3, quality=quality, Quality=quality.capitalize(), query=query
            )
            reply = loop.run(endpoint.complete(prompt, temperature=1.0, max_tokens=512, seed=seed))
            beginnings.append(json.dumps(" ".join(reply.text.split()))[1:-1][:200])
    assert made_up.startswith(tuple(beginnings)), "it is not an answer to the paper's prompt"


@pytest.mark.long
def test_the_export_serves_in_vllm_as_in_transformers(trained, url):
    """vLLM on its own, with its own loader and the exported tokenizer. transformers checks its
    log-probs."""
    folder = trained[1] / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = read_jsonl(trained[1] / "samples.jsonl")
    prompts = [turn["prompt"] for sample in samples for turn in sample["turns"]][:4]
    assert len(prompts) == 4
    for text in prompts:
        messages = [{"role": "user", "content": text}]
        body = {
            "model": "tiny", "messages": messages, "max_tokens": 6, "logprobs": True, "return_token_ids": True,
        }  # fmt: skip
        request = Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=60) as response:
            answer = json.load(response)
        prompt_ids = answer["prompt_token_ids"]
        assert prompt_ids == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        (choice,) = answer["choices"]
        token_ids = choice["token_ids"]
        logps = [token["logprob"] for token in choice["logprobs"]["content"]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[0]
        logits = logits[len(prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(logps), atol=1e-4)
