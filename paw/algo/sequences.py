"""Samples -> sequences: turns that continue one another are computed as one.

A turn continues the sequence of the previous turn if its prompt begins with that turn's prompt and
response. Then no token is computed twice, and the observation between the turns is already in the
sequence as a target. So a conversation is one sequence. The paper's prompts consist of one message
each, and each makes its own sequence. The result of learning is the same either way (tested).
Weights, advantages and selection belong to the turns. A target counts as found in the next prompt
only if its context there is the same. It must come right after the text that the template puts
before it: the turn separator, or the opening of a tool's result (preceded by the end token if the
response was cut). If a turn's target is not found there, its sequence ends and its observation is
appended, as for the last turn.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from paw.algo.shared_samples import SharedSamples
from paw.types import Ids, Sample, no_ids


def sequences(samples: Sequence[Sample], *, with_observation: bool) -> list[list[int]]:
    """Return, for each sequence, the indices of its samples, in sample order.

    Without observations, samples share a sequence if they continue one another. With observations,
    an observation that is a target must also be in the prompt that follows.
    """
    members_of: list[list[int]] = []
    for i, sample in enumerate(samples):
        if i > 0 and _continues(samples[i - 1], sample, with_observation):
            members_of[-1].append(i)
        else:
            members_of.append([i])
    return members_of


def _continues(previous: Sample, sample: Sample, with_observation: bool) -> bool:
    """Whether a sample continues the sequence of the previous one."""
    is_next_turn = (sample.trajectory, sample.step) == (previous.trajectory, previous.step + 1)
    if not (sample.continues and is_next_turn):
        return False
    if not with_observation or previous.wm_weight == 0.0:
        return True
    appended = _appended_ids(previous, with_observation)
    observation_start = len(previous.prompt_ids) + len(previous.response_ids)
    return np.array_equal(
        sample.prompt_ids[observation_start : observation_start + len(appended)], appended
    )


def _appended_ids(sample: Sample, with_observation: bool) -> Ids:
    """Return the separator and observation to append after a response, if it is a target."""
    if with_observation and sample.wm_weight > 0.0:
        return np.concatenate([sample.separator_ids, sample.observation_ids])
    return no_ids()


def row_ids(last: Sample, with_observation: bool) -> Ids:
    """The tokens of a sequence, by its last sample, whose prompt holds the others."""
    appended = _appended_ids(last, with_observation)
    return np.concatenate([last.prompt_ids, last.response_ids, appended])


def target_spans(
    samples: Sequence[Sample], members: Sequence[int], with_observation: bool
) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether observed) of each target in a sequence, in the order of samples."""
    for sample in (samples[i] for i in members):
        response_start = len(sample.prompt_ids)
        response_end = response_start + len(sample.response_ids)
        yield response_start, response_end, False
        if with_observation and sample.wm_weight > 0.0:
            observation_start = response_end + len(sample.separator_ids)
            for offset, target_ids in sample.targets:
                target_start = observation_start + offset
                yield target_start, target_start + len(target_ids), True


def minibatches(samples: Sequence[Sample], *, size: int, seed: int) -> list[Sequence[Sample]]:
    """Cut a seeded shuffle of the update's sequences into mini-batches of about `size` samples.

    n samples make round(n / size) mini-batches, but at least one. Sequences are not split.
    """
    if isinstance(samples, SharedSamples):
        starts = samples.chain_starts()
    else:
        firsts = [members[0] for members in sequences(samples, with_observation=False)]
        starts = np.array(firsts, np.int64)
    shuffled = list(range(len(starts)))
    random.Random(seed).shuffle(shuffled)
    sizes = np.diff(np.append(starts, len(samples)))[shuffled]
    samples_before = np.cumsum(sizes) - sizes
    indices = np.repeat(starts[shuffled] - samples_before, sizes) + np.arange(len(samples))

    # A sequence belongs to the mini-batch in which its first sample is.
    minibatch_count = max(1, round(len(samples) / size))
    cuts = [len(samples) * i // minibatch_count for i in range(1, minibatch_count)]
    first_sequences = np.searchsorted(samples_before, [0, *cuts])
    bounds = np.append(samples_before, len(samples))[[*first_sequences, len(shuffled)]].tolist()
    parts: list[Sequence[Sample]] = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        if isinstance(samples, SharedSamples):
            parts.append(samples.subset(indices[start:end]))
        else:
            parts.append([samples[i] for i in indices[start:end]])
    return parts
