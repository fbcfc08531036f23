"""Trajectories -> samples: one per turn (prompt h_t, response a_t, separator, observation o_{t+1})."""

from collections import Counter
from collections.abc import Callable

from paw.types import Group, Sample


def to_samples(
    groups: list[Group],
    *,
    separator_ids: list[int],
    encode_observation: Callable[[str], list[int]] | None,
    invalid_penalty: float,
) -> list[Sample]:
    """Samples of an update in group, trajectory, step order.

    Token ids and log-probs are the engine's own, never re-encoded. `encode_observation` turns the raw next
    observation into target ids; None (world model off) leaves samples without a target, as an empty observation does.
    """
    samples = []
    trajectory_index = 0
    for group_index, group in enumerate(groups):
        for trajectory in group.trajectories:
            episode_return = trajectory.episode_return
            for step, turn in enumerate(trajectory.turns):
                penalty = 0.0 if turn.outcome.valid else invalid_penalty
                target = encode_observation(turn.outcome.observation) if encode_observation else []
                samples.append(
                    Sample(
                        group=group_index,
                        trajectory=trajectory_index,
                        step=step,
                        prompt_ids=turn.prompt_ids,
                        response_ids=turn.response_ids,
                        separator_ids=separator_ids if target else [],
                        observation_ids=target,
                        sampled_logp=turn.sampled_logp,
                        sampled_entropy=turn.entropy,
                        score=episode_return - penalty,
                        episode_return=episode_return,
                        reward=turn.outcome.reward,
                        penalty=penalty,
                        anchor=turn.anchor,
                    )
                )
            trajectory_index += 1
    tokens = Counter[int]()
    for sample in samples:
        tokens[sample.group] += len(sample.response_ids)
    for sample in samples:
        sample.token_weight = 1.0 / (len(groups) * tokens[sample.group])
    return samples
