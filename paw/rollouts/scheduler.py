"""Episodes played at once: agents' coroutines on one event loop, over one engine.

A finished response goes to its agent, which steps its environment, and the next turn's request enters the engine
immediately. Environments that may block run in threads meanwhile. Seeds derive from (seed, stream, task, member, turn),
so an episode's tokens do not depend on which others it was batched with.
"""

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paw import plugins
from paw.config import Config
from paw.envs.base import EnvFactory, check_kind, eval_tasks, further_tasks, train_tasks
from paw.envs.threads import Daemons, Threads
from paw.errors import OURS, EnvironmentFailure, UserError, describe, others_code, shown, to_stderr
from paw.rollouts.chat import ContextFull
from paw.rollouts.engines.base import Completion, Request
from paw.rollouts.episode import EngineModel, EnvHandle, Episode, Model, Played, RolloutStats, bind, find_agent
from paw.rollouts.guard import MAX_REWARD, Guarded, make_threads, number
from paw.rollouts.loop import EpisodeLoop
from paw.rollouts.turns import turns_problem
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


class Rollouts:
    """Plays episodes by the agent of agent.type, or `agent`; keeps its environments (some are processes) between plays.

    `engine` and `chat` are those of the model; None where `run` is told who answers. `encode_observation` gives the
    world model's targets, which each of several ranks makes of what it has played.
    """

    def __init__(
        self,
        factory: EnvFactory,
        engine: Any,
        chat: Any,
        config: Config,
        ranks: "Ranks | None" = None,
        *,
        agent: Callable[..., Any] | None = None,
        encode_observation: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.factory, self.engine, self.chat, self.config, self.ranks = factory, engine, chat, config, ranks
        self.encode_observation = encode_observation
        self.agent = agent or find_agent(config)
        self.threads = make_threads(factory, config.env, THREADS)
        self.loop = EpisodeLoop()
        self._keys = itertools.count()
        self.loop.set_default_executor(Daemons())
        self._judges = Threads(THREADS, config.env.step_timeout_s)
        self._reward: Any = load_reward(config)
        self._idle: list[Guarded] = []
        self._cut_is_told = False

    def training(self, step: int, count: int, progress: Progress | None = None) -> Played:
        """Play the first `count` tasks of update `step` in groups, as `play` does; then further ones, see `refill`."""
        played = self.play(self.tasks(step, count), **self.options(step), progress=progress)
        return self.refill(played, step, count, progress)

    def refill(self, played: Played, step: int, count: int, progress: Progress | None) -> Played:
        """Groups of further tasks in place of those whose returns are all equal, from which no policy learns: dynamic
        sampling (DAPO, arXiv 2503.14476). At most `rollout.refill` times `count`; the groups as they were where none of
        all varies."""
        groups, stats = played
        most, begun, config = self.config.rollout.refill * count, 0, self.config
        varied, uniform = split_by_variance(groups)
        while begun < most and len(varied) < count:
            start, missing = step * most + begun, min(count - len(varied), most - begun)
            tasks = further_tasks(self.factory, start, missing, config.run.seed, split=config.env.train_split)
            options = self.options(step) | {"stream": f"train/{step}/{begun}"}
            further, seen = self.play(tasks, **options, progress=progress)
            found = split_by_variance(further)
            varied, uniform = varied + found[0], uniform + found[1]
            stats, begun = RolloutStats.sum([stats, seen]), begun + missing
        if most and varied:
            groups, stats.uniform = varied, uniform
        return groups, stats

    def tasks(self, step: int, count: int) -> list[Task]:
        return train_tasks(self.factory, step, count, self.config.run.seed, split=self.config.env.train_split)

    def options(self, step: int) -> dict[str, Any]:
        """How `play` plays the tasks of update `step`."""
        own = {"group_size": self.config.rollout.group_size, "temperature": self.config.rollout.temperature}
        return own | {"seed": self.config.run.seed, "stream": f"train/{step}"}

    def evaluation(self, progress: Progress | None = None) -> Played:
        """Play the evaluation games once each, as `play` does."""
        config = self.config.eval
        tasks = eval_tasks(self.factory, self.config.env.eval_split, config.games, config.seed)
        options = {"group_size": 1, "temperature": config.temperature}
        return self.play(tasks, **options, seed=config.seed, stream="eval", progress=progress)

    def play(self, tasks: list[Task], **options: Any) -> Played:
        """Play each task `group_size` times with the engine's current weights, each rank its share of the episodes.

        `stream` names the draw ("train/12", "eval"), so that no two share random numbers. An episode that fails is left
        out; a group left with fewer than min(2, group_size) members is dropped. Returns the groups of all ranks, in the
        order of tasks.
        """
        return self.share(self.play_own(tasks, **options), tasks, options["group_size"])

    def share(self, own: Played, tasks: list[Task], group_size: int) -> Played:
        """What all ranks have played of the tasks, in their order, the parts of a group put together; takes all ranks.

        Groups left with too few members are dropped here, whichever rank played them.
        """
        parts = [own]
        if self.ranks and self.ranks.world_size > 1:
            from paw.rollouts.exchange import exchange

            parts = exchange(own, tasks, self.ranks, self.encode_observation)
        groups = [Group(task, [], place) for place, task in enumerate(tasks)]
        for group in (group for played, _ in parts for group in played):
            groups[group.place].trajectories += group.trajectories
        kept = [group for group in groups if len(group.trajectories) >= min(2, group_size)]
        stats = RolloutStats.sum(stats for _, stats in parts)
        stats.groups_dropped = len(groups) - len(kept)
        return kept, stats

    def play_own(
        self,
        tasks: list[Task],
        *,
        group_size: int,
        temperature: float,
        seed: int,
        stream: str,
        progress: Progress | None = None,
    ) -> Played:
        """This rank's share of the episodes, for `share`: one block of all, in the order of tasks and members.

        So the members of a group stay together and share their prompt in the engine's cache, but for those at the ends.
        """
        for task in tasks:
            if not (isinstance(task, Task) and isinstance(task.id, str) and isinstance(task.kind, str)):
                name = type(self.factory).__name__
                raise UserError(f"{name}: {shown(task)} is among the tasks; each must be a Task, id and kind texts")
            check_kind(task, self.factory)
        rank, count = (self.ranks.rank, self.ranks.world_size) if self.ranks else (0, 1)
        members = [(place, member) for place in range(len(tasks)) for member in range(group_size)]
        cuts = (len(members) * rank // count, len(members) * (rank + 1) // count)
        groups = [
            Group(tasks[place], [Trajectory(tasks[place], member) for _, member in of], place)
            for place, of in itertools.groupby(members[slice(*cuts)], key=lambda pair: pair[0])
        ]
        episodes = [Episode(t, group.place, seed, stream, temperature) for group in groups for t in group.trajectories]
        given_up, finished = self.threads.given_up, itertools.count(1)
        processes_lost = self._processes_lost
        report = progress or (lambda done, total: None)
        self.run(episodes, ended=lambda _: report(next(finished), len(episodes)))
        stats = RolloutStats.sum(episode.stats for episode in episodes)
        stats.threads_lost = self.threads.given_up - given_up
        stats.processes_lost = self._processes_lost - processes_lost
        if stats.texts_cut and not self._cut_is_told:
            self._cut_is_told = True
            most = self.config.env.max_text
            to_stderr(f"{stats.texts_cut} texts of the environment were cut to env.max_text = {most} (said once)")
        for group in groups:
            group.trajectories = [t for t in group.trajectories if t.failure is None and t.turns]
        return groups, stats

    def run(
        self,
        episodes: Sequence[Episode],
        make_model: Callable[[EnvHandle], Model] | None = None,
        *,
        at_once: int = 0,
        ended: Callable[[Episode], None] | None = None,
    ) -> None:
        """Play the episodes to their ends, `at_once` of them in parallel (0: all); `ended` gets each as it ends.

        `make_model` says who answers in place of the engine. Whatever an environment or an agent raises is its
        episode's failure. KeyboardInterrupt, UserError, and what the engine or `ended` raise end the play.
        """
        self._queue: list[tuple[tuple[int, int], Request, asyncio.Future[Completion]]] = []
        self._in_flight: dict[int, asyncio.Future[Completion]] = {}
        self._error: BaseException | None = None
        self._live, self._unmade, self._left = 0, 0, len(episodes)
        self._changed, self._making = asyncio.Event(), asyncio.Lock()
        places = asyncio.Semaphore(at_once or len(episodes) or 1)

        async def play(episode: Episode) -> None:
            try:
                async with places:
                    self.loop.enter(episode.trajectory)
                    self._live += 1
                    await self._play(episode, make_model or (lambda env: EngineModel(env, self)))
                    self._live -= 1
                    if ended and not self._error:
                        ended(episode)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.end(error)
            self._left -= 1
            self._changed.set()

        outer = asyncio._get_running_loop()  # of a notebook, which runs its cells inside; asyncio has one a thread
        asyncio._set_running_loop(None)
        tasks = [self.loop.create_task(play(episode)) for episode in episodes]
        driver = self.loop.create_task(self._drive())
        try:
            self.loop.run_until_complete(driver)
        finally:
            self.end(asyncio.CancelledError())
            if left := [task for task in (*tasks, driver) if not task.done() and task.cancel()]:
                self.loop.run_until_complete(asyncio.wait(left, timeout=STOP_S))
            asyncio._set_running_loop(outer)

    async def sample(self, episode: Episode, prompt_ids: list[int], seed: int, stopped: Any) -> Completion:
        limit, future = self.config.rollout.max_response_tokens, self.loop.create_future()
        request = Request(next(self._keys), prompt_ids, seed, episode.temperature, limit, stopped)
        self._queue.append(((episode.index, episode.trajectory.member), request, future))
        self._changed.set()
        return await future

    def close(self) -> None:
        """Close the environments. What one of them raises, or that it hangs, no longer matters."""
        self.threads.close(*(environment.close for environment in self._idle))
        self._judges.close()
        self._idle.clear()
        if not self.loop.is_closed():
            self.loop.close()

    def end(self, error: BaseException) -> None:
        """Have the play end with this error, or an earlier one."""
        self._error = self._error or error
        self._changed.set()

    async def _drive(self) -> None:
        while self._left and not self._error:
            for _ in range(3):  # rounds of the loop from the answer of a thread to the next request
                await asyncio.sleep(0)
            waiting = len(self._queue) + len(self._in_flight)
            # An engine that takes no request while it runs waits for all live episodes. Each waits while environments
            # are made, so that the members of a group begin together and share their prompt in its cache.
            if self.engine and waiting and not self._unmade and (self.engine.continuous or waiting >= self._live):
                if self._step() and self.threads.count:
                    for _ in range(3):
                        await asyncio.sleep(0)
                    time.sleep(MOMENT_S)
            elif self._left and not self._error:
                self._changed.clear()
                await self._changed.wait()
        if self._error:
            raise self._error

    def _step(self) -> bool:
        if not self.engine.continuous:
            self._queue.sort(key=lambda queued: queued[0])  # batches do not depend on which environment was faster
        for _, request, future in self._queue:
            self.engine.submit(request)
            self._in_flight[request.key] = future
        self._queue.clear()
        completions = self.engine.step()
        for completion in completions:
            future = self._in_flight.pop(completion.key, None)
            if future and not future.done() and completion.failure:
                future.set_exception(EnvironmentFailure(completion.failure))
            elif future and not future.done():
                future.set_result(completion)
        return bool(completions)

    async def _play(self, episode: Episode, make_model: Callable[[EnvHandle], Model]) -> None:
        trajectory, started, guarded = episode.trajectory, time.monotonic(), None
        try:
            guarded = self._idle.pop() if self._idle else await self._make()
            env = EnvHandle(guarded, self.threads, episode, self.config.env)
            model = make_model(env)
            try:
                async with env.patience.limit():
                    await self.agent(env, model)
            except ContextFull:
                episode.context_full = True
                episode.stats.context_full = 1
            model.ended()
            if not (trajectory.turns or trajectory.failure or episode.context_full):
                raise RuntimeError("the agent ended without a call of the model")
            if self._reward and trajectory.turns and trajectory.failure is None:
                await self._judge(trajectory)
            if not (trajectory.turns or trajectory.failure or episode.context_full):
                raise RuntimeError("its turns were taken away")
            if problem := turns_problem(trajectory.turns, with_tokens=isinstance(model, EngineModel)):
                raise RuntimeError(problem)
        except OURS:
            raise
        except BaseException as error:
            trajectory.failure = trajectory.failure or describe(error)
        episode.seconds = time.monotonic() - started
        episode.stats.failed = [trajectory] if trajectory.failure is not None else []
        if guarded:
            episode.stats.texts_cut, guarded.texts_cut = guarded.texts_cut, 0
            if trajectory.failure is None:
                self._idle.append(guarded)

    @property
    def _processes_lost(self) -> int:
        return getattr(self.factory, "processes_lost", 0)

    async def _make(self) -> Guarded:
        self._unmade += 1
        try:
            async with self._making:  # one after the other, in the order of episodes
                environment = await self.threads.run(self.factory.make)
        finally:
            self._unmade -= 1
            self._changed.set()
        if inspect.iscoroutinefunction(getattr(environment, "step", None)):
            self.threads.count = THREADS
        return Guarded(environment, self.config.env)

    async def _judge(self, trajectory: Trajectory) -> None:
        """Give the episode the reward of reward.type in place of the environment's, to the last turn."""
        value = await self._judges.run(self._reward, trajectory)
        value = number(f"reward.type = '{self.config.reward.type}'", value, -MAX_REWARD, MAX_REWARD)
        for turn in trajectory.turns:
            turn.outcome = replace(turn.outcome, reward=value if turn is trajectory.turns[-1] else 0.0)


def load_reward(config: Config) -> Callable[[Trajectory], Any] | None:
    """The reward function that reward.type names, with its settings; None for the environment's own rewards."""
    name = config.reward.type
    if name == "env":
        return None
    reward = plugins.load("rewards", name)
    with others_code(f"reward.type = '{name}'"):
        return bind(reward, config.reward)


def split_by_variance(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """(groups whose members differ in what they won, those where they do not); a lone member counts among the first."""
    found: tuple[list[Group], list[Group]] = [], []
    for group in groups:
        returns = {member.episode_return for member in group.trajectories}
        found[len(group.trajectories) > 1 and len(returns) == 1].append(group)
    return found
