"""Episodes played at once: agents' coroutines on one event loop, over one engine, each finished turn sent on at once.

A finished response goes to its agent, which steps its environment, and the next turn's request enters the engine
immediately; only live episodes generate. Environments that may block (child processes, networks) run in threads
meanwhile, those of a user in threads with a deadline. Seeds derive from (seed, stream, task, member, turn), so an
episode's tokens do not depend on which others it was batched with.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from paw import plugins
from paw.config import Config
from paw.envs.base import EnvFactory, eval_tasks, train_tasks
from paw.errors import OURS, EnvironmentFailure, UserError, describe, shown, to_stderr
from paw.rollout.chat import Chat
from paw.rollout.engines.base import Completion, Engine, Request
from paw.rollout.episode import Agent, ContextFull, EngineModel, EnvHandle, Episode, Model, bind, find_agent
from paw.rollout.guard import MAX_REWARD, Guarded, make_threads, number
from paw.rollout.threads import Threads
from paw.types import Group, Task, Trajectory

if TYPE_CHECKING:
    from paw.model.ranks import Ranks

Progress = Callable[[int, int], None]
"""Called with (episodes finished, episodes in all)."""
THREADS = 64
"""Environments stepped in parallel. Many more child processes would outlast their time limit starting together."""
MOMENT_S = 2e-4
"""After responses, for the environments in threads that answer at once: their next requests join the next batch."""
STOP_S = 1.0
"""Seconds that agents have to end after an error or Ctrl-C."""


class Scheduler:
    """Plays episodes on an event loop; keeps its environments (some are processes) from one play to the next.

    Args:
        engine: samples the responses. None where the episodes' models do so themselves.
    """

    def __init__(self, factory: EnvFactory, config: Config, engine: Engine | None = None) -> None:
        self.factory, self.config, self.engine = factory, config, engine
        self.threads = make_threads(factory, config.env, THREADS)
        self._judges = Threads(THREADS, config.env.step_timeout_s)
        self._reward = _find_reward(config)
        self._loop = asyncio.new_event_loop()
        self._idle: list[Guarded] = []
        self._keys = 0
        self._answered = False
        self._order: dict[asyncio.Task[Any] | None, int] = {}

    def run(
        self,
        episodes: Sequence[Episode],
        agent: Agent,
        make_model: Callable[[EnvHandle], Model],
        *,
        at_once: int = 0,
        ended: Callable[[Episode], None] | None = None,
    ) -> None:
        """Play the episodes to their ends, `at_once` of them in parallel (0: all); `ended` gets each as it ends.

        Whatever an environment or an agent raises is its episode's `failure`. KeyboardInterrupt, UserError, and what
        the engine or `ended` raise end the play.
        """
        self._queue: list[tuple[int, Request, asyncio.Future[Completion]]] = []
        self._in_flight: dict[int, asyncio.Future[Completion]] = {}
        self._live, self._unmade, self._left, self._error, self._stopped = 0, 0, len(episodes), None, False
        self._changed, self._making = asyncio.Event(), asyncio.Lock()
        places = asyncio.Semaphore(at_once or len(episodes) or 1)

        async def play(episode: Episode) -> None:
            try:
                async with places:
                    self._live += 1
                    try:
                        await self._play(episode, agent, make_model)
                    finally:
                        self._live -= 1
                    if ended and not (self._stopped or self._error):
                        ended(episode)
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._left -= 1
                self._changed.set()

        with _outside_of_loops():
            tasks = [self._loop.create_task(play(episode)) for episode in episodes]
            self._order = {task: i for i, task in enumerate(tasks)}
            try:
                self._loop.run_until_complete(self._drive())
            finally:
                self._stopped = True
                self._stop([task for task in tasks if not task.done()])

    async def sample(self, *request: Any) -> Completion:
        """The engine's answer to Request(key, *request), for a coroutine of an episode."""
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._keys += 1
        self._queue.append((self._order.get(asyncio.current_task(), 0), Request(self._keys, *request), future))
        self._changed.set()
        return await future

    def close(self) -> None:
        """Close the environments. What one of them raises, or that it hangs, no longer matters."""
        self.threads.close(*(environment.close for environment in self._idle))
        self._judges.close()
        self._idle.clear()
        if not self._loop.is_closed():
            self._loop.close()

    async def _drive(self) -> None:
        while self._left and not self._error:
            for _ in range(2):  # rounds of the loop from the answer of a thread to the next request
                await asyncio.sleep(0)
            waiting = len(self._queue) + len(self._in_flight)
            # An engine that takes no request while it runs waits for all live episodes. Each waits while environments
            # are made, so that the members of a group begin together and share their prompt in its cache.
            if self.engine and waiting and not self._unmade and (self.engine.continuous or waiting >= self._live):
                self._step(self.engine)
                if self.threads.count and self._answered:
                    for _ in range(2):
                        await asyncio.sleep(0)
                    time.sleep(MOMENT_S)
            elif self._left and not self._error:
                self._changed.clear()
                await self._changed.wait()
        if self._error:
            raise self._error

    def _step(self, engine: Engine) -> None:
        if not engine.continuous:
            self._queue.sort(key=lambda queued: queued[0])  # batches do not depend on which environment was faster
        for _, request, future in self._queue:
            engine.submit(request)
            self._in_flight[request.key] = future
        self._queue.clear()
        completions = engine.step()
        self._answered = bool(completions)
        for completion in completions:
            future = self._in_flight.pop(completion.key, None)
            if future and not future.done():
                future.set_result(completion)

    async def _play(self, episode: Episode, agent: Agent, make_model: Callable[[EnvHandle], Model]) -> None:
        trajectory, started, guarded = episode.trajectory, time.monotonic(), None
        try:
            guarded = self._idle.pop() if self._idle else await self._make()
            env = EnvHandle(guarded, self.threads, episode, self.config.env)
            try:
                await agent(env, make_model(env))
            except ContextFull:
                episode.context_full = True
            if not trajectory.turns and trajectory.failure is None and not episode.context_full:
                raise RuntimeError("the agent ended without a call of the model")
            if self._reward and trajectory.turns and trajectory.failure is None:
                await self._judge(self._reward, trajectory)
        except OURS:
            raise
        except BaseException as error:
            trajectory.failure = trajectory.failure or describe(error)
        episode.seconds = time.monotonic() - started
        if guarded:
            episode.texts_cut, guarded.texts_cut = guarded.texts_cut, 0
            if trajectory.failure is None:
                self._idle.append(guarded)

    async def _make(self) -> Guarded:
        self._unmade += 1
        async with self._making:  # one after the other, in the order of episodes
            made = await self.threads.settled(self.factory.make)
        self._unmade -= 1
        self._changed.set()
        environment = _result(made)
        if inspect.iscoroutinefunction(getattr(environment, "step", None)):
            self.threads.count = max(self.threads.count, THREADS)
        return Guarded(environment, self.config.env)

    async def _judge(self, reward: Callable[[Trajectory], Any], trajectory: Trajectory) -> None:
        """Give the episode the reward of reward.type in place of the environment's: all of it to the last turn."""

        value = _result(await self._judges.settled(reward, trajectory))
        value = number(f"reward.type = '{self.config.reward.type}'", value, -MAX_REWARD, MAX_REWARD)
        for turn in trajectory.turns:
            last = turn is trajectory.turns[-1]
            turn.outcome = replace(turn.outcome, reward=value if last else 0.0)

    def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        if tasks:  # Ctrl-C may have struck inside a library's own task, which nobody awaits any more
            self._loop.set_exception_handler(lambda *_: None)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_S))


