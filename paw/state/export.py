"""Hugging Face export: loads with AutoModelForCausalLM and `vllm serve` without a merge step."""

import copy
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from paw import __version__
from paw.config import Config
from paw.envs import make_factory
from paw.errors import to_stderr
from paw.files import fsync, fsync_tree, writing
from paw.model.policy import Policy
from paw.recipe import dump
from paw.state.record import read_info

CARD = """---
library_name: transformers
tags: [paw, reinforcement-learning, language-agent]
---
# {config.run.name}

Trained from `{config.model.path}` on {config.env.name} with [PaW](https://arxiv.org/abs/2606.02388) {version}: \
{updates} updates of
{method}. The resolved configuration is in `paw.toml`.
"""


def export(
    policy: Policy,
    tokenizer: Any,
    folder: Path,
    weights: dict[str, Tensor],
    *,
    config: Config,
    step: int,
    method: str = "",
) -> Path:
    """Write weights (`full_parameters`, tied ones once), tokenizer, chat template and a model card to `folder`.

    `method` names the updates where they are not those of `config`. Written beside it and moved in when complete; other
    files there stay. Raises UserError when it cannot be written.
    """
    world = f"world model {config.wm.loss} (alpha {config.wm.alpha:g})" if config.wm.enabled else "no world model"
    method = method or f"{config.advantage.type}, {world}"
    temp = folder.with_name(f".tmp_{folder.name}")
    try:
        with writing(f"the exported model to {folder}"):
            shutil.rmtree(temp, ignore_errors=True)  # of an export that was killed
            temp.mkdir(parents=True)
            policy.lm.save_pretrained(temp, state_dict=weights)
            _with_options(tokenizer, config.model.chat_template_kwargs).save_pretrained(temp)
            card = CARD.format(config=config, version=__version__, updates=step, method=method)
            (temp / "README.md").write_text(card, encoding="utf-8")
            (temp / "paw.toml").write_text(dump(config), encoding="utf-8")
            fsync_tree(temp)
            folder.mkdir(exist_ok=True)
            for file in temp.iterdir():
                file.replace(folder / file.name)
            fsync(folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def _with_options(tokenizer: Any, options: dict[str, Any]) -> Any:
    """The tokenizer with `model.chat_template_kwargs` written into its chat template, so that servers need not know."""
    if not options:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    settings = "".join(f"{{%- set {key} = {json.dumps(value)} -%}}\n" for key, value in options.items())
    tokenizer.chat_template = settings + tokenizer.chat_template.removeprefix(settings)
    return tokenizer


def start_model(run: Path | None, config: Config, report: Callable[[str], None] = to_stderr) -> str:
    """The model that `run` (None: a new one) starts from: config.model.path, or a warm-up model.

    The warm-up model of a run begun is the one its run.json names, as long as it is there: one made by later code may
    have another tokenizer. `report` hears about a warm-up.
    """
    if config.model.path != "quickstart":
        return config.model.path
    start = str(read_info(run).get("start", "")) if run else ""
    if start and (Path(start) / "config.json").is_file():
        return start
    warmup: Any = importlib.import_module("paw.tools.warmup")
    return str(warmup.ensure_warm_model(config, make_factory(config), report).resolve())
