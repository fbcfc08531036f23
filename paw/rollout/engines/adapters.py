"""LoRA adapters on their way to rollout servers, which have the base weights: a folder of peft's, by vLLM 0.32's own
LoRA support."""

from pathlib import Path
from typing import Any

import torch

from paw.config import LoraConfig
from paw.errors import clean
from paw.rollout.engines.transfer import FileTransfer
from paw.rollout.engines.vllm import lora_options, write_adapters


class AdapterTransfer(FileTransfer):
    """Adapters of each version in the place of the last ones: requests that run go on with the new ones.

    vLLM knows them by the name `model`, under which it answers, and reads them when they are first needed.
    """

    def __init__(self, dtype: torch.dtype, timeout_s: float, folder: Path | None, lora: LoraConfig) -> None:
        super().__init__(dtype, timeout_s, folder)
        self._lora, self.model = lora, self._folder.name

    def _prepare(self, weights: Any, version: int) -> None:
        write_adapters(self._folder, weights, self.dtype, self._lora, "new")

    def _load(self, weights: Any, urls: list[str], version: int) -> dict[str, str]:
        (self._folder / "new").replace(self._folder / "adapter_model.safetensors")  # while nobody samples
        return self.each(urls, self._take)

    def _take(self, url: str) -> None:
        body = {"lora_name": self.model, "lora_path": str(self._folder)}
        answer = self._client.post(f"{url}/v1/load_lora_adapter", json=body)
        if answer.status_code == 200:
            return
        if "already been loaded" not in answer.text:
            needs = f"--enable-lora --max-lora-rank {lora_options(self._lora)['max_lora_rank']}"
            raise RuntimeError(
                f"it takes no LoRA adapters: it needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and {needs}, or use"
                f" --lora.send merged (status {answer.status_code}: {clean(answer.text, 200)})"
            )
        # Not by load_inplace, with which vLLM reads the files again at every step, nor under another name, which
        # requests that run do not have: dropped by its number, it is read again from the same place.
        for number in self.post(url, "collective_rpc", {"method": "list_loras"})["results"][0]:
            self.post(url, "collective_rpc", {"method": "remove_lora", "args": [number]})
