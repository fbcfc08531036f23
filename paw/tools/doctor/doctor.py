"""`paw doctor`: what is installed and what is missing.

With --model PATH: whether the trainer computes the model's own log-probs, checked before any
training.
"""

import importlib.util
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from paw.config import plugins
from paw.errors import UserError
from paw.io.hub import check_hub
from paw.rollouts.engines import find_engine
from paw.rollouts.engines.base import Engine
from paw.version import __version__

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
EXTRAS = {
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
"""Module -> (what it is for, what to install with pip)."""


def run() -> int:
    """Print what is installed.

    Returns 0 if training can start, 1 if something required is missing.
    """
    print(f"paw {__version__}, Python {platform.python_version()} ({sys.executable})")
    installed = metadata.packages_distributions()
    ok = installed.keys() >= set(REQUIRED)
    for name in REQUIRED:
        if name in installed:
            print(f"  ok       {name} {metadata.version(name)}")
        else:
            print(f"  MISSING  {name}: required; pip install -e .")
    for module, (purpose, package) in EXTRAS.items():
        if module in installed and importlib.util.find_spec(module):
            print(f"  ok       {module} {metadata.version(installed[module][0])}: {purpose}")
        else:
            print(f"  -        {module}: {purpose}; pip install {package}")
    for name in plugins.names("engines"):
        print(_engine_line(name, installed))
    if ok:
        _print_device()
        print("ready: paw train quickstart")
    return 0 if ok else 1


def _engine_line(name: str, installed: Mapping[str, list[str]]) -> str:
    """What an engine can do, or what it needs. `installed`: module -> names of its packages."""
    try:
        engine_type = find_engine(name)
    except UserError as error:
        return f"  -        {error}"
    versions = []
    for module, package in engine_type.requires.items():
        if module not in installed or not importlib.util.find_spec(module):
            return f"  -        engine {name}: needs {module}; pip install {package}"
        versions.append(f" ({module} {metadata.version(installed[module][0])})")
    return f"  ok       engine {name}{''.join(versions)}: {_abilities(engine_type)}"


def _abilities(engine_type: type[Engine]) -> str:
    """Where an engine runs and what it gives, in words."""
    where = "on the trainer's device" if engine_type.shares_card else "on devices of its own"
    gives = ["log-probs"]
    if engine_type.gives_entropy:
        gives.append("entropies")
    if engine_type.gives_versions:
        gives.append("the version of each token's weights")
    return f"{where}; gives {', '.join(gives)}"


def _print_device() -> None:
    import torch

    from paw.model.attention import pick_attention
    from paw.model.dtype import pick_dtype
    from paw_kernels import best_backend, why_not_backend

    if torch.cuda.is_available():
        device = torch.device("cuda")
        backends = ("triton", "cuda")
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            print(
                f"  ok       GPU {i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            )
    else:
        device = torch.device("cpu")
        backends = ("cpu",)
        print(
            "  -        no GPU seen by torch; training runs on the CPU with "
            f"{torch.get_num_threads()} threads"
        )

    dtype_name = pick_dtype(device)
    dtype = getattr(torch, dtype_name)
    why = "" if dtype_name == "bfloat16" else " (this CPU has no instructions for bfloat16)"
    print(f"  ok       model.dtype = 'auto' on {device.type}: {dtype_name}{why}")
    print(f"  ok       attention on {device.type}: {pick_attention('auto', device, dtype)}")
    print(f"  ok       head backend on {device.type}: {best_backend(device, dtype)}")
    for backend in backends:
        reason = why_not_backend(backend, device, dtype)
        if reason:
            print(f"  -        head backend {backend}: {reason}")


def run_model(path: str, *, as_json: bool) -> int:
    """Print the findings about a model. Returns 0 if it can be trained, else 1.

    Raises UserError if there is none.
    """
    check_hub(path)
    findings = inspect(path)
    print(json.dumps(findings, indent=1) if as_json else "\n".join(_lines(findings)))
    return 1 if findings["problems"] else 0


def inspect(path: str) -> dict[str, Any]:
    """The findings about a model, JSON-able.

    Differences are the largest, in nats; None if they cannot be computed.
    """
    from paw.model.attention import pick_attention
    from paw.model.check import check_model, check_path, number_of_experts
    from paw.model.dtype import pick_dtype
    from paw.model.loading import load_policy, load_tokenizer
    from paw.model.policy import DTYPES, decoder_layers, pick_backend, pick_device
    from paw.rollouts.engines.generation import check_sampling
    from paw.rollouts.text.chat import Chat

    device = pick_device("auto")
    dtype = pick_dtype(device)
    attention = pick_attention("auto", device, DTYPES[dtype])
    backend = pick_backend("auto", device, dtype, path)
    # bfloat16 on every device: a model that is inspected on a CPU may be trained on a GPU.
    policy = load_policy(
        path,
        device=device,
        check=False,
        dtype="bfloat16",
        attention=pick_attention("auto", device, DTYPES["bfloat16"]),
        head_backend=pick_backend("auto", device, "bfloat16", path),
    )
    shape: Any = policy.lm.config.get_text_config()
    layer_types = getattr(shape, "layer_types", None)
    if not layer_types:
        layer_types = ["full_attention"] * len(decoder_layers(policy.lm))
    experts = number_of_experts(shape)
    problems: list[str] = []

    def attempt(check: Callable[[], Any]) -> Any:
        """What `check` returns; a UserError is noted among the problems, and the result is None."""
        try:
            return check()
        except UserError as error:
            problems.append(str(error).removeprefix(f"model.path = '{path}': "))
            return None

    float32_difference = attempt(lambda: check_model(policy, path))
    bfloat16_difference = None if problems else attempt(lambda: check_path(policy, path))
    chat = attempt(lambda: Chat(load_tokenizer(path)))
    try:
        sampling = f"off by {check_sampling(policy.lm):.1e} nats"
    except UserError as error:
        sampling = str(error)
    return {
        "path": path,
        "model_type": shape.model_type,
        "parameters": policy.lm.num_parameters(),
        "layers": dict(Counter(layer_types)),
        "experts": experts,
        "experts_per_token": getattr(shape, "num_experts_per_tok", None) if experts else None,
        "device": device.type,
        "dtype": dtype,
        "attention": attention,
        "head_backend": backend,
        "vocabulary": policy.head_weight.shape[0],
        "logit_scale": policy.transform.scale,
        "logit_softcap": policy.transform.softcap,
        "difference_float32": float32_difference,
        "difference_bfloat16": bfloat16_difference,
        "transformers_engine": sampling,
        "chat_template": "usable" if chat else problems[-1],
        "template_opens": chat.opened if chat else None,
        "problems": problems,
    }


def _lines(findings: dict[str, Any]) -> list[str]:
    """The findings for people, a line each, then problems and the verdict.

    Empty findings are left out.
    """
    lines = []
    for key, value in findings.items():
        if value and key != "problems":
            lines.append(f"  {key.replace('_', ' '):<21} {_text(value)}")
    lines += [f"  PROBLEM               {problem}" for problem in findings["problems"]]
    lines.append("cannot be trained as it is" if findings["problems"] else "can be trained")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    if isinstance(value, float):
        return f"{value:.1e} nats"
    if isinstance(value, int):
        return f"{value:,}"
    return value
