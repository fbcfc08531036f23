"""What a request to a rollout server costs the trainer's process: processor time, connections, requests a second.

    python bench/rollout/server_client.py       renews bench/results/server_client_cpu.csv

The server is a small process that answers each request after a pause with 150 tokens in the form of
vLLM's; the client is the trainer's own pool of servers, with 1,000 tokens of prompt. Client and
server have a core each, if there are two. What is measured is the processor time of the client alone.
"""

import argparse
import asyncio
import json
import multiprocessing
import queue
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, cpu_name, write
from paw.distributed.ranks import Ranks
from paw.io.files import raise_file_limit
from paw.io.http import MAX_FILES
from paw.rollouts.engines.base import Completion, Request
from paw.rollouts.engines.pool import ServerPool
from paw.rundir.record import code_commit

PROMPT_TOKENS = 1000
RESPONSE_TOKENS = 150
CASES = ((1, 500), (64, 1000), (1000, 4000), (10_000, 20_000))
"""(requests at a time, requests in all)"""


def response_body() -> bytes:
    """An answer of vLLM's /inference/v1/generate."""
    ids = list(range(RESPONSE_TOKENS))
    logprobs = [
        {
            "token": f"token_id:{i}",
            "token_id": i,
            "logprob": -0.51234,
            "bytes": None,
            "top_logprobs": [],
        }
        for i in ids
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "stop",
        "logprobs": {"content": logprobs},
        "weight_versions": [{"version": "0", "start": 0, "end": RESPONSE_TOKENS}],
    }
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "prompt_tokens_details": {"cached_tokens": PROMPT_TOKENS - 100},
    }
    return json.dumps({"request_id": "x", "choices": [choice], "usage": usage}).encode()


class FakeServer(asyncio.Protocol):
    """Answers each request after a pause, and counts connections."""

    connections = 0
    pause_s = 1.0
    answer = b""

    def connection_made(self, transport: Any) -> None:
        FakeServer.connections += 1
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while True:
            end = self.received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.received[:end].lower()
            size = 0
            for line in head.split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    size = int(line.partition(b":")[2])
            if len(self.received) < end + 4 + size:
                return
            self.received = self.received[end + 4 + size :]
            asyncio.get_running_loop().call_later(self.pause_s, self.reply)

    def reply(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.answer)


def serve(pipe: Any, pause_s: float) -> None:
    """Run a FakeServer; sends its port through `pipe`, and for each message the connections so far."""
    raise_file_limit(MAX_FILES)
    body = response_body()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    FakeServer.answer = head.encode() + body
    FakeServer.pause_s = pause_s

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(FakeServer, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        loop.add_reader(pipe.fileno(), lambda: pipe.send(pipe.recv() and FakeServer.connections))
        await server.serve_forever()

    asyncio.run(main())


def measure(concurrent: int, total: int, pause_s: float) -> dict[str, Any]:
    """The costs of `total` requests, `concurrent` at a time."""
    pipe, child_pipe = multiprocessing.Pipe()
    child = multiprocessing.Process(target=serve, args=(child_pipe, pause_s), daemon=True)
    child.start()
    pool = ServerPool(
        [f"http://127.0.0.1:{pipe.recv()}"],
        end_ids=[1],
        vocabulary=200_000,
        timeout_s=600,
        ranks=Ranks(),
    )
    pool.expect(0)
    pool.arrive(0, {})

    completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
    prompt = list(range(100_000, 100_000 + PROMPT_TOKENS))
    cpu_start = time.process_time()
    start = time.perf_counter()
    submitted = 0
    failures = 0
    for done in range(total):
        while submitted < min(total, done + concurrent):
            pool.submit(Request(submitted, prompt, submitted, 1.0, 512), completions.put)
            submitted += 1
        failures += bool(completions.get().failure)
    cpu_s = time.process_time() - cpu_start
    wall_s = time.perf_counter() - start

    pipe.send("connections")
    connections = pipe.recv()
    pool.close()
    child.terminate()
    return {
        "concurrent": concurrent,
        "requests": total,
        "cpu_ms": round(1e3 * cpu_s / total, 3),
        "requests_s": round(total / wall_s, 1),
        "connections": connections,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--pause", type=float, default=1.0, help="seconds until an answer comes")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for concurrent, total in CASES:
            pause_s = 0.0 if concurrent == 1 else options.pause
            row = {"repeat": repeat, **measure(concurrent, total, pause_s), "pause_s": pause_s}
            row |= {"device": cpu_name(), "python": sys.version.split()[0], "commit": code_commit()}
            print(row, flush=True)
            rows.append(row)
    write(RESULTS / "server_client_cpu.csv", rows)


if __name__ == "__main__":
    main()
