"""vLLM servers that a run starts on its own machine: watched, restarted once, and ended with the run, however it ends.

Each is a child of a small process (watch.py) that holds the other end of a pipe to the trainer:
once that is gone, kill -9 included, the server's whole process group is ended.
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

import torch

from paw.config import Config, LoraConfig
from paw.envs.http import BlockingHttpClient
from paw.errors import UserError, clean
from paw.files import text_of
from paw.model.ranks import Ranks
from paw.rollouts.engines.vllm import DEFAULTS, engine_options
from paw.rollouts.engines.watch import GOODBYE, GRACE_S, WEIGHTS_DIR

HEALTH_S = 2.0
"""Seconds for a server to say that it is there."""
START_S = 1800.0
"""Seconds for a server to come up: large models take long to load, and to compile."""
LAST_LINES = 4
"""Of a log, from its last error on, that are shown."""


def vllm_command(
    model: str | Path,
    *,
    max_model_len: int,
    dtype: str,
    on_cpu: bool,
    gpu_memory_utilization: float = 0.9,
    tensor_parallel: int = 1,
    nccl: bool = False,
    entropy: bool = False,
    lora: LoraConfig | None = None,
) -> list[str]:
    """What serves `model`, a folder or Hugging Face name, but for the port."""
    options = engine_options(max_model_len, dtype=dtype, on_cpu=on_cpu, entropy=entropy, lora=lora)
    options |= {"model": model, "host": "127.0.0.1", "disable_uvicorn_access_log": True}
    options |= {"enable_scale_out": True, "enable_prompt_tokens_details": True}
    if not on_cpu:
        options |= {
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel,
        }
    if nccl:
        options["weight_transfer_config"] = '{"backend": "nccl"}'
    if entropy:
        options["worker_extension_cls"] = "paw.rollouts.engines.entropy.Extension"
    command = [sys.executable, "-m", "paw.rollouts.engines.served"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return command


VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
VARIABLES["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_RANKS += ("VLLM_ENABLE_V1_MULTIPROCESSING",)
"""Variables that a server must not inherit."""


def start_servers(
    config: Config,
    model: str,
    folder: Path,
    *,
    device: torch.device,
    ranks: Ranks,
    entropy: bool,
    lora: LoraConfig | None,
) -> "Servers":
    """Start engine.servers on the GPUs after the ranks' own.

    Raises UserError where there are too few.
    """
    options, limits = config.engine, config.rollout
    if ranks.on_host != ranks.world_size:
        raise UserError(
            "engine.servers: a run on several machines does not start servers; start them, set engine.urls"
        )
    gpus: list[list[str]] = [[]] * options.servers
    if device.type == "cuda":
        every = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        every = every if every != [""] else list(map(str, range(torch.cuda.device_count())))
        if len(every) < ranks.world_size + options.gpus:
            need = f"engine.servers = {options.servers} x engine.tensor_parallel = {options.tensor_parallel}"
            raise UserError(
                f"{need} and training need {ranks.world_size + options.gpus} GPUs; there are {len(every)}"
            )
        size = options.tensor_parallel
        gpus = [every[ranks.world_size + size * i :][:size] for i in range(options.servers)]
    command = vllm_command(
        model,
        max_model_len=limits.max_prompt_tokens + limits.max_response_tokens,
        dtype=config.model.dtype,
        on_cpu=device.type == "cpu",
        gpu_memory_utilization=options.memory_share,
        tensor_parallel=options.tensor_parallel,
        nccl=options.transfer == "nccl" or (options.transfer == "auto" and device.type == "cuda"),
        entropy=entropy,
        lora=lora,
    )
    return Servers(command, gpus, folder, weights_dir=options.weights_dir)


class Servers:
    """A server on each of `gpus`, the devices of one; `command` is what starts it, but for the port.

    `urls` are known at once; `wait` until they answer. `folder` is for what they write;
    `weights_dir` is where this process leaves weights for them (None: in memory).
    """

    def __init__(
        self,
        command: Sequence[str],
        gpus: Sequence[Sequence[str]],
        folder: Path,
        *,
        weights_dir: Path | None = None,
    ) -> None:
        self._command, self._gpus, self._folder = list(command), gpus, folder
        self._weights_dir = weights_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._ports = [_free_port() for _ in gpus]
        self._restarted: set[int] = set()
        self._running = [self._start(index) for index in range(len(gpus))]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def wait(self) -> None:
        """Until every server answers.

        Raises UserError for one that ends, with its last words, or takes too long.
        """
        client = BlockingHttpClient("engine.servers", timeout_s=HEALTH_S)
        try:
            self._wait(client)
        finally:
            client.close()

    def _wait(self, client: BlockingHttpClient) -> None:
        began, left = time.monotonic(), set(range(len(self._running)))
        while left:
            for index in sorted(left):
                if self._running[index].poll() is not None:
                    raise UserError(
                        f"vLLM server {index} ended while it started: {self._last_words(index)}"
                    )
                with suppress(Exception):  # nobody listens yet, or something else does
                    answer = client.ask("GET", f"{self.urls[index]}/health")
                    left -= {index} if answer.status == 200 else set()
            if left and time.monotonic() - began > START_S:
                raise UserError(
                    f"vLLM server {min(left)} does not answer after {START_S:g} s: {self._log(min(left))}"
                )
            time.sleep(0.5 if left else 0)

    def revive(self) -> list[str]:
        """Start the servers that have ended once more, each once in a run; returns a line about
        each. Does not wait: the next weights go to those that answer by then."""
        lines = []
        for index, process in enumerate(self._running):
            if process.poll() is not None and index not in self._restarted:
                self._restarted.add(index)
                lines.append(
                    f"vLLM server {index} has ended ({self._last_words(index)}): starting it once more"
                )
                self._running[index] = self._start(index)
        return lines

    def close(self) -> None:
        for process in self._running:
            if process.stdin:
                with suppress(OSError):  # it has ended already
                    process.stdin.write(GOODBYE)
                    process.stdin.flush()
                with suppress(OSError):
                    process.stdin.close()  # which ends it
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S + 5)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        variables = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        variables = DEFAULTS | {"VLLM_LOGGING_LEVEL": "WARNING"} | variables | VARIABLES
        if self._gpus[index]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[index])
        else:  # the model lies in the engine's process, as on one GPU: a process less that imports vLLM
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
        code = self._running[index].returncode or 0
        if code > 128:
            return f"killed by {signal.Signals(code - 128).name}; {self._log(index)}"
        lines = text_of(self._log(index)).splitlines()
        errors = [
            place for place, line in enumerate(lines) if "Error" in line and "WARNING" not in line
        ]
        said = " ".join(lines[errors[-1] :][:LAST_LINES]) if errors else "no error in its log"
        return f"{clean(said, 500)}; {self._log(index)}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
