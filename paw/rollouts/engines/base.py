"""What an engine is: token ids in, token ids and log-probabilities out, new weights after updates.

`engine.type` names a class derived from `Engine`: a built-in one, or your own (see
docs/bring-your-own.md). Both are declared in the same way, and everything that an engine must or
may offer is documented here. Before a run has an engine, its class answers what `paw plan`,
`paw doctor` and the checks of a configuration ask, by class attributes and class methods.

`submit` requests at any time, `step` until the finished ones come back. The transformers engine
finishes whatever is queued in one step; vLLM batches continuously. The module of a built-in engine
loads no torch when it is imported, so that a configuration is checked in a moment; yours may.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from paw.config.values import Section
from paw.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paw.config.sections import Config, LoraConfig
    from paw.distributed.ranks import Ranks
    from paw.model.policy import Policy
    from paw.rollouts.text.chat import Chat


# --- one response


@dataclass(frozen=True)
class Request:
    """One response to sample. An engine sees tokens only, neither environment nor actions.

    Most are turns of episodes. After an evaluation the callback `samples` also asks for predictions
    of observations, which it shows in samples.jsonl. Their prompt is a turn up to where its
    observation begins, max_tokens the observation's length, the temperature 0, and the key
    negative. If `submit` refuses one with a UserError, that prediction is missing.
    """

    key: int
    """Unique among requests in flight; comes back with the completion."""
    prompt_ids: list[int]
    seed: int
    """Same seed, prompt and weights: same tokens, whatever else is in the batch."""
    temperature: float
    """0 is greedy."""
    max_tokens: int
    stopped: Callable[[list[int]], bool] | None = None
    """Whether a response of these tokens is complete: sampling stops then, before an end token."""


@dataclass(frozen=True)
class Completion:
    key: int
    token_ids: list[int]
    """Up to and including the end token, or cut at max_tokens."""
    logp: list[float]
    """The model's own log-probability of each token: log_softmax(logits / temperature) over the
    full vocabulary, however the token was chosen (top-p, a grammar). The trainer compares it with
    its own (health/sampler_mismatch), ends the run if they differ, and with policy.old_logp =
    "engine" trains on it. At temperature 0 any number will do: nothing is trained on it."""
    entropy: list[float] | None
    """Entropy of the distribution that `logp` is from, at each token, nats; None if the engine does
    not give it. With policy.old_logp = "engine" it is compared like `logp`."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    versions: list[int] | None = None
    """Version of the weights that each token was sampled from; None: the engine's own for all."""
    server: str = ""
    """URL of the server that answered."""
    failure: str = ""
    """Why nothing was sampled, through no fault of the request: it fails its episode."""


# --- making and planning an engine


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made from."""

    config: "Config"
    """The whole configuration; `config.engine` has the engine's own settings."""
    policy: "Policy"
    """The trainer's model: `policy.lm` is the Hugging Face model, on `policy.device`."""
    chat: "Chat"
    """Text to token ids and back, through the model's chat template: `chat.decode(ids)` is the text
    of sampled tokens, for engines that send or log texts."""
    model_path: str | Path
    """Folder or Hugging Face name of the model, for engines that build their own."""
    end_ids: frozenset[int]
    """Tokens that end a response."""
    context: int
    """Tokens of the longest prompt and response together."""
    ranks: "Ranks"
    own_weights: bool = False
    """Whether the policy's weights will be sharded, so that an engine needs a copy of them."""
    check: bool = True
    """Whether this rank should check that the engine can sample from the model."""
    lora: "LoraConfig | None" = None
    """Adapters that the model will have, if `sync` is to take them apart from the other weights."""
    started: Any = None
    """What `Engine.start` returned on rank 0."""


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class PlannedRun:
    """What the plan of an engine depends on."""

    config: "Config"
    ranks: int
    """GPUs that train."""
    gpu_bytes: float
    """Memory of a GPU."""
    weight_bytes: int
    """All weights of the model in the dtype of the forward pass."""
    element_bytes: int
    """An element in that dtype."""
    adapter_bytes: int
    """The LoRA adapters in that dtype; 0 without LoRA."""
    copies_weights: bool
    """Whether the forward pass computes with copies of the policy's weights, in another dtype."""
    kv_bytes: int
    """KV cache of a token in 16 bits."""
    heads: int
    """Attention heads of a layer, of the queries."""
    kv_heads: int
    """Attention heads of a layer, of keys and values."""
    cache_wanted: int
    """Tokens that the KV cache of an engine should at least hold."""


@dataclass(frozen=True)
class EnginePlan:
    """What a run's engines will take and how fast they are; sizes in bytes.

    `paw plan` adds this to what the trainer takes.
    """

    engines: int
    """Engines that share the episodes of an update."""
    decodes: bool = True
    """Whether they decode on GPUs that the plan knows. If not (a service elsewhere), it counts no
    time for rollouts, and what follows about GPUs and the cache keeps its defaults."""
    cards: int = 1
    """GPUs of each engine."""
    least_cards: int = 1
    """Fewest GPUs that give an engine room for the model; 0: no number does."""
    weights: float = 0.0
    """On each GPU that trains, while episodes are played: weights and buffers of the engine."""
    cache: float = 0.0
    """On each GPU that trains, while episodes are played: the KV cache."""
    asleep: float = 0.0
    """What stays on each GPU that trains, while it trains."""
    host: float = 0.0
    """Page-locked host memory of each rank, while it trains."""
    own_card: tuple[float, float] | None = None
    """(weights, KV cache) on each GPU of an engine that does not share those that train."""
    cache_tokens: float = float("inf")
    """Tokens that an engine's KV cache holds: it limits the sequences that are decoded together."""
    cache_is_fixed: bool = False
    """Whether the cache has a fixed size, which has to hold PlannedRun.cache_wanted tokens."""
    least_step_s: float = 30e-3
    """Seconds of a decoding step, however few sequences it has."""
    sent_bytes: float | None = None
    """What is sent to an engine after each update; None: all weights."""
    sent_by: Literal["memory", "nccl", "files"] = "memory"
    """How it is sent: within the process, by NCCL between GPUs, or as files."""


