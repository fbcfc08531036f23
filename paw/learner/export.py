"""Hugging Face export: loads with AutoModelForCausalLM and `vllm serve` without a merge step."""

from pathlib import Path
from typing import Any

from paw import __version__
from paw.config import Config, load
from paw.errors import UserError
from paw.learner.model import Policy, load_policy, load_tokenizer
from paw.trust import checkpoint

CARD = """---
library_name: transformers
tags: [paw, reinforcement-learning, language-agent]
---
# {name}

Trained from `{base}` on {env} with [PaW](https://arxiv.org/abs/2606.02388) {version}: {updates} updates of
{estimator}, {world}. The resolved configuration is in `paw.toml`.
"""


def export(policy: Policy, tokenizer: Any, folder: Path, *, config: Config, step: int) -> Path:
    """Write weights, tokenizer, chat template and a model card to `folder`.

    Raises UserError when it cannot be written.
    """
    from paw.config import dump

    world = f"world model {config.wm.loss} (alpha {config.wm.alpha:g})" if config.wm.enabled else "no world model"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        policy.lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        card = CARD.format(
            name=config.run.name,
            base=config.model.path,
            env=config.env.name,
            version=__version__,
            updates=step,
            estimator=config.advantage.estimator,
            world=world,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / "paw.toml").write_text(dump(config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the exported model to {folder}: {error.strerror or error}") from None
    return folder


def export_run(run: Path, *, checkpoint_name: str | None = None, out: Path | None = None) -> Path:
    """Export a checkpoint of a run directory (default: the newest that verifies); returns the folder written."""
    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: no run directory (config.toml is missing)")
    config = load(run / "config.toml")
    if checkpoint_name:
        path = run / "checkpoints" / checkpoint_name
    else:
        path = checkpoint.latest(run / "checkpoints", warn=print)
    if path is None or not path.is_dir():
        raise UserError(f"{run}: no checkpoint {checkpoint_name or ''} to export; see {run}/checkpoints")
    base = start_model(run, config)
    policy = load_policy(base)
    tensors, state = checkpoint.load(path, like={"model": policy.named_parameters_once()})
    policy.load(tensors["model"])
    return export(policy, load_tokenizer(base), out or run / "hf", config=config, step=state["step"])


def start_model(run: Path, config: Config) -> str:
    """The model a run started from: config.model.path, or the warm-up model it made."""
    if config.model.path != "quickstart":
        return config.model.path
    from paw.experience.envs import make_suite
    from paw.learner.warmup import ensure_warm_model

    return str(ensure_warm_model(config, make_suite(config.env), print))
