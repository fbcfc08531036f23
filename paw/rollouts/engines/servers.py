"""vLLM servers that a run starts on its own machine. Each is restarted once, and ends with the run.

Each server is a child of a small process (watch.py) that holds the other end of a pipe to the
trainer. When the trainer has ended, even by kill -9, that process ends the server's whole process
group.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

from paw.config.sections import Config, LoraConfig
from paw.distributed.ranks import Ranks
from paw.errors import UserError, clean
from paw.io.files import text_of
from paw.io.http import BlockingHttpClient
from paw.rollouts.engines.settings import ServerConfig
from paw.rollouts.engines.vllm_library import DEFAULTS, engine_options, wants_entropy
from paw.rollouts.engines.watch import GOODBYE, GRACE_S, WEIGHTS_DIR

HEALTH_S = 2.0
"""Seconds that a server has to say whether it is up."""
START_S = 1800.0
"""Seconds that a server has to come up. Large models take long to load and compile."""
POLL_S = 0.5
"""Seconds between two checks of servers that are coming up."""
LAST_LINES = 4
"""Number of log lines quoted, starting at the last error."""
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
"""Variables that a server needs."""
NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""Variables of a rank that must not be passed to a server."""


def vllm_command(
    model: str | Path,
    *,
    max_model_len: int,
    dtype: str,
    on_cpu: bool,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.9,
    tensor_parallel: int = 1,
    nccl: bool = False,
    entropy: bool = False,
    lora: LoraConfig | None = None,
) -> list[str]:
    """Return the command that serves `model` (a folder or Hugging Face name), without the port."""
    options = engine_options(
        max_model_len,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        on_cpu=on_cpu,
        entropy=entropy,
        lora=lora,
    )
    options |= {
        "model": model,
        "host": "127.0.0.1",
        "disable_uvicorn_access_log": True,
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
    }
    if not on_cpu:
        options["gpu_memory_utilization"] = gpu_memory_utilization
        options["tensor_parallel_size"] = tensor_parallel
    if nccl:
        options["weight_transfer_config"] = '{"backend": "nccl"}'
    if entropy:
        options["worker_extension_cls"] = "paw.rollouts.engines.entropy.Extension"

    command = [sys.executable, "-m", "paw.rollouts.engines.served"]
    for name, value in options.items():
        command += _flag(name.replace("_", "-"), value)
    return command


def _flag(name: str, value: Any) -> list[str]:
    """Return an option as words of the command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *map(str, values)]


def start_servers(
    config: Config,
    model: str,
    *,
    device: torch.device,
    ranks: Ranks,
    lora: LoraConfig | None,
) -> "Servers":
    """Start engine.servers on the GPUs after the ranks' own.

    Raises UserError if there are too few.
    """
    settings = cast(ServerConfig, config.engine)
    limits = config.rollout
    if ranks.on_host != ranks.world_size:
        raise UserError(
            "engine.servers: a run on several machines cannot start servers;"
            " start them yourself and set engine.urls"
        )
    on_gpus = device.type == "cuda"
    command = vllm_command(
        model,
        max_model_len=limits.max_prompt_tokens + limits.max_response_tokens,
        dtype=config.model.dtype,
        on_cpu=device.type == "cpu",
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel=settings.tensor_parallel,
        nccl=settings.transfer == "nccl" or (settings.transfer == "auto" and on_gpus),
        entropy=wants_entropy(config),
        lora=lora,
    )
    if on_gpus:
        gpus = _divide_gpus(settings.servers, settings.tensor_parallel, ranks.world_size)
    else:
        gpus = [[]] * settings.servers
    folder = config.run.dir / config.run.name / "servers"
    return Servers(command, gpus, folder, weights_dir=settings.weights_dir)


def _divide_gpus(servers: int, tensor_parallel: int, ranks: int) -> list[list[str]]:
    """Return the GPUs of each server, as in CUDA_VISIBLE_DEVICES. They follow the ranks' own.

    Raises UserError if there are too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    wanted = ranks + servers * tensor_parallel
    if len(gpus) < wanted:
        raise UserError(
            f"engine.servers = {servers} x engine.tensor_parallel = {tensor_parallel}"
            f" and training need {wanted} GPUs; there are {len(gpus)}"
        )
    starts = range(ranks, wanted, tensor_parallel)
    return [gpus[first_gpu : first_gpu + tensor_parallel] for first_gpu in starts]


