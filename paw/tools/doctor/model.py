"""`paw doctor --model PATH`: finds out whether a model can be trained.

The trainer must compute the model's own log-probs, and its chat template must be usable.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from paw.errors import UserError
from paw.io.hub import check_hub
from paw.model.attention import pick_attention
from paw.model.check import check_model, check_path, number_of_experts
from paw.model.dtype import pick_dtype
from paw.model.loading import load_policy, load_tokenizer
from paw.model.policy import DTYPES, Policy, decoder_layers, pick_backend, pick_device
from paw.rollouts.engines.generation import check_sampling
from paw.rollouts.text.chat import Chat

Result = TypeVar("Result")


def run(path: str, *, as_json: bool) -> int:
    """Print the findings about a model. Returns 0 if it can be trained, else 1.

    Raises UserError if there is no such model.
    """
    check_hub(path)
    findings = inspect(path)
    if as_json:
        print(json.dumps(findings, indent=1))
    else:
        print("\n".join(_lines(findings)))
    return 1 if findings["problems"] else 0


def inspect(path: str) -> dict[str, Any]:
    """Return the findings about a model, which can be written as JSON.

    Each difference is the largest one, in nats, or None if it cannot be computed.
    """
    device = pick_device("auto")
    dtype = pick_dtype(device)
    attention = pick_attention("auto", device, DTYPES[dtype])
    backend = pick_backend("auto", device, dtype, path)
    policy = _load(path, device)
    checks = _Checks(policy, path)
    return {
        "path": path,
        **_shape_of(policy),
        "device": device.type,
        "dtype": dtype,
        "attention": attention,
        "head_backend": backend,
        "vocabulary": policy.head_weight.shape[0],
        "logit_scale": policy.transform.scale,
        "logit_softcap": policy.transform.softcap,
        "difference_float32": checks.float32_difference,
        "difference_bfloat16": checks.bfloat16_difference,
        "transformers_engine": checks.sampling,
        "chat_template": "usable" if checks.chat else checks.problems[-1],
        "template_opens": checks.chat.opened if checks.chat else None,
        "problems": checks.problems,
    }


def _load(path: str, device: torch.device) -> Policy:
    """Load the model in bfloat16 on any device, as a GPU may train what a CPU inspects."""
    return load_policy(
        path,
        device=device,
        check=False,
        dtype="bfloat16",
        attention=pick_attention("auto", device, DTYPES["bfloat16"]),
        head_backend=pick_backend("auto", device, "bfloat16", path),
    )


def _shape_of(policy: Policy) -> dict[str, Any]:
    """Return what the model's configuration says about its decoder."""
    config: Any = policy.lm.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = ["full_attention"] * len(decoder_layers(policy.lm))
    experts = number_of_experts(config)
    return {
        "model_type": config.model_type,
        "parameters": policy.lm.num_parameters(),
        "layers": dict(Counter(layer_types)),
        "experts": experts,
        "experts_per_token": getattr(config, "num_experts_per_tok", None) if experts else None,
    }


class _Checks:
    """The checks of a model. One that fails adds to `problems` and has the result None."""

    def __init__(self, policy: Policy, path: str) -> None:
        self.path = path
        self.problems: list[str] = []
        self.float32_difference = self._attempt(lambda: check_model(policy, path))
        self.bfloat16_difference: float | None = None
        if not self.problems:
            self.bfloat16_difference = self._attempt(lambda: check_path(policy, path))
        self.chat = self._attempt(lambda: Chat(load_tokenizer(path)))
        self.sampling = _sampling(policy)

    def _attempt(self, check: Callable[[], Result]) -> Result | None:
        try:
            return check()
        except UserError as error:
            self.problems.append(str(error).removeprefix(f"model.path = '{self.path}': "))
            return None


def _sampling(policy: Policy) -> str:
    """Say how far the transformers engine is off, or why it cannot sample."""
    try:
        return f"off by {check_sampling(policy.lm):.1e} nats"
    except UserError as error:
        return str(error)


def _lines(findings: dict[str, Any]) -> list[str]:
    """Write the findings for people, one per line, then problems and the verdict.

    Empty findings are left out.
    """
    lines = []
    for key, value in findings.items():
        if value and key != "problems":
            lines.append(f"  {key.replace('_', ' '):<21} {_text(value)}")
    lines += [f"  PROBLEM               {problem}" for problem in findings["problems"]]
    lines.append("cannot be trained as it is" if findings["problems"] else "can be trained")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    if isinstance(value, float):
        return f"{value:.1e} nats"
    if isinstance(value, int):
        return f"{value:,}"
    return value
