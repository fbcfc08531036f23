"""The sections of the tools: [warmup], [endpoint], [sft], [tracking] and [rwml]."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from paw.config.values import (
    Count,
    Natural,
    NonNegative,
    Only,
    Positive,
    Rate,
    Seconds,
    Section,
    Seed,
    Share,
    Url,
    listed,
)


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
    corpus_turns: Count = 12_000
    """Turns of expert play that the tokenizer is learned from."""
    stop_success: Share = 0.2
    """The warm-up stops once the mean success of two checks on sampled episodes reaches this."""
    max_steps: Count = 1600
    """Maximum number of optimizer steps."""
    batch_size: Count = 64
    """Turns per optimizer step."""
    lr: Positive = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of the layers. muon takes half the steps."""
    random_actions: Share = 0.3
    """Share of random actions during expert play, which show the model states off the expert's
    path."""
    lm_weight: NonNegative = 0.3
    """Weight of next-token prediction on prompts and observations. Answers have weight 1."""
    observations: bool = True
    """Whether next-token prediction covers prompts and observations, or only prompts."""
    seed: Seed = 0
    """Seed of weights, games and batches."""


class EndpointConfig(Section):
    """An OpenAI-compatible chat endpoint that plays instead of a local model (`paw eval`)."""

    url: Url | None = None
    """Base URL, such as https://api.openai.com/v1."""
    model: str | None = None
    """Name of the model at the endpoint."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    timeout_s: Seconds = 120.0
    """Time limit of a request, in seconds."""
    retries: Natural = 9
    """Retries after 408, 409, 429, 5xx and broken connections. The pauses grow. Nine retries take
    more than two minutes."""
    concurrency: Count = 8
    """Maximum number of simultaneous requests."""
    requests_per_minute: Natural = 0
    """Maximum number of requests per minute; 0 means no limit."""
    tokens_per_minute: Natural = 0
    """Maximum number of prompt and answer tokens per minute; 0 means no limit."""
    input_price: NonNegative = 0.0
    """US dollars per million prompt tokens; 0 reports no cost."""
    output_price: NonNegative = 0.0
    """US dollars per million answer tokens."""


class SftConfig(Section):
    """Supervised fine-tuning (`paw sft`). Mini-batches, schedule and clipping are in `optim`."""

    turns: Count = 2000
    """Turns of expert play to learn from."""
    epochs: Count = 1
    """Passes over the turns."""
    lr: Rate = 1e-5
    """Learning rate, used instead of optim.lr."""
    lm_weight: NonNegative = 0.0
    """Weight of next-token prediction on everything except answers. Answers have weight 1."""
    observations: bool = True
    """Whether `lm_weight` covers prompts and observations, or only prompts."""
    random_actions: Share = 0.0
    """Share of random actions during expert play. They are imitated too."""
    won: bool = True
    """Whether to learn only from the won episodes of a recording."""
    save_every: Natural = 200
    """Steps between checkpoints. 0 saves only on Ctrl-C."""


class TrackingConfig(Section):
    """The names that experiment trackers (`run.trackers`) give this run."""

    ONLY: ClassVar = Only("run.trackers")
    project: Annotated[str, Field(min_length=1)] = "paw"
    """Name of the project (in MLflow, of the experiment)."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run. If unset, the name of its folder."""
    tags: list[str] = []
    """One tag or a list of tags."""

    _one_or_more = field_validator("tags", mode="before")(listed)


class RwmlConfig(Section):
    """The stages of `paw rwml`: reinforcement world-model learning (arXiv 2602.05842)."""

    episodes: Annotated[int, Field(ge=2)] = 3
    """collect: episodes per task."""
    dedup: bool = False
    """collect: keep only one of identical triplets."""
    sft_share: Share = 0.1
    """filter: share of the triplets that a copy of the model is fine-tuned on."""
    sft_epochs: Count = 1
    """filter, sft: epochs."""
    sft_lr: Rate = 1e-5
    """filter, sft: learning rate."""
    attempts: Annotated[int, Field(ge=2)] = 10
    """filter: predictions for each of the other triplets."""
    easy_share: Share = 0.3
    """filter: share of the triplets that count as easy."""
    keep_easy: Share = 0.1
    """filter: probability that an easy triplet is kept."""
