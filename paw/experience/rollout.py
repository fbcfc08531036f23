"""Episodes: environments and the engine, each finished turn sent on at once.

A finished response goes to its environment and the next turn's request enters the engine immediately; only live
episodes generate. Environments that may block (child processes, networks) run in threads meanwhile. Seeds derive from
(seed, stream, task, member, turn), so an episode's tokens do not depend on which others it was batched with.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from paw.config import Config
from paw.errors import UserError
from paw.experience.chat import Chat
from paw.experience.engines.base import Completion, Engine, Request
from paw.experience.envs.base import Environment, Suite
from paw.types import Group, Task, Trajectory, Turn

if TYPE_CHECKING:
    from paw.learner.distributed import Ranks

Progress = Callable[[int, int], None]
"""Called with (episodes finished, episodes in all)."""
THREADS = 64
"""Environments that may think at once. Many more child processes would outlast their time limit starting together."""


@dataclass
class RolloutStats:
    """What happened besides the episodes themselves."""

    groups_dropped: int = 0
    prompts_truncated: int = 0
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
            **({"perf/cached_frac": self.cached_tokens / self.prompt_tokens} if self.cached_tokens else {}),
        }


@dataclass
class _Episode:
    environment: Environment
    trajectory: Trajectory
    group: int
    prompt: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    anchor: str = ""
    done: bool = False

    def play(self, response: str, completion: Completion | None, version: int) -> "_Episode":
        """Start, or play `response`; then look at the next turn. May run in a thread: touches this episode alone.

        Whatever an environment raises costs its own episode; only what the user can mend stops the run.
        """
        environment, trajectory = self.environment, self.trajectory
        try:
            if completion is None:
                environment.reset(trajectory.task)
            else:
                outcome = environment.step(response)
                self.done = outcome.done
                trajectory.turns.append(
                    Turn(
                        prompt_ids=self.prompt_ids,
                        response_ids=completion.token_ids,
                        sampled_logp=completion.logp,
                        entropy=completion.entropy,
                        prompt=self.prompt,
                        response=response,
                        outcome=outcome,
                        anchor=self.anchor,
                        version=version,
                    )
                )
            if not self.done:
                self.prompt, self.anchor = environment.prompt(), environment.anchor()
        except UserError:
            raise
        except Exception as error:
            self.done = True
            trajectory.failure = f"{type(error).__name__}: {error}"
            with suppress(Exception):  # it is broken already
                environment.close()
        return self


class _ThisThread(Executor):
    """Runs what it is given at once, for environments that never wait: threads would only cost."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Rollouts:
    """Plays groups of episodes; keeps its environments (some are processes) from one update to the next."""

    def __init__(self, suite: Suite, engine: Engine, chat: Chat, config: Config, ranks: "Ranks | None" = None):
        self.suite, self.engine, self.chat, self.config, self.ranks = suite, engine, chat, config, ranks
        self._idle: list[Environment] = []
        self._key = 0

    def training(self, step: int, count: int, progress: Progress | None = None) -> tuple[list[Group], RolloutStats]:
        """Play the first `count` tasks of update `step` in groups, as `play` does; all ranks together."""
        size, temperature = self.config.rollout.group_size, self.config.rollout.temperature
        seed, stream = self.config.run.seed, f"train/{step}"
        tasks = self.suite.train_tasks(step, count, seed)
        return self._share(tasks, group_size=size, temperature=temperature, seed=seed, stream=stream, progress=progress)

    def evaluation(self, progress: Progress | None = None) -> tuple[list[Group], RolloutStats]:
        """Play the evaluation games once each, as `play` does; all ranks together."""
        config = self.config.eval
        tasks = self.suite.eval_tasks(self.config.env.eval_split, config.games, config.seed)
        return self._share(
            tasks, group_size=1, temperature=config.temperature, seed=config.seed, stream="eval", progress=progress
        )

    def _share(self, tasks: list[Task], **options: Any) -> tuple[list[Group], RolloutStats]:
        """Play this rank's share of the tasks; answers everybody's groups, in the order of tasks."""
        if self.ranks is None:
            return self.play(tasks, **options)
        places = range(self.ranks.rank, len(tasks), self.ranks.world)
        own = self.play([tasks[i] for i in places], places=places, **options)
        played, stats = zip(*self.ranks.gather(own), strict=True)
        return sorted(chain(*played), key=lambda group: group.place), RolloutStats.sum(stats)

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
        stats = RolloutStats()
        groups = [
            Group(task, [Trajectory(task, member) for member in range(group_size)], place)
            for place, task in zip(range(len(tasks)) if places is None else places, tasks, strict=True)
        ]
        total, finished, thinking = len(tasks) * group_size, 0, 0
        in_flight: dict[int, _Episode] = {}
        completions: list[Completion] = []
        answered: SimpleQueue[Future[_Episode]] = SimpleQueue()
        lock_step = lock_step or not self.engine.continuous

        def think(episode: _Episode, completion: Completion | None = None) -> None:
            """Give the episode's environment its turn; the episode comes back in `answered`."""
            nonlocal thinking
            thinking += 1
            response = self.chat.decode(completion.token_ids) if completion else ""
            threads.submit(episode.play, response, completion, self.engine.version).add_done_callback(answered.put)

        def send(episode: _Episode) -> None:
            """Send the episode's next prompt to the engine, or retire it."""
            nonlocal finished, thinking
            thinking -= 1
            if episode.done:
                finished += 1
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

        with ThreadPoolExecutor(THREADS) if self.suite.may_block else _ThisThread() as threads:
            for group in groups:
                for trajectory in group.trajectories:
                    environment = self._idle.pop() if self._idle else self.suite.make()
                    think(_Episode(environment, trajectory, group.place))
            while finished < total:
                # Wait for environments only while the engine has nothing to do; in lock-step for all of them.
                while thinking and (lock_step or not in_flight or not answered.empty()):
                    send(answered.get().result())
                completions += self.engine.step()
                if lock_step and self.engine.pending:
                    continue
                for completion in completions:
                    stats.response_tokens += len(completion.token_ids)
                    stats.cached_tokens += completion.cached_tokens
                    think(in_flight.pop(completion.key), completion)
                completions.clear()
        stats.failed = [t for group in groups for t in group.trajectories if t.failure is not None]
        for group in groups:
            group.trajectories = [t for t in group.trajectories if t.failure is None and t.turns]
        kept = [group for group in groups if len(group.trajectories) >= min(2, group_size)]
        stats.groups_dropped = len(groups) - len(kept)
        return kept, stats

    def close(self) -> None:
        for environment in self._idle:
            environment.close()
        self._idle.clear()


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the coordinates of a draw; stable across platforms and Python versions."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
