"""What each rank has played, told to all of them: rows of tokens as arrays, the rest (texts, outcomes) as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from paw.rollouts.episode import Played
from paw.types import Task, Trajectory, Turn

if TYPE_CHECKING:
    from paw.model.ranks import Ranks


def exchange(
    own: Played, tasks: Sequence[Task], ranks: "Ranks", encode: Callable[[str], list[int]] | None = None
) -> list[Played]:
    """What each rank has played of `tasks`, in the order of ranks; a call of all, which takes `own` apart.

    Log-probs and entropies travel as float32, which is what engines give. With `encode` each rank encodes the
    observations of the episodes it played.
    """
    ids, values = list[list[int]](), list[list[float]]()
    for turn in turns_of(own):
        observation = (turn.observation_ids or encode(turn.observation)) if encode else []
        ids += turn.prompt_ids, turn.response_ids, turn.versions or [], observation
        values += turn.sampled_logp, turn.entropy or []
        turn.prompt_ids, turn.response_ids, turn.sampled_logp = [], [], []
        turn.entropy = turn.versions = turn.observation_ids = None
    set_tasks(own, {task.id: replace(task, payload=None) for task in tasks})  # which every rank has
    parts = ranks.gather(own, Played)
    all_ids, all_values = ranks.gather_rows(ids, int), ranks.gather_rows(values, float)
    for part, its_ids, its_values in zip(parts, map(iter, all_ids), map(iter, all_values), strict=True):
        for turn in turns_of(part):
            turn.prompt_ids, turn.response_ids, versions, observation = islice(its_ids, 4)
            turn.sampled_logp, entropy = islice(its_values, 2)
            turn.versions, turn.entropy = versions or None, entropy or None
            turn.observation_ids = observation if encode else None
        set_tasks(part, {task.id: task for task in tasks})
    return parts


def _trajectories(played: Played) -> list[Trajectory]:
    groups, stats = played
    return [*chain(*(group.trajectories for group in groups)), *stats.failed]


def turns_of(played: Played) -> list[Turn]:
    return [turn for trajectory in _trajectories(played) for turn in trajectory.turns]


def set_tasks(played: Played, by_id: dict[str, Task]) -> None:
    for holder in (*played[0], *_trajectories(played)):
        holder.task = by_id[holder.task.id]
