"""Sends weights to rollout servers, by NCCL between GPUs, or as files that both sides see.

Both ways use interfaces of vLLM 0.32 (VLLM_SERVER_DEV_MODE=1): its weight transfer engine, or
`reload_weights`. If a server fails, `send` continues with the others and returns which ones failed.
Every answer of a server is checked, and bounded in time and size.
"""

import importlib
import json
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from paw.config.sections import LoraConfig
from paw.distributed.gather import BUCKET_BYTES
from paw.envs.checked import Strict, problem
from paw.errors import clean, describe
from paw.io.files import writing
from paw.io.http import BlockingHttpClient, HttpAnswer
from paw.model.host import in_parts
from paw.rollouts.engines.adapter_files import write_adapters
from paw.rollouts.engines.vllm_library import WEIGHTS_DIR_HINT, import_vllm, lora_options
from paw.rollouts.engines.weight_folders import make_weight_folder

if TYPE_CHECKING:
    from paw.model.weights import Weights

SHARD_BYTES = 2 << 30
"""Bytes per file. Rank 0 holds one file in memory."""
QUICK_S = 60.0
"""Time limit in seconds for calls that need no work from a server. The other servers wait."""
ANSWER_BYTES = 1 << 20
"""Maximum bytes of an answer, which says little more than that the server is done."""
MAX_GPUS = 4096
"""Maximum number of GPUs of a server, which has a worker on each."""
MAX_ADAPTERS = 64
"""Maximum number of adapters of a worker. Servers are started for one."""


class Done(Strict):
    success: bool


class WorldSize(Strict):
    world_size: int = Field(ge=1, le=MAX_GPUS)


AdapterNumber = Annotated[int, Field(ge=0, lt=2**63)]


class AdapterNumbers(Strict):
    """The adapters that each worker holds."""

    results: list[Annotated[list[AdapterNumber], Field(max_length=MAX_ADAPTERS)]] = Field(
        min_length=1, max_length=MAX_GPUS
    )


M = TypeVar("M", bound=BaseModel)


class Transfer(ABC):
    """How rank 0 sends weights to servers. The other ranks only take part in gathering them.

    `timeout_s` is the time limit of each whole answer.
    """

    def __init__(self, dtype: torch.dtype, timeout_s: float) -> None:
        self.dtype = dtype
        self._client = BlockingHttpClient("engine.type = 'server'", timeout_s=timeout_s)
        self._quick_s = min(timeout_s, QUICK_S)
        self._threads = ThreadPoolExecutor(max_workers=64)

    def send(self, weights: "Weights", urls: Sequence[str], version: int) -> dict[str, str]:
        """Load the weights into every server, which then answers with this version.

        Goes through all of `weights` once, whatever fails. Running requests continue with the new
        weights: earlier tokens are recomputed, so each token's log-prob comes from one version.
        Returns what went wrong, by URL.
        """
        self._prepare(weights, version)
        faults = self.each(urls, lambda url: self.post(url, "pause?mode=keep", quick=True))
        paused = [url for url in urls if url not in faults]
        return faults | self._load(weights, paused, version)

    def _prepare(self, weights: "Weights", version: int) -> None:  # noqa: B027
        """Do everything that can be done while the servers are sampling."""

    @abstractmethod
    def _load(self, weights: "Weights", urls: Sequence[str], version: int) -> dict[str, str]:
        """Load the weights into the paused servers, and `_resume` each.

        Returns what went wrong, by URL.
        """

    def _resume(self, url: str, version: int) -> None:
        """Resume a server that has loaded the weights, under their version."""
        answer = self.post(url, "reset_prefix_cache?reset_running_requests=true", quick=True)
        if not _parse(Done, answer, "reset_prefix_cache").success:
            raise RuntimeError("it did not reset its prefix cache, which belongs to older weights")
        self.post(url, "update_weight_version", {"new_version": str(version)}, quick=True)
        self.post(url, "resume", quick=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def ask(
        self,
        method: str,
        url: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        quick: bool = False,
    ) -> HttpAnswer:
        """Return the server's answer, whatever the status. `quick` calls need no work from it."""
        return self._client.ask(
            method,
            f"{url}/{path}",
            body,
            timeout_s=self._quick_s if quick else None,
            max_bytes=ANSWER_BYTES,
        )

    def post(
        self, url: str, path: str, body: dict[str, Any] | None = None, *, quick: bool = False
    ) -> Any:
        """Return the server's JSON. Raises RuntimeError for any status but 200."""
        answer = self.ask("POST", url, path, body, quick=quick)
        if answer.status == 404:
            raise RuntimeError(
                f"it has no /{path}: start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
            )
        if answer.status != 200:
            raise RuntimeError(f"/{path}: status {answer.status}: {clean(answer.text, 200)}")
        return json.loads(answer.body) if answer.body else None

    def each(self, urls: Iterable[str], call: Callable[[str], object]) -> dict[str, str]:
        """Call `call(url)` for all servers in parallel. Returns what it raised, by URL."""
        call_of_url = {url: self._threads.submit(call, url) for url in urls}
        faults = {}
        for url, future in call_of_url.items():
            error = future.exception()
            if error:
                faults[url] = describe(error)
        return faults


class FileTransfer(Transfer):
    """Sends safetensors files through a folder under `folder`, which the servers must see too.

    By default the folder is in memory (/dev/shm).
    """

    def __init__(self, dtype: torch.dtype, timeout_s: float, folder: Path | None = None) -> None:
        super().__init__(dtype, timeout_s)
        self._folder = make_weight_folder(folder)

    def _prepare(self, weights: "Weights", version: int) -> None:
        folder = self._folder / str(version)
        with writing(folder, WEIGHTS_DIR_HINT):
            folder.mkdir(exist_ok=True)
            cast_weights = ((name, tensor.to(self.dtype)) for name, tensor in weights)
            for number, file_tensors in enumerate(in_parts(cast_weights, SHARD_BYTES)):
                if "lm_head.weight" in file_tensors:
                    # The format refuses a tied head, which shares the embedding's memory.
                    file_tensors["lm_head.weight"] = file_tensors["lm_head.weight"].clone()
                save_file(
                    file_tensors, folder / f"model-{number:05d}.safetensors", {"format": "pt"}
                )

    def _load(self, weights: "Weights", urls: Sequence[str], version: int) -> dict[str, str]:
        path = str(self._folder / str(version))
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}

        def load(url: str) -> None:
            self.post(url, "collective_rpc", body)
            self._resume(url, version)

        faults = self.each(urls, load)
        shutil.rmtree(path, ignore_errors=True)
        return faults

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


