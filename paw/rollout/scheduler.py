"""Episodes: environments and the engine, each finished turn sent on at once.

A finished response goes to its environment and the next turn's request enters the engine immediately; only live
episodes generate. Environments that may block (child processes, networks) run in threads meanwhile, those of a user in
threads with a deadline. Seeds derive from (seed, stream, task, member, turn), so an episode's tokens do not depend on
which others it was batched with.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from paw.config import Config
from paw.envs.base import EnvFactory
from paw.envs.guard import Guarded, make_threads
from paw.errors import OURS, UserError, describe, quietly, shown, to_stderr
from paw.rollout.chat import Chat
from paw.rollout.engines.base import Completion, Engine, Request
from paw.types import Group, Outcome, Task, Trajectory, Turn

if TYPE_CHECKING:
    from paw.model.parallel import Ranks

Progress = Callable[[int, int], None]
"""Called with (episodes finished, episodes in all)."""
THREADS = 64
"""Environments that may think at once. Many more child processes would outlast their time limit starting together."""


@dataclass
class RolloutStats:
    """What happened besides the episodes themselves."""

    groups_dropped: int = 0
    prompts_truncated: int = 0
    texts_cut: int = 0
    """Texts of environments longer than env.max_text."""
    threads_lost: int = 0
    """Calls of environments given up after env.step_timeout_s, each with its thread."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    cached_tokens: int = 0
    failed: list[Trajectory] = field(default_factory=list)
    """Episodes whose environment failed: they are in no group."""

    @property
    def failures(self) -> list[str]:
        """Which task, and why."""
        return [f"{trajectory.task.id}: {trajectory.failure}" for trajectory in self.failed]

    @classmethod
    def sum(cls, parts: Iterable["RolloutStats"]) -> "RolloutStats":
        total = cls()
        for part in parts:
            for name, value in vars(part).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def metrics(self) -> dict[str, float]:
        return {
            "health/env_failures": len(self.failed),
            "health/groups_dropped": self.groups_dropped,
            "health/prompts_truncated": self.prompts_truncated,
            "health/texts_cut": self.texts_cut,
            "health/threads_lost": self.threads_lost,
            **({"perf/cached_frac": self.cached_tokens / self.prompt_tokens} if self.cached_tokens else {}),
        }


@dataclass
class _Episode:
    environment: Guarded
    trajectory: Trajectory
    group: int
    prompt: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    anchor: str = ""
    response: str | None = None
    """To the prompt; None before the first."""
    completion: Completion | None = None
    done: bool = False

    def play(self) -> tuple[Outcome | None, str, str]:
        """Start, or play the response; then look at the next turn: (outcome, prompt, anchor). Runs in a thread that may
        be given up, so it changes nothing but the environment. Raises whatever that does.
        """
        environment, outcome = self.environment, None
        try:
            if self.response is None:
                environment.reset(self.trajectory.task)
            else:
                outcome = environment.step(self.response)
            if outcome and outcome.done:
                return outcome, "", ""
            return outcome, environment.context(), environment.anchor()
        except BaseException:
            with quietly():  # it is broken already
                environment.close()
            raise

    def take(self, played: Future[tuple[Outcome | None, str, str]], version: int) -> None:
        """What `play` came to. Whatever an environment raised costs its own episode, but for Ctrl-C and UserError."""
        try:
            outcome, prompt, anchor = played.result()
        except OURS:
            raise
        except BaseException as error:
            self.done, self.trajectory.failure = True, describe(error)
            return
        if outcome and self.completion:
            turn = Turn(
                prompt_ids=self.prompt_ids,
                response_ids=self.completion.token_ids,
                sampled_logp=self.completion.logp,
                entropy=self.completion.entropy,
                prompt=self.prompt,
                response=self.response or "",
                outcome=outcome,
                anchor=self.anchor,
                version=version,
            )
            self.trajectory.turns.append(turn)
            self.done = outcome.done
        self.prompt, self.anchor = prompt, anchor


