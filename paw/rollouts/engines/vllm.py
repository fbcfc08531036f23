"""vLLM in this process: continuous batching, prefix caching, weights streamed in after every update.

Written for vLLM 0.32; everything that knows its internals is in this file. What is not obvious:
- `add_request` returns an internal id, outputs carry ours. It accepts duplicate ids and clips
  prompts beyond the limit, silently: `submit` refuses both.
- The default output kind is cumulative with an aliased list. Seeds with chunked prefill crash the
  CPU engine.
- Raw log-probs ignore the temperature (2.2 nats off at 0.4): `processed_logprobs`. top-p and top-k
  would renormalise them away from the policy and are never set; neither is generation_config.json
  read.
- Construction reseeds every global random generator and, on CPU, replaces `torch.set_num_threads`
  by a no-op: both are put back. On a GPU it would set torch to one thread, which Dynamo's guards
  then hold its compiled graphs to, unless OMP_NUM_THREADS is set: it is meanwhile, to the trainer's
  number.
- What the attention kernels cannot do (head sizes on CPU) shows only at the first token:
  construction samples one.
"""

import json
import os
import random
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from paw.config import LoraConfig
from paw.errors import UserError, describe
from paw.files import writing
from paw.model.ranks import lost_peer, out_of_memory
from paw.rollouts.engines.base import Completion, Engine, Request

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, so tensors pass by reference
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, at most: what vLLM may be started with."""


class EngineDiedError(UserError):
    """vLLM cannot go on, whatever is asked of it next."""

    exit_code = 1


class VllmEngine(Engine):
    """One vLLM engine; under torchrun one in each rank. `model_dir` needs only the architecture
    (config.json): weights are random until the first `sync`. `entropy`: completions have it.
    `lora`: `sync` takes its adapters apart from the base weights, and those where it has none.
    Raises UserError when vLLM is missing or cannot serve the model."""

    continuous = checkpoint_names = True
    version = -1
    """Until the first `sync`."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        end_ids: Collection[int],
        max_model_len: int,
        dtype: str = "bfloat16",
        gpu_memory_utilization: float = 0.5,
        sleep_level: int = 2,
        entropy: bool = False,
        lora: LoraConfig | None = None,
    ):
        super().__init__(max_model_len)
        vllm = self._vllm = import_vllm()
        self._on_cpu = vllm.platforms.current_platform.is_cpu()
        arguments = engine_options(
            max_model_len, dtype=dtype, on_cpu=self._on_cpu, entropy=entropy, lora=lora
        ) | dict(
            gpu_memory_utilization=gpu_memory_utilization,
            enable_sleep_mode=not self._on_cpu,
            load_format="dummy",
            trust_remote_code=False,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            arguments |= dict(distributed_executor_backend="external_launcher")
        try:
            with _global_state_kept():
                self._llm: Any = vllm.LLM(str(model_dir), **arguments)
                self._llm.generate(
                    [vllm.TokensPrompt(prompt_token_ids=[0])],
                    vllm.SamplingParams(max_tokens=1, seed=0, logprobs=0, detokenize=False),
                    use_tqdm=False,
                )
        except (ValueError, RuntimeError, OSError) as error:
            if out_of_memory(error):
                raise
            reason = (
                " ".join(str(error).split())[:300] or type(error).__name__
            )  # one line of what may be a page
            raise UserError(
                f"vLLM cannot serve model.path = '{model_dir}' with {max_model_len} tokens of context"
                f" (rollout.max_prompt_tokens + rollout.max_response_tokens): {reason}"
            ) from error
        self._sleep_level, self._end_ids, self._asleep = sleep_level, sorted(end_ids), False
        self._lora, self._adapters, self._have_base = lora, None, False
        self._entropy: Any = None
        if entropy:
            from paw.rollouts.engines.entropy import take

            self._entropy = take

    def submit(self, request: Request) -> None:
        if self.version < 0 or self._asleep:
            raise RuntimeError("the engine has no weights: call sync first")
        super().submit(request)
        kinds = self._vllm.sampling_params.RequestOutputKind
        parameters = self._vllm.SamplingParams(
            **sampling_options(request, self._end_ids, str(request.key) if self._entropy else ""),
            output_kind=kinds.CUMULATIVE if request.stopped else kinds.FINAL_ONLY,
        )
        prompt = self._vllm.inputs.tokens_input(request.prompt_ids)
        self._llm.llm_engine.add_request(
            str(request.key), prompt, parameters, lora_request=self._adapters
        )

    def step(self) -> list[Completion]:
        """One token for every running request; the requests that finished with it."""
        if not self.requests:
            return []
        with _naming("sampling"):
            outputs = self._llm.llm_engine.step()
        completions, early = [], []
        for output in outputs:
            key, answer = int(output.request_id), output.outputs[0]
            stopped = self.requests[key].stopped
            if not output.finished and not (stopped and stopped(answer.token_ids)):
                continue
            early += [] if output.finished else [output.request_id]
            del self.requests[key]
            token_ids = list(answer.token_ids)
            logp = [
                position[token].logprob
                for position, token in zip(answer.logprobs, token_ids, strict=True)
            ]
            entropy = self._entropy and self._entropy(str(key), len(token_ids))
            completions.append(
                Completion(
                    key, token_ids, logp, entropy, cached_tokens=output.num_cached_tokens or 0
                )
            )
        if early:
            self._llm.llm_engine.abort_request(
                early
            )  # our names, not the engine's own: it ignores those
        return completions

    def sync(self, parameters: Any, version: int) -> None:
        """Load every parameter in place and drop cached prompts, whose keys and values belong to the old weights."""
        super().sync(parameters, version)
        if self._asleep:
            torch.cuda.empty_cache()  # blocks that torch keeps for reuse would be in the way
            self._llm.wake_up(tags=["weights"])
        if not (self._lora and self._have_base):
            weights = iter(parameters.base if self._lora else parameters)
            self._llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
            self._have_base = True
            if self._on_cpu:
                self._llm.apply_model(_repack_experts)
        if self._lora:
            self._load_adapters(parameters.adapters, self._lora)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: requests are still running")

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory, or drop them, until the next `sync`; no-op on CPU."""
        super().sleep()
        if not (self._on_cpu or self._asleep):
            with _naming("going to sleep"):
                self._llm.sleep(level=self._sleep_level)
            self._asleep, self._have_base = True, self._sleep_level == 1

    def _load_adapters(self, adapters: Iterable[tuple[str, Tensor]], lora: LoraConfig) -> None:
        make = self._vllm.lora.request.LoRARequest
        with tempfile.TemporaryDirectory(prefix="paw-") as folder:
            dtype = self._llm.llm_engine.model_config.dtype
            write_adapters(Path(folder), adapters, dtype, lora, "adapter_model.safetensors")
            self._llm.llm_engine.add_lora(make("paw", 1, folder, load_inplace=True))
        self._adapters = make(
            "paw", 1, "loaded"
        )  # with load_inplace vLLM would read the files at every step

    def close(self) -> None:
        """Shut down; before `destroy_process_group`, since vLLM destroys its own groups."""
        if self._llm is not None:
            with suppress(Exception):  # it may have died
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            super().close()


def engine_options(
    max_model_len: int, *, dtype: str, on_cpu: bool, entropy: bool, lora: LoraConfig | None
) -> dict[str, Any]:
    """vLLM's arguments, in this process as in a server."""
    options: dict[str, Any] = {
        "dtype": dtype, "max_model_len": max_model_len, "max_num_seqs": 256,
        "max_num_batched_tokens": max(8192, max_model_len), "skip_tokenizer_init": True, "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    if on_cpu:
        options |= {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32}
    if entropy:
        options["logits_processors"] = ["paw.rollouts.engines.entropy:Entropy"]
    return options | (lora_options(lora) if lora else {})


def sampling_options(request: Request, end_ids: Collection[int], entropy_of: str) -> dict[str, Any]:
    """vLLM's sampling parameters; the entropies are kept under the name `entropy_of`, unless it is ""."""
    options = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed & (2**63 - 1),
        "stop_token_ids": end_ids,
        "logprobs": 0,
        "detokenize": False,
    }
    return options | (
        {"extra_args": {"paw_entropy": [entropy_of, len(request.prompt_ids)]}} if entropy_of else {}
    )


def lora_options(lora: LoraConfig) -> dict[str, Any]:
    """vLLM's, for adapters of one policy on the layers that have them.

    UserError for a rank that it does not serve.
    """
    rank = next((rank for rank in LORA_RANKS if rank >= lora.rank), None)
    if rank is None:
        raise UserError(
            f"lora.rank = {lora.rank}: vLLM serves adapters of at most {LORA_RANKS[-1]}; use --lora.send merged"
        )
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        "max_loras": 1,
        "lora_target_modules": lora.targets,
    }


