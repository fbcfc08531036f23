"""The rollout engine protocol: token ids in, token ids and log-probabilities out.

One loop serves both engines: `submit` requests at any time, `step` until the finished ones come back. The
transformers engine finishes whatever is queued in one step; vLLM batches continuously.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One response to sample. Raises ValueError for an empty prompt, no room to answer, or a negative temperature."""

    key: int
    """Unique among requests in flight; comes back with the completion."""
    prompt_ids: list[int]
    seed: int
    """Same seed, prompt and weights: same tokens, whatever else is in the batch."""
    temperature: float
    """0 is greedy."""
    max_tokens: int
    stopped: Callable[[list[int]], bool] | None = None
    """Whether a response of these tokens is complete before its end token: sampling stops once it is."""

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_tokens < 1 or self.temperature < 0:
            raise ValueError(f"empty prompt, max_tokens < 1 or temperature < 0: {self}")


@dataclass(frozen=True)
class Completion:
    key: int
    token_ids: list[int]
    """Up to and including the end token, or cut at max_tokens."""
    logp: list[float]
    """Log-probability of each token at the request's temperature (the distribution it was drawn from)."""
    entropy: list[float] | None
    """Entropy at each token, nats; None when the engine does not know it."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""


class Engine(Protocol):
    version: int
    """Weight version: the number of updates the weights have seen."""
    continuous: bool
    """Whether requests may join while others run. Otherwise `step` finishes what is queued, so full batches pay."""

    checkpoint_names: bool
    """Whether `sync` wants names as in a model's files, or as transformers has them: experts one by one or together."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Completion]:
        """Work a little (or a lot) and return what has finished; [] only while something is still running."""
        ...

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        ...

    def sync(self, parameters: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take new weights, (Hugging Face name, full tensor) one at a time. Nothing may be pending."""

    def sleep(self) -> None:
        """Give device memory back until the next `sync`, which wakes the engine. Nothing may be pending."""

    def close(self) -> None: ...
