"""vLLM in this process: continuous batching, prefix caching, weights streamed in after updates.

Importing this module loads neither torch nor vLLM. It is written for vLLM 0.32, and everything that
depends on vLLM's internals is in this file. Some facts are not obvious:
- `add_request` returns an internal id, but outputs carry ours. It silently accepts duplicate ids
  and clips prompts beyond the limit. `submit` refuses both.
- The default output kind is cumulative, with a list that vLLM keeps changing. Seeds with chunked
  prefill crash the CPU engine.
- Raw log-probs ignore the temperature (2.2 nats off at 0.4), so we use `processed_logprobs`. top-p
  and top-k would renormalise them away from the policy, so they are never set, and
  generation_config.json is not read.
- Construction reseeds every global random generator and, on a CPU, replaces `torch.set_num_threads`
  with a function that does nothing. Both are restored. On a GPU, construction sets torch to one
  thread unless OMP_NUM_THREADS is set, and the guards of Dynamo's compiled graphs then expect one
  thread. So the variable has the trainer's number during construction.
- If the attention kernels cannot handle a model (head sizes on a CPU), this shows only at the first
  token. So construction samples one.
"""

import os
import random
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from paw.config.sections import LoraConfig
from paw.errors import UserError, describe
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
    sampling_options,
    wants_entropy,
    write_adapters,
)

if TYPE_CHECKING:
    from torch import Tensor


class EngineDiedError(UserError):
    """vLLM has died and can answer nothing any more."""

    exit_code = 1


