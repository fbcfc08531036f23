"""The paper's own numbers (arXiv 2606.02388) for tables beside ours: what paper.toml holds of its Tables 1 to 4."""

import tomllib
from pathlib import Path

from paw.config import Config

PAPER: dict[str, dict[str, dict[str, float]]] = tomllib.loads(
    Path(__file__).with_name("paper.toml").read_text(encoding="utf-8")
)
"""Success in per cent: env.name -> start of the model's name -> arm."""
TITLES = {"alfworld": "ALFWorld", "webshop": "WebShop", "search": "search QA"}


def columns(config: Config) -> dict[str, dict[str, float]]:
    """Title -> arm -> success: of the configuration's environment and model, or of the smallest of each environment.

    >>> from paw.recipe import load
    >>> columns(load("webshop-grpo-14b"))
    {'WebShop, Qwen2.5-14B': {'grpo': 74.7, 'paw': 77.1}}
    """
    found = {(env, model): arms for env, models in PAPER.items() for model, arms in models.items()}
    name = config.model.path.rpartition("/")[2] + "-"
    chosen = [(env, model) for env, model in found if env == config.env.name and name.startswith(f"{model}-")]
    chosen = chosen or [(env, next(iter(models))) for env, models in PAPER.items()]
    return {f"{TITLES[env]}, {model}": found[env, model] for env, model in chosen}
