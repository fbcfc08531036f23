"""`paw doctor`: what is installed and what is missing.

Torch may be missing too, so this module does not load it. The checks of a model and of the kernels
need torch, so they are in their own modules.
"""

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

from paw.config import plugins
from paw.envs.terminal import sandbox
from paw.errors import UserError
from paw.rollouts.engines import find_engine
from paw.rollouts.engines.base import Engine
from paw.tools.doctor.check import Check
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

    Returns 0 if all is well, 1 if something required is missing or wrong. Raises UserError for
    options that do not go together.
    """
    if options.kernels:
        if options.json:
            raise UserError("paw doctor --kernels prints no JSON; leave --json out")
        from paw.tools.doctor import kernels  # loads torch

        return kernels.check(options.shape, options.model)
    if options.model:
        from paw.tools.doctor import model  # loads torch

        return model.run(options.model, as_json=options.json)
    return _check_installation(as_json=options.json)


def _check_installation(*, as_json: bool) -> int:
    """Print what is installed. Returns 0 if training can start, 1 if a requirement is missing."""
    installed = metadata.packages_distributions()
    is_ready = installed.keys() >= set(REQUIRED)
    checks = [*_required(installed), *_extras(installed), _sandbox()]
    checks += [_engine(name, installed) for name in plugins.names("engines")]
    if is_ready:
        from paw.tools.doctor.device import device_checks  # loads torch, if it is there

        checks += device_checks()

    if as_json:
        report = {
            "paw": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "ready": is_ready,
            "checks": [check._asdict() for check in checks],
        }
        print(json.dumps(report, indent=1))
        return 0 if is_ready else 1
    print(f"paw {__version__}, Python {platform.python_version()} ({sys.executable})")
    for check in checks:
        print(check.line())
    if is_ready:
        print("ready: paw train quickstart")
    return 0 if is_ready else 1


def _required(installed: Mapping[str, list[str]]) -> list[Check]:
    """Check what every run needs. `installed` has package names by module."""
    checks: list[Check] = []
    for name in REQUIRED:
        if name in installed:
            checks.append(Check("ok", f"{name} {metadata.version(name)}"))
        else:
            checks.append(Check("missing", f"{name}: required; pip install paw-trainer"))
    return checks


def _extras(installed: Mapping[str, list[str]]) -> list[Check]:
    """Check the libraries of the extras."""
    checks: list[Check] = []
    for module, (purpose, package) in EXTRAS.items():
        if module in installed and importlib.util.find_spec(module):
            version = metadata.version(installed[module][0])
            checks.append(Check("ok", f"{module} {version}: {purpose}"))
        else:
            checks.append(Check("absent", f"{module}: {purpose}; pip install {package}"))
    return checks


def _sandbox() -> Check:
    """Check whether the terminal can be played here."""
    problem = sandbox.problem()
    if problem:
        return Check("absent", f"bubblewrap: env.name = 'terminal'; {problem}; {sandbox.FIX}")
    return Check("ok", "bubblewrap: env.name = 'terminal'; a sandbox starts here")


def _engine(name: str, installed: Mapping[str, list[str]]) -> Check:
    """Check what an engine can do or needs."""
    try:
        engine_type = find_engine(name)
    except UserError as error:
        return Check("absent", str(error))
    versions = []
    for module, package in engine_type.requires.items():
        if module not in installed or not importlib.util.find_spec(module):
            return Check("absent", f"engine {name}: needs {module}; pip install {package}")
        versions.append(f" ({module} {metadata.version(installed[module][0])})")
    return Check("ok", f"engine {name}{''.join(versions)}: {_abilities(engine_type)}")


def _abilities(engine_type: type[Engine]) -> str:
    """Say in words where an engine runs and what it returns."""
    where = "on the trainer's device" if engine_type.shares_card else "on devices of its own"
    gives = ["log-probs"]
    if engine_type.gives_entropy:
        gives.append("entropies")
    if engine_type.gives_versions:
        gives.append("the version of each token's weights")
    return f"{where}; gives {', '.join(gives)}"
