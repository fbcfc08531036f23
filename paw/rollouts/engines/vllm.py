"""vLLM in this process, with continuous batching and prefix caching. Updates stream in new weights.

Importing this module loads neither torch nor vLLM, which `vllm_instance.py` uses.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Self, cast

from paw.config.sections import LoraConfig
from paw.rollouts.engines import vllm_plan
from paw.rollouts.engines.base import (
    Completion,
    Engine,
    EngineParts,
    EnginePlan,
    PlannedRun,
    Request,
)
from paw.rollouts.engines.settings import VllmConfig
from paw.rollouts.engines.vllm_library import (
    REQUIRES,
    engine_options,
    import_vllm,
    wants_entropy,
)


class VllmEngine(Engine):
    """One vLLM engine. Under torchrun there is one in each rank.

    Args:
        model_dir: only the architecture (config.json) is read; weights are random until the first
            `sync`.
        max_model_len: tokens of the longest prompt and response together.
        max_num_seqs: maximum number of responses that are sampled at the same time.
        entropy: whether completions have it.
        lora: adapters that `sync` takes without the base weights. It takes those only if vLLM does
            not have them.

    Raises UserError if vLLM is missing or cannot serve the model.
    """

    Config = VllmConfig
    requires = REQUIRES
    gives_entropy = True
    takes_adapters = True
    sized_by_share = True
    memory_keys = ("gpu_memory_utilization",)
    replaceable = True
    continuous = True
    checkpoint_names = True
    version = -1
    """-1 until the first `sync`."""

    @classmethod
    def make(cls, parts: EngineParts) -> Self:
        config = parts.config
        settings = cast(VllmConfig, config.engine)
        return cls(
            parts.model_path,
            end_ids=parts.end_ids,
            max_model_len=parts.context,
            dtype=config.model.dtype,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            sleep_level=settings.sleep_level,
            max_num_seqs=settings.max_num_seqs,
            entropy=wants_entropy(config),
            lora=parts.lora,
        )

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        settings = cast(VllmConfig, run.config.engine)
        weights, cache = vllm_plan.card_bytes(run, cards=1, share=settings.gpu_memory_utilization)
        keeps_base_weights = settings.sleep_level == 1
        sends_adapters = vllm_plan.sends_adapters(run) and keeps_base_weights
        return EnginePlan(
            engines=run.ranks,
            weights=weights,
            cache=cache,
            asleep=vllm_plan.ASLEEP,
            host=run.weight_bytes if keeps_base_weights else 0,
            cache_tokens=cache / run.kv_bytes,
            cache_is_fixed=True,
            sequences=settings.max_num_seqs,
            least_step_s=vllm_plan.STEP_S,
            sent_bytes=run.adapter_bytes if sends_adapters else None,
            sent_by="files" if sends_adapters else "memory",
        )

    def __init__(
        self,
        model_dir: str | Path,
        *,
        end_ids: Collection[int],
        max_model_len: int,
        dtype: str = "bfloat16",
        gpu_memory_utilization: float = 0.5,
        sleep_level: int = 2,
        max_num_seqs: int = 256,
        entropy: bool = False,
        lora: LoraConfig | None = None,
    ):
        super().__init__(max_model_len)
        vllm = import_vllm()
        from paw.rollouts.engines.vllm_instance import VllmInstance  # loads torch

        self._on_cpu = vllm.platforms.current_platform.is_cpu()
        self._sleep_level = sleep_level
        self._asleep = False
        self._closed = False
        self._has_base = False
        """Whether vLLM has the base weights, so `sync` needs to load only adapters."""
        self._lora = lora
        options = engine_options(
            max_model_len,
            max_num_seqs=max_num_seqs,
            dtype=dtype,
            on_cpu=self._on_cpu,
            entropy=entropy,
            lora=lora,
        )
        options["gpu_memory_utilization"] = gpu_memory_utilization
        self._instance = VllmInstance(
            vllm,
            str(model_dir),
            options,
            end_ids=end_ids,
            on_cpu=self._on_cpu,
            entropy=entropy,
        )

    def submit(self, request: Request) -> None:
        if self.version < 0 or self._asleep:
            raise RuntimeError("the engine has no weights: call sync first")
        super().submit(request)
        self._instance.add(request)

    def step(self) -> list[Completion]:
        """Sample one token for every running request. Returns the requests that finished."""
        if not self.requests:
            return []
        completions = self._instance.step(self.requests)
        for completion in completions:
            del self.requests[completion.key]
        return completions

    def sync(self, parameters: Any, version: int) -> None:
        """Load every parameter in place. Drops cached prompts, which belong to old weights."""
        super().sync(parameters, version)
        if self._asleep:
            self._instance.wake_weights()
        if self._lora is None:
            self._load_base(parameters)
        else:
            if not self._has_base:
                self._load_base(parameters.base)
            self._instance.load_adapters(parameters.adapters, self._lora)
        if self._asleep:
            self._instance.wake_cache()
            self._asleep = False
        self._instance.forget_prompts()

    def _load_base(self, parameters: Any) -> None:
        self._instance.load_weights(parameters)
        self._has_base = True

    def sleep(self) -> None:
        """Free the KV cache until the next `sync`, and drop the weights or move them to the host.

        Does nothing on a CPU.
        """
        super().sleep()
        if self._on_cpu or self._asleep:
            return
        self._instance.sleep(self._sleep_level)
        self._asleep = True
        self._has_base = self._sleep_level == 1

    def close(self) -> None:
        """Shut down. Call before `destroy_process_group`, since vLLM destroys its own groups."""
        if self._closed:
            return
        self._closed = True
        self._instance.close()
        super().close()
