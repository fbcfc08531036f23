"""vLLM's own server as the sampler. It gives the same tokens as the in-process engine, takes
weights while requests are running, and leaves nothing behind when it is killed."""

import copy
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from command_line import as_words
from forked import CONTEXT, run_ranks
from jsonl import read_jsonl, write_jsonl
from processes import wait_until
from run_examples import SMALL, in_their_folder, run_example
from templates import QWEN25_TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer

from paw.algo.sequences import sequences
from paw.config.recipe import load
from paw.config.sections import LoraConfig
from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.model.lora import add_adapters
from paw.rollouts.engines.base import Request
from paw.rollouts.engines.pool import SendingPool
from paw.rollouts.engines.server import ServerEngine
from paw.rollouts.engines.servers import Servers, vllm_command
from paw.rollouts.engines.transfer import AdapterTransfer, FileTransfer, NcclTransfer
from paw.rollouts.engines.vllm import VllmEngine
from paw.rollouts.sync import Weights, push_weights
from paw.run import open_run
from paw.trainer import prepare
from paw.types import Reply, ToolCall

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
LORA = LoraConfig(rank=4, alpha=8.0)
LIMIT = 1500
GUESS = Path(__file__).parents[2] / "examples" / "number_game.py"
AGENT = GUESS.with_name("own_agent.py")
CALLS = [Reply.of("", ToolCall("add", {"n": n}, "")) for n in (3, 4)]
ADDER = """
from paw.envs.conversation import Conversation
from paw.types import Outcome, Task

class Adder(Conversation):
    tasks = [Task(str(goal), payload=goal) for goal in (7, 8, 11, 12)] * 2
    tools = [{"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}]

    def begin(self, task):
        self.sum, self.goal = 0, task.payload
        return [{"role": "user", "content": f"Reach {self.goal}."}]

    def call(self, call):
        self.sum += call.arguments["n"]
        won = self.sum == self.goal
        return Outcome(f"the sum is {self.sum}", float(won), done=won, won=won)

    def say(self, text):
        return Outcome("", 0.0, done=True, won=False)
"""


def make_model(folder, seed=0):
    """The model in the folder, with different weights if a seed is given."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if seed else ():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def vocabulary(folder):
    return json.loads((Path(folder) / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llm):
    """The random model that all servers use. Its vocabulary has the words of `CALLS`."""
    folder = tiny_llm(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.add_tokens([str(call) for call in CALLS])
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(folder):
    command = vllm_command(
        folder, max_model_len=LIMIT, dtype="float32", on_cpu=True, entropy=True, lora=LORA
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # it compiles things that nothing reads
        started = Servers(command, [[]], folder / "servers")
    started.wait()
    yield started
    (group,) = set(map(os.getpgid, servers_of(folder)))
    assert len(members(group)) >= 2  # with its engine
    os.kill(started._running[0].pid, signal.SIGKILL)  # the process that looks after the server
    os.kill(group, signal.SIGKILL)  # the API server, the first of its process group
    wait_until(lambda: not members(group), seconds=30)
    started.close()


def play(engine, requests):
    for request in requests:
        engine.submit(request)
    completions = {}
    while engine.pending:
        completions |= {completion.key: completion for completion in engine.step()}
    return [completions[request.key] for request in requests]


def make_requests(count=8, max_tokens=20):
    generator = torch.Generator().manual_seed(0)
    requests = []
    for place, length in enumerate(torch.randint(1, 130, (count,), generator=generator)):
        prompt_ids = torch.randint(4, 200, (length,), generator=generator).tolist()
        requests.append(Request(50 + place, prompt_ids, 900 + place, 1.0, max_tokens))
    return requests


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@torch.no_grad()
def truth(model, request, completion):
    """(log-prob, entropy) of each token of the response, from the model's logits in float64."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    logits = model(input_ids=ids).logits[0].double()
    rows = (logits / request.temperature).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    logps = rows.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return logps.tolist(), (-rows.exp() * rows).sum(-1).tolist()


def servers_of(folder):
    """Ids of servers, whose command names the model's folder, without their supervising
    processes."""
    servers = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if str(folder) in words and "paw.rollouts.engines.watch" not in words:
                servers.append(int(path.name))
    return servers


