"""vLLM's own server as the sampler: the tokens of the engine in the process, weights changed under
running requests, servers that are killed, and nothing left behind."""

import copy
import importlib.util
import json
import math
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from forked import CONTEXT, run_ranks
from templates import QWEN25_TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer

from paw.algo.samples import sequences
from paw.config.recipe import load
from paw.config.sections import LoraConfig
from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.model.lora import add_adapters
from paw.rollouts.engines.base import Request
from paw.rollouts.engines.server import SendingPool, ServerEngine
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
GUESS = Path(__file__).parents[2] / "docs" / "example_environment.py"
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
    """The model of the folder, its weights drawn again where there is a seed."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if seed else ():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return model


def vocabulary(folder):
    return json.loads((Path(folder) / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llm):
    """The model of all servers: random, its vocabulary that of
    `test_tools_are_called_and_answered`."""
    made = tiny_llm(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made)
    tokenizer.add_tokens(list(map(str, CALLS)))
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(made)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def servers(folder):
    command = vllm_command(
        folder, max_model_len=LIMIT, dtype="float32", on_cpu=True, entropy=True, lora=LORA
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # it compiles what nothing reads
        started = Servers(command, [[]], folder / "servers")
    started.wait()
    yield started
    groups = set(map(os.getpgid, pids(folder)))
    assert len(groups) == 1
    assert len(members(groups)) >= 2  # with its engine
    for pid in (
        started._running[0].pid,
        *groups,
    ):  # what looks after it, and the API server: the first of its group
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not members(groups))
    started.close()


def play(engine, requests):
    for request in requests:
        engine.submit(request)
    found = {}
    while engine.pending:
        found |= {completion.key: completion for completion in engine.step()}
    return [found[request.key] for request in requests]


def requests(count=12, max_tokens=20):
    g = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(4, 200, (n,), generator=g).tolist()
        for n in torch.randint(1, 130, (count,), generator=g)
    ]
    return [Request(50 + i, prompt, 900 + i, 1.0, max_tokens) for i, prompt in enumerate(prompts)]


@torch.no_grad()
def truth(model, request, completion):
    """(log-prob, entropy) of each token of the response, from the model's logits in float64."""
    logits = (
        model(input_ids=torch.tensor([request.prompt_ids + completion.token_ids]))
        .logits[0]
        .double()
    )
    rows = (logits / request.temperature).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    logp = rows.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return logp.tolist(), (-rows.exp() * rows).sum(-1).tolist()


def pids(folder, port=""):
    """Of servers, whose command names the model's folder and the port; not of the process that
    looks after one."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if (
                str(folder) in words
                and (not port or port in words)
                and "paw.rollouts.engines.watch" not in words
            ):
                found.append(int(path.name))
    return found


def members(groups):
    """Processes of these process groups: a server's own name those that it starts."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            state, _, group = (path / "stat").read_text().rpartition(") ")[2].split()[:3]
            if int(group) in groups and state != "Z":
                found.append(int(path.name))
    return found


def wait_until(done, seconds=30):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert done()


@pytest.mark.parametrize("rank", [0, 4])
def test_two_ranks_train_on_a_server_one_update_behind(quick, folder, servers, tmp_path, rank):
    """By the sampler's log-probs and entropies: no log-prob pass."""
    where = {
        "env.name": f"{GUESS}:Guess",
        "model.path": folder,
        "run.dir": tmp_path,
        "run.name": "run",
    }
    engine = {
        "engine.type": "server",
        "engine.urls": json.dumps(servers.urls),
        "policy.old_logp": "engine",
    }
    own = {
        "policy.kl_coef": 0,
        "rollout.max_response_tokens": 8,
        "rollout.max_prompt_tokens": 500,
        "optim.lr": 1e-3,
    }
    own |= {
        "rollout.ahead": 1,
        "run.updates": 3,
        "rollout.tasks": 2,
        "rollout.group_size": 2,
        "eval.games": 2,
    }
    own |= {"lora.rank": rank}
    settings = {
        key: value
        for key, value in (quick | where | engine | own).items()
        if not key.startswith("warmup.")
    }
    words = [
        "train",
        "quickstart",
        *(part for key, value in settings.items() for part in (f"--{key}", str(value))),
    ]
    found = run_ranks([words, words], [tmp_path, tmp_path], on_host=2)
    assert [code for code, _ in found] == [0, 0], found
    start, *updates = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert start["eval/games"] == 2
    assert len(updates) == 3
    assert updates[0]["health/sampler_mismatch"] < 1e-4
    assert updates[0]["staleness/max"] == 0
    assert [line["staleness/max"] for line in updates[1:]] == [1, 1]
    for line in updates:
        assert line.get("health/sampler_mismatch", 0.0) < 1e-4
        assert line["optim/grad_norm"] > 0
        assert line["health/env_failures"] == 0
        assert line["time/score"] < line["time/update"] / 5


