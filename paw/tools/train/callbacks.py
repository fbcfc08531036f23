"""The callbacks of every run: a line for each update, episodes to read, and the report."""

import math
import os
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw.episode_log import rounded
from paw.errors import UserError
from paw.metric_list import METRICS
from paw.rollouts.continuation import ids_of
from paw.rollouts.engines.base import Request
from paw.rollouts.success import success_text
from paw.rollouts.text.pieces import TokenTexts
from paw.types import Group, Sample, Trajectory, Values, as_ids

if TYPE_CHECKING:
    from paw.run import Run

LINE = {metric.name: metric.progress for metric in METRICS if metric.progress}
"""Formats of metrics on the line of an update."""
TROUBLE = {metric.name: metric.trouble for metric in METRICS if metric.trouble}
"""Formats of metrics that the line shows unless they are 0."""
MAX_EPISODES = 3
"""Maximum number of episodes per evaluation that become samples."""
MAX_TURNS = 20
"""Number of turns of an episode in a sample."""


class Progress:
    """Prints a line for each update on the first rank's terminal."""

    def __init__(self) -> None:
        self._update = 0
        """The last update shown."""
        self._last = 0.0
        """Monotonic time of the last line."""
        self._seconds: deque[float] = deque(maxlen=10)
        """Seconds that the last updates of this session took."""

    def on_start(self, run: "Run") -> None:
        """Start the clock of the first update."""
        self._update = run.step
        self._last = time.monotonic()
        self._seconds.clear()

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        """Print the update's metrics, except those that are absent, null or not finite."""
        if not run.ranks.first:
            return
        now = time.monotonic()
        if run.step > self._update:
            self._seconds.append(now - self._last)
        self._last = now
        self._update = run.step

        planned = run.config.run.updates
        texts = [f"update {run.step:>{len(str(planned))}}/{planned}"]
        texts += _metric_texts(metrics)
        if self._seconds:
            seconds_left = sum(self._seconds) / len(self._seconds) * (planned - run.step)
            texts.append(f"{self._seconds[-1]:.1f} s")
            texts.append(f"left {timedelta(seconds=round(seconds_left))}")
        for name, text in TROUBLE.items():
            if _is_finite(metrics.get(name)) and metrics[name]:
                texts.append(text.format(metrics[name]))
        run.say("  ".join(texts))


def _metric_texts(metrics: dict[str, Any]) -> list[str]:
    """Return the evaluation (if any) and the metrics in `LINE`, as the line shows them."""
    texts: list[str] = []
    if "eval/games" in metrics:
        evaluation = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        texts.append(f"eval {success_text(evaluation)}")
    for name, text in LINE.items():
        if _is_finite(metrics.get(name)):
            texts.append(text.format(metrics[name]))
    return texts


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Samples:
    """Writes a few episodes of each evaluation to samples.jsonl.

    Each turn comes with the model's greedy prediction of the next observation, and the probability
    of each token of the real one (teacher-forced). All ranks compute them.
    """

    def on_evaluation(self, run: "Run", groups: list[Group], metrics: dict[str, Any]) -> None:
        for group in run.full_groups(groups[:MAX_EPISODES]):
            sample = sample_episode(run, group.trajectories[0])
            if run.log:
                run.log.sample(run.step, sample)


def sample_episode(run: "Run", episode: Trajectory) -> dict[str, Any]:
    """Return the record of an episode for samples.jsonl, with its first MAX_TURNS turns."""
    chat = run.chat
    turns = episode.turns[:MAX_TURNS]
    contexts: list[list[int]] = []
    targets: list[list[int]] = []
    for turn in turns:
        separator_ids = chat.separator_ids
        if turn.separator_ids is not None:
            separator_ids = turn.separator_ids.tolist()
        contexts.append(ids_of(turn) + separator_ids)
        if turn.observation_ids is not None:
            targets.append(turn.observation_ids.tolist())
        else:
            targets.append(chat.observation_ids(turn.observation, run.config.wm.max_tokens))

    _submit_predictions(run, contexts, targets)
    probabilities = _token_probabilities(run, contexts, targets)
    predictions: dict[int, str] = {}
    while run.engine.pending:
        for completion in run.engine.step():
            predictions[-1 - completion.key] = chat.decode(completion.token_ids)

    texts = TokenTexts(chat.raw_text)
    turn_records = [
        {
            "prompt": turn.prompt,
            "response": turn.response,
            "action": turn.outcome.action,
            "valid": turn.outcome.valid,
            "observation": turn.outcome.observation,
            "predicted": predictions.get(i),
            "entropy": _mean(turn.entropy),
            "tokens": texts.of(turn.response_ids.tolist()),
            "logp": rounded(turn.sampled_logp, digits=3),
            "token_entropy": None if turn.entropy is None else rounded(turn.entropy, digits=3),
            "observation_token_p": probabilities.get(i, []),
            "observation_tokens": [chat.decode([token]) for token in targets[i]],
        }
        for i, turn in enumerate(turns)
    ]
    return {
        "task": episode.task.id,
        "kind": episode.task.kind,
        "won": episode.won,
        "return": episode.episode_return,
        "length": len(episode.turns),
        "turns": turn_records,
    }


def _mean(values: Values | None) -> float | None:
    """Return the mean of an array; None if it is None or empty."""
    if values is None or not len(values):
        return None
    return sum(values.tolist()) / len(values)


def _submit_predictions(run: "Run", contexts: list[list[int]], targets: list[list[int]]) -> None:
    """Ask the engine for a greedy prediction of each target that is not empty.

    Turn i has the key -1 - i. The engine's limit is for prompt and response together. A request
    that exceeds it gets no prediction.
    """
    for i, (context, target) in enumerate(zip(contexts, targets, strict=True)):
        if target:
            request = Request(-1 - i, context, seed=0, temperature=0.0, max_tokens=len(target))
            with suppress(UserError):
                run.engine.submit(request)


def _token_probabilities(
    run: "Run", contexts: list[list[int]], targets: list[list[int]]
) -> dict[int, list[float]]:
    """Return the probability of each target token by turn, for targets that are not empty."""
    turns = [i for i, target in enumerate(targets) if target]
    samples = [Sample(0, i, 0, as_ids(contexts[i]), as_ids(targets[i])) for i in turns]
    scored = log_probs(
        run.policy, samples, Packing.of(run.config.optim, run.policy), temperature=1.0
    )
    probabilities: dict[int, list[float]] = {}
    for row, i in enumerate(turns):
        token_logps = scored[row][0].tolist()
        probabilities[i] = [round(math.exp(logp), 4) for logp in token_logps]
    return probabilities


class Report:
    """Writes the report of a run that ended normally or was stopped, in a separate process."""

    def on_end(self, run: "Run") -> None:
        if not run.ranks.first or run.failed:
            return
        command = [sys.executable, "-m", "paw", "report", str(run.directory)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        problem = ""
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                env=env,
                capture_output=True,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches only this process
            )
        except OSError as error:
            problem = str(error)
        else:
            if result.returncode:
                last_line = result.stderr.strip().rpartition("\n")[2].removeprefix("paw: ")
                problem = last_line or f"exit code {result.returncode}"
        if problem:
            run.say(
                f"warning: no report was written: {problem}; paw report {run.directory} writes it"
            )
