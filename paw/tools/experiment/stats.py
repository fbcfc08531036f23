"""What several seeds say: means with Student intervals, paired differences, areas under curves. Plain Python."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean over seeds with its 95 % interval; one seed has neither spread nor interval."""

    mean: float
    n: int
    sd: float | None = None
    low: float | None = None
    high: float | None = None


def interval(values: Sequence[float]) -> Interval:
    """Mean, standard deviation (n - 1) and the two-sided 95 % Student interval of the mean."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Interval(mean, n)
    sd = stdev(values)
    half = student(n - 1) * sd / math.sqrt(n)
    return Interval(mean, n, sd, mean - half, mean + half)


def paired(first: Mapping[int, float], other: Mapping[int, float]) -> Interval | None:
    """`other` less `first`, seed by seed: the same start model and the same games. None without a common seed."""
    differences = [other[seed] - first[seed] for seed in first if seed in other]
    return interval(differences) if differences else None


def verdict(difference: Interval | None) -> str:
    """What a difference in success says, if anything."""
    if difference is None or difference.n < 3 or difference.low is None or difference.high is None:
        return "not shown (fewer than three seeds)"  # two may well differ by the same game
    helps, hurts = difference.low > 0, difference.high < 0
    return "helps beyond the interval" if helps else "hurts beyond the interval" if hurts else "not shown"


def area(steps: Sequence[int], values: Sequence[float]) -> float:
    """Mean height of the curve through the points (trapezoids): a share if the values are."""
    if len(steps) < 2:
        return fmean(values)
    parts = [(steps[i + 1] - steps[i]) * (values[i + 1] + values[i]) / 2 for i in range(len(steps) - 1)]
    return sum(parts) / (steps[-1] - steps[0])


def student(freedom: int, level: float = 0.95) -> float:
    """t with P(|T| <= t) = level for whole degrees of freedom (Abramowitz and Stegun 26.7.3-4), by bisection.

    >>> [round(student(n), 3) for n in (1, 2, 9, 120)]
    [12.706, 4.303, 2.262, 1.98]
    """
    odd = freedom % 2

    def inside(angle: float) -> float:  # t = sqrt(freedom) tan(angle)
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for m in range(odd, freedom - 1, 2):
            term *= (m - 1) / m * math.cos(angle) ** 2 if m > 1 else 1.0
            total += term
        within = math.sin(angle) * total
        return 2 / math.pi * (angle + within) if odd else within

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