def test_tools_are_called_and_answered(folder, servers, says_only, updated, tmp_path, monkeypatch):
    """An update in which vLLM writes calls, its parser of the template's format reads them, and the
    results come back through the template, to ids that stay; its log-probs are the trainer's. The
    URLs have a password, which no file of the run has."""
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
    # "auto" is float32 here, for what servers get too.
    monkeypatch.setattr("paw.model.dtype.cpu_features", frozenset)
    config = load("quickstart", {key: str(value) for key, value in keys.items()})
    with open_run(config) as run:
        groups, stats = updated(run)
        line = run.log.history[-1]
        chat = run.chat
        joined = sequences(samples := prepare(run, groups), with_observation=True)
    assert not stats.failures
    assert line["health/sampler_mismatch"] < 1e-4
    assert 0 < line["success/all"] < 1
    assert math.isfinite(line["policy/loss"])
    assert line["wm/loss"] > 0
    assert line["optim/grad_norm"] > 0
    several = 0
    actions = set()
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        for before, turn in pairwise(trajectory.turns):
            said = before.prompt_ids + before.response_ids
            assert turn.prompt_ids[: len(said)] == said
            results = before.outcome.results or [before.outcome.observation]
            told = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in results)
            end = "" if before.response_ids[-1] in chat.end_ids else "<|im_end|>"
            came = chat._backend.decode(turn.prompt_ids[len(said) :], skip_special_tokens=False)
            assert came == f"{end}\n<|im_start|>user{told}<|im_end|>\n<|im_start|>assistant\n"
            several += len(results) > 1
            actions.add(before.outcome.action)
        first = chat.decode(trajectory.turns[0].prompt_ids)
        assert '"name": "add"' in first
        assert f"Reach {trajectory.task.id}." in first
    assert all(f'add({{"n": {n}}})' in "; ".join(actions) for n in (3, 4))
    assert several
    assert len(joined) == sum(len(group.trajectories) for group in groups) < len(samples)
    files = [file for file in (tmp_path / config.run.name).rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if b"p4ssw0rd" in file.read_bytes()]


def test_a_server_samples_what_the_engine_in_the_process_samples(vllm_here, folder, servers):
    files = FileTransfer(torch.float32, 60)
    ends = [257]
    words = vocabulary(folder)
    pool = SendingPool(
        servers.urls,
        files,
        end_ids=ends,
        vocabulary=words,
        timeout_s=60,
        ranks=Ranks(),
        entropy=True,
    )
    over_http = ServerEngine(pool, LIMIT)
    here = VllmEngine(folder, end_ids=ends, max_model_len=LIMIT, dtype="float32", entropy=True)
    for version, model in enumerate((make_model(folder), make_model(folder, seed=1))):
        for engine in (over_http, here):
            push_weights(model, engine, version=version)
        asked = requests()
        ours = play(here, asked)
        theirs = play(over_http, asked)
        assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]
        for request, one, other in zip(asked, ours, theirs, strict=True):
            logp, entropy = truth(model, request, other)
            assert other.logp == pytest.approx(one.logp, abs=1e-5)
            assert other.logp == pytest.approx(logp, abs=1e-4)
            assert other.entropy == pytest.approx(one.entropy, abs=1e-5)
            assert other.entropy == pytest.approx(entropy, abs=1e-4)
    assert not pool.faults
    here.close()
    pool.close()


def adapted(model, seed):
    """The model with adapters that no other seed gives."""
    model = copy.deepcopy(model)
    if seed == 0:
        add_adapters(model, LORA, seed=0)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=g))
    return model