def members(group):
    """Ids of the processes in a process group: a server and the processes it has started."""
    processes = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            fields = (path / "stat").read_text().rpartition(") ")[2].split()
            state, _, group_of_process = fields[:3]
            if int(group_of_process) == group and state != "Z":
                processes.append(int(path.name))
    return processes


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.long)])
def test_two_ranks_train_on_a_server_one_update_behind(quick, folder, servers, tmp_path, rank):
    """They train with the sampler's log-probs and entropies."""
    settings = quick | {
        "env.name": f"{GUESS}:Guess", "model.path": folder, "run.dir": tmp_path, "run.name": "run",
        "engine.type": "server", "engine.urls": json.dumps(servers.urls), "policy.old_logp": "engine",
        "policy.kl_coef": 0, "optim.lr": 1e-3, "lora.rank": rank, "rollout.ahead": 1, "rollout.tasks": 2,
        "rollout.group_size": 2, "rollout.max_prompt_tokens": 500, "rollout.max_response_tokens": 8,
        "run.updates": 2, "eval.games": 2,
    }  # fmt: skip
    settings = {key: value for key, value in settings.items() if not key.startswith("warmup.")}
    words = ["train", "quickstart", *as_words(settings)]
    ended = run_ranks([words, words], [tmp_path, tmp_path], on_host=2)
    assert [code for code, _ in ended] == [0, 0], ended

    start, *updates = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert start["eval/games"] == 2
    assert [metrics["staleness/max"] for metrics in updates] == [0, 1]
    assert updates[0]["health/sampler_mismatch"] < 1e-4
    for metrics in updates:
        assert metrics.get("health/sampler_mismatch", 0.0) < 1e-4
        assert metrics["optim/grad_norm"] > 0
        assert metrics["health/env_failures"] == 0


def test_tools_are_called_and_answered(folder, servers, says_only, updated, tmp_path, monkeypatch):
    """In this update, vLLM writes calls, its parser for the template's format reads them, and the
    template puts the results into the next prompt, where earlier ids stay as they are. vLLM's
    log-probs are the trainer's. The URLs contain a password, which no file of the run contains."""
    (tmp_path / "adder.py").write_text(ADDER)
    model = shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("servers"))
    says_only(model, *CALLS, "<|im_end|>", template=QWEN25_TEMPLATE)
    urls = [url.replace("://", "://me:p4ssw0rd@") for url in servers.urls]
    keys = {
        "model.path": model, "engine.type": "server", "engine.urls": json.dumps(urls), "wm.alpha": 1.0,
        "env.name": f"{tmp_path / 'adder.py'}:Adder", "env.max_turns": 4, "model.tool_parser": "hermes",
        "rollout.max_response_tokens": 6, "rollout.max_prompt_tokens": LIMIT - 6, "rollout.tasks": 4, "run.threads": 1,
        "rollout.group_size": 4, "policy.old_logp": "trainer", "run.dir": tmp_path, "model.dtype": "auto",
    }  # fmt: skip
    # "auto" is float32 here, also for what servers get.
    monkeypatch.setattr("paw.model.dtype.cpu_features", frozenset)
    config = load("quickstart", {key: str(value) for key, value in keys.items()})
    with open_run(config) as run:
        groups, stats = updated(run)
        metrics = run.log.history[-1]
        chat = run.chat
        samples = prepare(run, groups)
        joined = sequences(samples, with_observation=True)
    assert not stats.failures
    assert metrics["health/sampler_mismatch"] < 1e-4
    assert 0 < metrics["success/all"] < 1
    assert math.isfinite(metrics["policy/loss"])
    assert metrics["wm/loss"] > 0
    assert metrics["optim/grad_norm"] > 0

    turns_with_several_results = 0
    actions = set()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        for turn, next_turn in pairwise(trajectory.turns):
            so_far = [*turn.prompt_ids, *turn.response_ids]
            assert next_turn.prompt_ids[: len(so_far)].tolist() == so_far
            appended = next_turn.prompt_ids[len(so_far) :]
            text = chat._backend.decode(appended, skip_special_tokens=False)
            end = "" if turn.response_ids[-1] in chat.end_ids else "<|im_end|>"
            results = turn.outcome.results or [turn.outcome.observation]
            shown = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
            assert text == f"{end}\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"
            turns_with_several_results += len(results) > 1
            actions.add(turn.outcome.action)
        first_prompt = chat.decode(trajectory.turns[0].prompt_ids)
        assert '"name": "add"' in first_prompt
        assert f"Reach {trajectory.task.id}." in first_prompt
    assert turns_with_several_results
    for number in (3, 4):
        assert f'add({{"n": {number}}})' in "; ".join(actions)
    assert len(joined) == len(trajectories)
    assert len(joined) < len(samples)
    files = [file for file in (tmp_path / config.run.name).rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if b"p4ssw0rd" in file.read_bytes()]