# --- engines


class Engine(ABC):
    """Samples responses.

    It holds requests of at most `positions` tokens, prompt and response together (None: any). What
    methods of your own engine raise ends the run with a line that names it.
    """

    # What is known before there is an engine.

    Config: ClassVar[type[Section]] = Section
    """The engine's own keys of the section [engine], for a subclass that has some."""
    requires: ClassVar[dict[str, str]] = {}
    """Module -> what to install with pip, for each module that it needs beyond PaW's own."""
    shares_card: ClassVar[bool] = True
    """Whether it runs on the GPUs that train, in turns with the trainer."""
    runs_policy: ClassVar[bool] = False
    """Whether it samples with the trainer's model, which then has to take the longest context."""
    gives_entropy: ClassVar[bool] = False
    """Whether completions have the entropy at each token. Log-probs are always required."""
    gives_versions: ClassVar[bool] = False
    """Whether completions have the version of the weights of each token, so that new weights may
    arrive while requests are pending."""
    has_pool: ClassVar[bool] = False
    """Whether it has a `pool`, a `paw.rollouts.engines.pool.SendingPool` of servers that a process
    beside the trainer can ask as well. `rollout.ahead` needs it."""
    takes_adapters: ClassVar[bool] = False
    """Whether `sync` can take LoRA adapters apart from the base weights, for `lora.send`."""
    sized_by_share: ClassVar[bool] = False
    """Whether its key engine.gpu_memory_utilization is its share of the GPUs that train, which
    `paw plan` may then change."""
    replaceable: ClassVar[bool] = False
    """Whether `paw plan` may propose servers in its place."""

    # What is known of a running one.

    continuous = False
    """Whether requests may join while others run.

    Otherwise `step` finishes what is queued, so full batches pay.
    """
    checkpoint_names = False
    """Whether `sync` wants names as in a model's files, or as transformers has them: experts one by
    one or together."""
    version = 0
    """Weight version: the number of updates the weights have seen."""

    @classmethod
    def start(
        cls,
        config: "Config",
        model_path: str,
        *,
        device: "torch.device",
        ranks: "Ranks",
        lora: "LoraConfig | None",
    ) -> Closable | None:
        """Start processes that take long to come up; called on rank 0 before the models are loaded.

        What it returns is closed at the end of the run, and handed to `make` as `parts.started`.
        """
        return None

    @classmethod
    def make(cls, parts: EngineParts) -> "Engine":
        """The engine of a run; it gets the policy's weights before the first request.

        A call of all ranks. By default the class is called with `parts`.
        """
        engine: Any = cls
        return engine(parts)

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        """What the engines of a run will take.

        By default an engine in each rank, with a copy of the weights on the GPU at all times.
        """
        return EnginePlan(engines=run.ranks, weights=run.weight_bytes, asleep=run.weight_bytes)

    def __init__(self, positions: int | None) -> None:
        self.positions = positions
        self.requests: dict[int, Request] = {}
        """Those that were submitted and have not come back, by key."""

    @property
    def faults(self) -> dict[str, str]:
        """What is wrong with parts that get no requests until the next `sync`, by their names."""
        return {}

    @property
    def pending(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        """Queue a request for the next `step`.

        Raises ValueError for a key in flight, UserError beyond the limit.
        """
        if request.key in self.requests:
            raise ValueError(f"key in flight: {request.key}")
        if self.positions and len(request.prompt_ids) + request.max_tokens > self.positions:
            raise UserError(
                f"a prompt of {len(request.prompt_ids)} tokens and {request.max_tokens} of response"
                f" exceed the model's {self.positions} positions; lower"
                " rollout.max_prompt_tokens and rollout.max_response_tokens"
            )
        self.requests[request.key] = request

    @abstractmethod
    def step(self) -> list[Completion]:
        """Work a little, or a lot, and return what has finished.

        [] only while something is still running.
        """

    def sync(self, parameters: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take new weights, (Hugging Face name, full tensor) one at a time.

        Nothing may be pending. With several ranks an engine that has weights of its own goes
        through all parameters, since gathering them takes all ranks.
        """
        self._must_be_idle("sync")
        self.version = version

    def sleep(self) -> None:
        """Give device memory back until the next `sync`, which wakes the engine.

        Nothing may be pending.
        """
        self._must_be_idle("sleep")

    def exclude(self, servers: Collection[str]) -> bool:
        """Send no more requests to these servers. Returns False if no others are left.

        Nothing may be pending.
        """
        return False

    def close(self) -> None:
        self.requests.clear()

    def _must_be_idle(self, action: str) -> None:
        if self.requests:
            raise RuntimeError(
                f"{action} with {self.pending} requests pending: step until they have finished"
            )