def test_adapters_alone_are_sent_also_under_running_requests(
    vllm_here, folder, servers, monkeypatch
):
    """In the process and to a server: tokens are those of the merged weights, each log-prob is that
    of one version."""
    pytest.importorskip("peft")
    base = make_model(folder, seed=1)
    models = [adapted(base, seed=0)]
    models.append(adapted(models[0], seed=1))
    options = {
        "end_ids": [257],
        "vocabulary": vocabulary(folder),
        "timeout_s": 60,
        "ranks": Ranks(),
    }
    merging = SendingPool(servers.urls, FileTransfer(torch.float32, 60), **options)
    whole = ServerEngine(merging, LIMIT)
    push_weights(models[0], whole, version=0)
    asked = requests()
    expected = play(whole, asked)
    merging.close()

    adapters = AdapterTransfer(torch.float32, 60, None, LORA)
    pool = SendingPool(
        servers.urls,
        FileTransfer(torch.float32, 60),
        **options,
        adapters=adapters,
        model=adapters.model,
    )
    over_http = ServerEngine(pool, LIMIT)
    here = VllmEngine(folder, end_ids=[257], max_model_len=LIMIT, dtype="float32", lora=LORA)
    for engine in (here, over_http):
        push_weights(models[0], engine, version=0)
        found = play(engine, asked)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.logp == pytest.approx(other.logp, abs=1e-4)
    longest = max(asked, key=lambda request: len(request.prompt_ids))
    assert play(over_http, [longest])[0].cached_tokens > 0
    assert play(here, [longest])[0].cached_tokens > 0

    monkeypatch.setattr(
        Weights, "base", property(lambda self: pytest.fail("base weights were sent again"))
    )
    long = [replace(request, key=request.key + 100, max_tokens=350) for request in asked]
    for request in long:
        over_http.submit(request)
    time.sleep(0.5)
    push_weights(models[1], here, version=1)
    push_weights(models[1], over_http, version=1)
    completions = []
    while over_http.pending:
        completions += over_http.step()
    assert {completion.failure for completion in completions} == {""}
    assert {0, 1} in [set(completion.versions) for completion in completions]
    for completion in completions:
        request = next(request for request in long if request.key == completion.key)
        of = [truth(model, request, completion)[0] for model in models]
        right = [of[version][place] for place, version in enumerate(completion.versions)]
        assert completion.logp == pytest.approx(right, abs=1e-4)
    for engine in (here, over_http):
        (again,) = play(engine, [longest])
        assert again.logp == pytest.approx(truth(models[1], longest, again)[0], abs=1e-4)
        # Where the requests above computed it anew.
        assert again.cached_tokens == 0 or engine is over_http
    for version in (2, 3):
        push_weights(models[0], over_http, version=version)
    assert [c.token_ids for c in play(over_http, asked)] == [c.token_ids for c in expected]
    assert not pool.faults
    (held,) = adapters.post(servers.urls[0], "collective_rpc", {"method": "list_loras"})["results"]
    assert len(held) == 1  # of all versions one
    assert {path.name for path in adapters._folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    here.close()
    pool.close()


def test_a_server_that_takes_no_such_adapters_is_refused(folder, servers):
    large = LoraConfig(rank=9)
    transfers = FileTransfer(torch.float32, 60), AdapterTransfer(torch.float32, 60, None, large)
    pool = SendingPool(
        servers.urls,
        transfers[0],
        end_ids=[],
        vocabulary=vocabulary(folder),
        timeout_s=60,
        ranks=Ranks(),
        adapters=transfers[1],
        model=transfers[1].model,
        have_base=True,
    )
    model = make_model(folder)
    add_adapters(model, large, seed=0)
    refused = r"takes no LoRA adapters: it needs .* --max-lora-rank 16, .*rank 9 is greater than max_lora_rank 8"
    with pytest.raises(UserError, match=refused):
        push_weights(model, ServerEngine(pool, LIMIT), version=0)
    pool.close()


def run_with_a_server(folder):
    Servers(vllm_command(folder, max_model_len=64, dtype="float32", on_cpu=True), [[]], folder)
    time.sleep(600)


def test_servers_end_with_their_run_however_it_ends(tmp_path):
    """A process that has started a server is killed while that is coming up."""
    run = CONTEXT.Process(target=run_with_a_server, args=(tmp_path,))
    run.start()
    wait_until(lambda: pids(tmp_path))
    groups = set(map(os.getpgid, pids(tmp_path)))
    run.kill()
    wait_until(lambda: not members(groups))


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
        for request, completion in zip(requests(), play(engine, requests()), strict=True):
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
        for request, completion in zip(requests(), play(engine, requests()), strict=True):
            logp, entropy = truth(model.cpu().float(), request, completion)
            assert completion.logp == pytest.approx(logp, abs=0.1)
            assert completion.entropy == pytest.approx(entropy, abs=0.1)
        engine.sleep()
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_reach_a_server_by_nccl(folder):
    """And its entropies are those of the GPU's model runner."""
    options = {"gpu_memory_utilization": 0.3, "nccl": True, "entropy": True}
    command = vllm_command(folder, max_model_len=LIMIT, dtype="bfloat16", on_cpu=False, **options)
    started = Servers(command, [["1"]], folder / "nccl")
    try:
        started.wait()
        transfer = NcclTransfer(torch.bfloat16, 120, "127.0.0.1")
        options = {
            "end_ids": [257],
            "vocabulary": vocabulary(folder),
            "timeout_s": 120,
            "ranks": Ranks(),
        }
        pool = SendingPool(started.urls, transfer, **options, entropy=True)
        engine = ServerEngine(pool, LIMIT)
        model = make_model(folder, seed=1).to("cuda", torch.bfloat16)
        for version in range(2):
            push_weights(model, engine, version=version)
            for request, completion in zip(requests(), play(engine, requests()), strict=True):
                logp, entropy = truth(model.float().cpu(), request, completion)
                assert completion.logp == pytest.approx(logp, abs=0.1)
                assert completion.versions[0] == version
                assert completion.entropy == pytest.approx(entropy, abs=0.1)
            model = make_model(folder, seed=2).to("cuda", torch.bfloat16)
        pool.close()
    finally:
        started.close()
