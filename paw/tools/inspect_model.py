"""`paw doctor --model PATH`: what a model is, and whether it is trained with its own log-probs, before any training."""

import json
from collections import Counter
from typing import Any

from paw.errors import UserError


def run(path: str, *, as_json: bool = False) -> int:
    """Print the findings; 0 when the model can be trained, else 1. Raises UserError where there is no model."""
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
    """The findings for a person."""
    experts = f", {found['experts']} experts, {found['experts_per_token']} a token" if found["experts"] else ""
    layers = ", ".join(f"{n} {kind}" for kind, n in found["layers"].items())
    scale, cap = found["logit_scale"], found["logit_softcap"]
    head = f"{found['head_backend']}, vocabulary {found['vocabulary']:,}"
    head += (f", logits times {scale:g}" if scale != 1.0 else "") + (f", soft cap {cap:g}" if cap else "")
    exact, rounded = found["difference_float32"], found["difference_bfloat16"]
    differ = "not known" if exact is None else f"{exact:.1e} nats in float32"
    differ += "" if rounded is None else f", {rounded:.1e} in bfloat16"
    opens = found["template_opens"]
    thinking = "" if opens is None else ", opens no thinking" if not opens else f", begins every answer with {opens!r}"
    return [
        f"model {found['path']}: {found['model_type']}",
        f"  parameters     {found['parameters']:,}{experts}",
        f"  layers         {layers}",
        f"  attention      {found['attention']} on {found['device']}",
        f"  head           {head}",
        f"  log-probs      off by {differ} (packed rows against the model's own)",
        f"  sampling       transformers engine {found['transformers_engine']}",
        f"  chat template  {found['chat_template']}{thinking}",
        *(f"  PROBLEM        {problem}" for problem in found["problems"]),
        "can be trained" if not found["problems"] else "cannot be trained as it is",
    ]
