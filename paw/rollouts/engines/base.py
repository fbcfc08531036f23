"""The interface of an engine: token ids in, token ids and log-probs out, new weights after updates.

`engine.type` names a class derived from `Engine`, either built-in or your own (see
docs/bring-your-own.md). Both kinds are declared in the same way, and this file documents everything
that an engine must or may offer. `paw plan`, `paw doctor` and the checks of a configuration need
facts about an engine before the run has one. Class attributes and class methods provide them.

`submit` requests at any time, and call `step` until the finished ones come back. The transformers
engine finishes whatever is queued in one step; vLLM batches continuously. Importing the module of a
built-in engine does not load torch, so a configuration is checked quickly. Your own module may load
it.
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

    from paw.config import sections
    from paw.distributed.ranks import Ranks
    from paw.model.policy import Policy
    from paw.rollouts.text.chat import Chat


# --- one response


@dataclass(frozen=True)
class Request:
    """One response to sample. An engine sees only tokens, not environments or actions.

    Most requests are turns of episodes. After an evaluation, the callback `samples` also asks for
    predictions of observations, which it writes to samples.jsonl. The prompt of such a request is a
    turn up to the start of its observation, max_tokens is the observation's length, the temperature
    is 0, and the key is negative. If `submit` refuses one with a UserError, that prediction is
    missing.
    """

    key: int
    """Unique among requests in flight. The completion carries it too."""
    prompt_ids: list[int]
    seed: int
    """The same seed, prompt and weights give the same tokens, whatever else is in the batch."""
    temperature: float
    """0 is greedy."""
    max_tokens: int
    stopped: Callable[[list[int]], bool] | None = None
    """Whether these tokens are a complete response. If so, sampling stops before an end token."""
    episode: tuple[int, int] | None = None
    """The episode that asks, as (index of the group, number of the member). In many environments an
    episode's next request begins with the tokens of this one. First requests of a group are
    equal."""


@dataclass(frozen=True)
class Completion:
    key: int
    token_ids: list[int]
    """Includes the end token, unless the response was cut at max_tokens."""
    logp: list[float]
    """The model's own log-probability of each token: log_softmax(logits / temperature) over the
    full vocabulary, however the token was chosen (top-p, a grammar). The trainer compares it with
    its own (health/sampler_mismatch) and ends the run if they differ. With policy.old_logp =
    "engine" it also trains on it. At temperature 0 it may be any number, because such responses are
    not trained on."""
    entropy: list[float] | None
    """Entropy at each token of the distribution that `logp` is from, in nats; None if the engine
    does not return it. With policy.old_logp = "engine" it is compared as `logp` is."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    versions: list[int] | None = None
    """Weight version that sampled each token. None means the engine's own version for all."""
    server: str = ""
    """URL of the server that answered."""
    failure: str = ""
    """Why nothing was sampled although the request was valid. The episode then fails."""


# --- making and planning an engine


@dataclass(frozen=True)
class EngineParts:
    """Everything an engine is made from."""

    config: "sections.Config"
    """The whole configuration; `config.engine` has the engine's own settings."""
    policy: "Policy"
    """The trainer's model: `policy.lm` is the Hugging Face model, on `policy.device`."""
    chat: "Chat"
    """Turns text into token ids and back, through the model's chat template. `chat.decode(ids)` is
    the text of sampled tokens, for engines that send or log texts."""
    model_path: str | Path
    """Folder or Hugging Face name of the model, for engines that build their own."""
    end_ids: frozenset[int]
    """Tokens that end a response."""
    context: int
    """Maximum number of tokens of a prompt and its response together."""
    ranks: "Ranks"
    own_weights: bool = False
    """Whether the policy's weights will be sharded, so that an engine needs a copy of them."""
    check: bool = True
    """Whether this rank should check that the engine can sample from the model."""
    lora: "sections.LoraConfig | None" = None
    """Adapters that the model will have, if `sync` takes them separately from other weights."""
    started: Any = None
    """What `Engine.start` returned on rank 0."""


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class PlannedRun:
    """What the plan of an engine depends on."""

    config: "sections.Config"
    ranks: int
    """GPUs that train."""
    gpu_bytes: float
    """Memory of one GPU."""
    weight_bytes: int
    """All weights of the model in the dtype of the forward pass."""
    element_bytes: int
    """One element in that dtype."""
    adapter_bytes: int
    """The LoRA adapters in that dtype; 0 without LoRA."""
    copies_weights: bool
    """Whether the forward pass uses copies of the policy's weights in another dtype."""
    kv_bytes: int
    """KV cache of one token in 16 bits."""
    heads: int
    """Query heads of an attention layer."""
    kv_heads: int
    """Key-value heads of an attention layer."""
    cache_wanted: int
    """Minimum number of tokens that an engine's KV cache should hold."""


