"""The transform that a model applies to its head's logits before the softmax: a scale (Granite,
Cohere, Falcon-H1) or a soft cap (Gemma, nanochat). The kernels and the transformers engine apply it
too.

    z = softcap tanh(scale u / softcap),  u = W h + b        without a soft cap z = scale u
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Settings of config.json that multiply the logits (`logits_scaling` divides them)."""
CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class LogitTransform:
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitTransform":
        """Return the transform that a Hugging Face model's config asks for.

        `model.check` checks that the model applies it.
        """
        settings = config.get_text_config()
        factors = [getattr(settings, name, None) for name in FACTORS]
        caps = [getattr(settings, name, None) for name in CAPS]
        scale = next((float(factor) for factor in factors if factor is not None), 1.0)
        scale /= getattr(settings, "logits_scaling", None) or 1.0
        softcap = next((float(cap) for cap in caps if cap), None)
        return cls(scale=scale, softcap=softcap)

    def __call__(self, logits: Tensor) -> Tensor:
        """Transform the head's logits [..., V] into the softmax's, in float32."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        return logits

    def options(self, temperature: float) -> dict[str, Any]:
        """Return the kernels' `temperature` and `softcap`. Kernels cap first and scale last."""
        options = {"temperature": temperature / self.scale}
        if self.softcap is not None:
            options["softcap"] = self.softcap / self.scale
        return options
