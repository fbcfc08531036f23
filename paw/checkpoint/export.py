"""Export to the Hugging Face format, which AutoModelForCausalLM and `vllm serve` load directly."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor

from paw.config.recipe import dump
from paw.config.sections import Config
from paw.errors import quietly
from paw.io.files import fsync, fsync_tree, writing
from paw.io.hub import is_hub_name
from paw.model.policy import Policy, kept_buffers
from paw.version import __version__

CARD = """---
{metadata}
---
# {config.run.name}

Trained from `{config.model.path}` on {config.env.name} \
with [PaW](https://arxiv.org/abs/2606.02388) {version}: \
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
    """Write weights, tokenizer, chat template and a model card to `folder`, and return it.

    `weights` come from `full_parameters`, each tied weight once. `method` describes the updates if
    `config` did not make them. The files are written to a different folder and moved once all are
    complete. Other files in `folder` stay. Raises UserError if they cannot be written.
    """
    if not method:
        world_model = "no world model"
        if config.wm.enabled:
            world_model = f"world model {config.wm.loss} (alpha {config.wm.alpha:g})"
        method = f"{config.advantage.type}, {world_model}"
    card = CARD.format(
        config=config, metadata=metadata(config), version=__version__, updates=step, method=method
    )
    served_tokenizer = _with_options(tokenizer, config.model.chat_template_kwargs)

    temporary = folder.with_name(f".tmp_{folder.name}")
    try:
        with writing(f"the exported model to {folder}"):
            shutil.rmtree(temporary, ignore_errors=True)  # left over from an export that was killed
            temporary.mkdir(parents=True)
            policy.lm.save_pretrained(temporary, state_dict=kept_buffers(policy.lm) | weights)
            served_tokenizer.save_pretrained(temporary)
            (temporary / "README.md").write_text(card, encoding="utf-8")
            (temporary / "paw.toml").write_text(dump(config), encoding="utf-8")
            fsync_tree(temporary)

            folder.mkdir(exist_ok=True)
            for path in temporary.iterdir():
                path.replace(folder / path.name)
            fsync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def metadata(config: Config) -> str:
    """Return the YAML head of the model card. The hub uses it to find models.

    Names that are folders on this disk are left out.
    """
    base_model = config.model.path
    dataset = str(getattr(config.env, "data", None))
    tags = [
        "paw",
        "reinforcement-learning",
        "language-agent",
        config.env.name,
        config.advantage.type,
    ]
    if config.wm.enabled:
        tags.append("world-model")
    card = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model if _is_at_hub(base_model) else None,
        datasets=[dataset] if _is_at_hub(dataset) else None,
        license=_license_of(Path(base_model).expanduser()),
        tags=tags,
    )
    return card.to_yaml()


def _is_at_hub(name: str) -> bool:
    return is_hub_name(name) and not Path(name).expanduser().exists()


def _license_of(model: Path) -> str | None:
    """Return the license named by the card in a model's folder, or None."""
    readme = model / "README.md"
    with quietly():  # the card may hold anything
        if readme.is_file():
            return getattr(ModelCard.load(readme).data, "license", None)
    return None


def _with_options(tokenizer: Any, options: dict[str, Any]) -> Any:
    """Return the tokenizer with `model.chat_template_kwargs` written into its chat template, so
    that servers do not need to know them."""
    if not options:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    settings = "".join(
        f"{{%- set {key} = {json.dumps(value)} -%}}\n" for key, value in options.items()
    )
    tokenizer.chat_template = settings + tokenizer.chat_template.removeprefix(settings)
    return tokenizer
