"""What vLLM's servers answer: how large it may be, what it holds, and whether its numbers can be true. No torch."""

import math
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AliasPath, Field, FiniteFloat

from paw.envs.checked import FIRST_ERROR, Strict
from paw.errors import clean, shown

BASE_BYTES, TOKEN_BYTES, LINE_BYTES = 1 << 16, 1 << 10, 1 << 12
"""Of an answer at most: whatever its tokens, for each token of it, and for each token that comes in
a line of its own. vLLM takes some 150 and 400."""
ROUNDING = 1e-3
"""A log-probability is at most this; an entropy may be as much, relatively, above that of equal probabilities."""
LOWEST = -1000.0
"""A log-probability is at least this: float32 draws nothing below -104. vLLM has -9999 for one that
it does not know, or that is no number."""
SPANS = 4
"""Of versions that are named in a fault's line."""
VERSION = re.compile(r"[0-9]{1,18}")


class WrongAnswer(Exception):
    """Not what was asked for. One line says what is wrong."""


class Spot(Strict):
    token_id: int
    logprob: FiniteFloat


class Span(Strict):
    version: str
    start: int
    end: int


class Choice(Strict):
    token_ids: Annotated[list[int], FIRST_ERROR]
    spots: Annotated[list[Spot], FIRST_ERROR] = Field(
        [], validation_alias=AliasPath("logprobs", "content")
    )
    finish_reason: str | None = None
    weight_versions: Annotated[list[Span], FIRST_ERROR] | None = None


class Answer(Strict):
    choices: Annotated[list[Choice], FIRST_ERROR] = Field(min_length=1)
    cached: int | None = Field(
        None, validation_alias=AliasPath("usage", "prompt_tokens_details", "cached_tokens")
    )


EntropiesOfResponse = Annotated[list[FiniteFloat], FIRST_ERROR]
EntropiesOfWorker = Annotated[list[EntropiesOfResponse | None], FIRST_ERROR]


class Entropies(Strict):
    results: Annotated[list[EntropiesOfWorker], FIRST_ERROR] = Field(min_length=1)


def most_bytes(tokens: int, *, lines: bool = False) -> int:
    """Bytes of an answer about so many tokens at most; `lines`: each comes in a line of its own."""
    return BASE_BYTES + tokens * (LINE_BYTES if lines else TOKEN_BYTES)


def check_tokens(choice: Choice, vocabulary: int) -> None:
    """Raises WrongAnswer for tokens that the model does not have, and for what is no log-probability."""
    for token in choice.token_ids:
        if not 0 <= token < vocabulary:
            raise WrongAnswer(f"token {shown(token)} of a vocabulary of {vocabulary}")
    for spot in choice.spots:
        if spot.logprob > ROUNDING:
            raise WrongAnswer(
                "a log-probability above 0: the server needs --logprobs-mode processed_logprobs"
            )
        if spot.logprob < LOWEST:
            raise WrongAnswer(
                f"a log-probability of {spot.logprob:g}, with which no token is drawn"
            )


def check_entropies(entropies: Sequence[float], vocabulary: int) -> None:
    """Raises WrongAnswer for an entropy that no distribution over the vocabulary has."""
    highest = math.log(vocabulary)
    slack = ROUNDING * max(1.0, highest)
    for entropy in entropies:
        if not -slack <= entropy <= highest + slack:
            raise WrongAnswer(f"an entropy of {entropy:g}: it is between 0 and {highest:.3g}")


def token_versions(spans: Sequence[Span], count: int) -> list[int]:
    """The version of the weights of each of `count` tokens. Raises WrongAnswer if the spans do not
    give one for each, in order.

    >>> token_versions([Span(version="1", start=0, end=2), Span(version="2", start=2, end=3)], 3)
    [1, 1, 2]
    """
    end = 0
    in_order = True
    for span in spans:
        in_order = (
            in_order
            and span.start == end <= span.end <= count
            and bool(VERSION.fullmatch(span.version))
        )
        end = span.end
    if not in_order or end != count:
        raise WrongAnswer(
            f"no version of the weights for each of {count} tokens: {_described(spans)}"
        )
    return [int(span.version) for span in spans for _ in range(span.start, span.end)]


def _described(spans: Sequence[Span]) -> str:
    """The first few spans in a fault's line."""
    if not spans:
        return "without a version"
    return ", ".join(
        f"{clean(span.version, 20)} of tokens {shown(span.start)} to {shown(span.end)}"
        for span in spans[:SPANS]
    )