def test_an_unchanged_agent_trains_on_a_server(folder, servers, says_only, updated, tmp_path):
    """An update with an agent that is a program written with OpenAI's client. Its conversations are
    sequences of vLLM's own tokens, and vLLM's log-probs are the trainer's."""
    model = shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("servers"))
    says_only(model, *CALLS, "<|im_end|>", template=QWEN25_TEMPLATE)
    rows = [{"question": f"Reach {goal}.", "goal": goal} for goal in (7, 8)]
    write_jsonl(tmp_path / "tasks.jsonl", rows)
    keys = {
        "env.name": "tasks", "env.data": tmp_path / "tasks.jsonl", "env.max_turns": 4, "agent.type": "command",
        "agent.command": f"{sys.executable} {AGENT}", "model.path": model, "model.tool_parser": "hermes",
        "model.dtype": "float32", "engine.type": "server", "engine.urls": json.dumps(servers.urls),
        "rollout.max_response_tokens": 6, "rollout.max_prompt_tokens": LIMIT - 6, "rollout.tasks": 1,
        "rollout.group_size": 2, "run.threads": 1, "run.dir": tmp_path, "policy.old_logp": "trainer", "wm.alpha": 1.0,
    }  # fmt: skip
    with open_run(load("quickstart", {key: str(value) for key, value in keys.items()})) as run:
        groups, stats = updated(run)
        metrics = run.log.history[-1]
        samples = prepare(run, groups)
        joined = sequences(samples, with_observation=True)
    assert not stats.failures
    assert metrics["health/sampler_mismatch"] < 1e-4
    assert metrics["wm/loss"] > 0
    (group,) = groups
    assert len(joined) == len(group.trajectories) == 2
    assert len(samples) > len(joined)
    for trajectory in group.trajectories:
        total = sum(3 * turn.response.count(str(CALLS[0])) for turn in trajectory.turns)
        total += sum(4 * turn.response.count(str(CALLS[1])) for turn in trajectory.turns)
        assert trajectory.episode_return == float(total == trajectory.task.payload["goal"])
        for turn in trajectory.turns[:-1]:
            assert turn.outcome.observation.startswith("the sum is ")


def test_the_example_trains_adapters_on_a_server(
    folder, servers, paw_env, read_metrics, tmp_path, monkeypatch, capfd
):
    """On a server that is already running."""
    pytest.importorskip("peft")
    in_their_folder(monkeypatch, paw_env["PAW_CACHE"], tmp_path)
    settings = {
        "model.path": folder, "model.dtype": "float32", "engine.servers": 0, "lora.rank": 4,
        "engine.urls": json.dumps(servers.urls), "wm.alpha": 1.0, "wm.weight": 1.0,
    }  # fmt: skip
    assert run_example(monkeypatch, "lora_on_vllm", SMALL | settings) == 0, capfd.readouterr().err
    assert "solved, share, on new problems: " in capfd.readouterr().out
    _, metrics = read_metrics(tmp_path / "runs" / "lora-on-vllm")
    assert metrics["health/env_failures"] == 0
    assert metrics["health/sampler_mismatch"] < 1e-4
    assert metrics["optim/grad_norm"] > 0
    assert (tmp_path / "runs" / "lora-on-vllm" / "hf" / "model.safetensors").is_file()


def make_pool(folder, urls, transfer, *, timeout_s=60, **options):
    """Servers of the model that the transfer sends weights to."""
    return SendingPool(
        urls,
        transfer,
        end_ids=[257],
        vocabulary=vocabulary(folder),
        timeout_s=timeout_s,
        ranks=Ranks(),
        **options,
    )


