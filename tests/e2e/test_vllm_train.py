"""One training with the engines of users, vLLM as the sampler and ALFWorld's own games; what it
exports, served by vLLM's server: as the model of an evaluation, of ReAct by its authors' examples,
and as ZeroSearch's search engine."""

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
"""On a busy machine; the server imports torch and vLLM in two processes."""


@pytest.fixture(scope="module")
def trained(run_here, vllm_here, quick, tiny_llm, tmp_path_factory):
    """(folder of a mixture of experts, directory of the run that trained it)."""
    folder = tmp_path_factory.mktemp("vllm")
    model = tiny_llm(folder / "model", "qwen3_moe")
    small = {
        "rollout.tasks": 2,
        "rollout.group_size": 2,
        "eval.games": 2,
        "rollout.max_response_tokens": 16,
        "env.max_turns": 3,
    }
    engine = {
        "engine.type": "vllm",
        "model.dtype": "auto",
        "policy.old_logp": "trainer",
        "optim.lr": 1e-2,
    }
    where = {"model.path": model, "run.dir": folder, "run.name": "run", "env.backend": BACKEND}
    (folder / "mine.py").write_text(
        "def odd(trajectory):\n    return float(trajectory.turns[0].response_ids[0] % 2)\n"
    )
    # It wins no game: of rewards that are all 0 comes no gradient.
    own = {"reward.type": f"{folder / 'mine.py'}:odd"}
    with pytest.MonkeyPatch.context() as patch:
        # "auto" is float32 here, for vLLM too.
        patch.setattr("paw.model.dtype.cpu_features", frozenset)
        assert run_here("train", "quickstart", quick | small, engine, where, own) == 0
    return model, folder / "run"


def test_the_sampler_has_the_trainers_weights_at_every_update(trained, quick_run):
    """Weights reach the engine's fused experts; the export holds them one by one, as the model's
    files did."""
    model, run = trained
    start, *updates = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(updates) == 2
    assert start["eval/games"] == updates[-1]["eval/games"] == 2
    # Of other kinds of games.
    ours = json.loads((quick_run / "metrics.jsonl").read_text().splitlines()[1])
    other = {name for name in updates[0].keys() ^ ours.keys() if not name.startswith("success/")}
    assert other == {"perf/cached_frac"}
    for line in updates:
        assert all(math.isfinite(value) for value in line.values())
        assert line["policy/loss"] != 0
        assert line["health/sampler_mismatch"] < 1e-4
        assert line["perf/cached_frac"] > 0
        assert line["health/env_failures"] == line["health/groups_dropped"] == 0
        assert line["optim/grad_norm"] > 0
        assert line["wm/loss"] > 0
        assert line["time/sync"] > 0
    about = json.loads((run / "run.json").read_text())
    assert about["engine"] == "vllm"
    assert about["games"].startswith("textworld 1.") is (BACKEND == "textworld")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run / "hf"))
    assert before.keys() == after.keys()
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in after
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert any("experts" in name for name in moved)
    assert any("mlp.gate" in name for name in moved)


@pytest.fixture(scope="module")
def url(trained, tmp_path_factory):
    """Address of a server of the exported model, named "tiny"."""
    log = tmp_path_factory.mktemp("served") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, **QUIET}
    # With chunked prefill, seeds crash the CPU engine.
    words = f"--served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32 --max-model-len {POSITIONS}"
    words += " --enforce-eager --block-size 32 --no-enable-chunked-prefill"
    with log.open("w") as out:
        serve = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
        ]  # in the packages vllm and vllm-cpu
        command = [*serve, "--model", trained[1] / "hf", *words.split()]
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
    begun = ask(endpoint, "hello", start="Well, ", **sampling)
    assert begun.prompt_tokens == reply.prompt_tokens + len("Well, ")  # no end of turn, no new one
    with pytest.raises(ContextFull):
        ask(endpoint, "x" * POSITIONS, **sampling)
    with pytest.raises(UserError, match=r"no model .none.; it serves: tiny$"):
        ask(Endpoint(EndpointConfig(url=url, model="none")), "hello", **sampling)
    loop.close()


def test_an_evaluation(url, paw_here, tmp_path):
    words = {
        "env": "alfworld", "env.data": "none", "env.difficulty": "tiny", "env.style": "compact", "env.max_turns": 4,
        "rollout.max_response_tokens": 16, "endpoint": url, "model": "tiny", "eval.games": 4, "out": tmp_path / "out",
    }  # fmt: skip
    assert "| tiny | plain |" in paw_here("eval", words).stdout
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    ]
    assert sorted(line["place"] for line in lines) == list(range(4))
    assert all(
        line["failure"] is None and line["prompt_tokens"] > 0 and line["turns"] for line in lines
    )


