"""Gives every rank the whole episodes that other ranks have played. Callbacks use it, not training.

Token ids and log-probs travel as arrays, texts and outcomes as JSON.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paw.rollouts.base import RolloutResult, RolloutStats
from paw.types import (
    AwayTrajectory,
    Group,
    Ids,
    Task,
    Trajectory,
    Turn,
    Values,
    no_ids,
    no_values,
)

if TYPE_CHECKING:
    from paw.distributed.ranks import Ranks


def gather_turns(groups: Sequence[Group], ranks: "Ranks") -> list[Group]:
    """Return the groups with the turns of all episodes, on every rank. Every rank must call this.

    Every rank then holds all of them in memory. Log-probs and entropies travel as float32, which is
    what engines return.
    """
    own_trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    is_partial = any(isinstance(trajectory, AwayTrajectory) for trajectory in own_trajectories)
    if not any(ranks.gather(is_partial)):
        return list(groups)

    tasks = [group.task for group in groups]
    own_groups: list[Group] = []
    for group_index, group in enumerate(groups):
        # A task may occur more than once, so groups are identified by their position. Payloads are
        # left out, because every rank has them.
        task = Task(str(group_index), group.task.kind)
        own_groups.append(Group(task, _own_copies(group, task), group_index))
    own_result = own_groups, RolloutStats()
    token_ids, values = _take_numbers(own_result)

    gathered = ranks.gather(own_result, RolloutResult)
    gathered_ids = ranks.gather_rows(token_ids, int)
    gathered_values = ranks.gather_rows(values, float)

    full = [Group(task, [], group.index) for task, group in zip(tasks, groups, strict=True)]
    for result, rank_ids, rank_values in zip(gathered, gathered_ids, gathered_values, strict=True):
        _restore_numbers(result, iter(rank_ids), iter(rank_values))
        rank_groups, _ = result
        for group_index, group in enumerate(rank_groups):
            for trajectory in group.trajectories:
                trajectory.task = tasks[group_index]
                full[group_index].trajectories.append(trajectory)
    return full


def _own_copies(group: Group, task: Task) -> list[Trajectory]:
    """Return copies of the episodes that this rank has played, for `_take_numbers`."""
    copies: list[Trajectory] = []
    for trajectory in group.trajectories:
        if not isinstance(trajectory, AwayTrajectory):
            turns = [replace(turn) for turn in trajectory.turns]
            copies.append(replace(trajectory, task=task, turns=turns))
    return copies


def _take_numbers(result: RolloutResult) -> tuple[list[Ids], list[Values]]:
    """Take the numbers out of the turns: four rows of ids and two rows of values for each turn.

    They are in the order in which `_restore_numbers` reads them.
    """
    token_ids: list[Ids] = []
    values: list[Values] = []
    for turn in turns_of(result):
        versions = no_ids() if turn.versions is None else turn.versions
        observation_ids = no_ids() if turn.observation_ids is None else turn.observation_ids
        entropy = no_values() if turn.entropy is None else turn.entropy
        token_ids += [turn.prompt_ids, turn.response_ids, versions, observation_ids]
        values += [turn.sampled_logp, entropy]

        turn.prompt_ids = no_ids()
        turn.response_ids = no_ids()
        turn.versions = None
        turn.observation_ids = None
        turn.sampled_logp = no_values()
        turn.entropy = None
    return token_ids, values


def _restore_numbers(result: RolloutResult, ids: Iterator[Ids], values: Iterator[Values]) -> None:
    """Give the turns the rows that `_take_numbers` took."""
    for turn in turns_of(result):
        turn.prompt_ids = next(ids)
        turn.response_ids = next(ids)
        versions = next(ids)
        turn.versions = versions if len(versions) else None
        observation_ids = next(ids)
        turn.observation_ids = observation_ids if len(observation_ids) else None
        turn.sampled_logp = next(values)
        entropy = next(values)
        turn.entropy = entropy if len(entropy) else None


def _trajectories(result: RolloutResult) -> list[Trajectory]:
    """Return all episodes: those in groups, then those that failed."""
    groups, stats = result
    trajectories: list[Trajectory] = []
    for group in groups:
        trajectories += group.trajectories
    return trajectories + stats.failed


def turns_of(result: RolloutResult) -> list[Turn]:
    """Return the turns of all episodes, including failed ones."""
    turns: list[Turn] = []
    for trajectory in _trajectories(result):
        turns += trajectory.turns
    return turns


def set_tasks(result: RolloutResult, by_id: dict[str, Task]) -> None:
    """Replace the task of every group and episode with the one of the same id in `by_id`."""
    groups, _ = result
    for group in groups:
        group.task = by_id[group.task.id]
    for trajectory in _trajectories(result):
        trajectory.task = by_id[trajectory.task.id]