def test_a_server_samples_what_the_engine_in_the_process_samples(vllm_here, folder, servers):
    pool = make_pool(folder, servers.urls, FileTransfer(torch.float32, 60), entropy=True)
    over_http = ServerEngine(pool, LIMIT)
    in_process = VllmEngine(
        folder, end_ids=[257], max_model_len=LIMIT, dtype="float32", entropy=True
    )
    for version, model in enumerate((make_model(folder), make_model(folder, seed=1))):
        for engine in (over_http, in_process):
            push_weights(model, engine, version=version)
        requests = make_requests()
        expected = play(in_process, requests)
        completions = play(over_http, requests)
        assert tokens_of(completions) == tokens_of(expected)
        for request, completion, local in zip(requests, completions, expected, strict=True):
            logp, entropy = truth(model, request, completion)
            assert completion.logp == pytest.approx(local.logp, abs=1e-5)
            assert completion.logp == pytest.approx(logp, abs=1e-4)
            assert completion.entropy == pytest.approx(local.entropy, abs=1e-5)
            assert completion.entropy == pytest.approx(entropy, abs=1e-4)
    assert not pool.faults
    in_process.close()
    pool.close()


def adapted(model, seed):
    """The model with adapters determined by the seed."""
    model = copy.deepcopy(model)
    if seed == 0:
        add_adapters(model, LORA, seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def test_adapters_alone_are_sent_also_under_running_requests(
    vllm_here, folder, servers, monkeypatch
):
    """In the process and on a server, tokens are those of the merged weights, and each log-prob
    belongs to one version."""
    pytest.importorskip("peft")
    base = make_model(folder, seed=1)
    models = [adapted(base, seed=0)]
    models.append(adapted(models[0], seed=1))
    merging = make_pool(folder, servers.urls, FileTransfer(torch.float32, 60))
    whole = ServerEngine(merging, LIMIT)
    push_weights(models[0], whole, version=0)
    requests = make_requests()
    expected = play(whole, requests)
    merging.close()

    adapters = AdapterTransfer(torch.float32, 60, None, LORA)
    files = FileTransfer(torch.float32, 60)
    pool = make_pool(folder, servers.urls, files, adapters=adapters, model=adapters.model)
    over_http = ServerEngine(pool, LIMIT)
    in_process = VllmEngine(folder, end_ids=[257], max_model_len=LIMIT, dtype="float32", lora=LORA)
    for engine in (in_process, over_http):
        push_weights(models[0], engine, version=0)
        completions = play(engine, requests)
        assert tokens_of(completions) == tokens_of(expected)
        for completion, merged in zip(completions, expected, strict=True):
            assert completion.logp == pytest.approx(merged.logp, abs=1e-4)
    longest = max(requests, key=lambda request: len(request.prompt_ids))
    assert play(over_http, [longest])[0].cached_tokens > 0
    assert play(in_process, [longest])[0].cached_tokens > 0

    def base_weights(self):
        pytest.fail("base weights were sent again")

    monkeypatch.setattr(Weights, "base", property(base_weights))
    push_under_running_requests(over_http, models, requests)
    push_weights(models[1], in_process, version=1)
    for engine in (in_process, over_http):
        (completion,) = play(engine, [longest])
        logp, _ = truth(models[1], longest, completion)
        assert completion.logp == pytest.approx(logp, abs=1e-4)
        if engine is in_process:  # on the server, the requests above have cached it again
            assert completion.cached_tokens == 0
    for version in (2, 3):
        push_weights(models[0], over_http, version=version)
    assert tokens_of(play(over_http, requests)) == tokens_of(expected)
    assert not pool.faults

    list_loras = {"method": "list_loras"}
    (loaded,) = adapters.post(servers.urls[0], "collective_rpc", list_loras)["results"]
    assert len(loaded) == 1  # one of all versions
    files_left = {path.name for path in adapters._folder.iterdir()}
    assert files_left == {"adapter_config.json", "adapter_model.safetensors"}
    in_process.close()
    pool.close()


def push_under_running_requests(engine, models, requests):
    """Push the second model while the engine samples with the first. The log-prob of each token is
    that of the version that the engine names."""
    running = {}
    for request in requests:
        long = replace(request, key=request.key + 100, max_tokens=250)
        running[long.key] = long
        engine.submit(long)
    short = replace(requests[0], max_tokens=1)
    engine.submit(short)
    completions = {}
    while short.key not in completions:
        completions |= {completion.key: completion for completion in engine.step()}
    push_weights(models[1], engine, version=1)
    while engine.pending:
        completions |= {completion.key: completion for completion in engine.step()}
    completions = [completions[key] for key in running]
    assert {completion.failure for completion in completions} == {""}
    assert {0, 1} in [set(completion.versions) for completion in completions]
    for completion in completions:
        logps = [truth(model, running[completion.key], completion)[0] for model in models]
        expected = [logps[version][place] for place, version in enumerate(completion.versions)]
        assert completion.logp == pytest.approx(expected, abs=1e-4)


def test_a_server_that_takes_no_such_adapters_is_refused(folder, servers):
    large = LoraConfig(rank=9)
    adapters = AdapterTransfer(torch.float32, 60, None, large)
    files = FileTransfer(torch.float32, 60)
    pool = make_pool(
        folder, servers.urls, files, adapters=adapters, model=adapters.model, have_base=True
    )
    model = make_model(folder)
    add_adapters(model, large, seed=0)
    refused = (
        "takes no LoRA adapters: it needs .* --max-lora-rank 16, "
        ".*rank 9 is greater than max_lora_rank 8"
    )
    with pytest.raises(UserError, match=refused):
        push_weights(model, ServerEngine(pool, LIMIT), version=0)
    pool.close()


def run_with_a_server(folder):
    Servers(vllm_command(folder, max_model_len=64, dtype="float32", on_cpu=True), [[]], folder)
    time.sleep(600)


def test_servers_end_with_their_run_however_it_ends(tmp_path):
    """A process that has started a server is killed while the server is coming up."""
    run = CONTEXT.Process(target=run_with_a_server, args=(tmp_path,))
    run.start()
    wait_until(lambda: servers_of(tmp_path))
    groups = set(map(os.getpgid, servers_of(tmp_path)))
    run.kill()
    wait_until(lambda: not any(map(members, groups)), seconds=30)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sleep_level", [1, 2])
def test_adapters_beside_bf16_weights_that_sleep_keeps_or_drops(folder, sleep_level):
    options = {
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,
        "sleep_level": sleep_level,
        "lora": LORA,
    }
    engine = VllmEngine(folder, end_ids=[257], max_model_len=LIMIT, **options)
    model = adapted(make_model(folder, seed=1).to("cuda", torch.bfloat16), seed=0)
    for version in range(3):
        push_weights(model, engine, version=version)
        for request, completion in zip(make_requests(), play(engine, make_requests()), strict=True):
            logp, _ = truth(copy.deepcopy(model).cpu().float(), request, completion)
            assert completion.logp == pytest.approx(logp, abs=0.1)
        engine.sleep()
        model = adapted(model, seed=version + 1)
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_log_probs_and_entropies_of_a_gpus_model_runner_are_the_trainers(folder):
    options = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "entropy": True}
    engine = VllmEngine(folder, end_ids=[257], max_model_len=LIMIT, **options)
    for version in range(2):
        model = make_model(folder, seed=version).to("cuda", torch.bfloat16)
        push_weights(model, engine, version=version)
        for request, completion in zip(make_requests(), play(engine, make_requests()), strict=True):
            logp, entropy = truth(model.cpu().float(), request, completion)
            assert completion.logp == pytest.approx(logp, abs=0.1)
            assert completion.entropy == pytest.approx(entropy, abs=0.1)
        engine.sleep()
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_reach_a_server_by_nccl(folder):
    """The server also gives the entropies of the GPU's model runner."""
    options = {"gpu_memory_utilization": 0.3, "nccl": True, "entropy": True}
    command = vllm_command(folder, max_model_len=LIMIT, dtype="bfloat16", on_cpu=False, **options)
    started = Servers(command, [["1"]], folder / "nccl")
    try:
        started.wait()
        transfer = NcclTransfer(torch.bfloat16, 120, "127.0.0.1")
        pool = make_pool(folder, started.urls, transfer, timeout_s=120, entropy=True)
        engine = ServerEngine(pool, LIMIT)
        model = make_model(folder, seed=1).to("cuda", torch.bfloat16)
        for version in range(2):
            push_weights(model, engine, version=version)
            requests = make_requests()
            for request, completion in zip(requests, play(engine, requests), strict=True):
                logp, entropy = truth(model.float().cpu(), request, completion)
                assert completion.logp == pytest.approx(logp, abs=0.1)
                assert completion.versions[0] == version
                assert completion.entropy == pytest.approx(entropy, abs=0.1)
            model = make_model(folder, seed=2).to("cuda", torch.bfloat16)
        pool.close()
    finally:
        started.close()
