"""How the tasks of each update are divided among several environments ([[envs]]).

Tasks that an environment loses to rounding in one update come back in a later one. All numbers are
integers, so every rank and every resumed run has the same tasks.
"""

import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

WHOLE = 1_000_000
"""Shares are whole millionths."""


class Position(NamedTuple):
    """The tasks given to each environment before an update."""

    given: dict[str, int]
    """Tasks that each environment had in the updates before."""
    credit: dict[str, int]
    """Credit of each in millionths of a task; negative if it has had more than its share."""


class TaskShares:
    """Divides the tasks of updates.

    Example: 3 tasks an update with shares 1 and 1 give 2 and 1 tasks, then 1 and 2, and so on.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        """`shares` are positive, relative to one another."""
        self.initial = in_millionths(shares)
        self._chosen: dict[int, dict[str, int]] = {}
        """The shares that a curriculum has chosen, by the first update that they apply to."""
        nothing = dict.fromkeys(shares, 0)
        self._positions: dict[int, dict[int, Position]] = {}
        """Position before an update, by tasks in an update and number of the update."""
        self._start = Position(nothing, nothing)

    def choose(self, step: int, shares: Mapping[str, float]) -> None:
        """Set the shares of update `step` and the later ones."""
        self._chosen[step] = in_millionths(shares)

    def is_chosen(self, step: int) -> bool:
        """Whether `choose` was called for update `step`."""
        return step in self._chosen

    def of(self, step: int) -> dict[str, int]:
        """Return the shares of update `step`, in millionths."""
        chosen = [update for update in self._chosen if update <= step]
        return self._chosen[max(chosen)] if chosen else self.initial

    def tasks(self, step: int, count: int) -> dict[str, range]:
        """Return which of its tasks each environment plays in update `step`, of `count` tasks.

        The environments with the most credit come first, one task at a time.
        """
        before = self._before(step, count)
        after = _advanced(before, self.of(step), count)
        return {label: range(before.given[label], after.given[label]) for label in before.given}

    def state(self, step: int, count: int) -> dict[str, Any]:
        """Return the state that `load_state` needs to continue from update `step`, as JSON."""
        position = self._before(step, count)
        return {"given": position.given, "credit": position.credit, "shares": self.of(step)}

    def load_state(self, state: Mapping[str, Any], step: int, count: int) -> None:
        """Load a saved state.

        Environments that it does not know begin with nothing. If it is malformed, raises KeyError,
        TypeError, ValueError or AttributeError and changes nothing.
        """
        given, credit, shares = (
            {label: int(state[part].get(label, 0)) for label in self.initial}
            for part in ("given", "credit", "shares")
        )
        if min(*given.values(), *shares.values()) < 0 or not any(shares.values()):
            raise ValueError("a number of tasks or a share is negative, or all shares are 0")
        owed = sum(credit.values())  # not 0 if the recipe has other environments now
        credit[next(iter(credit))] -= owed
        self._chosen = {step: in_millionths(shares)}
        self._positions = {count: {step: Position(given, credit)}}

    def _before(self, step: int, count: int) -> Position:
        positions = self._positions.setdefault(count, {0: self._start})
        known_update = max((update for update in positions if update <= step), default=None)
        if known_update is None:
            known_update = 0
            positions[0] = self._start
        position = positions[known_update]
        for update in range(known_update, step):
            position = _advanced(position, self.of(update), count)
        if step not in positions:
            positions[step] = position
        return position


def in_millionths(shares: Mapping[str, float]) -> dict[str, int]:
    """Return shares as millionths that add up to one.

    >>> in_millionths({"a": 1, "b": 2})
    {'a': 333333, 'b': 666667}
    """
    share_sum = sum(shares.values())
    exact = {label: share / share_sum * WHOLE for label, share in shares.items()}
    rounded = {label: int(value) for label, value in exact.items()}
    missing = WHOLE - sum(rounded.values())
    by_remainder = sorted(exact, key=lambda label: rounded[label] - exact[label])
    for label in by_remainder[:missing]:
        rounded[label] += 1
    return rounded


def _advanced(position: Position, shares: Mapping[str, int], count: int) -> Position:
    """Return the position after an update of `count` tasks."""
    given = dict(position.given)
    credit = {label: owed + shares[label] * count for label, owed in position.credit.items()}
    for _ in range(count):
        # An environment without a share gets no tasks, even if it still has credit.
        label = max((label for label in credit if shares[label]), key=lambda label: credit[label])
        given[label] += 1
        credit[label] -= WHOLE
    return Position(given, credit)


def drawn(shares: Mapping[str, int], indices: Iterable[int], seed: int) -> list[str]:
    """Return the environment of each of these places, drawn with the shares as probabilities.

    This is for tasks that do not belong to an update's own, such as those that replace groups.
    """
    labels = list(shares)
    weights = list(shares.values())
    return [random.Random(f"{seed}/{i}").choices(labels, weights)[0] for i in indices]


def interleaved(counts: Mapping[str, int]) -> list[str]:
    """Return each label as often as it counts, spread evenly.

    Ranks play blocks of the tasks, so each then gets its part of every environment.

    >>> interleaved({"a": 4, "b": 2})
    ['a', 'b', 'a', 'a', 'b', 'a']
    """
    places: list[tuple[float, int, str]] = []
    for order, (label, count) in enumerate(counts.items()):
        places += [((2 * i + 1) / (2 * count), order, label) for i in range(count)]
    return [label for _, _, label in sorted(places)]
