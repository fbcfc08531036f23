"""Checks quickly whether the Hugging Face hub can be reached, without half a minute of retries.

Imports no torch.
"""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from paw.errors import UserError

CONNECT_S = 3.0
"""Seconds to wait for a connection to the hub."""
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def check_hub(name: str) -> None:
    """Raise UserError if the model is not on this machine and the hub cannot be reached.

    `name` is a folder or a name on the hub. Files of the latter may be in the hub's cache.
    """
    path = Path(name).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise UserError(
                f"model.path = '{name}': there is no config.json in it, "
                "so it is not a Hugging Face model"
            )
        return
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(
            f"model.path = '{name}': there is no such folder; "
            "give a model's folder, its name on the hub, or 'quickstart'"
        )
    reason = unreachable()
    if reason and not _in_cache(name):
        raise UserError(
            f"model.path = '{name}': there is no such folder, it is not in the hub's cache, "
            f"and {reason}"
        )


def _in_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no such name can be on the hub
        return False


def unreachable() -> str:
    """Return why the hub cannot be reached, or "" if it answers or there is a proxy."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(variable) for variable in PROXIES):
        return ""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    usual_port = 80 if url.scheme == "http" else 443
    try:
        port = url.port or usual_port
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{url.hostname} cannot be reached ({error.strerror or error})"
    return ""


def is_hub_name(name: str) -> bool:
    """Whether this could be the name of a model on the hub: USER/NAME."""
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return "/" in name
