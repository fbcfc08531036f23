"""Hugging Face export: loads with AutoModelForCausalLM and `vllm serve` without a merge step."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor

from paw import __version__
from paw.config import Config
from paw.errors import quietly
from paw.files import fsync, fsync_tree, writing
from paw.hub import is_hub_name
from paw.model.policy import Policy, kept_buffers
from paw.recipe import dump

CARD = """---
{metadata}
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

    `method` names the updates where they are not those of `config`. Written beside it and moved in
    when complete; other files there stay. Raises UserError when it cannot be written.
    """
    world = (
        f"world model {config.wm.loss} (alpha {config.wm.alpha:g})"
        if config.wm.enabled
        else "no world model"
    )
    method = method or f"{config.advantage.type}, {world}"
    temp = folder.with_name(f".tmp_{folder.name}")
    try:
        with writing(f"the exported model to {folder}"):
            shutil.rmtree(temp, ignore_errors=True)  # of an export that was killed
            temp.mkdir(parents=True)
            policy.lm.save_pretrained(temp, state_dict=kept_buffers(policy.lm) | weights)
            _with_options(tokenizer, config.model.chat_template_kwargs).save_pretrained(temp)
            about = {
                "metadata": metadata(config),
                "version": __version__,
                "updates": step,
                "method": method,
            }
            card = CARD.format(config=config, **about)
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


def metadata(config: Config) -> str:
    """The head of the model card, YAML: what the hub knows a model by.

    Folders of this disk are no names there.
    """
    base, data = config.model.path, str(getattr(config.env, "data", None))
    at_hub = [
        name for name in (base, data) if is_hub_name(name) and not Path(name).expanduser().exists()
    ]
    tags = [
        "paw",
        "reinforcement-learning",
        "language-agent",
        config.env.name,
        config.advantage.type,
    ]
    readme = Path(base).expanduser() / "README.md"
    licence = None
    with quietly():  # whatever it holds
        licence = (
            getattr(ModelCard.load(readme).data, "license", None) if readme.is_file() else None
        )
    card = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base if base in at_hub else None,
        datasets=[data] if data in at_hub else None,
        license=licence,
        tags=[*tags, *(["world-model"] if config.wm.enabled else [])],
    )
    return card.to_yaml()


def _with_options(tokenizer: Any, options: dict[str, Any]) -> Any:
    """The tokenizer with `model.chat_template_kwargs` written into its chat template, so that servers need not know."""
    if not options:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    settings = "".join(
        f"{{%- set {key} = {json.dumps(value)} -%}}\n" for key, value in options.items()
    )
    tokenizer.chat_template = settings + tokenizer.chat_template.removeprefix(settings)
    return tokenizer
