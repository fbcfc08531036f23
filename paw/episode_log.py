"""A few training episodes of every update, as episodes.jsonl of the run directory has them.

They show what the update learnt from: each sampled token with its log-probability, entropy and
advantage, and the tokens of observations that the world model was trained on, with the
probabilities they had then. With several ranks they are episodes that rank 0 has played. All of
these numbers are by-products of training, so recording takes no forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from paw.algo.batches import Batch
from paw.algo.loss import target_count
from paw.algo.shared_samples import column
from paw.rollouts.text.pieces import TokenTexts
from paw.types import AwayTrajectory, Group, Sample, Trajectory, Turn, Values

MAX_TURNS = 64
"""Most turns of an episode that are recorded."""
MAX_TOKENS = 2_048
"""Most tokens of a response that are recorded."""
MAX_CHARS = 8_000
"""Most characters of a prompt or an observation."""

Record = dict[str, Any]
Key = tuple[int, int]
"""(index of the trajectory in the update, step) of a turn."""


@dataclass
class ChosenEpisode:
    """An episode that is being recorded."""

    index: int
    """Index over all trajectories of the update, as in `Sample.trajectory`."""
    trajectory: Trajectory
    group: Record
    """size, won and return (the mean) of the episodes of the same task."""


@dataclass
class EpisodeLog:
    """Records episodes of the update in progress. Set on rank 0 only."""

    count: int
    """Episodes of each update."""
    texts: TokenTexts
    by_token: bool = False
    """Whether each token has an advantage of its own (PPO)."""
    chosen: list[ChosenEpisode] = field(default_factory=list)
    target_logps: dict[Key, torch.Tensor] = field(default_factory=dict)
    """The log-probs of the target tokens [n] when the world model first learnt from them, on the
    device, of turns that are being recorded."""
    records: list[Record] = field(default_factory=list)
    """Complete records that are not written yet."""

    def start(self, groups: Sequence[Group]) -> None:
        """Choose the episodes: the first one of each task, then the second of each, and so on."""
        self.target_logps.clear()
        self.records.clear()
        candidates: list[tuple[int, int, ChosenEpisode]] = []
        turn_index = 0
        for group_index, group in enumerate(groups):
            summary: Record = {}
            episode_place = 0  # among those of this rank
            for trajectory in group.trajectories:
                if not isinstance(trajectory, AwayTrajectory):
                    summary = summary or _group_summary(group)
                    chosen = ChosenEpisode(turn_index, trajectory, summary)
                    candidates.append((episode_place, group_index, chosen))
                    episode_place += 1
                turn_index += 1
        candidates.sort(key=lambda candidate: candidate[:2])
        self.chosen = [chosen for _, _, chosen in candidates[: self.count]]

    def observe(self, logp: torch.Tensor, batch: Batch, minibatch: Sequence[Sample]) -> None:
        """Keep the log-probs [N] that a micro-batch's targets had, for the chosen episodes.

        They stay on the device, and are not read here.
        """
        indices = {chosen.index for chosen in self.chosen}
        response_start = 0
        for i in batch.indices:
            sample = minibatch[i]
            responses_end = response_start + len(sample.response_ids)
            sequence_end = responses_end + target_count(sample, batch.with_observation)
            key = (sample.trajectory, sample.step)
            if sequence_end > responses_end and sample.trajectory in indices:
                self.target_logps.setdefault(key, logp[responses_end:sequence_end].detach())
            response_start = sequence_end

    def finish(self, samples: Sequence[Sample]) -> None:
        """Complete the records, once the optimizer has taken the update's steps."""
        indices = [chosen.index for chosen in self.chosen]
        is_chosen = np.isin(column(samples, "trajectory"), indices)
        by_key: dict[Key, Sample] = {}
        for i in np.flatnonzero(is_chosen).tolist():
            sample = samples[i]
            by_key[sample.trajectory, sample.step] = sample
        targets = self._read_targets()
        for chosen in self.chosen:
            self.records.append(self._episode(chosen, by_key, targets))
        self.chosen = []

    def take(self) -> list[Record]:
        """Return the complete records, which are then forgotten."""
        records = self.records
        self.records = []
        return records

    def _read_targets(self) -> dict[Key, Values]:
        """Read the log-probs of targets from the device, in one transfer."""
        if not self.target_logps:
            return {}
        tensors = list(self.target_logps.values())
        values = torch.cat(tensors).float().numpy(force=True)
        ends = np.cumsum([len(tensor) for tensor in tensors])
        parts = np.split(values, ends[:-1])
        targets = dict(zip(self.target_logps, parts, strict=True))
        self.target_logps.clear()
        return targets

    def _episode(
        self, chosen: ChosenEpisode, samples: dict[Key, Sample], targets: dict[Key, Values]
    ) -> Record:
        trajectory = chosen.trajectory
        turns: list[Record] = []
        for step, turn in enumerate(trajectory.turns[:MAX_TURNS]):
            key = (chosen.index, step)
            turns.append(self._turn(turn, samples.get(key), targets.get(key)))
        prompt = trajectory.turns[0].prompt if trajectory.turns else ""
        return {
            "task": trajectory.task.id,
            "kind": trajectory.task.kind,
            "member": trajectory.member,
            "won": trajectory.won,
            "return": trajectory.episode_return,
            "score": trajectory.summary.score,
            "group": chosen.group,
            "length": len(trajectory.turns),
            "prompt": prompt[:MAX_CHARS],
            "turns": turns,
        }

    def _turn(self, turn: Turn, sample: Sample | None, target_logps: Values | None) -> Record:
        response_ids = turn.response_ids[:MAX_TOKENS].tolist()
        record: Record = {
            "action": turn.outcome.action,
            "valid": turn.outcome.valid,
            "reward": turn.outcome.reward,
            "tokens": self.texts.of(response_ids),
            "logp": rounded(turn.sampled_logp[:MAX_TOKENS], digits=3),
            "observation": turn.observation[:MAX_CHARS],
        }
        if turn.entropy is not None:
            record["entropy"] = rounded(turn.entropy[:MAX_TOKENS], digits=3)
        if sample is None:
            return record

        record["advantage"] = _advantage(sample, by_token=self.by_token)
        record["selected"] = sample.wm_weight > 0.0
        if target_logps is not None:
            observation_ids, logps = _targets(turn, sample, target_logps)
            record["observation_tokens"] = self.texts.of(observation_ids)
            record["observation_logp"] = logps
        return record


