"""Stands for the tokens and texts of a turn that another rank holds."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from paw.errors import UserError


class AwayError(UserError):
    """Something of a turn was read on a rank that does not hold it."""


class Away(Sequence[Any]):
    """A row of numbers, or the turns of an episode, on another rank. Only its length is known here.

    Reading an element raises AwayError.
    """

    __slots__ = ("_length", "rank")

    def __init__(self, length: int, rank: int) -> None:
        self._length = length
        self.rank = rank
        """The rank that held it when this was made."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __contains__(self, item: object) -> NoReturn:
        self._refuse()

    def __reversed__(self) -> Iterator[Any]:
        self._refuse()

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def __repr__(self) -> str:
        return f"<{self._length} on rank {self.rank}>"

    def _refuse(self) -> NoReturn:
        raise AwayError(
            f"these {self._length} tokens or turns are on rank {self.rank}; "
            "to have all on every rank, an advantage estimator declares @estimator(tokens=True), "
            "a callback tokens = True (docs/scale.md#what-a-rank-holds)"
        )


@lru_cache(65536)
def away(length: int, rank: int) -> Any:
    """Return an Away. Equal ones are one object, so a turn that is not here takes few bytes."""
    return Away(length, rank)
