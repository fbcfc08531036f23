"""The section `[engine]` of a configuration."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import field_validator

from paw.values import Count, Natural, Only, Seconds, Section, Share, Url

SERVER, STARTED = Only("engine.type", ("server",)), Only("engine.servers")


def listed(value: Any) -> Any:
    """A name alone is a list of one."""
    return [value] if isinstance(value, str) else value


class EngineConfig(Section):
    """What samples responses."""

    type: Literal["transformers", "vllm", "server"] = "transformers"
    """transformers: the trainer's own weights. vllm: an engine in each rank, beside the trainer. server: servers of
    vLLM, on devices or machines of their own (docs/scale.md)."""
    max_batch_tokens: Annotated[Count, Only("engine.type", ("transformers",))] = 65536
    """Padded prompt tokens of one forward pass."""
    gpu_memory_utilization: Annotated[Share, Only("engine.type", ("vllm", "server"))] | None = None
    """Share of the device's memory for vLLM's weights and KV cache; unset: 0.5 beside the trainer, 0.9 for a server."""
    sleep_level: Annotated[Literal[1, 2], Only("engine.type", ("vllm",))] = 2
    """vLLM while training: 2 drops its weights (every update sends new ones anyway), 1 keeps them in host memory."""
    urls: Annotated[list[Url], SERVER] = []
    """Servers that run already, of this model and for this run alone: one URL or a list."""
    servers: Annotated[Natural, SERVER] = 0
    """Servers to start here and end with the run, in place of `urls`."""
    tensor_parallel: Annotated[Count, SERVER, STARTED] = 1
    """GPUs of each. `paw train --gpus N` leaves servers * tensor_parallel of the N to them."""
    transfer: Annotated[Literal["auto", "nccl", "files"], SERVER] = "auto"
    """How weights reach servers: nccl between GPUs, files through a folder that both see; auto: nccl on a GPU."""
    weights_dir: Annotated[Path | None, SERVER] = None
    """The folder for files; unset: in memory, for servers on this machine."""
    timeout_s: Annotated[Seconds, SERVER] = 600.0
    """Seconds for a whole response, and for new weights, before a server is left out."""

    _one_or_more = field_validator("urls", mode="before")(listed)

    @property
    def memory_share(self) -> float:
        return self.gpu_memory_utilization or (0.9 if self.type == "server" else 0.5)

    @property
    def gpus(self) -> int:
        """Devices of the servers that the run starts."""
        return self.servers * self.tensor_parallel if self.type == "server" else 0