class Servers:
    """Servers that this process starts. `urls` are known immediately. Call `wait` before use.

    Args:
        command: starts a server. The port is appended.
        gpus: the devices of each server.
        folder: for what the servers write.
        weights_dir: where this process puts weights for them; None for memory.
    """

    def __init__(
        self,
        command: Sequence[str],
        gpus: Sequence[Sequence[str]],
        folder: Path,
        *,
        weights_dir: Path | None = None,
    ) -> None:
        self._command = list(command)
        self._gpus = gpus
        self._folder = folder
        self._weights_dir = weights_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._ports = [_free_port() for _ in gpus]
        self._restarted: set[int] = set()
        """Indices of the servers that have been restarted."""
        self._running = [self._start(server_index) for server_index in range(len(gpus))]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def wait(self) -> None:
        """Wait until every server answers.

        Raises UserError for a server that ends, with the last lines of its log, and for one that
        takes too long.
        """
        client = BlockingHttpClient("engine.servers", timeout_s=HEALTH_S)
        try:
            self._wait(client)
        finally:
            client.close()

    def _wait(self, client: BlockingHttpClient) -> None:
        started_at = time.monotonic()
        waiting = list(range(len(self._running)))
        while True:
            waiting = [
                server_index for server_index in waiting if not self._answers(client, server_index)
            ]
            if not waiting:
                return
            if time.monotonic() - started_at > START_S:
                server_index = waiting[0]
                raise UserError(
                    f"vLLM server {server_index} did not answer within {START_S:g} s: "
                    f"{self._log(server_index)}"
                )
            time.sleep(POLL_S)

    def _answers(self, client: BlockingHttpClient, index: int) -> bool:
        """Whether a server is up. Raises UserError if it has ended."""
        if self._running[index].poll() is not None:
            raise UserError(f"vLLM server {index} ended during startup: {self._last_words(index)}")
        with suppress(Exception):  # nothing listens yet, or something else does
            return client.ask("GET", f"{self.urls[index]}/health").status == 200
        return False

    def revive(self) -> list[str]:
        """Restart servers that have ended, each at most once in a run.

        Does not wait. The next weights go to the servers that are up by then. Returns a line for
        each restarted server.
        """
        lines = []
        for server_index, process in enumerate(self._running):
            if process.poll() is not None and server_index not in self._restarted:
                self._restarted.add(server_index)
                lines.append(
                    f"vLLM server {server_index} has ended ({self._last_words(server_index)}): "
                    "restarting it"
                )
                self._running[server_index] = self._start(server_index)
        return lines

    def close(self) -> None:
        for process in self._running:
            if process.stdin:
                with suppress(OSError):  # the server has ended already
                    process.stdin.write(GOODBYE)
                    process.stdin.flush()
                with suppress(OSError):
                    process.stdin.close()  # this ends the server
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S + 5)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        variables = DEFAULTS | {"VLLM_LOGGING_LEVEL": "WARNING"} | inherited | VARIABLES
        if self._gpus[index]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[index])
        else:  # the engine runs in the server's process, so one process fewer imports vLLM
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        watch = [sys.executable, "-m", "paw.rollouts.engines.watch"]
        if self._weights_dir:
            watch.append(f"{WEIGHTS_DIR}{self._weights_dir.absolute()}")
        command = [*watch, *self._command, "--port", str(self._ports[index])]
        with self._log(index).open("ab") as log:
            return subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def _log(self, index: int) -> Path:
        return self._folder / f"server-{index}.log"

    def _last_words(self, index: int) -> str:
        """Say what killed a server, or its last error, and where its log is."""
        log = self._log(index)
        exit_code = self._running[index].returncode or 0
        if exit_code > 128:
            return f"killed by {signal.Signals(exit_code - 128).name}; {log}"
        lines = text_of(log).splitlines()
        last_error = None
        for number, line in enumerate(lines):
            if "Error" in line and "WARNING" not in line:
                last_error = number
        if last_error is None:
            return f"no error in its log; {log}"
        text = " ".join(lines[last_error:][:LAST_LINES])
        return f"{clean(text, 500)}; {log}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