def test_the_react_authors_examples_on_an_official_game(url, paw_here, official_games, tmp_path):
    """The server bills the tokens of exactly the prompt that is expected, a byte each."""
    ((name, game),) = official_games(1)
    split = name.partition("/")[0]
    (tmp_path / "json_2.1.1" / name).mkdir(parents=True)
    (tmp_path / "json_2.1.1" / name / "game.tw-pddl").write_text(json.dumps(game))
    kinds = ("put", "examine", "clean", "heat", "cool", "puttwo")
    put = "put some mug on desk."
    told = "You are in a room.\nYour task is to: {task}\n> think: To solve {i}, I need a mug.\nOK.\n> {act}\n"
    texts = {
        f"react_{kind}_{i}": told.format(task=put, i=f"{kind} {i}", act="put mug 1 in/on desk 2")
        for kind in kinds
        for i in range(3)
    }
    (tmp_path / "alfworld_3prompts.json").write_text(json.dumps(texts))
    words = {
        "env": "alfworld", "env.data": tmp_path, "env.eval_split": split, "env.max_turns": 1,
        "agent": "react", "agent.examples": tmp_path / "alfworld_3prompts.json", "endpoint": url, "model": "tiny",
        "rollout.max_response_tokens": 16, "eval.games": 1, "out": tmp_path / "out",
    }  # fmt: skip
    assert "| tiny | react |" in paw_here("eval", words).stdout
    (line,) = [
        json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    ]
    env = {"name": "alfworld", "data": tmp_path, "eval_split": split}
    factory = make_factory(Config.model_validate({"model": {"path": "-"}, "env": env}))
    task = factory.tasks(split, 0)[0]
    assert line["task"] == task.id
    assert line["failure"] is None
    assert line["calls"] == line["steps"] == 1
    kind = {"look": "examine", "two": "puttwo", "pick": "put"}.get(task.kind, task.kind)
    both = [told.format(task=put, i=f"{kind} {i}", act="move mug 1 to desk 2") for i in (1, 0)]
    room = factory.make().reset(task).partition("\n\n")[2].replace("\n\n", "\n")
    head = (
        "Interact with a household to solve a task. After each '>' stands a thought, 'think: ...', or an action. Write "
        "what comes after the last '>', in one line. Here are two examples.\n"
    )
    prompt = head + "\n".join(both) + f"\nHere is the task.\n{room}\n>"
    assert line["prompt_tokens"] == len("_user\n_\n_assistant\n") + len(prompt)


def test_zerosearch_trains_on_what_a_real_model_makes_up(
    url, paw_here, read_metrics, tiny_llm, says_only, tmp_path
):
    """Its recipe: the server gets the paper's prompt, and its answer is the observation."""
    query = "where is it"
    asked = {"golden_answers": ["Tuk"], "data_source": "nq"}
    lines = "".join(json.dumps(asked | {"question": f"Where is {i}?"}) + "\n" for i in range(8))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines)
    model = says_only(
        tiny_llm(tmp_path / "model"), f"<search>{query}</search>", "<answer>Tuk</answer>"
    )
    small = {
        "run.updates": 1, "run.threads": 1, "rollout.tasks": 2, "rollout.group_size": 4, "model.dtype": "float32",
        "rollout.max_prompt_tokens": 4000, "rollout.max_response_tokens": 8, "engine.type": "transformers",
        "env.max_turns": 2, "model.checkpointing": "none", "eval.games": 8, "env.simulator.model": "tiny",
    }  # fmt: skip
    where = {"model.path": model, "env.data": tmp_path, "run.dir": tmp_path, "run.name": "run"}
    paw_here("train", "search-zerosearch", small, where, {"env.simulator.url": url})
    *_, line = read_metrics(tmp_path / "run")
    assert line["health/env_failures"] == 0
    assert line["optim/grad_norm"] > 0
    assert math.isfinite(line["policy/loss"])
    samples = [
        json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ]
    seen = {turn["observation"] for sample in samples for turn in sample["turns"]} - {""}
    seed = derive_seed(0, "zerosearch", query)
    endpoint = Endpoint(EndpointConfig(url=url, model="tiny"))
    (made_up,) = {observation.partition("Doc 1: ")[2] for observation in seen}
    with asyncio.Runner() as loop:
        for quality in ("useful", "noisy"):
            prompt = PROMPT.format(
                count=3, quality=quality, Quality=quality.capitalize(), query=query
            )
            answer = loop.run(
                endpoint.complete(prompt, temperature=1.0, max_tokens=512, seed=seed)
            ).text
            if made_up.startswith(json.dumps(" ".join(answer.split()))[1:-1][:200]):
                return
    raise AssertionError(f"{made_up} is no answer to the paper's prompt")


def test_the_export_serves_in_vllm_as_in_transformers(trained, url):
    """vLLM alone, with its own loader and the exported tokenizer; its log-probs re-read by
    transformers."""
    folder = trained[1] / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [json.loads(line) for line in (trained[1] / "samples.jsonl").read_text().splitlines()]
    prompts = [turn["prompt"] for sample in samples for turn in sample["turns"]][:4]
    assert len(prompts) == 4
    for text in prompts:
        messages = [{"role": "user", "content": text}]
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": 6,
            "logprobs": True,
            "return_token_ids": True,
        }
        request = Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        prompt_ids = found["prompt_token_ids"]
        token_ids = found["choices"][0]["token_ids"]
        logp = torch.tensor(
            [token["logprob"] for token in found["choices"][0]["logprobs"]["content"]]
        )
        assert prompt_ids == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[
                0, len(prompt_ids) - 1 : -1
            ]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        assert torch.allclose(own, logp, atol=1e-4)