class Rollouts:
    """Plays groups of episodes; keeps its environments (some are processes) from one update to the next."""

    def __init__(self, factory: EnvFactory, engine: Engine, chat: Chat, config: Config, ranks: "Ranks | None" = None):
        self.factory, self.engine, self.chat, self.config, self.ranks = factory, engine, chat, config, ranks
        self._threads = make_threads(factory, config.env, THREADS)
        self._idle: list[Guarded] = []
        self._key = 0
        self._cut_is_told = False

    def training(self, step: int, count: int, progress: Progress | None = None) -> tuple[list[Group], RolloutStats]:
        """Play the first `count` tasks of update `step` in groups, as `play` does; all ranks together."""
        size, temperature = self.config.rollout.group_size, self.config.rollout.temperature
        seed, stream = self.config.run.seed, f"train/{step}"
        tasks = self.factory.train_tasks(step, count, seed)
        return self._share(tasks, group_size=size, temperature=temperature, seed=seed, stream=stream, progress=progress)

    def evaluation(self, progress: Progress | None = None) -> tuple[list[Group], RolloutStats]:
        """Play the evaluation games once each, as `play` does; all ranks together."""
        config = self.config.eval
        tasks = self.factory.eval_tasks(self.config.env.eval_split, config.games, config.seed)
        return self._share(
            tasks, group_size=1, temperature=config.temperature, seed=config.seed, stream="eval", progress=progress
        )

    def _share(self, tasks: list[Task], **options: Any) -> tuple[list[Group], RolloutStats]:
        """Play this rank's share of the tasks; answers everybody's groups, in the order of tasks."""
        for task in tasks:
            if not (isinstance(task, Task) and isinstance(task.id, str) and isinstance(task.kind, str)):
                name = type(self.factory).__name__
                raise UserError(f"{name}: {shown(task)} is among the tasks; each must be a Task, id and kind texts")
        if self.ranks is None:
            return self.play(tasks, **options)
        places = range(self.ranks.rank, len(tasks), self.ranks.world)
        own = self.play([tasks[i] for i in places], places=places, **options)
        _set_tasks(own, {task.id: replace(task, payload=None) for task in tasks})  # which every rank has
        played = self.ranks.gather(own, tuple[list[Group], RolloutStats])
        for part in played:
            _set_tasks(part, {task.id: task for task in tasks})
        groups, stats = zip(*played, strict=True)
        return sorted(chain(*groups), key=lambda group: group.place), RolloutStats.sum(stats)

    def play(
        self,
        tasks: list[Task],
        *,
        group_size: int,
        temperature: float,
        seed: int,
        stream: str,
        places: Sequence[int] | None = None,
        progress: Progress | None = None,
        lock_step: bool = False,
    ) -> tuple[list[Group], RolloutStats]:
        """Play each task `group_size` times with the engine's current weights.

        `places` are the tasks' indices among those of all ranks, which seeds derive from (default: 0, 1, ...); `stream`
        names the draw ("train/12", "eval"), so that no two share random numbers. An episode whose environment fails is
        left out; a group left with fewer than min(2, group_size) members is dropped.

        `lock_step` lets all live episodes wait for each other's turn: for comparison, and for an engine that takes no
        request while it runs. Groups, tokens and log-probs are the same.
        """
        stats, given_up = RolloutStats(), self._threads.given_up
        groups = [
            Group(task, [Trajectory(task, member) for member in range(group_size)], place)
            for place, task in zip(range(len(tasks)) if places is None else places, tasks, strict=True)
        ]
        total, finished = len(tasks) * group_size, 0
        in_flight: dict[int, _Episode] = {}
        completions: list[Completion] = []
        stepping: dict[Future[Any], _Episode] = {}
        answered: SimpleQueue[Future[Any]] = SimpleQueue()
        lock_step = lock_step or not self.engine.continuous

        def advance(episode: _Episode) -> None:
            """Give the episode's environment its turn; the episode's future comes back in `answered`."""
            future = self._threads.submit(episode.play)
            stepping[future] = episode
            future.add_done_callback(answered.put)

        def send(future: Future[Any]) -> None:
            """Send the episode's next prompt to the engine, or retire it."""
            nonlocal finished
            episode = stepping.pop(future)
            episode.take(future, self.engine.version)
            if episode.done:
                finished += 1
                stats.texts_cut += episode.environment.texts_cut
                episode.environment.texts_cut = 0
                if episode.trajectory.failure is None:
                    self._idle.append(episode.environment)
                if progress:
                    progress(finished, total)
                return
            episode.prompt_ids, cut = self.chat.fit_prompt(episode.prompt, self.config.rollout.max_prompt_tokens)
            stats.prompts_truncated += cut > 0
            stats.prompt_tokens += len(episode.prompt_ids)
            self._key += 1
            in_flight[self._key] = episode
            trajectory, limit = episode.trajectory, self.config.rollout.max_response_tokens
            draw = derive_seed(seed, stream, episode.group, trajectory.member, len(trajectory.turns))
            self.engine.submit(Request(self._key, episode.prompt_ids, draw, temperature, max_tokens=limit))

        for group in groups:
            for trajectory in group.trajectories:
                environment = self._idle.pop() if self._idle else self._make()
                advance(_Episode(environment, trajectory, group.place))
        while finished < total:
            # Wait for environments only while the engine has nothing to do; in lock-step for all of them.
            while stepping and (lock_step or not in_flight or not answered.empty()):
                send(self._threads.next_done(answered))
            completions += self.engine.step()
            if lock_step and self.engine.pending:
                continue
            for completion in completions:
                stats.response_tokens += len(completion.token_ids)
                stats.cached_tokens += completion.cached_tokens
                episode = in_flight.pop(completion.key)
                episode.completion, episode.response = completion, self.chat.answer(completion.token_ids)
                advance(episode)
            completions.clear()
        stats.threads_lost = self._threads.given_up - given_up
        if stats.texts_cut and not self._cut_is_told:
            self._cut_is_told = True
            most = self.config.env.max_text
            to_stderr(f"{stats.texts_cut} texts of the environment were cut to env.max_text = {most} (said once)")
        stats.failed = [t for group in groups for t in group.trajectories if t.failure is not None]
        for group in groups:
            group.trajectories = [t for t in group.trajectories if t.failure is None and t.turns]
        kept = [group for group in groups if len(group.trajectories) >= min(2, group_size)]
        stats.groups_dropped = len(groups) - len(kept)
        return kept, stats

    def close(self) -> None:
        """Close the environments. What one of them raises, or that it hangs, no longer matters."""
        self._threads.close(*(environment.close for environment in self._idle))
        self._idle.clear()

    def _make(self) -> Guarded:
        return Guarded(self.factory, self.config.env, self._threads)


def _set_tasks(played: tuple[list[Group], RolloutStats], by_id: dict[str, Task]) -> None:
    groups, stats = played
    for holder in (*groups, *(t for group in groups for t in group.trajectories), *stats.failed):
        holder.task = by_id[holder.task.id]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the coordinates of a draw; stable across platforms and Python versions."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