class AdapterTransfer(FileTransfer):
    """Sends LoRA adapters to servers that have the base weights, using vLLM 0.32's LoRA support.

    They travel as a folder in peft's format. Each version's adapters replace the previous ones, in
    running requests too. vLLM knows the adapters by the name `model`, under which it answers, and
    reads them when they are first needed.
    """

    def __init__(
        self, dtype: torch.dtype, timeout_s: float, folder: Path | None, lora: LoraConfig
    ) -> None:
        super().__init__(dtype, timeout_s, folder)
        self._lora = lora
        self.model = self._folder.name

    def _prepare(self, weights: Any, version: int) -> None:
        write_adapters(self._folder, weights, self.dtype, self._lora, "new")

    def _load(self, weights: Any, urls: Sequence[str], version: int) -> dict[str, str]:
        # The adapters are replaced here because nothing is being sampled.
        (self._folder / "new").replace(self._folder / "adapter_model.safetensors")

        def load(url: str) -> None:
            self._load_adapters(url)
            self._resume(url, version)

        return self.each(urls, load)

    def _load_adapters(self, url: str) -> None:
        """Make a server read the adapters, for the first time or again."""
        body = {"lora_name": self.model, "lora_path": str(self._folder)}
        answer = self.ask("POST", url, "v1/load_lora_adapter", body)
        if answer.status == 200:
            return
        if "already been loaded" not in answer.text:
            max_rank = lora_options(self._lora)["max_lora_rank"]
            options = f"--enable-lora --max-lora-rank {max_rank}"
            raise RuntimeError(
                "it takes no LoRA adapters: it needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                f" and {options}, or use --lora.send merged"
                f" (status {answer.status}: {clean(answer.text, 200)})"
            )
        # The server has the previous version's adapters. Once they are dropped by their number, it
        # reads the folder again when they are next needed. vLLM's own methods do not work here:
        # with load_inplace it reads the files at every step, and running requests do not know a
        # new name.
        answer = self.post(url, "collective_rpc", {"method": "list_loras"})
        for number in _parse(AdapterNumbers, answer, "collective_rpc").results[0]:
            self.post(url, "collective_rpc", {"method": "remove_lora", "args": [number]})


