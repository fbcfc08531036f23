"""Sections beside those of training itself: engines, warm-up, endpoints, tuning, trackers, RWML's stages."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from paw.values import (
    Count,
    Natural,
    NonNegative,
    Only,
    PluginSection,
    Positive,
    Rate,
    Seconds,
    Section,
    Seed,
    Share,
    Url,
)

SERVER, STARTED = Only("engine.type", ("server",)), Only("engine.servers")


def listed(value: Any) -> Any:
    """A name alone is a list of one."""
    return [value] if isinstance(value, str) else value


class EngineConfig(PluginSection):
    """What samples responses."""

    KIND, KEY, WITHIN = "engines", "type", ("transformers", "vllm", "server")
    type: str = "transformers"
    """transformers: the trainer's own weights. vllm: an engine in each rank, beside the trainer.
    server: servers of vLLM, on devices or machines of their own (docs/scale.md). Or an engine of
    your own, "module:name" or "FILE.py:name" (docs/bring-your-own.md)."""
    max_batch_tokens: Annotated[Count, Only("engine.type", ("transformers",))] = 65536
    """Padded prompt tokens of one forward pass."""
    gpu_memory_utilization: Annotated[Share, Only("engine.type", ("vllm", "server"))] | None = None
    """Share of the device's memory for vLLM's weights and KV cache; unset: 0.5 beside the trainer, 0.9 for a server."""
    sleep_level: Annotated[Literal[1, 2], Only("engine.type", ("vllm",))] = 2
    """vLLM while training: 2 drops its weights (every update sends new ones anyway), 1 keeps them in host memory."""
    urls: Annotated[list[Url], SERVER] = []
    """Servers that run already, of this model and for this run alone: one URL or a list."""
    servers: Annotated[Natural, SERVER] = 0
    """Servers to start here and end with the run, in place of `urls`."""
    tensor_parallel: Annotated[Count, SERVER, STARTED] = 1
    """GPUs of each. `paw train --gpus N` leaves servers * tensor_parallel of the N to them."""
    transfer: Annotated[Literal["auto", "nccl", "files"], SERVER] = "auto"
    """How weights reach servers: nccl between GPUs, files through a folder that both see; auto: nccl on a GPU."""
    weights_dir: Annotated[Path | None, SERVER] = None
    """The folder for files; unset: in memory, for servers on this machine."""
    timeout_s: Annotated[Seconds, SERVER] = 600.0
    """Seconds for a whole response, and for new weights, before a server is left out."""

    _one_or_more = field_validator("urls", mode="before")(listed)

    @property
    def memory_share(self) -> float:
        """gpu_memory_utilization, or its default for this type."""
        return self.gpu_memory_utilization or (0.9 if self.type == "server" else 0.5)

    @property
    def gpus(self) -> int:
        """Devices of the servers that the run starts; only engine.type = "server" has any."""
        return self.servers * self.tensor_parallel


class WarmupConfig(Section):
    """The quickstart model: its size, and a supervised warm-up on expert play."""

    ONLY: ClassVar = Only("model.path", ("quickstart",))
    hidden_size: Count = 64
    """Hidden size."""
    layers: Count = 3
    """Decoder layers."""
    head_size: Count = 32
    """Size of an attention head."""
    intermediate_size: Count = 160
    """Hidden size of the MLP."""
    initializer_range: Positive = 0.1
    """Standard deviation of the initial weights."""
    stop_success: Share = 0.2
    """Success rate of sampled episodes on warm-up games, mean of two checks, at which the warm-up stops."""
    max_steps: Count = 1600
    """Optimizer steps at most."""
    batch_size: Count = 64
    """Turns of an optimizer step."""
    lr: Positive = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of layers, which takes half the steps."""
    random_actions: Share = 0.3
    """Share of random actions executed during expert play, so that the model sees states off the expert's path."""
    lm_weight: NonNegative = 0.3
    """Weight of next-token prediction on prompt and observation beside that on the answer."""
    observations: bool = True
    """Whether next-token prediction covers the environment's answers, or prompts alone."""
    seed: Seed = 0
    """Seed of weights, games and batches."""


class EndpointConfig(Section):
    """An OpenAI-compatible chat endpoint that plays in place of a local model (`paw eval`)."""

    url: Url | None = None
    """Base URL, such as https://api.openai.com/v1."""
    model: str | None = None
    """Name of the model at the endpoint."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    timeout_s: Seconds = 120.0
    """Seconds of one request."""
    retries: Natural = 9
    """After 408, 409, 429, 5xx and broken connections, with growing pauses: nine last more than two minutes."""
    concurrency: Count = 8
    """Requests at a time."""
    requests_per_minute: Natural = 0
    """Requests per minute at most; 0 is no limit."""
    tokens_per_minute: Natural = 0
    """Tokens per minute at most, prompt and answer; 0 is no limit."""
    input_price: NonNegative = 0.0
    """US dollars per million prompt tokens; 0 reports no cost."""
    output_price: NonNegative = 0.0
    """US dollars per million tokens of answers."""


class SftConfig(Section):
    """Supervised fine-tuning (`paw sft`); mini-batches, schedule and clipping are those of `optim`."""

    turns: Count = 2000
    """Turns of expert play."""
    epochs: Count = 1
    """Times that each turn is learnt from."""
    lr: Rate = 1e-5
    """Learning rate, in place of optim.lr."""
    lm_weight: NonNegative = 0.0
    """Weight of next-token prediction on what is not the answer, beside the mean over answer tokens."""
    observations: bool = True
    """Whether that covers what the environment answered, or prompts alone."""
    random_actions: Share = 0.0
    """Share of random actions executed, and imitated, during expert play."""
    won: bool = True
    """Of recorded episodes, whether those that were not won are left out."""
    save_every: Natural = 200
    """Steps from one checkpoint to the next; 0: none before Ctrl-C."""


class TrackingConfig(Section):
    """What `run.trackers` call this run."""

    ONLY: ClassVar = Only("run.trackers")
    project: Annotated[str, Field(min_length=1)] = "paw"
    """Project, or experiment."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run there; unset, that of its folder."""
    tags: list[str] = []
    """Tags: one or a list."""

    _one_or_more = field_validator("tags", mode="before")(listed)


class RwmlConfig(Section):
    """The stages of `paw rwml`: reinforcement world-model learning (arXiv 2602.05842)."""

    episodes: Annotated[int, Field(ge=2)] = 3
    """collect: episodes of each task."""
    dedup: bool = False
    """collect: keep identical triplets once."""
    sft_share: Share = 0.1
    """filter: share of the triplets that a copy of the model is fine-tuned on."""
    sft_epochs: Count = 1
    """filter, sft: epochs."""
    sft_lr: Rate = 1e-5
    """filter, sft: learning rate."""
    attempts: Annotated[int, Field(ge=2)] = 10
    """filter: predictions of each other triplet."""
    easy_share: Share = 0.3
    """filter: share of the triplets that count as easy."""
    keep_easy: Share = 0.1
    """filter: probability that an easy triplet is kept."""
