"""`paw doctor --model PATH`: what a model is, and whether it is trained with its own log-probs, before any training."""

import json
from collections import Counter
from typing import Any

from paw.errors import UserError
from paw.hub import check_hub


def run(path: str, *, as_json: bool = False) -> int:
    """Print the findings; 0 when the model can be trained, else 1. Raises UserError where there is no model."""
    check_hub(path)
    found = inspect(path)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(lines(found)))
    return 1 if found["problems"] else 0


def inspect(path: str) -> dict[str, Any]:
    """JSON-able findings; differences are the largest in nats, None where they cannot be had."""
    from paw.model.attention import pick_attention
    from paw.model.check import check_model, check_path, check_sampling, number_of_experts
    from paw.model.policy import DTYPES, decoder_layers, load_policy, load_tokenizer, pick_backend, pick_device
    from paw.rollout.chat import Chat

    device = pick_device("auto")
    attention = pick_attention("auto", device, DTYPES["bfloat16"])
    backend = pick_backend("auto", device, "bfloat16")
    options: dict[str, Any] = {"dtype": "bfloat16", "attention": attention, "head_backend": backend}
    policy = load_policy(path, device=device, check=False, **options)
    shape: Any = policy.lm.config.get_text_config()
    kinds = getattr(shape, "layer_types", None) or ["full_attention"] * len(decoder_layers(policy.lm))
    experts = number_of_experts(shape)
    problems: list[str] = []

    def difference(check: Any, *given: Any) -> float | None:
        try:
            return check(*given)
        except UserError as error:
            problems.append(str(error).removeprefix(f"model.path = '{path}': "))
            return None

    exact = difference(check_model, policy, path)
    rounded = difference(check_path, policy, path) if not problems else None
    template, opened = "usable", None
    try:
        opened = Chat(load_tokenizer(path)).opened
    except UserError as error:
        template = str(error)
        problems.append(template)
    try:
        sampling = f"off by {check_sampling(policy.lm):.1e} nats"
    except UserError as error:
        sampling = str(error)
    return {
        "path": path,
        "model_type": shape.model_type,
        "parameters": policy.lm.num_parameters(),
        "layers": dict(Counter(kinds)),
        "experts": experts,
        "experts_per_token": getattr(shape, "num_experts_per_tok", None) if experts else None,
        "device": device.type,
        "attention": attention,
        "head_backend": backend,
        "vocabulary": policy.head_weight.shape[0],
        "logit_scale": policy.transform.scale,
        "logit_softcap": policy.transform.softcap,
        "difference_float32": exact,
        "difference_bfloat16": rounded,
        "transformers_engine": sampling,
        "chat_template": template,
        "template_opens": opened,
        "problems": problems,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The findings for a person, a line each, then problems and the verdict; what the model lacks is left out."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{count} {kind}" for kind, count in value.items())
        return f"{value:.1e} nats" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value

    shown = {key.replace("_", " "): value for key, value in found.items() if value and key != "problems"}
    verdict = "cannot be trained as it is" if found["problems"] else "can be trained"
    problems = [f"  PROBLEM               {problem}" for problem in found["problems"]]
    return [*(f"  {name:<21} {text(value)}" for name, value in shown.items()), *problems, verdict]
