"""What the engines share: token ids in, token ids and log-probabilities out.

`submit` requests at any time, `step` until the finished ones come back. The transformers engine
finishes whatever is queued in one step; vLLM batches continuously.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paw.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One response to sample."""

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
    versions: list[int] | None = None
    """Of the weights that each token was sampled from; None: all from the engine's."""
    server: str = ""
    """URL of the server that answered."""
    failure: str = ""
    """Why nothing was sampled, through no fault of the request: it fails its episode."""


class Engine(ABC):
    """Holds requests of at most `positions` tokens, prompt and response together (None: any)."""

    continuous = False
    """Whether requests may join while others run.

    Otherwise `step` finishes what is queued, so full batches pay.
    """
    checkpoint_names = False
    """Whether `sync` wants names as in a model's files, or as transformers has them: experts one by one or together."""
    version = 0
    """Weight version: the number of updates the weights have seen."""

    def __init__(self, positions: int | None) -> None:
        self.positions = positions
        self._requests: dict[int, Request] = {}

    @property
    def faults(self) -> dict[str, str]:
        """What is wrong with parts of it that nothing is asked of until the next `sync`, by their names."""
        return {}

    @property
    def pending(self) -> int:
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """Queue a request for the next `step`.

        Raises ValueError for a key in flight, UserError beyond the limit.
        """
        if request.key in self._requests:
            raise ValueError(f"key in flight: {request.key}")
        if self.positions and len(request.prompt_ids) + request.max_tokens > self.positions:
            raise UserError(
                f"a prompt of {len(request.prompt_ids)} tokens and {request.max_tokens} of response exceed the model's"
                f" {self.positions} positions; lower rollout.max_prompt_tokens and rollout.max_response_tokens"
            )
        self._requests[request.key] = request

    @abstractmethod
    def step(self) -> list[Completion]:
        """Work a little (or a lot) and return what has finished; [] only while something is still running."""

    def sync(self, parameters: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take new weights, (Hugging Face name, full tensor) one at a time.

        Nothing may be pending.
        """
        self._must_be_idle("sync")
        self.version = version

    def sleep(self) -> None:
        """Give device memory back until the next `sync`, which wakes the engine.

        Nothing may be pending.
        """
        self._must_be_idle("sleep")

    def leave_out(self, servers: Collection[str]) -> bool:
        """Ask nothing of these any more; False where no others are left. Nothing may be pending."""
        return False

    def close(self) -> None:
        self._requests.clear()

    def _must_be_idle(self, action: str) -> None:
        if self._requests:
            raise RuntimeError(
                f"{action} with {self.pending} requests pending: step until they have finished"
            )
