"""The keys that each built-in engine adds to the section [engine]. No torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import field_validator

from paw.config.sections import EngineConfig
from paw.config.values import Count, Natural, Only, Rate, Seconds, Url, listed

STARTED = Only("engine.servers")


class TransformersConfig(EngineConfig):
    max_batch_tokens: Count = 65536
    """Maximum number of prompt tokens, with padding, in one forward pass."""


class VllmConfig(EngineConfig):
    gpu_memory_utilization: Rate = 0.5
    """Share of the device's memory that vLLM uses for weights and KV cache, next to the trainer."""
    sleep_level: Literal[1, 2] = 2
    """What vLLM does with its weights while the trainer works. 2 drops them (every update sends new
    ones); 1 keeps them in host memory."""
    max_num_seqs: Count = 256
    """Maximum number of responses that vLLM samples at the same time. `paw plan` proposes one."""


class ServerConfig(EngineConfig):
    gpu_memory_utilization: Rate = 0.9
    """Share of a server's GPUs for its weights and KV cache."""
    urls: list[Url] = []
    """Servers that already run this model and serve only this run: one URL or a list."""
    router: Annotated[Url | None, Only("engine.urls")] = None
    """Address of a router in front of engine.urls, such as vllm-router, Ray Serve or a Kubernetes
    service. Requests go there; weights go to engine.urls."""
    servers: Natural = 0
    """Number of servers to start on this machine instead of using `urls`. They end with the run."""
    tensor_parallel: Annotated[Count, STARTED] = 1
    """GPUs per server. `paw train --gpus N` reserves servers * tensor_parallel of the N for
    them."""
    max_num_seqs: Annotated[Count, STARTED] = 256
    """Maximum number of responses that a server samples at the same time. `paw plan` proposes
    one."""
    transfer: Literal["auto", "nccl", "files"] = "auto"
    """How weights reach the servers. nccl sends them between GPUs; files uses a folder that both
    sides see. auto is nccl on a GPU, otherwise files."""
    weights_dir: Path | None = None
    """Folder for transfer by files. If unset, it is in memory, for servers on this machine."""
    timeout_s: Seconds = 600.0
    """Seconds that a server may take to answer a request or to load new weights. After that it gets
    no more requests."""

    _one_or_more = field_validator("urls", mode="before")(listed)

    @property
    def gpus(self) -> int:
        return self.servers * self.tensor_parallel

    @property
    def weight_folders(self) -> list[Path]:
        return [self.weights_dir] if self.weights_dir else []

    @property
    def contradiction(self) -> str:
        if bool(self.urls) != bool(self.servers):
            return ""
        return (
            f"engine.type = '{self.type}' needs either engine.urls = 'http://...' or "
            "engine.servers = 1"
        )
