"""The result of playing episodes, and the protocol for whatever plays them in a run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from paw.types import Group, Trajectory

Progress = Callable[[int, int], None]
"""Called with (episodes finished, total episodes)."""
HEALTH = ("groups_dropped", "prompts_truncated", "texts_cut", "threads_lost")
"""Counts that are always reported, under health/."""


@dataclass
class RolloutStats:
    """Counts of what happened in one episode, or in many together."""

    groups_dropped: int = 0
    prompts_truncated: int = 0
    texts_cut: int = 0
    """Texts from environments that were longer than env.max_text."""
    threads_lost: int = 0
    """Environment calls abandoned after env.step_timeout_s, each with its thread."""
    context_full: int = 0
    """Episodes that ended because the next prompt did not fit."""
    processes_lost: int = 0
    """Environment processes that died or hung (env.processes)."""
    rewards_failed: int = 0
    """Episodes without the rewards of [reward] or [[rewards]], because one failed."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    """Tokens sampled or billed, including those that a stop string cut off."""
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its cache."""
    failed: list[Trajectory] = field(default_factory=list)
    """Episodes whose environment or agent failed. They are in no group."""
    uniform: list[Group] = field(default_factory=list)
    """Groups that were replaced because all their returns were equal."""

    @property
    def failures(self) -> list[str]:
        return [f"{trajectory.task.id}: {trajectory.failure}" for trajectory in self.failed]

    @classmethod
    def sum(cls, parts: Iterable["RolloutStats"]) -> "RolloutStats":
        stats_sum = cls()
        for other_stats in parts:
            for name, value in vars(other_stats).items():
                setattr(stats_sum, name, getattr(stats_sum, name) + value)
        return stats_sum

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {"health/env_failures": len(self.failed)}
        for name in HEALTH:
            metrics[f"health/{name}"] = getattr(self, name)
        if self.cached_tokens:
            metrics["perf/cached_frac"] = self.cached_tokens / self.prompt_tokens
        if self.uniform:
            metrics["health/groups_refilled"] = len(self.uniform)
        if self.processes_lost:
            metrics["health/processes_lost"] = self.processes_lost
        if self.rewards_failed:
            metrics["health/rewards_failed"] = self.rewards_failed
        return metrics


RolloutResult = tuple[list[Group], RolloutStats]
"""The groups played, and counts of what happened."""


class RolloutSource(Protocol):
    """Where a run gets its episodes.

    They are played on request (`Rollouts`) or in advance (`AsyncRollouts`).
    """

    def training(self, step: int, count: int, progress: Progress | None = None) -> RolloutResult:
        """Return the episodes of the first `count` tasks of update `step`, in groups.

        Every rank must call this and `evaluation`.
        """
        ...

    def evaluation(self, progress: Progress | None = None) -> RolloutResult:
        """Play each evaluation game `eval.attempts` times."""
        ...

    def close(self) -> None:
        """Close the environments."""
        ...
