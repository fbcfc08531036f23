"""A curriculum: a user's function chooses how much of each update each environment gets."""

import numbers
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from paw.config import plugins
from paw.errors import UserError, clean, others_code, short_repr

WINDOW = 10
"""Number of updates over which success is averaged."""
MOST = 1e12
"""Largest share."""


class Curriculum:
    """The function that rollout.curriculum names, and the success rates that it gets.

    The function gets (step, success): the number of updates done, and for each label of [[envs]]
    the share of its training episodes that were won, over the last WINDOW updates that played it; 0
    before the first. It returns the shares of the next update by label, relative to one another. A
    label may be missing, which means 0.
    """

    def __init__(self, name: str, labels: list[str]) -> None:
        """Raises UserError if there is no such function."""
        self._origin = f"rollout.curriculum = '{clean(name)}'"
        try:
            self._function: Callable[..., Any] = plugins.load("curricula", name)
        except UserError as error:
            raise UserError(f"rollout.curriculum: {error}") from None
        self._recent: dict[str, deque[float]] = {label: deque(maxlen=WINDOW) for label in labels}

    def note(self, success: Mapping[str, float]) -> None:
        """Add an update's success, by label of the environments that it has played."""
        for label, value in success.items():
            self._recent[label].append(value)

    def shares(self, step: int) -> dict[str, float]:
        """Return the shares of update `step`. Raises UserError if the function fails."""
        success = {
            label: sum(values) / len(values) if values else 0.0
            for label, values in self._recent.items()
        }
        with others_code(self._origin, all_theirs=True):
            shares = self._function(step, success)
        return self._checked(shares)

    def state(self) -> dict[str, list[float]]:
        """Return the state to save in a checkpoint, as JSON."""
        return {label: list(values) for label, values in self._recent.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises TypeError or ValueError, and changes nothing, if malformed."""
        loaded = {label: [float(value) for value in state.get(label, [])] for label in self._recent}
        for label, values in loaded.items():
            self._recent[label] = deque(values, maxlen=WINDOW)

    def _checked(self, shares: Any) -> dict[str, float]:
        if not isinstance(shares, Mapping):
            raise UserError(
                f"{self._origin} returned {short_repr(shares)}, not a dict of shares by label"
            )
        unknown = [label for label in shares if label not in self._recent]
        if unknown:
            raise UserError(
                f"{self._origin} returned a share of {short_repr(unknown[0])}; "
                f"the [[envs]] are {', '.join(self._recent)}"
            )
        for label, share in shares.items():
            if not isinstance(share, numbers.Real) or not 0 <= cast(float, share) <= MOST:
                raise UserError(
                    f"{self._origin} returned {short_repr(share)} as the share of '{label}', which "
                    f"is not a number from 0 to {MOST:g}"
                )
        if not sum(shares.values()) > 0:
            raise UserError(f"{self._origin} returned no share above 0: {short_repr(dict(shares))}")
        return {label: float(shares.get(label, 0.0)) for label in self._recent}
