"""Gives every rank the episodes that all ranks have played.

Token ids and log-probs travel as arrays, texts and outcomes as JSON.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paw.rollouts.base import RolloutResult
from paw.types import Ids, Task, Trajectory, Turn, Values, no_ids, no_values

if TYPE_CHECKING:
    from paw.distributed.ranks import Ranks


def exchange(
    own_result: RolloutResult,
    tasks: Sequence[Task],
    ranks: "Ranks",
    encode: Callable[[str], Ids] | None = None,
) -> list[RolloutResult]:
    """Return the episodes of `tasks` that each rank has played, in the order of ranks.

    A call of all ranks. `own_result` is taken apart. Log-probs and entropies travel as float32,
    which is what engines return. With `encode`, each rank encodes the observations of the episodes
    that it has played.
    """
    ids, values = _take_numbers(own_result, encode)
    # Payloads are left out, because every rank has them.
    set_tasks(own_result, {task.id: replace(task, payload=None) for task in tasks})

    gathered = ranks.gather(own_result, RolloutResult)
    gathered_ids = ranks.gather_rows(ids, int)
    gathered_values = ranks.gather_rows(values, float)

    tasks_by_id = {task.id: task for task in tasks}
    for result, rank_ids, rank_values in zip(gathered, gathered_ids, gathered_values, strict=True):
        _restore_numbers(result, iter(rank_ids), iter(rank_values), encoded=encode is not None)
        set_tasks(result, tasks_by_id)
    return gathered


def _take_numbers(
    result: RolloutResult, encode: Callable[[str], Ids] | None
) -> tuple[list[Ids], list[Values]]:
    """Take the numbers out of the turns: four rows of ids and two rows of values for each turn.

    They are in the order in which `_restore_numbers` reads them.
    """
    ids: list[Ids] = []
    values: list[Values] = []
    for turn in turns_of(result):
        observation_ids = no_ids()
        if encode and turn.observation_ids is not None:
            observation_ids = turn.observation_ids
        elif encode:
            observation_ids = encode(turn.observation)
        versions = no_ids() if turn.versions is None else turn.versions
        entropy = no_values() if turn.entropy is None else turn.entropy
        ids += [turn.prompt_ids, turn.response_ids, versions, observation_ids]
        values += [turn.sampled_logp, entropy]

        turn.prompt_ids = no_ids()
        turn.response_ids = no_ids()
        turn.versions = None
        turn.observation_ids = None
        turn.sampled_logp = no_values()
        turn.entropy = None
    return ids, values


def _restore_numbers(
    result: RolloutResult, ids: Iterator[Ids], values: Iterator[Values], *, encoded: bool
) -> None:
    """Give the turns the rows that `_take_numbers` took.

    `encoded` says whether observations were encoded.
    """
    for turn in turns_of(result):
        turn.prompt_ids = next(ids)
        turn.response_ids = next(ids)
        versions = next(ids)
        turn.versions = versions if len(versions) else None
        observation_ids = next(ids)
        turn.observation_ids = observation_ids if encoded else None
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