class VllmEngine(Engine):
    """One vLLM engine. Under torchrun there is one in each rank.

    Args:
        model_dir: only the architecture (config.json) is read; weights are random until the first
            `sync`.
        max_model_len: tokens of the longest prompt and response together.
        max_num_seqs: responses that are sampled at the same time, at most.
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
        self._vllm = import_vllm()
        self._on_cpu = self._vllm.platforms.current_platform.is_cpu()
        self._sleep_level = sleep_level
        self._end_ids = sorted(end_ids)
        self._asleep = False
        self._has_base = False
        """Whether vLLM has the base weights, so `sync` needs to load only adapters."""
        self._lora = lora
        self._adapters: Any = None
        """vLLM's request object for the newest adapters."""
        options = engine_options(
            max_model_len,
            max_num_seqs=max_num_seqs,
            dtype=dtype,
            on_cpu=self._on_cpu,
            entropy=entropy,
            lora=lora,
        )
        options |= {
            "gpu_memory_utilization": gpu_memory_utilization,
            "enable_sleep_mode": not self._on_cpu,
            "load_format": "dummy",
            "trust_remote_code": False,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
        }
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            options["distributed_executor_backend"] = "external_launcher"
        self._llm: Any = self._start(str(model_dir), options)
        self._take_entropy: Callable[[str, int], list[float] | None] | None = None
        """(key, tokens) -> entropies of a finished response."""
        if entropy:
            from paw.rollouts.engines.entropy import take

            self._take_entropy = take

    def _start(self, model_dir: str, options: dict[str, Any]) -> Any:
        """Return vLLM's engine, after it has sampled one token."""
        from paw.distributed.ranks import out_of_memory  # loads torch

        try:
            with _global_state_kept():
                llm = self._vllm.LLM(model_dir, **options)
                llm.generate(
                    [self._vllm.TokensPrompt(prompt_token_ids=[0])],
                    self._vllm.SamplingParams(max_tokens=1, seed=0, logprobs=0, detokenize=False),
                    use_tqdm=False,
                )
        except (ValueError, RuntimeError, OSError) as error:
            if out_of_memory(error):
                raise
            # Keep one line of what may be a page.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"vLLM cannot serve model.path = '{model_dir}' with {options['max_model_len']}"
                " tokens of context (rollout.max_prompt_tokens + rollout.max_response_tokens):"
                f" {reason}"
            ) from error
        return llm

    def submit(self, request: Request) -> None:
        if self.version < 0 or self._asleep:
            raise RuntimeError("the engine has no weights: call sync first")
        super().submit(request)
        key = str(request.key)
        entropy_key = key if self._take_entropy else ""
        kinds = self._vllm.sampling_params.RequestOutputKind
        parameters = self._vllm.SamplingParams(
            **sampling_options(request, self._end_ids, entropy_key),
            output_kind=kinds.CUMULATIVE if request.stopped else kinds.FINAL_ONLY,
        )
        prompt = self._vllm.inputs.tokens_input(request.prompt_ids)
        self._llm.llm_engine.add_request(key, prompt, parameters, lora_request=self._adapters)

    def step(self) -> list[Completion]:
        """Sample one token for every running request. Returns the requests that finished."""
        if not self.requests:
            return []
        with _naming("sampling"):
            outputs = self._llm.llm_engine.step()

        completions = []
        stopped_early = []
        for output in outputs:
            key = int(output.request_id)
            response = output.outputs[0]
            if not output.finished:
                stopped = self.requests[key].stopped
                if not stopped or not stopped(response.token_ids):
                    continue
                stopped_early.append(output.request_id)
            del self.requests[key]
            completions.append(self._completion(key, response, output.num_cached_tokens or 0))
        if stopped_early:
            # Use our names, because the engine ignores its own.
            self._llm.llm_engine.abort_request(stopped_early)
        return completions

    def _completion(self, key: int, response: Any, cached_tokens: int) -> Completion:
        token_ids = list(response.token_ids)
        logp = []
        for token, logprobs in zip(token_ids, response.logprobs, strict=True):
            logp.append(logprobs[token].logprob)
        entropy = None
        if self._take_entropy:
            entropy = self._take_entropy(str(key), len(token_ids))
        return Completion(key, token_ids, logp, entropy, cached_tokens=cached_tokens)

    def sync(self, parameters: Any, version: int) -> None:
        """Load every parameter in place. Drops cached prompts, which belong to old weights."""
        import torch

        super().sync(parameters, version)
        if self._asleep:
            torch.cuda.empty_cache()  # vLLM needs the blocks that torch keeps for reuse
            self._llm.wake_up(tags=["weights"])
        if self._lora is None:
            self._load_weights(parameters)
        else:
            if not self._has_base:
                self._load_weights(parameters.base)
            self._load_adapters(parameters.adapters, self._lora)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: requests are still running")

    def sleep(self) -> None:
        """Free the KV cache until the next `sync`, and drop the weights or move them to the host.

        Does nothing on a CPU.
        """
        super().sleep()
        if self._on_cpu or self._asleep:
            return
        with _naming("going to sleep"):
            self._llm.sleep(level=self._sleep_level)
        self._asleep = True
        self._has_base = self._sleep_level == 1

    def _load_weights(self, parameters: Iterable[tuple[str, "Tensor"]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(parameters)})
        self._has_base = True
        if self._on_cpu:
            self._llm.apply_model(_repack_experts)

    def _load_adapters(self, adapters: Iterable[tuple[str, "Tensor"]], lora: LoraConfig) -> None:
        make_request = self._vllm.lora.request.LoRARequest
        with tempfile.TemporaryDirectory(prefix="paw-") as folder:
            dtype = self._llm.llm_engine.model_config.dtype
            write_adapters(Path(folder), adapters, dtype, lora, "adapter_model.safetensors")
            request = make_request("paw", 1, folder, load_inplace=True)
            self._llm.llm_engine.add_lora(request)
        # Requests name another one. With load_inplace, vLLM would read the files at every step.
        self._adapters = make_request("paw", 1, "loaded")

    def close(self) -> None:
        """Shut down. Call before `destroy_process_group`, since vLLM destroys its own groups."""
        if self._llm is None:
            return
        with suppress(Exception):  # it may have died
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        super().close()


def _repack_experts(model: Any) -> None:
    """Put the experts' weights into the order that the CPU's kernel reads.

    vLLM does so only at the first load.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


@contextmanager
def _naming(action: str) -> Iterator[None]:
    """Turn whatever error vLLM dies of into an EngineDiedError of one line.

    Out-of-memory errors and the end of another rank are raised unchanged.
    """
    from paw.distributed.ranks import lost_peer, out_of_memory  # loads torch

    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or out_of_memory(error) or lost_peer(error):
            raise
        rank = os.environ.get("RANK", "0")
        raise EngineDiedError(
            f"vLLM engine of rank {rank} died while {action}: {describe(error)[:300]};"
            " checkpoints are kept (--resume auto)"
        ) from error


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Restore what construction changes: random generators and torch's number of threads."""
    import numpy as np
    import torch

    threads = torch.get_num_threads()
    set_threads = torch.set_num_threads
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    omp_threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # If an earlier engine has set this, vLLM ignores the number.
    os.environ.pop("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", None)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if omp_threads is not None:
            os.environ["OMP_NUM_THREADS"] = omp_threads
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
