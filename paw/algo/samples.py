"""Trajectories -> samples: one for each turn, with the engine's own token ids."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paw.algo.shared_samples import Columns, SharedSamples, assign, column
from paw.types import AwayTrajectory, Group, Ids, Sample, Trajectory, Turn, as_ids, no_ids


def to_samples(
    groups: list[Group],
    *,
    separator_ids: list[int],
    encode_observation: Callable[[str], Ids] | None,
    invalid_penalty: float | Mapping[str, float],
    rank: int = 0,
    share: Callable[[SharedSamples], None] | None = None,
) -> Sequence[Sample]:
    """Return the samples of an update, ordered by group, trajectory and step: a list, on one rank.

    With several ranks, this one is `rank`, and `share` fills the numbers of the turns that other
    ranks have played (`algo.rows.share_scalars`).

    Token ids and log-probs are the engine's own, never re-encoded. `encode_observation` turns the
    raw next observation into target ids. If it is None (world model off), or if an observation is
    empty, samples have no target. `invalid_penalty` may be that of each environment, by
    `Task.env`.
    """
    template_separator = as_ids(separator_ids)
    own_samples: dict[int, Sample] = {}
    places = _Places()
    for group_index, group in enumerate(groups):
        group_penalty = invalid_penalty
        if isinstance(group_penalty, Mapping):
            group_penalty = group_penalty[group.task.env]
        for trajectory in group.trajectories:
            if isinstance(trajectory, AwayTrajectory):
                places.add(group_index, holder=trajectory.rank, turns=len(trajectory.turns))
                continue
            trajectory_samples = _trajectory_samples(
                trajectory,
                group=group_index,
                index=len(places.turns),
                template_separator=template_separator,
                encode_observation=encode_observation,
                invalid_penalty=group_penalty,
            )
            own_samples.update(enumerate(trajectory_samples, places.total_turns))
            places.add(group_index, holder=rank, turns=len(trajectory_samples))

    samples: Sequence[Sample] = list(own_samples.values())
    if share:
        samples = SharedSamples(places.columns(), own_samples, rank)
        share(samples)
    _fill_token_weights(samples, n_groups=len(groups))
    return samples


class _Places:
    """Where each trajectory of the update was played, in their order."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.holders: list[int] = []
        """The rank that has played each trajectory."""
        self.turns: list[int] = []
        """The number of turns of each trajectory."""
        self.total_turns = 0

    def add(self, group: int, *, holder: int, turns: int) -> None:
        self.groups.append(group)
        self.holders.append(holder)
        self.turns.append(turns)
        self.total_turns += turns

    def columns(self) -> Columns:
        """Return the columns of all turns of the update, with the numbers that are known here."""
        counts = np.array(self.turns, np.int64)
        firsts = np.cumsum(counts) - counts
        return Columns.of_turns(
            group=np.repeat(np.array(self.groups, np.int32), counts),
            trajectory=np.repeat(np.arange(len(counts)), counts),
            step=np.arange(self.total_turns) - np.repeat(firsts, counts),
            holder=np.repeat(np.array(self.holders, np.int32), counts),
        )


def _trajectory_samples(
    trajectory: Trajectory,
    *,
    group: int,
    index: int,
    template_separator: Ids,
    encode_observation: Callable[[str], Ids] | None,
    invalid_penalty: float,
) -> list[Sample]:
    """Return the samples of the trajectory with that index, of a group with that index."""
    episode_return = trajectory.episode_return
    samples: list[Sample] = []
    previous: Turn | None = None
    for step, turn in enumerate(trajectory.turns):
        penalty = 0.0 if turn.outcome.valid else invalid_penalty
        target = _target_ids(turn, encode_observation)
        separator = turn.separator_ids
        if separator is None:
            separator = template_separator
        versions = turn.versions
        if versions is None:
            versions = np.full(len(turn.response_ids), turn.version, np.int32)
        samples.append(
            Sample(
                group=group,
                trajectory=index,
                step=step,
                continues=previous is not None and _begins_with(turn, previous),
                prompt_ids=turn.prompt_ids,
                response_ids=turn.response_ids,
                separator_ids=separator if len(target) else no_ids(),
                observation_ids=target,
                spans=turn.spans if len(target) else [],
                sampled_logp=turn.sampled_logp,
                sampled_entropy=turn.entropy,
                versions=versions,
                server=turn.server,
                score=episode_return - penalty,
                episode_return=episode_return,
                reward=turn.outcome.reward,
                penalty=penalty,
                anchor=turn.anchor,
            )
        )
        previous = turn
    return samples


def _begins_with(turn: Turn, previous: Turn) -> bool:
    """Whether a turn's prompt begins with the prompt and response of the previous one."""
    response_start = len(previous.prompt_ids)
    response_end = response_start + len(previous.response_ids)
    prompt_ids = turn.prompt_ids
    return np.array_equal(prompt_ids[:response_start], previous.prompt_ids) and np.array_equal(
        prompt_ids[response_start:response_end], previous.response_ids
    )


def _fill_token_weights(samples: Sequence[Sample], *, n_groups: int) -> None:
    """Fill the weight of a response token: a mean over each group's tokens, then over groups."""
    group = column(samples, "group").astype(np.int64)
    group_tokens = np.bincount(group, column(samples, "response_length"))
    assign(samples, "token_weight", 1.0 / (n_groups * group_tokens[group]))


def _target_ids(turn: Turn, encode_observation: Callable[[str], Ids] | None) -> Ids:
    """Return the world model's target of a turn; empty without a world model."""
    if encode_observation is None:
        return no_ids()
    if turn.observation_ids is not None:
        return turn.observation_ids
    return encode_observation(turn.observation)