@dataclass(frozen=True)
class EnginePlan:
    """What a run's engines will need and how fast they are. Sizes are in bytes.

    `paw plan` adds this to what the trainer needs.
    """

    engines: int
    """Engines that share the episodes of an update."""
    decodes: bool = True
    """Whether they decode on GPUs that the plan knows. If not (a service elsewhere), the plan
    counts no time for rollouts, and the fields below about GPUs and the cache keep their
    defaults."""
    cards: int = 1
    """GPUs of each engine."""
    least_cards: int = 1
    """Minimum number of GPUs on which the model fits; 0 if no number is enough."""
    weights: float = 0.0
    """The engine's weights and buffers on each training GPU, while episodes are played."""
    cache: float = 0.0
    """The KV cache on each training GPU, while episodes are played."""
    asleep: float = 0.0
    """What stays on each training GPU while it trains."""
    host: float = 0.0
    """Page-locked host memory of each rank, while it trains."""
    own_card: tuple[float, float] | None = None
    """(weights, KV cache) on each GPU of an engine that does not share the training GPUs."""
    cache_tokens: float = float("inf")
    """Tokens that an engine's KV cache holds. It also limits how many sequences decode
    together."""
    sequences: float = float("inf")
    """Maximum number of sequences that an engine decodes together."""
    cache_is_fixed: bool = False
    """Whether the cache has a fixed size that must hold PlannedRun.cache_wanted tokens."""
    least_step_s: float = 30e-3
    """Minimum duration of a decoding step in seconds, however few sequences it has."""
    sent_bytes: float | None = None
    """Bytes sent to an engine after each update; None for all weights."""
    sent_by: Literal["memory", "nccl", "files"] = "memory"
    """How it is sent: within the process, by NCCL between GPUs, or as files."""


# --- engines


class Engine(ABC):
    """Samples responses.

    It holds requests of at most `positions` tokens, prompt and response together (None for any
    length). If a method of your own engine raises an error, the run ends with a line that names the
    engine.
    """

    # Known before there is an engine.

    Config: ClassVar[type[Section]] = Section
    """The engine's own keys in the section [engine], if a subclass has any."""
    requires: ClassVar[dict[str, str]] = {}
    """What to install with pip for each module beyond PaW's own dependencies, by module."""
    shares_card: ClassVar[bool] = True
    """Whether it takes turns with the trainer on the training GPUs."""
    runs_policy: ClassVar[bool] = False
    """Whether it samples with the trainer's model, which then must take the longest context."""
    gives_entropy: ClassVar[bool] = False
    """Whether completions have the entropy at each token. Log-probs are always required."""
    gives_versions: ClassVar[bool] = False
    """Whether completions have the weight version of each token. New weights may then arrive while
    requests are pending."""
    has_pool: ClassVar[bool] = False
    """Whether it has a `pool`, a `paw.rollouts.engines.pool.SendingPool` of servers that a process
    beside the trainer can also use. `rollout.ahead` needs it."""
    takes_adapters: ClassVar[bool] = False
    """Whether `sync` can take LoRA adapters without the base weights, for `lora.send`."""
    sized_by_share: ClassVar[bool] = False
    """Whether its key engine.gpu_memory_utilization is its share of the training GPUs' memory. If
    so, `paw plan` may change it."""
    memory_keys: ClassVar[tuple[str, ...]] = ()
    """Its keys of [engine] that bound its memory on the training GPUs. If a GPU's memory runs out
    while it works, the run's last line names them."""
    replaceable: ClassVar[bool] = False
    """Whether `paw plan` may propose servers instead of it."""
    starts_servers: ClassVar[bool] = False
    """Whether it starts `engine.servers` servers of `engine.tensor_parallel` GPUs each. `paw plan`
    proposes the built-in engine that does."""

    # Known once an engine is running.

    continuous = False
    """Whether requests may join while others run.

    If not, `step` finishes everything that is queued, so batches should be full.
    """
    checkpoint_names = False
    """Whether `sync` takes the parameter names of a model's files instead of those of transformers.
    They differ for experts, which are stored one by one or together."""
    version = 0
    """Weight version: the number of updates the weights have seen."""

    @classmethod
    def start(
        cls,
        config: "sections.Config",
        model_path: str,
        *,
        device: "torch.device",
        ranks: "Ranks",
        lora: "sections.LoraConfig | None",
    ) -> Closable | None:
        """Start processes that take long to come up; called on rank 0 before the models are loaded.

        The returned object is closed at the end of the run and passed to `make` as `parts.started`.
        """
        return None

    @classmethod
    def make(cls, parts: EngineParts) -> "Engine":
        """Make the engine of a run. It gets the policy's weights before the first request.

        Every rank must call this. By default the class is called with `parts`.
        """
        engine: Any = cls
        return engine(parts)

    @classmethod
    def plan(cls, run: PlannedRun) -> EnginePlan:
        """Return what the engines of a run will need.

        The default assumes an engine in each rank, with a copy of the weights on the GPU at all
        times.
        """
        return EnginePlan(engines=run.ranks, weights=run.weight_bytes, asleep=run.weight_bytes)

    def __init__(self, positions: int | None) -> None:
        self.positions = positions
        self.requests: dict[int, Request] = {}
        """Requests that were submitted and have not come back, by key."""

    @property
    def faults(self) -> dict[str, str]:
        """What is wrong with parts that get no requests until the next `sync`, by their name."""
        return {}

    @property
    def pending(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        """Queue a request for the next `step`.

        Raises ValueError for a key in flight, and UserError for a request beyond the limit.
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
        """Do some work, and return the completions that have finished.

        Returns [] only while something is still running.
        """

    def sync(self, parameters: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take new weights, as (Hugging Face name, full tensor) pairs, one at a time.

        No request may be pending. With several ranks, an engine that has its own weights must go
        through all parameters, since gathering them takes all ranks.
        """
        self._must_be_idle("sync")
        self.version = version

    def sleep(self) -> None:
        """Release device memory until the next `sync`, which wakes the engine.

        No request may be pending.
        """
        self._must_be_idle("sleep")

    def exclude(self, servers: Collection[str]) -> bool:
        """Send no more requests to these servers. Returns False if no others are left.

        No request may be pending.
        """
        return False

    def close(self) -> None:
        self.requests.clear()

    def _must_be_idle(self, action: str) -> None:
        if self.requests:
            raise RuntimeError(
                f"{action} with {self.pending} requests pending: step until they have finished"
            )
