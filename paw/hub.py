"""The Hugging Face hub: without a network an answer at once, in place of half a minute of attempts.

No torch.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from paw.errors import UserError

PATIENCE_S = 3.0


def check_hub(name: str) -> None:
    """UserError where `name` is no model's folder, not in the hub's cache, and the hub cannot be reached."""
    path = Path(name).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        raise UserError(
            f"model.path = '{name}': there is no config.json in it, so it is not a Hugging Face model"
        )
    if not path.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise UserError(
            f"model.path = '{name}': there is no such folder; give a model's, its name on the hub, or 'quickstart'"
        )
    if path.exists() or not (why := unreachable()):
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    raise UserError(
        f"model.path = '{name}': there is no such folder, it is not in the hub's cache, and {why}"
    )


def unreachable() -> str:
    """Why the hub cannot be reached; "" where it answers, or a proxy is asked."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    if any(
        os.environ.get(variable)
        for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return ""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout=PATIENCE_S).close()
    except OSError as error:
        return f"{url.hostname} cannot be reached ({error.strerror or error})"
    return ""


def is_hub_name(name: str) -> bool:
    """Whether it could be USER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name
