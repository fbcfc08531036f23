"""What a request to a rollout server costs the trainer's process: processor time, connections, requests per second.

    python bench/rollout/server_client.py       writes bench/results/server_client_cpu.csv

The server is a small process that answers each request after a pause, with 150 tokens in vLLM's
format. The client is the trainer's own server pool, with prompts of 1,000 tokens. Client and server
have a core each if there are two. Only the client's processor time is measured.
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

from bench.common import RESULTS, machine_columns, write
from paw.distributed.ranks import Ranks
from paw.io.files import raise_file_limit
from paw.io.http import MAX_FILES
from paw.rollouts.engines.base import Completion, Request
from paw.rollouts.engines.pool import ServerPool

PROMPT_TOKENS = 1000
RESPONSE_TOKENS = 150
CASES = ((1, 500), (64, 1000), (1000, 4000), (10_000, 20_000))
"""(requests at a time, requests in all)"""


def response_body() -> bytes:
    """An answer in the format of vLLM's /inference/v1/generate."""
    token_ids = list(range(RESPONSE_TOKENS))
    logprobs = []
    for token_id in token_ids:
        token_logprob = {
            "token": f"token_id:{token_id}",
            "token_id": token_id,
            "logprob": -0.51234,
            "bytes": None,
            "top_logprobs": [],
        }
        logprobs.append(token_logprob)
    choice = {
        "index": 0,
        "token_ids": token_ids,
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

    def data_received(self, received_bytes: bytes) -> None:
        self.received += received_bytes
        while True:
            head_end = self.received.find(b"\r\n\r\n")
            if head_end < 0:
                return
            headers = self.received[:head_end].lower()
            body_size = 0
            for header_line in headers.split(b"\r\n"):
                if header_line.startswith(b"content-length:"):
                    body_size = int(header_line.partition(b":")[2])
            if len(self.received) < head_end + 4 + body_size:
                return
            self.received = self.received[head_end + 4 + body_size :]
            asyncio.get_running_loop().call_later(self.pause_s, self.reply)

    def reply(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.answer)


def serve(connection: Any, pause_s: float) -> None:
    """Run a FakeServer. Sends its port, then, for each message, the number of connections."""
    raise_file_limit(MAX_FILES)
    body = response_body()
    headers = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    FakeServer.answer = headers.encode() + body
    FakeServer.pause_s = pause_s

    async def main() -> None:
        event_loop = asyncio.get_running_loop()
        server = await event_loop.create_server(FakeServer, "127.0.0.1", 0, backlog=4096)
        connection.send(server.sockets[0].getsockname()[1])
        event_loop.add_reader(
            connection.fileno(),
            lambda: connection.send(connection.recv() and FakeServer.connections),
        )
        await server.serve_forever()

    asyncio.run(main())


def measure(concurrent: int, request_count: int, pause_s: float) -> dict[str, Any]:
    """What `request_count` requests cost, with `concurrent` at a time."""
    connection, child_pipe = multiprocessing.Pipe()
    server_process = multiprocessing.Process(target=serve, args=(child_pipe, pause_s), daemon=True)
    server_process.start()
    server_pool = ServerPool(
        [f"http://127.0.0.1:{connection.recv()}"],
        end_ids=[1],
        vocabulary=200_000,
        timeout_s=600,
        ranks=Ranks(),
    )
    server_pool.expect(0)
    server_pool.arrive(0, {})

    completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
    prompt = list(range(100_000, 100_000 + PROMPT_TOKENS))
    cpu_start = time.process_time()
    started = time.perf_counter()
    submitted = 0
    failures = 0
    for completed in range(request_count):
        while submitted < min(request_count, completed + concurrent):
            server_pool.submit(Request(submitted, prompt, submitted, 1.0, 512), completions.put)
            submitted += 1
        failures += bool(completions.get().failure)
    cpu_s = time.process_time() - cpu_start
    wall_s = time.perf_counter() - started

    connection.send("connections")
    connections = connection.recv()
    server_pool.close()
    server_process.terminate()
    return {
        "concurrent": concurrent,
        "requests": request_count,
        "cpu_ms": round(1e3 * cpu_s / request_count, 3),
        "requests_s": round(request_count / wall_s, 1),
        "connections": connections,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--pause", type=float, default=1.0, help="seconds until the server answers")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for concurrent, request_count in CASES:
            pause_s = 0.0 if concurrent == 1 else options.pause
            record = {
                "repeat": repeat,
                **measure(concurrent, request_count, pause_s),
                "pause_s": pause_s,
            }
            record |= machine_columns()
            print(record, flush=True)
            records.append(record)
    write(RESULTS / "server_client_cpu.csv", records)


if __name__ == "__main__":
    main()
