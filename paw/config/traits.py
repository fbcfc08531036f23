"""What an advantage estimator declares about itself. The configuration and the run rely on it.

An estimator without a declaration has the defaults of `EstimatorTraits`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Need = Literal["groups", "critic", "nothing"]
Anchors = Literal["text", "equality", "nothing"]


@dataclass(frozen=True)
class EstimatorTraits:
    """Properties of an advantage estimator that other settings and parts of a run depend on."""

    needs: Need = "groups"
    """What it compares an episode with.

    groups: the other episodes of its task. So `rollout.group_size` must be 2 or more, and
    `rollout.refill` and `advantage.penalty_only` apply, which concern groups whose returns are all
    equal. critic: the critic's values. The estimator is called for each sample, as (values, score,
    **settings) with the value before each response token, and returns the advantage of each of
    these tokens. nothing: neither of these.
    """
    tokens: bool = False
    """Whether it reads tokens, log-probs or other numbers of tokens.

    With several ranks, each holds a part of them, and the others know only their lengths. For an
    estimator that reads them, all are sent to every rank, at the cost of their memory.
    """
    by_group: bool = False
    """Whether an advantage depends only on the samples of its own group (`Sample.group`).

    With several ranks, each then calls it with the samples of some groups. Without it, every rank
    calls it with all samples, which takes each rank as long as one rank alone.
    """
    anchors: Anchors = "text"
    """What it reads of `Sample.anchor`. With "equality", ranks exchange digests of the texts."""

    @property
    def needs_groups(self) -> bool:
        return self.needs == "groups"

    @property
    def needs_critic(self) -> bool:
        return self.needs == "critic"


_declared: dict[Any, EstimatorTraits] = {}


def estimator(
    *,
    needs: Need = "groups",
    tokens: bool = False,
    by_group: bool = False,
    anchors: Anchors = "text",
) -> Callable[[Function], Function]:
    """Decorate an advantage estimator to declare what it needs, see `EstimatorTraits`."""

    def declare(function: Function) -> Function:
        _declared[function] = EstimatorTraits(
            needs=needs, tokens=tokens, by_group=by_group, anchors=anchors
        )
        return function

    return declare


def traits_of(estimator: Any) -> EstimatorTraits:
    """Return the traits that an estimator declared, or the defaults."""
    if not isinstance(estimator, Hashable):
        return EstimatorTraits()
    return _declared.get(estimator, EstimatorTraits())
