"""The callbacks of every run: a line of each update, episodes to read, and the report."""

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
from paw.errors import UserError
from paw.rollouts.engines.base import Request
from paw.rollouts.success import success_text
from paw.types import Group, Sample, Trajectory

if TYPE_CHECKING:
    from paw.run import Run

LINE = {
    "reward/mean": "reward {:.3g}", "success/all": "success {:.1%}", "eval": "eval {}",
    "wm/lambda": "lambda {:.3f}", "policy/loss": "policy {:.3g}", "wm/loss": "world {:.3g}",
    "policy/entropy": "entropy {:.3g}", "policy/kl": "kl {:.3g}", "optim/grad_norm": "grad {:.3g}",
    "health/valid_actions": "valid {:.0%}", "seconds": "{:.1f} s", "perf/tokens_per_s": "{:,.0f} tok/s",
    "perf/peak_gib": "{:.1f} GiB", "left": "left {}",
}  # fmt: skip
"""The line of an update: metric -> how it is written."""
TROUBLE = {
    "optim/skipped": "steps skipped {:.0f}", "health/env_failures": "environment failures {:.0f}",
    "health/groups_dropped": "groups dropped {:.0f}", "health/threads_lost": "threads lost {:.0f}",
}  # fmt: skip
"""The same, where it is not 0."""
MAX_EPISODES, MAX_TURNS = 3, 20
"""Of an evaluation, and of an episode: samples are for reading, the rest is for metrics."""


class Progress:
    """A line of each update on the first rank's terminal."""

    def on_start(self, run: "Run") -> None:
        """The first update's time counts from here."""
        self._step, self._last = run.step, time.monotonic()
        self._seconds: deque[float] = deque(maxlen=10)

    def on_update(self, run: "Run", metrics: dict[str, Any]) -> None:
        """Show the update's metrics; a name that is absent, or null, is left out."""
        if not run.ranks.first:
            return
        now, total = time.monotonic(), run.config.run.updates
        if run.step > self._step:
            self._seconds.append(now - self._last)
        self._last, self._step = now, run.step
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        shown: dict[str, Any] = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if self._seconds:
            left = sum(self._seconds) / len(self._seconds) * (total - run.step)
            shown |= {"seconds": self._seconds[-1], "left": str(timedelta(seconds=round(left)))}
        if "eval/games" in metrics:
            shown["eval"] = success_text({name.removeprefix("eval/"): value for name, value in metrics.items()})
        parts = [text.format(shown[name]) for name, text in LINE.items() if name in shown]
        parts += [text.format(shown[name]) for name, text in TROUBLE.items() if shown.get(name)]
        run.say("  ".join([f"step {run.step:>{len(str(total))}}/{total}", *parts]))


class Samples:
    """Writes a few episodes of each evaluation to samples.jsonl, with the greedy prediction of each next observation
    and the probability of each of its real tokens (teacher-forced). All ranks compute them."""

    def on_evaluation(self, run: "Run", groups: list[Group], metrics: dict[str, Any]) -> None:
        for group in groups[:MAX_EPISODES]:
            sample = sample_episode(run, group.trajectories[0])
            if run.log:
                run.log.sample(run.step, sample)


def sample_episode(run: "Run", episode: Trajectory) -> dict[str, Any]:
    turns, chat = episode.turns[:MAX_TURNS], run.chat
    separators = [chat.separator_ids if turn.separator_ids is None else turn.separator_ids for turn in turns]
    contexts = [turn.prompt_ids + turn.response_ids + ids for turn, ids in zip(turns, separators, strict=True)]
    targets = [t.observation_ids or chat.observation_ids(t.observation, run.config.wm.max_tokens) for t in turns]
    for i, (context, target) in enumerate(zip(contexts, targets, strict=True)):
        if target:
            with suppress(UserError):  # beyond the engine's length, which is made for prompt and response
                run.engine.submit(Request(-1 - i, context, seed=0, temperature=0.0, max_tokens=len(target)))
    known = [i for i, target in enumerate(targets) if target]
    samples = [Sample(0, i, 0, contexts[i], targets[i]) for i in known]
    scored = log_probs(run.policy, samples, temperature=1.0, budget=run.config.optim.micro_batch_tokens)
    probabilities = {i: [round(math.exp(logp), 4) for logp in scored[place][0]] for place, i in enumerate(known)}
    predicted: dict[int, str] = {}
    while run.engine.pending:
        predicted |= {-1 - done.key: chat.decode(done.token_ids) for done in run.engine.step()}
    return {
        "task": episode.task.id,
        "kind": episode.task.kind,
        "won": episode.won,
        "return": episode.episode_return,
        "length": len(episode.turns),
        "turns": [
            {
                "prompt": turn.prompt,
                "response": turn.response,
                "action": turn.outcome.action,
                "valid": turn.outcome.valid,
                "observation": turn.outcome.observation,
                "predicted": predicted.get(i),
                "entropy": sum(turn.entropy) / len(turn.entropy) if turn.entropy else None,
                "observation_token_p": probabilities.get(i, []),
                "observation_tokens": [chat.decode([token]) for token in targets[i]],
            }
            for i, turn in enumerate(turns)
        ],
    }


class Report:
    """Has a process of its own write the report of a run that ended in order, or was told to stop."""

    def on_end(self, run: "Run") -> None:
        if not run.ranks.first or run.failed:
            return
        command = [sys.executable, "-m", "paw", "report", str(run.directory)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        try:  # in a session of its own: Ctrl-C reaches this process alone
            options: Any = {"capture_output": True, "text": True, "errors": "replace", "start_new_session": True}
            done = subprocess.run(command, stdin=subprocess.DEVNULL, env=env, **options)
            said = done.stderr.strip().rpartition("\n")[2].removeprefix("paw: ")
            why = (said or f"exit code {done.returncode}") if done.returncode else ""
        except OSError as error:
            why = str(error)
        if why:
            run.say(f"warning: no report was written: {why}; paw report {run.directory} writes it")
