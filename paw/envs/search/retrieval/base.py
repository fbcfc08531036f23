"""What every search engine offers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Documents = Sequence[tuple[str, str]]
"""(id, contents) each."""


class Hit(NamedTuple):
    """One document found."""

    id: str
    contents: str
    score: float
    """The higher the better; what it measures depends on the retriever."""


class Retriever(Protocol):
    """Safe to use from several threads."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most `topk` hits, best first."""
        ...
