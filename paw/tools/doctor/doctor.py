"""`paw doctor`: what is installed and what is missing.

Torch may be missing too, so this module does not load it. The checks of a model and of the kernels
need torch, so they are in their own modules.
"""

import argparse
import importlib.util
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

from paw.config import plugins
from paw.envs.terminal import sandbox
from paw.errors import UserError
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
    "aiohttp": (
        "env.retriever = URL, engine.type = 'server', agent.type = 'command'",
        "'paw-trainer[servers]'",
    ),
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
"""(purpose, what to install with pip) by module."""


def run(options: argparse.Namespace, _: object) -> int:
    """Check the kernels with --kernels, a model with --model, else the installation.

    Returns 0 if all is well, 1 if something required is missing or wrong.
    """
    if options.kernels:
        from paw.tools.doctor import kernels  # loads torch

        return kernels.check(options.shape, options.model)
    if options.model:
        from paw.tools.doctor import model  # loads torch

        return model.run(options.model, as_json=options.json)
    return _check_installation()


def _check_installation() -> int:
    """Print what is installed. Returns 0 if training can start, 1 if a requirement is missing."""
    print(f"paw {__version__}, Python {platform.python_version()} ({sys.executable})")
    installed = metadata.packages_distributions()
    complete = installed.keys() >= set(REQUIRED)
    for name in REQUIRED:
        if name in installed:
            print(f"  ok       {name} {metadata.version(name)}")
        else:
            print(f"  MISSING  {name}: required; pip install paw-trainer")
    for module, (purpose, package) in EXTRAS.items():
        if module in installed and importlib.util.find_spec(module):
            print(f"  ok       {module} {metadata.version(installed[module][0])}: {purpose}")
        else:
            print(f"  -        {module}: {purpose}; pip install {package}")
    print(_sandbox_line())
    for name in plugins.names("engines"):
        print(_engine_line(name, installed))
    if complete:
        from paw.tools.doctor.device import print_device  # loads torch, if it is there

        print_device()
        print("ready: paw train quickstart")
    return 0 if complete else 1


def _sandbox_line() -> str:
    """Say whether the terminal can be played here."""
    problem = sandbox.problem()
    if problem:
        return f"  -        bubblewrap: env.name = 'terminal'; {problem}; {sandbox.FIX}"
    return "  ok       bubblewrap: env.name = 'terminal'; a sandbox starts here"


def _engine_line(name: str, installed: Mapping[str, list[str]]) -> str:
    """Say what an engine can do or needs. `installed` has package names by module."""
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
    """Say in words where an engine runs and what it returns."""
    where = "on the trainer's device" if engine_type.shares_card else "on devices of its own"
    gives = ["log-probs"]
    if engine_type.gives_entropy:
        gives.append("entropies")
    if engine_type.gives_versions:
        gives.append("the version of each token's weights")
    return f"{where}; gives {', '.join(gives)}"
