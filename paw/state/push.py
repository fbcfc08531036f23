"""An exported model sent to the Hugging Face hub."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError

from paw.errors import UserError, describe
from paw.hub import is_hub_name, unreachable

EXPORTED = (
    "README.md", "paw.toml", "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer*", "*.model", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt",
)  # fmt: skip
"""What of an exported folder is sent; whatever else lies there stays."""


def check_push(name: str) -> None:
    """UserError for what is no USER/NAME; before a model is exported."""
    if not is_hub_name(name):
        raise UserError(f"--push {name}: it takes USER/NAME, of letters, digits, '-', '_' and '.'")


def push(folder: Path, name: str, *, public: bool = False) -> str:
    """Send an exported model to the hub as USER/NAME, made private unless it is there already; returns its address.

    The licence of the base model is taken over where its card says one. UserError: no token, no
    network, no right; the folder stays as it is.
    """
    why = unreachable() or (
        "" if get_token() else "there is no token: `hf auth login`, or set HF_TOKEN"
    )
    try:
        if not why:
            api = HfApi()
            card: Any = ModelCard.load(folder / "README.md")
            api.create_repo(name, private=not public, exist_ok=True)
            if card.data.base_model and not card.data.license:
                with suppress(HfHubHTTPError):  # not there, or not for this token
                    card.data.license = getattr(
                        api.model_info(card.data.base_model).card_data, "license", None
                    )
                    card.save(folder / "README.md")
            files = [file.name for file in folder.iterdir() if any(map(file.match, EXPORTED))]
            return str(api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=files))
    except Exception as error:  # of the client, of HTTP, of what the hub says to the card
        why = describe(error)
    raise UserError(f"--push {name}: {why}; the model is in {folder}")
