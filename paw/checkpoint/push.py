"""Uploads an exported model to the Hugging Face hub."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError

from paw.errors import UserError, describe
from paw.io.hub import is_hub_name, unreachable

EXPORTED = (
    "README.md", "paw.toml", "config.json", "generation_config.json",
    "*.safetensors", "*.safetensors.index.json", "tokenizer*", "*.model", "chat_template.jinja",
    "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
)  # fmt: skip
"""The files of an exported folder that are uploaded. Other files stay on this machine."""


def check_push(name: str) -> None:
    """Raise UserError if `name` is not USER/NAME. Called before a model is exported."""
    if not is_hub_name(name):
        raise UserError(f"--push {name}: use USER/NAME, made of letters, digits, '-', '_' and '.'")


def push(folder: Path, name: str, *, public: bool = False) -> str:
    """Upload an exported model to the hub as USER/NAME. Returns its address.

    A new model is private unless `public`. The model gets the base model's license if the base
    model's card names one. Raises UserError if there is no token, network or permission. The folder
    is left unchanged.
    """
    problem = unreachable()
    if not problem and not get_token():
        problem = "there is no token: run `hf auth login`, or set HF_TOKEN"
    if not problem:
        try:
            return _upload(folder, name, public=public)
        except Exception as error:  # from the client, HTTP, or the hub, which may reject the card
            problem = describe(error)
    raise UserError(f"--push {name}: {problem}; the model is in {folder}")


def _upload(folder: Path, name: str, *, public: bool) -> str:
    api = HfApi()
    card: Any = ModelCard.load(folder / "README.md")
    api.create_repo(name, private=not public, exist_ok=True)
    if card.data.base_model and not card.data.license:
        with suppress(HfHubHTTPError):  # the base model is missing, or hidden from this token
            base_model = api.model_info(card.data.base_model)
            card.data.license = getattr(base_model.card_data, "license", None)
            card.save(folder / "README.md")
    names = [path.name for path in folder.iterdir() if any(map(path.match, EXPORTED))]
    return str(api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=names))
