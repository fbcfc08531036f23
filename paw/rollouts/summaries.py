"""Tells every rank how the episodes of all ranks ended. Their turns stay where they were played."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paw.rollouts.base import RolloutResult, RolloutStats
from paw.types import AwayTrajectory, EpisodeSummary, Group, Task, Trajectory

if TYPE_CHECKING:
    from paw.distributed.ranks import Ranks


@dataclass(frozen=True)
class EpisodeReport:
    """A summary of an episode for the other ranks."""

    task: str
    """Its id."""
    member: int
    failure: str | None
    summary: EpisodeSummary

    @classmethod
    def of(cls, trajectory: Trajectory) -> "EpisodeReport":
        return cls(
            task=trajectory.task.id,
            member=trajectory.member,
            failure=trajectory.failure,
            summary=trajectory.summary,
        )


@dataclass(frozen=True)
class RankReport:
    """What one rank has played."""

    groups: list[tuple[int, list[EpisodeReport]]]
    """(index of the task, its episodes)."""
    failed: list[EpisodeReport]
    stats: RolloutStats
    """Without episodes."""

    @classmethod
    def of(cls, result: RolloutResult) -> "RankReport":
        groups, stats = result
        group_reports: list[tuple[int, list[EpisodeReport]]] = []
        for group in groups:
            episodes = [EpisodeReport.of(trajectory) for trajectory in group.trajectories]
            group_reports.append((group.index, episodes))
        return cls(
            groups=group_reports,
            failed=[EpisodeReport.of(trajectory) for trajectory in stats.failed],
            stats=replace(stats, failed=[], uniform=[]),
        )

    def result(self, tasks: Sequence[Task], rank: int) -> RolloutResult:
        """Return what `rank` has played, without turns."""
        tasks_by_id = {task.id: task for task in tasks}

        def away(report: EpisodeReport, task: Task) -> AwayTrajectory:
            return AwayTrajectory(
                task, report.member, report.summary, rank=rank, failure=report.failure
            )

        groups: list[Group] = []
        for group_index, reports in self.groups:
            episodes: list[Trajectory] = [away(report, tasks[group_index]) for report in reports]
            groups.append(Group(tasks[group_index], episodes, group_index))
        failed: list[Trajectory] = []
        for report in self.failed:
            failed.append(away(report, tasks_by_id[report.task]))
        return groups, replace(self.stats, failed=failed)


def share_summaries(
    own_result: RolloutResult, tasks: Sequence[Task], ranks: "Ranks"
) -> list[RolloutResult]:
    """Return the episodes of `tasks` that each rank has played, in the order of ranks.

    Every rank must call this. Those of other ranks have no turns.
    """
    results: list[RolloutResult] = []
    reports = ranks.gather(RankReport.of(own_result), RankReport)
    for rank, report in enumerate(reports):
        results.append(own_result if rank == ranks.rank else report.result(tasks, rank))
    return results
