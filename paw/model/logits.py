"""What a model does to the logits of its head before the softmax: a scale (Granite, Cohere,
Falcon-H1), a soft cap (Gemma, nanochat). The kernels and the transformers engine apply the same.

    z = softcap tanh(scale u / softcap),  u = W h + b        without a cap z = scale u
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Settings of config.json that multiply the logits; `logits_scaling` divides them."""
CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class LogitTransform:
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitTransform":
        """The transform that a Hugging Face model's config asks for.

        `model.check` checks that the model does so.
        """
        shape = config.get_text_config()
        factors = [getattr(shape, name, None) for name in FACTORS]
        scale = next((float(factor) for factor in factors if factor is not None), 1.0)
        scale /= getattr(shape, "logits_scaling", None) or 1.0
        caps = [getattr(shape, name, None) for name in CAPS]
        return cls(scale, next((float(cap) for cap in caps if cap), None))

    def __call__(self, logits: Tensor) -> Tensor:
        """[..., V] as the head gives them -> as the softmax takes them, in float32."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def options(self, temperature: float) -> dict[str, Any]:
        """The same for the kernels, which cap first and scale last: their `temperature` and `softcap`."""
        softcap = None if self.softcap is None else self.softcap / self.scale
        return {
            "temperature": temperature / self.scale,
            **({} if softcap is None else {"softcap": softcap}),
        }