def _result(future: Any) -> Any:
    """The result of a future that is done. No coroutine can raise StopIteration: it becomes an EnvironmentFailure."""
    error = future.exception()
    if isinstance(error, StopIteration):
        raise EnvironmentFailure(describe(error))
    return future.result()


def _find_reward(config: Config) -> Callable[[Trajectory], Any] | None:
    name = config.reward.type
    return None if name == "env" else bind(plugins.load("rewards", name), config.reward)


@contextmanager
def _outside_of_loops() -> Iterator[None]:
    """A notebook runs its cells inside a loop, and asyncio has one a thread: that one is put aside meanwhile."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


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
    """Episodes whose environment or agent failed: they are in no group."""

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


SUMMED = ("prompts_truncated", "texts_cut", "prompt_tokens", "response_tokens", "cached_tokens")
"""Fields of RolloutStats that are sums over episodes."""


class Rollouts:
    """Plays groups of episodes with a model of ours, by the agent of agent.type, or `agent` where it is given."""

    def __init__(
        self,
        factory: EnvFactory,
        engine: Engine,
        chat: Chat,
        config: Config,
        ranks: "Ranks | None" = None,
        *,
        agent: Agent | None = None,
    ) -> None:
        self.factory, self.engine, self.chat, self.config, self.ranks = factory, engine, chat, config, ranks
        self.agent = agent or find_agent(config)
        self.scheduler = Scheduler(factory, config, engine)
        self.close = self.scheduler.close
        self._cut_is_told = False

    def training(self, step: int, count: int, progress: Progress | None = None) -> tuple[list[Group], RolloutStats]:
        """Play the first `count` tasks of update `step` in groups, as `play` does; all ranks together."""
        size, temperature = self.config.rollout.group_size, self.config.rollout.temperature
        seed, stream = self.config.run.seed, f"train/{step}"
        tasks = train_tasks(self.factory, step, count, seed, split=self.config.env.train_split)
        return self._share(tasks, group_size=size, temperature=temperature, seed=seed, stream=stream, progress=progress)

    def evaluation(self, progress: Progress | None = None) -> tuple[list[Group], RolloutStats]:
        """Play the evaluation games once each, as `play` does; all ranks together."""
        config = self.config.eval
        tasks = eval_tasks(self.factory, self.config.env.eval_split, config.games, config.seed)
        return self._share(
            tasks, group_size=1, temperature=config.temperature, seed=config.seed, stream="eval", progress=progress
        )

    def _share(self, tasks: list[Task], **options: Any) -> tuple[list[Group], RolloutStats]:
        """Play this rank's share of the tasks; returns everybody's groups, in the order of tasks."""
        for task in tasks:
            if not (isinstance(task, Task) and isinstance(task.id, str) and isinstance(task.kind, str)):
                name = type(self.factory).__name__
                raise UserError(f"{name}: {shown(task)} is among the tasks; each must be a Task, id and kind texts")
        if self.ranks is None:
            return self.play(tasks, **options)
        places = range(self.ranks.rank, len(tasks), self.ranks.world_size)
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
    ) -> tuple[list[Group], RolloutStats]:
        """Play each task `group_size` times with the engine's current weights.

        `places` are the tasks' indices among those of all ranks, which seeds derive from (default: 0, 1, ...); `stream`
        names the draw ("train/12", "eval"), so that no two share random numbers. An episode that fails is left out; a
        group left with fewer than min(2, group_size) members is dropped.
        """
        given_up, finished = self.scheduler.threads.given_up, 0
        groups = [
            Group(task, [Trajectory(task, member) for member in range(group_size)], place)
            for place, task in zip(range(len(tasks)) if places is None else places, tasks, strict=True)
        ]
        episodes = [Episode(t, group.place, seed, stream, temperature) for group in groups for t in group.trajectories]

        def ended(_: Episode) -> None:
            nonlocal finished
            finished += 1
            if progress:
                progress(finished, len(episodes))

        self.scheduler.run(episodes, self.agent, self.make_model, ended=ended)
        stats = RolloutStats(threads_lost=self.scheduler.threads.given_up - given_up)
        for name in SUMMED:
            setattr(stats, name, sum(getattr(episode, name) for episode in episodes))
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

    def make_model(self, env: EnvHandle) -> EngineModel:
        """The engine's model, for one episode."""
        return EngineModel(env, self.config, self.chat, self.scheduler.sample, self.engine.version)


def _set_tasks(played: tuple[list[Group], RolloutStats], by_id: dict[str, Task]) -> None:
    groups, stats = played
    for holder in (*groups, *(t for group in groups for t in group.trajectories), *stats.failed):
        holder.task = by_id[holder.task.id]
