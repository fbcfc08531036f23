"""Limits on responses of vLLM's servers: size, format and possible numbers. No torch."""

import math
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AliasPath, Field, FiniteFloat

from paw.envs.checked import FIRST_ERROR, Strict
from paw.errors import clean, short_repr

BASE_BYTES = 1 << 16
"""Maximum bytes of a response, apart from those of its tokens."""
TOKEN_BYTES = 1 << 10
"""Maximum bytes per token; vLLM uses about 150."""
LINE_BYTES = 1 << 12
"""Maximum bytes per token if each comes in its own line; vLLM uses about 400."""
ROUNDING = 1e-3
"""Largest allowed log-probability. Also the largest fraction by which an entropy may exceed that of
the uniform distribution."""
MIN_LOGP = -1000.0
"""Smallest allowed log-probability: no token below -104 is drawn in float32.

vLLM writes -9999 for a log-probability that it does not know or that is not a number.
"""
MAX_SPANS = 4
"""Maximum number of versions named in the message about a fault."""
VERSION = re.compile(r"[0-9]{1,18}")


class WrongAnswer(Exception):
    """A response does not fit the request. The message, one line, says why."""


class TokenLogprob(Strict):
    token_id: int
    logprob: FiniteFloat


class VersionSpan(Strict):
    """Tokens from `start` up to, but excluding, `end`, sampled from one weight version."""

    version: str
    start: int
    end: int


class Choice(Strict):
    """A response, or a part of one that is streamed."""

    token_ids: Annotated[list[int], FIRST_ERROR]
    logprobs: Annotated[list[TokenLogprob], FIRST_ERROR] = Field(
        [], validation_alias=AliasPath("logprobs", "content")
    )
    finish_reason: str | None = None
    weight_versions: Annotated[list[VersionSpan], FIRST_ERROR] | None = None


class GenerateResponse(Strict):
    """Body of /inference/v1/generate, or of one line of its stream."""

    choices: Annotated[list[Choice], FIRST_ERROR] = Field(min_length=1)
    cached: int | None = Field(
        None, validation_alias=AliasPath("usage", "prompt_tokens_details", "cached_tokens")
    )


EntropiesOfResponse = Annotated[list[FiniteFloat], FIRST_ERROR]
EntropiesOfWorker = Annotated[list[EntropiesOfResponse | None], FIRST_ERROR]


class EntropyResponse(Strict):
    """Body of /collective_rpc for `paw_entropy`."""

    results: Annotated[list[EntropiesOfWorker], FIRST_ERROR] = Field(min_length=1)


def most_bytes(tokens: int, *, lines: bool = False) -> int:
    """Return the maximum bytes of `tokens` tokens; with `lines`, each is on its own line."""
    return BASE_BYTES + tokens * (LINE_BYTES if lines else TOKEN_BYTES)


def check_tokens(choice: Choice, vocabulary: int) -> None:
    """Raise WrongAnswer for tokens that the model does not have, and for impossible log-probs."""
    for token_id in choice.token_ids:
        if not 0 <= token_id < vocabulary:
            raise WrongAnswer(f"token {short_repr(token_id)} of a vocabulary of {vocabulary}")
    for token in choice.logprobs:
        if token.logprob > ROUNDING:
            raise WrongAnswer(
                "a log-probability above 0: the server needs --logprobs-mode processed_logprobs"
            )
        if token.logprob < MIN_LOGP:
            raise WrongAnswer(
                f"a log-probability of {token.logprob:g}, too low for any token to be drawn"
            )


def check_entropies(entropies: Sequence[float], vocabulary: int) -> None:
    """Raise WrongAnswer for an entropy that no distribution over the vocabulary can have."""
    highest = math.log(vocabulary)
    slack = ROUNDING * max(1.0, highest)
    for entropy in entropies:
        if not -slack <= entropy <= highest + slack:
            raise WrongAnswer(f"an entropy of {entropy:g}; it must be between 0 and {highest:.3g}")


def token_versions(spans: Sequence[VersionSpan], count: int) -> list[int]:
    """Return the weight version of each of `count` tokens.

    Raises WrongAnswer if the spans do not cover the tokens in order.

    >>> spans = [VersionSpan(version="1", start=0, end=2), VersionSpan(version="2", start=2, end=3)]
    >>> token_versions(spans, 3)
    [1, 1, 2]
    """
    versions: list[int] = []
    for span in spans:
        follows = span.start == len(versions) <= span.end <= count
        if not follows or not VERSION.fullmatch(span.version):
            raise _no_versions(spans, count)
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != count:
        raise _no_versions(spans, count)
    return versions


def _no_versions(spans: Sequence[VersionSpan], count: int) -> WrongAnswer:
    faults = []
    for span in spans[:MAX_SPANS]:
        version = clean(span.version, 20)
        faults.append(f"{version} of tokens {short_repr(span.start)} to {short_repr(span.end)}")
    described = ", ".join(faults) or "without a version"
    return WrongAnswer(f"not one weight version for each of {count} tokens: {described}")