def _group_summary(group: Group) -> Record:
    summaries = [trajectory.summary for trajectory in group.trajectories]
    return {
        "size": len(summaries),
        "won": sum(summary.won for summary in summaries),
        "return": fmean(summary.episode_return for summary in summaries),
    }


def _advantage(sample: Sample, *, by_token: bool) -> float | list[float | None] | None:
    """Return the turn's advantage, or that of each token, None if another rank holds those."""
    if not by_token:
        return rounded([sample.advantage], digits=4)[0]
    if isinstance(sample.token_advantage, np.ndarray):
        return rounded(sample.token_advantage[:MAX_TOKENS], digits=4)
    return None


def _targets(
    turn: Turn, sample: Sample, target_logps: Values
) -> tuple[list[int], list[float | None]]:
    """Return (token ids of the observation, log-prob of each; None if it is not a target).

    If another rank holds the sample's row, the target tokens are those of the turn.
    """
    observation_ids = sample.observation_ids
    if not isinstance(observation_ids, np.ndarray):
        observation_ids = (
            turn.observation_ids if turn.observation_ids is not None else np.empty(0, np.int32)
        )
    logps: list[float | None] = [None] * len(observation_ids)
    values = iter(rounded(target_logps, digits=3))
    for target_start, target_end in sample.spans or [(0, len(observation_ids))]:
        for i in range(target_start, target_end):
            logps[i] = next(values, None)
    return observation_ids.tolist(), logps


def rounded(values: Values | Sequence[float], *, digits: int) -> list[float | None]:
    """Return rounded numbers for JSON, None for those that are not finite."""
    array = np.asarray(values, np.float64)
    numbers: list[float | None] = (array.round(digits) + 0.0).tolist()  # never -0.0
    if np.isfinite(array).all():
        return numbers
    return [
        number if is_finite else None
        for number, is_finite in zip(numbers, np.isfinite(array), strict=True)
    ]
