"""Episodes: environments and the engine, each finished turn sent on at once.

A finished response goes to its environment and the next turn's request enters the engine immediately; only live
episodes generate. Seeds derive from (seed, stream, task, member, turn), so an episode's tokens do not depend on which
others it was batched with.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from paw.config import RolloutConfig
from paw.errors import UserError
from paw.experience.chat import Chat
from paw.experience.engines.base import Completion, Engine, Request
from paw.experience.envs.base import Environment, Suite
from paw.types import Group, Task, Trajectory, Turn


@dataclass
class RolloutStats:
    """What happened besides the episodes themselves."""

    groups_dropped: int = 0
    prompts_truncated: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    cached_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    @classmethod
    def sum(cls, parts: Iterable["RolloutStats"]) -> "RolloutStats":
        total = cls()
        for part in parts:
            for name, value in vars(part).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def metrics(self) -> dict[str, float]:
        return {
            "health/env_failures": len(self.failures),
            "health/groups_dropped": self.groups_dropped,
            "health/prompts_truncated": self.prompts_truncated,
            "perf/cached_frac": self.cached_tokens / max(1, self.prompt_tokens),
        }


@dataclass
class _Episode:
    environment: Environment
    trajectory: Trajectory
    group: int
    prompt: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    anchor: str = ""


class Rollouts:
    """Plays groups of episodes; keeps its environments (some are processes) from one update to the next."""

    def __init__(self, suite: Suite, engine: Engine, chat: Chat, settings: RolloutConfig):
        self.suite, self.engine, self.chat, self.settings = suite, engine, chat, settings
        self._idle: list[Environment] = []
        self._key = 0

    def play(
        self,
        tasks: list[Task],
        *,
        group_size: int,
        temperature: float,
        seed: int,
        stream: str,
        places: Sequence[int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[list[Group], RolloutStats]:
        """Play each task `group_size` times with the engine's current weights.

        `places` are the tasks' indices among those of all ranks, which seeds derive from (default: 0, 1, ...).

        `stream` names the draw ("train/12", "eval"), so that no two share random numbers. An episode whose environment
        fails is left out; a group left with fewer than min(2, group_size) members is dropped. `progress` gets
        (episodes finished, episodes in all).
        """
        stats = RolloutStats()
        groups = [
            Group(task, [Trajectory(task, member) for member in range(group_size)], place)
            for place, task in zip(range(len(tasks)) if places is None else places, tasks, strict=True)
        ]
        total, finished = len(tasks) * group_size, 0
        in_flight: dict[int, _Episode] = {}

        def advance(episode: _Episode, completion: Completion | None = None) -> None:
            """Start the episode, or play its response; then send its next prompt to the engine, or retire it.

            Whatever an environment raises costs its own episode; only what the user can mend stops the run.
            """
            nonlocal finished
            environment, trajectory = episode.environment, episode.trajectory
            response = self.chat.decode(completion.token_ids) if completion else ""
            done = False
            try:
                if completion is None:
                    environment.reset(trajectory.task)
                else:
                    outcome = environment.step(response)
                    done = outcome.done
                    trajectory.turns.append(
                        Turn(
                            prompt_ids=episode.prompt_ids,
                            response_ids=completion.token_ids,
                            sampled_logp=completion.logp,
                            entropy=completion.entropy,
                            prompt=episode.prompt,
                            response=response,
                            outcome=outcome,
                            anchor=episode.anchor,
                            version=self.engine.version,
                        )
                    )
                if not done:
                    episode.prompt, episode.anchor = environment.prompt(), environment.anchor()
            except UserError:
                raise
            except Exception as error:
                done = True
                trajectory.failure = f"{type(error).__name__}: {error}"
                stats.failures.append(f"{trajectory.task.id}: {trajectory.failure}")
                with suppress(Exception):  # it is broken already
                    environment.close()
            if done:
                finished += 1
                if trajectory.failure is None:
                    self._idle.append(environment)
                if progress:
                    progress(finished, total)
                return
            episode.prompt_ids, cut = self.chat.fit_prompt(episode.prompt, self.settings.max_prompt_tokens)
            stats.prompts_truncated += cut > 0
            stats.prompt_tokens += len(episode.prompt_ids)
            self._key += 1
            in_flight[self._key] = episode
            self.engine.submit(
                Request(
                    key=self._key,
                    prompt_ids=episode.prompt_ids,
                    seed=derive_seed(seed, stream, episode.group, trajectory.member, len(trajectory.turns)),
                    temperature=temperature,
                    max_tokens=self.settings.max_response_tokens,
                )
            )

        for group in groups:
            for trajectory in group.trajectories:
                environment = self._idle.pop() if self._idle else self.suite.make()
                advance(_Episode(environment, trajectory, group.place))
        while in_flight:
            for completion in self.engine.step():
                stats.response_tokens += len(completion.token_ids)
                stats.cached_tokens += completion.cached_tokens
                advance(in_flight.pop(completion.key), completion)
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
