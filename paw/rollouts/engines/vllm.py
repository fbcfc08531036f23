"""vLLM in this process: continuous batching, prefix caching, weights streamed in after updates.

Written for vLLM 0.32; what depends on its internals is in this file. What is not obvious:
- `add_request` returns an internal id, outputs carry ours. It silently accepts duplicate ids and
  clips prompts beyond the limit: `submit` refuses both.
- The default output kind is cumulative, with a list that vLLM goes on to change. Seeds with chunked
  prefill crash the CPU engine.
- Raw log-probs ignore the temperature (2.2 nats off at 0.4), so they are `processed_logprobs`.
  top-p and top-k would renormalise them away from the policy: they are never set, and
  generation_config.json is not read.
- Construction reseeds every global random generator and, on a CPU, replaces `torch.set_num_threads`
  by a function that does nothing: both are put back. On a GPU it would set torch to one thread,
  unless OMP_NUM_THREADS is set, and the guards of Dynamo's compiled graphs would then expect one
  thread. So the variable has the trainer's number meanwhile.
- What the attention kernels cannot do (head sizes on a CPU) shows only at the first token, so
  construction samples one.
"""

import json
import os
import random
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paw.config.sections import LoraConfig
from paw.distributed.ranks import lost_peer, out_of_memory
from paw.errors import UserError, describe
from paw.io.files import writing
from paw.rollouts.engines.base import Completion, Engine, Request

ENVIRONMENT = {
    # The engine lives in this process, so that tensors pass by reference.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Variables that vLLM's engine in this process needs."""
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Variables that are set unless the user has set them."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM may be started with."""
WEIGHTS_DIR_HINT = " (engine.weights_dir says where)"


class EngineDiedError(UserError):
    """vLLM cannot go on, whatever is asked of it next."""

    exit_code = 1


class VllmEngine(Engine):
    """One vLLM engine; under torchrun one in each rank.

    Args:
        model_dir: only the architecture (config.json) is read; weights are random until the first
            `sync`.
        max_model_len: tokens of the longest prompt and response together.
        entropy: whether completions have it.
        lora: adapters that `sync` takes apart from the base weights. Those it takes only if vLLM
            does not have them.

    Raises UserError if vLLM is missing or cannot serve the model.
    """

    continuous = True
    checkpoint_names = True
    version = -1
    """-1 until the first `sync`."""

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
        self._vllm = import_vllm()
        self._on_cpu = self._vllm.platforms.current_platform.is_cpu()
        self._sleep_level = sleep_level
        self._end_ids = sorted(end_ids)
        self._asleep = False
        self._has_base = False
        """Whether vLLM has the base weights, beside which it takes adapters."""
        self._lora = lora
        self._adapters: Any = None
        """vLLM's request for the newest adapters."""
        options = engine_options(
            max_model_len, dtype=dtype, on_cpu=self._on_cpu, entropy=entropy, lora=lora
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
        """vLLM's engine, after it has sampled one token."""
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
            # One line of what may be a page.
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
        kinds = self._vllm.sampling_params.RequestOutputKind
        parameters = self._vllm.SamplingParams(
            **sampling_options(request, self._end_ids, key if self._take_entropy else ""),
            output_kind=kinds.CUMULATIVE if request.stopped else kinds.FINAL_ONLY,
        )
        prompt = self._vllm.inputs.tokens_input(request.prompt_ids)
        self._llm.llm_engine.add_request(key, prompt, parameters, lora_request=self._adapters)

    def step(self) -> list[Completion]:
        """One token for every running request; the requests that finished with it."""
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
            # By our names, not the engine's own: it ignores those.
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
        """Load every parameter in place, and drop cached prompts.

        Their keys and values belong to the old weights.
        """
        super().sync(parameters, version)
        if self._asleep:
            torch.cuda.empty_cache()  # blocks that torch keeps for reuse would be in the way
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

    def _load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(parameters)})
        self._has_base = True
        if self._on_cpu:
            self._llm.apply_model(_repack_experts)

    def _load_adapters(self, adapters: Iterable[tuple[str, Tensor]], lora: LoraConfig) -> None:
        make_request = self._vllm.lora.request.LoRARequest
        with tempfile.TemporaryDirectory(prefix="paw-") as folder:
            dtype = self._llm.llm_engine.model_config.dtype
            write_adapters(Path(folder), adapters, dtype, lora, "adapter_model.safetensors")
            request = make_request("paw", 1, folder, load_inplace=True)
            self._llm.llm_engine.add_lora(request)
        # Requests do not name the one above: with load_inplace vLLM would read the files at every
        # step.
        self._adapters = make_request("paw", 1, "loaded")

    def close(self) -> None:
        """Shut down; before `destroy_process_group`, since vLLM destroys its own groups."""
        if self._llm is None:
            return
        with suppress(Exception):  # it may have died
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        super().close()


