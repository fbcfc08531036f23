"""Loading a causal LM or a tokenizer, from a folder or by its Hugging Face name.

Code that comes with a model's files is never run, and pickles are never read.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from paw.errors import UserError, clean
from paw.io.hub import check_hub
from paw.model.check import check_model, check_rope, refused
from paw.model.policy import Policy

# transformers' progress bars and loading report would break up our lines of progress.
# `_check_weights` raises the problems in that report.
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model folder or hub name. Raises UserError if there is none."""
    check_hub(str(path))
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # broken files raise all kinds of errors
        raise _broken(path, f"no tokenizer found ({_reason(error)})") from None


def load_policy(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    weights: torch.dtype = torch.float32,
    on_device: bool = True,
    empty: bool = False,
    check: bool = True,
    longest: int = 0,
    **options: Any,
) -> Policy:
    """Load the policy of a model folder or Hugging Face name, with parameters of dtype `weights`.

    The policy will compute on `device`. Without `on_device`, its parameters stay in host memory.
    With `empty`, its parameters and buffers have arbitrary values, for a rank that will be sent the
    real ones. `longest` is the maximum number of tokens in a row (`check_rope`). `options` are
    those of Policy.

    Raises UserError if there is no such model, or if its weights do not fit its config.json or are
    not finite. With `check`, also raises it if the trainer's log-probs differ from the model's own
    (`model.check`).
    """
    check_hub(str(path))
    lm, report = _load_lm(path, weights, empty=empty)
    check_rope(lm, str(path), longest)
    if empty:
        lm.tie_weights()  # no_init_weights skips this too
        return _make_policy(lm, path, device, on_device, options)

    _check_weights(lm, path, report)
    policy = _make_policy(lm, path, device, on_device, options)
    if check:
        check_model(policy, str(path), longest)
    return policy


def _load_lm(
    path: str | Path, weights: torch.dtype, *, empty: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return (model, transformers' report on its weights). An `empty` model has an empty report."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_architecture(config, str(path))
        if empty:
            with no_init_weights():
                lm = AutoModelForCausalLM.from_config(
                    config, dtype=weights, attn_implementation="sdpa"
                )
            return lm, {}
        lm_and_report: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            trust_remote_code=False,  # if not given, transformers asks on standard input
            dtype=weights,
            attn_implementation="sdpa",
            output_loading_info=True,
            use_safetensors=True,  # never a pickle
            ignore_mismatched_sizes=True,  # `_check_weights` names them
        )
        return lm_and_report
    except UserError:
        raise
    except Exception as error:  # broken files and settings raise all kinds of errors
        raise _broken(path, f"cannot be loaded: {_reason(error)}") from None


def check_architecture(config: Any, path: str) -> None:
    """Raise UserError unless config.json describes a causal LM whose attention can be replaced."""
    model_classes: Any = AutoModelForCausalLM._model_mapping
    model_class = model_classes.get(type(config), None)
    subject = f"model.path = '{path}': model type '{config.model_type}'"
    if model_class is None:
        raise UserError(f"{subject} is not a causal language model of transformers")
    if not getattr(model_class, "_supports_sdpa", True):
        raise UserError(
            f"{subject} cannot be trained here: it mixes tokens with its own code "
            "(attention sinks, ALiBi, recurrence, ...), not with torch's attention, "
            "which PaW replaces to keep packed rows apart"
        )


def _check_weights(lm: PreTrainedModel, path: str | Path, report: dict[str, Any]) -> None:
    """Raise UserError if weights are missing, not finite, or of the wrong shape."""
    for name, stored_shape, expected_shape in sorted(report["mismatched_keys"]):
        raise _broken(
            path,
            f"'{name}' has shape {list(stored_shape)} in its files, "
            f"{list(expected_shape)} in its config.json",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise _broken(
            path, f"{len(missing)} weights are missing from its files, the first is '{missing[0]}'"
        )
    for name, parameter in lm.named_parameters():
        if not parameter.isfinite().all():
            raise _broken(path, f"'{name}' holds values that are not finite")


def _make_policy(
    lm: PreTrainedModel,
    path: str | Path,
    device: torch.device | str,
    on_device: bool,
    options: dict[str, Any],
) -> Policy:
    try:
        policy = Policy(lm, **options)
    except UserError:
        raise
    except Exception as error:  # Hugging Face's: no checkpointing, layers of several shapes
        reason = f"cannot be trained here: {clean(_reason(error), 200)}"
        raise refused(lm, str(path), reason) from None
    policy.device = torch.device(device)
    if on_device:
        policy = policy.to(device)
    return policy


def _broken(path: str | Path, reason: str) -> UserError:
    return UserError(f"model.path = '{path}': {reason}")


def _reason(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has no message."""
    message = str(error).strip()
    if "trust_remote_code" in message:
        return "its files point to custom code (auto_map), which PaW never runs"
    if not message:
        return type(error).__name__
    return message.splitlines()[0]
