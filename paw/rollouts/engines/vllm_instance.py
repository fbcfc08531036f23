"""An instance of vLLM in this process: construction, requests, weights, sleep.

Written for vLLM 0.32. What depends on the internals of vLLM's engine in this process is in this
file. Some facts are not obvious:
- `add_request` returns an internal id, but outputs carry ours. It silently accepts duplicate ids
  and clips prompts beyond the limit. `Engine.submit` refuses both.
- The default output kind is cumulative, with a list that vLLM keeps changing. Seeds with chunked
  prefill crash the CPU engine.
- Raw log-probs ignore the temperature (2.2 nats off at 0.4), so we use `processed_logprobs`. top-p
  and top-k would renormalise them away from the policy, so they are never set, and
  generation_config.json is not read.
- Construction reseeds every global random generator and, on a CPU, replaces `torch.set_num_threads`
  with a function that does nothing. Both are restored. On a GPU, construction sets torch to one
  thread unless OMP_NUM_THREADS is set, and the guards of Dynamo's compiled graphs then expect one
  thread. So the variable has the trainer's number during construction.
- Attention kernels that cannot handle a model (head sizes on a CPU) fail only at the first token.
  So construction samples one.
"""

import os
import random
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paw.config.sections import LoraConfig
from paw.distributed.ranks import lost_peer, out_of_memory
from paw.errors import UserError, describe
from paw.rollouts.engines.adapter_files import write_adapters
from paw.rollouts.engines.base import Completion, Request
from paw.rollouts.engines.vllm_library import sampling_options


class EngineDiedError(UserError):
    """vLLM has died and can answer nothing any more."""

    exit_code = 1


class VllmInstance:
    """vLLM's engine with the architecture of the model in `model_dir`, and random weights.

    `vllm` is the module, and `options` are arguments of its class LLM. Responses end at one of
    `end_ids`. With `entropy`, completions have it.

    Raises UserError if vLLM cannot serve the model.
    """

    def __init__(
        self,
        vllm: Any,
        model_dir: str,
        options: dict[str, Any],
        *,
        end_ids: Collection[int],
        on_cpu: bool,
        entropy: bool,
    ) -> None:
        self._vllm = vllm
        self._on_cpu = on_cpu
        self._end_ids = sorted(end_ids)
        self._adapters: Any = None
        """vLLM's request object for the newest adapters."""
        options = options | {
            "enable_sleep_mode": not on_cpu,
            "load_format": "dummy",
            "trust_remote_code": False,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
        }
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            options["distributed_executor_backend"] = "external_launcher"
        self.llm: Any = self._start(model_dir, options)
        self._take_entropy: Callable[[str, int], list[float] | None] | None = None
        """(key, tokens) -> entropies of a finished response."""
        if entropy:
            from paw.rollouts.engines.entropy import take  # needs vLLM

            self._take_entropy = take

    def _start(self, model_dir: str, options: dict[str, Any]) -> Any:
        """Return vLLM's engine, after it has sampled one token."""
        try:
            with global_state_kept():
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

    def add(self, request: Request) -> None:
        key = str(request.key)
        entropy_key = key if self._take_entropy else ""
        kinds = self._vllm.sampling_params.RequestOutputKind
        parameters = self._vllm.SamplingParams(
            **sampling_options(request, self._end_ids, entropy_key),
            output_kind=kinds.CUMULATIVE if request.stopped else kinds.FINAL_ONLY,
        )
        prompt = self._vllm.inputs.tokens_input(request.prompt_ids)
        self.llm.llm_engine.add_request(key, prompt, parameters, lora_request=self._adapters)

    def step(self, requests: Mapping[int, Request]) -> list[Completion]:
        """Sample one token for each of `requests`, which are all that run, by key.

        Returns those that finished. Raises EngineDiedError if vLLM dies.
        """
        with _naming("sampling"):
            outputs = self.llm.llm_engine.step()

        completions = []
        stopped_early = []
        for output in outputs:
            key = int(output.request_id)
            response = output.outputs[0]
            if not output.finished:
                stopped = requests[key].stopped
                if not stopped or not stopped(response.token_ids):
                    continue
                stopped_early.append(output.request_id)
            completions.append(self._completion(key, response, output.num_cached_tokens or 0))
        if stopped_early:
            # Use our names, because the engine ignores its own.
            self.llm.llm_engine.abort_request(stopped_early)
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

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Load parameters, given by their names in a model's files, in place."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(parameters)})
        if self._on_cpu:
            self.llm.apply_model(_repack_experts)

    def load_adapters(self, adapters: Iterable[tuple[str, Tensor]], lora: LoraConfig) -> None:
        """Load adapters, which all later requests use."""
        make_request = self._vllm.lora.request.LoRARequest
        with tempfile.TemporaryDirectory(prefix="paw-") as folder:
            dtype = self.llm.llm_engine.model_config.dtype
            write_adapters(Path(folder), adapters, dtype, lora, "adapter_model.safetensors")
            request = make_request("paw", 1, folder, load_inplace=True)
            self.llm.llm_engine.add_lora(request)
        # Requests name another one. With load_inplace, vLLM would read the files at every step.
        self._adapters = make_request("paw", 1, "loaded")

    def forget_prompts(self) -> None:
        """Drop the cached prompts. Raises RuntimeError if requests are running."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: requests are still running")

    def sleep(self, level: int) -> None:
        """Free the KV cache, and move the weights to the host (level 1) or drop them (level 2)."""
        with _naming("going to sleep"):
            self.llm.sleep(level=level)

    def wake_weights(self) -> None:
        """Take memory for the weights again."""
        torch.cuda.empty_cache()  # vLLM needs the blocks that torch keeps for reuse
        self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Take memory for the KV cache again."""
        self.llm.wake_up(tags=["kv_cache"])

    def close(self) -> None:
        with suppress(Exception):  # it may have died
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None


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
    """Turn any error that vLLM dies of into an EngineDiedError of one line.

    Out-of-memory errors and the end of another rank are raised unchanged.
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


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Restore what construction changes: random generators and torch's number of threads."""
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
