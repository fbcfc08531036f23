"""The interface of every search engine, and what it returns."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paw.envs.search.retrieval.corpus import Corpus

Documents = list[tuple[str, str]] | Corpus
"""(id, contents) of each document."""


class Hit(NamedTuple):
    """A document that a search returns."""

    id: str
    contents: str
    score: float
    """Higher is better. The scale depends on the retriever."""


class Retriever(Protocol):
    """A search engine. Several threads may use it at once."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most `topk` hits for each query, best first."""
        ...