class NcclTransfer(Transfer):
    """vLLM's own NCCL broadcast. Rank 0's GPU and those of all servers form one group.

    Tensors travel in buffers of BUCKET_BYTES, many in one broadcast. Both sides hold two buffers.

    The group is made again if the reachable servers have changed, because a server that restarted
    is not in it. Servers need --weight-transfer-config '{"backend": "nccl"}'. If a server dies
    while it is taking weights, the run hangs.
    """

    def __init__(self, dtype: torch.dtype, timeout_s: float, address: str) -> None:
        super().__init__(dtype, timeout_s)
        self._address = address
        self._members: list[str] = []
        """URLs of the servers in the group."""
        self._engine: Any = None
        """vLLM's end of the group on rank 0."""

    def _load(self, weights: "Weights", urls: Sequence[str], version: int) -> dict[str, str]:
        sizes: dict[str, int] = {}

        def ask_size(url: str) -> None:
            sizes[url] = self._world_size(url)

        faults = self.each(urls, ask_size)
        members = [url for url in urls if url in sizes]
        source = _Source(weights, self.dtype)
        try:
            if members and members != self._members:
                self._join({url: sizes[url] for url in members})
            if members:
                self._engine.source = source
                self._engine.send_weights()
            self._members = members
        except Exception as error:
            self._members = []
            faults |= dict.fromkeys(members, describe(error))
        source.finish()

        loaded = [url for url in urls if url not in faults]
        return faults | self.each(loaded, lambda url: self._resume(url, version))

    def _world_size(self, url: str) -> int:
        """GPUs of a server."""
        answer = self.ask("GET", url, "get_world_size", quick=True)
        if answer.status != 200:
            raise RuntimeError(
                f"/get_world_size: status {answer.status}: {clean(answer.text, 200)}"
            )
        return _parse(WorldSize, json.loads(answer.body), "get_world_size").world_size

    def _join(self, sizes: dict[str, int]) -> None:
        """Make the group of rank 0 and these servers. `sizes` has the GPU count of each, by URL."""
        import_vllm("engine.transfer = 'nccl'")
        nccl: Any = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
        if self._engine:
            self._engine.shutdown()
            self.each(sizes, lambda url: self.post(url, "shutdown_weight_transfer_engine"))
        with socket.create_server(("", 0)) as listening:
            port = listening.getsockname()[1]
        world_size = 1 + sum(sizes.values())
        no_weights: Any = _Source((), self.dtype)  # `_load` sets the source of each version
        self._engine = nccl.NCCLTrainerWeightTransferEngine.trainer_init(
            nccl.NCCLTrainerInitInfo(
                self._address,
                port,
                world_size,
                rank=0,
                packed=True,
                packed_buffer_size_bytes=BUCKET_BYTES,
            ),
            client=_Servers(self, sizes),
            source=no_weights,
        )

    def close(self) -> None:
        super().close()
        if self._engine:
            self._engine.shutdown()


def _parse(kind: type[M], answer: Any, path: str) -> M:
    """Parse a server's JSON as a `kind`. Raises RuntimeError if it has another format."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        raise RuntimeError(f"/{path}: not vLLM's answer: {problem(error)}") from None


class _Servers:
    """vLLM's VLLMWeightSyncClient for several servers.

    `sizes` has the GPU count of each server, by URL. Each GPU has a rank in the group.
    """

    def __init__(self, transfer: Transfer, sizes: dict[str, int]) -> None:
        self._transfer = transfer
        self._sizes = sizes

    def _post_all(self, path: str, bodies: dict[str, dict[str, Any]]) -> None:
        faults = self._transfer.each(
            bodies, lambda url: self._transfer.post(url, path, bodies[url])
        )
        if faults:
            raise RuntimeError("; ".join(f"{url}: {fault}" for url, fault in faults.items()))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        bodies = {}
        rank_offset = 1  # rank 0 is the trainer
        for url, size in self._sizes.items():
            bodies[url] = {"init_info": init_info | {"rank_offset": rank_offset}}
            rank_offset += size
        self._post_all("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post_all("start_weight_update", {url: {} for url in self._sizes})

    def update_weights(self, update_info: Any) -> None:
        body = {"update_info": update_info}
        self._post_all("update_weights", {url: body for url in self._sizes})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post_all("finish_weight_update", {url: {} for url in self._sizes})


class _Source:
    """vLLM's WeightSource for one pass over the weights, in the dtype used for transfer."""

    def __init__(self, weights: Any, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype
        self._pass: Iterator[tuple[str, Tensor]] | None = None
        """The pass, once it has started."""

    def metadata(self) -> list[Any]:
        base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
        return [base.ParamMeta(name, self._dtype, shape) for name, shape in self._weights.shapes()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._pass = iter(self._weights)
        for name, tensor in self._pass:
            yield name, tensor.detach().to(self._dtype)

    def finish(self) -> None:
        """Go through the remaining weights, since gathering them takes all ranks."""
        remaining = iter(self._weights) if self._pass is None else self._pass
        for _ in remaining:
            pass