def engine_options(
    max_model_len: int, *, dtype: str, on_cpu: bool, entropy: bool, lora: LoraConfig | None
) -> dict[str, Any]:
    """vLLM's arguments, in this process and of a server."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": 256,
        "max_num_batched_tokens": max(8192, max_model_len),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
    }
    if on_cpu:
        options |= {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32}
    if entropy:
        options["logits_processors"] = ["paw.rollouts.engines.entropy:Entropy"]
    if lora:
        options |= lora_options(lora)
    return options


def sampling_options(
    request: Request, end_ids: Collection[int], entropy_key: str
) -> dict[str, Any]:
    """vLLM's sampling parameters.

    Entropies are kept under the name `entropy_key`, unless it is "".
    """
    options = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed & (2**63 - 1),
        "stop_token_ids": end_ids,
        "logprobs": 0,
        "detokenize": False,
    }
    if entropy_key:
        options["extra_args"] = {"paw_entropy": [entropy_key, len(request.prompt_ids)]}
    return options


def lora_options(lora: LoraConfig) -> dict[str, Any]:
    """vLLM's arguments for the adapters of one policy.

    Raises UserError for a rank that vLLM does not serve.
    """
    for max_rank in LORA_RANKS:
        if max_rank >= lora.rank:
            return {
                "enable_lora": True,
                "max_lora_rank": max_rank,
                "max_loras": 1,
                "lora_target_modules": lora.targets,
            }
    raise UserError(
        f"lora.rank = {lora.rank}: vLLM serves adapters of at most {LORA_RANKS[-1]};"
        " use --lora.send merged"
    )


def write_adapters(
    folder: Path,
    adapters: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    lora: LoraConfig,
    name: str,
) -> None:
    """Write a folder as peft does, with the tensors in file `name`.

    Going through sharded `adapters` is a collective call of all ranks.
    """
    from safetensors.torch import save_file

    tensors = {key: tensor.to("cpu", dtype).contiguous() for key, tensor in adapters}
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.targets,
    }
    with writing(folder, WEIGHTS_DIR_HINT):
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / name, {"format": "pt"})


def _repack_experts(model: Any) -> None:
    """Put the experts' weights into the order that the CPU's kernel reads.

    vLLM does that at the first load only.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


@contextmanager
def _naming(action: str) -> Iterator[None]:
    """Turn whatever vLLM dies of into an EngineDiedError of one line.

    A lack of memory and the end of another rank pass as they are.
    """
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


def import_vllm(key: str = "engine.type = 'vllm'") -> Any:
    """vLLM, imported with the environment variables that it reads then.

    Raises UserError if it is not installed.
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
            f"{key} needs vLLM ({error}); run: pip install 'paw-trainer[vllm]', or use "
            "--engine.type transformers"
        ) from None
    return vllm


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Put back what construction changes: random generators and torch's number of threads."""
    threads = torch.get_num_threads()
    set_threads = torch.set_num_threads
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    omp_threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Set by an engine before, it would make vLLM ignore the number.
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