def write_adapters(
    folder: Path,
    adapters: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    lora: LoraConfig,
    name: str,
) -> None:
    """A folder as peft writes it, the tensors in file `name`; every rank takes part in gathering them."""
    from safetensors.torch import save_file

    tensors = {key: tensor.to("cpu", dtype).contiguous() for key, tensor in adapters}
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.targets,
    }
    with writing(folder, " (engine.weights_dir says where)"):
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / name, {"format": "pt"})


def checkpoint_parameters(
    model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The same under the names of the model's files, where transformers keeps the experts of a layer in one tensor."""
    for name, tensor in named:
        if tensor.dim() == 3:
            yield from revert_weight_conversion(model, {name: tensor}).items()  # type: ignore[arg-type]
        else:
            yield name, tensor


def _repack_experts(model: Any) -> None:
    """The CPU's kernel for experts reads weights in an order of its own, which vLLM restores at the first load only."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


@contextmanager
def _naming(action: str) -> Iterator[None]:
    """One line for whatever vLLM dies of, but for a lack of memory and another rank's end."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or out_of_memory(error) or lost_peer(error):
            raise
        rank = os.environ.get("RANK", "0")
        raise EngineDiedError(
            f"vLLM engine of rank {rank} died while {action}: {describe(error)[:300]}; checkpoints are kept (--resume"
            " auto)"
        ) from error


def import_vllm(what: str = "engine.type = 'vllm'") -> Any:
    """vLLM, with the variables that it reads when it is imported.

    Raises UserError where it is not installed.
    """
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        import vllm.inputs
        import vllm.lora.request
        import vllm.platforms
        import vllm.sampling_params
    except ImportError as error:
        raise UserError(
            f"{what} needs vLLM ({error}); run: pip install 'paw-trainer[vllm]', or use --engine.type transformers"
        ) from None
    return vllm


@contextmanager
def _global_state_kept() -> Iterator[None]:
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    python, numpy = random.getstate(), np.random.get_state()
    wanted = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.pop(
        "VLLM_OMP_NUM_THREADS_SET_BY_VLLM", None
    )  # an engine before: the number would count for nothing
    try:
        with torch.random.fork_rng():
            yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if wanted is not None:
            os.environ["OMP_NUM_THREADS"] = wanted
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
