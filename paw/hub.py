"""The Hugging Face hub without a network: an answer at once in place of half a minute of attempts. No torch."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from paw.errors import UserError

PATIENCE_S = 3.0


def check_hub(name: str) -> None:
    """UserError where `name` is no model's folder, not in the hub's cache, and the hub cannot be reached."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"model.path = '{name}': there is no config.json in it")
    if name.startswith(("/", ".", "~")) and not path.exists():
        raise UserError(f"model.path = '{name}': there is no such folder")
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    proxy = any(os.environ.get(variable) for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if path.exists() or (proxy and not offline):
        return
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    why = "HF_HUB_OFFLINE is set"
    if not offline:
        try:
            port = url.port or (80 if url.scheme == "http" else 443)
            socket.create_connection((url.hostname or "", port), timeout=PATIENCE_S).close()
            return
        except OSError as error:
            why = f"{url.hostname} cannot be reached ({error.strerror or error})"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise UserError(f"model.path = '{name}': there is no such folder, it is not in the hub's cache, and {why}")
