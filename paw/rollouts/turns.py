"""Checks what agents and reward functions can get wrong: stop strings, an episode's turns."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paw.errors import short_repr
from paw.types import Outcome, Turn


def checked_stop(stop: Iterable[Any]) -> list[str]:
    """Check and return the stop strings of a call of the model.

    Raises ValueError if one is not a text, or is empty. The agent sees this error, not the engine
    later.
    """
    stop_strings = list(stop)
    for stop_string in stop_strings:
        if not isinstance(stop_string, str) or not stop_string:
            raise ValueError(
                f"stop contains {short_repr(stop_string)}; each must be a non-empty string"
            )
    return stop_strings


def turns_problem(turns: Sequence[Turn], *, with_tokens: bool) -> str:
    """Say what is wrong with the turns; "" if nothing is.

    Training needs each token (`with_tokens`) with its log-prob.
    """
    for number, turn in enumerate(turns):
        if not isinstance(turn.outcome, Outcome) or not math.isfinite(turn.outcome.reward):
            return f"turn {number} has the outcome {short_repr(turn.outcome)}"
        if with_tokens:
            problem = _tokens_problem(turn)
            if problem:
                return f"turn {number} has {problem}"
    return ""


def _tokens_problem(turn: Turn) -> str:
    """Say what is wrong with the numbers of a turn; "" if nothing is."""
    if not len(turn.prompt_ids):
        return "no prompt_ids"
    if not len(turn.response_ids):
        return "no response_ids"
    for name in ("sampled_logp", "entropy", "versions"):
        values = getattr(turn, name)
        if values is not None and len(values) != len(turn.response_ids):
            return f"{len(turn.response_ids)} response_ids and {len(values)} of {name}"
    return ""
