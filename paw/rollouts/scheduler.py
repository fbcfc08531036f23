"""Plays episodes in parallel. Agents are coroutines on one event loop and share one engine.

A finished response goes to its agent, which steps its environment, and the next turn's request
enters the engine immediately. Environments that may block run in threads, and coroutine
environments on the loop. Seeds come from (seed, stream, task, member, turn), so an episode's tokens
do not depend on the other episodes in its batch.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paw.config.sections import Config
from paw.envs.base import EnvFactory, check_kind, eval_tasks, further_tasks, train_tasks
from paw.envs.several import parts_of
from paw.errors import (
    OURS,
    EnvironmentFailure,
    UserError,
    describe,
    short_repr,
    to_stderr,
)
from paw.io.threads import Daemons, Threads
from paw.rollouts.base import Progress, RolloutResult, RolloutStats
from paw.rollouts.engine_model import EngineModel
from paw.rollouts.engines.base import Completion, Request
from paw.rollouts.env_pool import STOP_S, EnvPool
from paw.rollouts.episode import Agent, EnvHandle, Episode, Model, find_agent, find_own_agents
from paw.rollouts.garbage import rarer_collections
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.loop import EpisodeLoop
from paw.rollouts.rewards import Reward, load_own_rewards, load_rewards
from paw.rollouts.summaries import share_summaries
from paw.rollouts.text.chat import ContextFull
from paw.rollouts.turns import turns_problem
from paw.types import Group, Task, Trajectory

if TYPE_CHECKING:
    from paw.distributed.ranks import Ranks

MOMENT_S = 2e-4
"""Seconds to wait after responses.

Environments in threads that answer at once can then join the next batch.
"""
LOOP_ROUNDS = 3
"""Event-loop rounds between a thread's answer and the next request."""


@dataclass
class QueuedRequest:
    """A request that the engine does not have yet."""

    order: tuple[int, int]
    """(index of the task, member) of its episode."""
    request: Request
    completion: asyncio.Future[Completion]


@dataclass
class PlayState:
    """What changes while `Rollouts.run_episodes` plays some episodes."""

    unfinished: int = 0
    """Episodes that have not ended, whether started or not."""
    live: int = 0
    """Episodes in play."""
    queue: list[QueuedRequest] = field(default_factory=list)
    in_flight: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)
    """Completions that the engine has not returned yet, by the key of their request."""
    error: BaseException | None = None
    """The error that ends the play before all episodes have ended."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request is queued, an episode ends or an error is set."""


class Rollouts:
    """Plays episodes with `agent`, by default that of agent.type, or of the environment's own.

    Environments are kept for later episodes, those of each factory in a pool. `engine` and `chat`
    are the model's. They are None if `run_episodes` gets a `make_model` instead.

    `training`, `evaluation` and `play_tasks` play tasks and return the groups of all ranks. The
    episodes of other ranks come without their turns. These methods call `play_share`, which plays
    this rank's episodes, and then `gather_groups`. `run_episodes` plays given episodes to their
    ends, and all others call it.
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
    ) -> None:
        self.factory = factory
        self.engine = engine
        self.chat = chat
        self.config = config
        self.ranks = ranks
        self.agent = agent or find_agent(config)
        self._own_agents = {} if agent else find_own_agents(config)
        """The agents of environments that name one of their own, by label."""
        self.loop = EpisodeLoop()
        closing = threading.Lock()
        self.pools: dict[str, EnvPool] = {}
        """The environments, by the label in their tasks."""
        for label, env_part in parts_of(factory, config.env).items():
            self.pools[label] = EnvPool(env_part.factory, env_part.config, self.loop, closing)
        self.loop.set_default_executor(Daemons())
        self._request_keys = itertools.count()
        self._rewards = load_rewards(config)
        self._own_rewards = load_own_rewards(config)
        """The rewards of environments that name their own, by label."""
        self._judges = Threads(config.env.threads, config.env.step_timeout_s)
        self._patient_judges = Threads(config.env.threads)
        """For rewards that limit their own time."""
        self.is_stepping = False
        """Whether the engine is in a step, which may take as long as a batch of answers."""
        self._cut_is_reported = False
        self._state = PlayState()

    def training(self, step: int, count: int, progress: Progress | None = None) -> RolloutResult:
        """Play the first `count` tasks of update `step` in groups, as `play_tasks` does.

        If groups have to be replaced, play further tasks (see `refill`).
        """
        tasks = self.tasks(step, count)
        own_result = self.play_share_of_update(step, tasks, progress)
        result = self.gather_groups(own_result, tasks, self.config.rollout.group_size)
        return self.refill(result, step, count, progress)

    def tasks(self, step: int, count: int) -> list[Task]:
        """Return the first `count` tasks of update `step`."""
        return train_tasks(
            self.factory, step, count, self.config.run.seed, split=self.config.env.train_split
        )

    def play_share_of_update(
        self, step: int, tasks: list[Task], progress: Progress | None
    ) -> RolloutResult:
        """Play this rank's share of the tasks of update `step`, for `gather_groups`."""
        return self.play_share(
            tasks,
            group_size=self.config.rollout.group_size,
            temperature=self.config.rollout.temperature,
            seed=self.config.run.seed,
            stream=f"train/{step}",
            progress=progress,
        )

    def refill(
        self, result: RolloutResult, step: int, count: int, progress: Progress | None
    ) -> RolloutResult:
        """Replace groups whose returns are all equal with groups of further tasks.

        A policy learns nothing from such groups. This is dynamic sampling (DAPO, arXiv 2503.14476).
        At most `rollout.refill` times `count` further tasks are played. If no group has differing
        returns, the groups stay as they were.
        """
        groups, stats = result
        config = self.config
        budget = config.rollout.refill * count
        tasks_played = 0
        varied, uniform = split_by_variance(groups)

        while tasks_played < budget and len(varied) < count:
            missing = min(count - len(varied), budget - tasks_played)
            tasks = further_tasks(
                self.factory,
                step * budget + tasks_played,
                missing,
                config.run.seed,
                step=step,
                split=config.env.train_split,
            )
            new_groups, new_stats = self.play_tasks(
                tasks,
                group_size=config.rollout.group_size,
                temperature=config.rollout.temperature,
                seed=config.run.seed,
                stream=f"train/{step}/{tasks_played}",
                progress=progress,
            )
            new_varied, new_uniform = split_by_variance(new_groups)
            varied += new_varied
            uniform += new_uniform
            stats = RolloutStats.sum([stats, new_stats])
            tasks_played += missing

        if budget and varied:
            stats.uniform = uniform
            return varied, stats
        return groups, stats

    def evaluation(self, progress: Progress | None = None) -> RolloutResult:
        """Play each evaluation game `eval.attempts` times, as `play_tasks` does."""
        config = self.config.eval
        return self.play_tasks(
            eval_tasks(self.factory, self.config.env.eval_split, config.games, config.seed),
            group_size=config.attempts,
            least_members=1,
            temperature=config.temperature,
            seed=config.seed,
            stream="eval",
            progress=progress,
        )

    def play_tasks(
        self,
        tasks: list[Task],
        *,
        group_size: int,
        temperature: float,
        seed: int,
        stream: str,
        progress: Progress | None = None,
        least_members: int = 2,
    ) -> RolloutResult:
        """Play each task `group_size` times with the engine's current weights.

        Each rank plays its share of the episodes. `stream` is as for `play_share`. Returns the
        groups of all ranks, in the order of tasks. An episode that fails is in no group. A group
        left with fewer than min(least_members, group_size) members is dropped.
        """
        own_result = self.play_share(
            tasks,
            group_size=group_size,
            temperature=temperature,
            seed=seed,
            stream=stream,
            progress=progress,
        )
        return self.gather_groups(own_result, tasks, group_size, least_members=least_members)

    def gather_groups(
        self,
        own_result: RolloutResult,
        tasks: list[Task],
        group_size: int,
        *,
        least_members: int = 2,
    ) -> RolloutResult:
        """Return the groups that all ranks have played, in the order of tasks.

        `own_result` has this rank's parts of them. The other ranks' episodes are summaries
        (`AwayTrajectory`). Groups with too few members left are dropped here, whichever rank played
        them. Every rank must call this.
        """
        rank_results = [own_result]
        if self.ranks and self.ranks.world_size > 1:
            rank_results = share_summaries(own_result, tasks, self.ranks)

        groups = [Group(task, [], task_index) for task_index, task in enumerate(tasks)]
        for rank_groups, _ in rank_results:
            for group in rank_groups:
                groups[group.index].trajectories += group.trajectories

        least_members = min(least_members, group_size)
        kept_groups = [group for group in groups if len(group.trajectories) >= least_members]
        stats = RolloutStats.sum(rank_stats for _, rank_stats in rank_results)
        stats.groups_dropped = len(groups) - len(kept_groups)
        return kept_groups, stats

    def play_share(
        self,
        tasks: list[Task],
        *,
        group_size: int,
        temperature: float,
        seed: int,
        stream: str,
        progress: Progress | None = None,
    ) -> RolloutResult:
        """Play this rank's share of the episodes, for `gather_groups`.

        `stream` names the draw ("train/12", "eval"), so no two draws share random numbers.
        """
        for task in tasks:
            self._check_task(task)

        groups = self._own_groups(tasks, group_size)
        episodes: list[Episode] = []
        for group in groups:
            for trajectory in group.trajectories:
                episodes.append(Episode(trajectory, group.index, seed, stream, temperature))

        finished = itertools.count(1)

        def report_progress(_: Episode) -> None:
            if progress:
                progress(next(finished), len(episodes))

        given_up_before = self._threads_lost
        processes_lost_before = self._processes_lost
        self.run_episodes(episodes, on_end=report_progress)

        stats = RolloutStats.sum(episode.stats for episode in episodes)
        stats.threads_lost = self._threads_lost - given_up_before
        stats.processes_lost = self._processes_lost - processes_lost_before
        self._report_cut_texts(stats.texts_cut)
        for group in groups:
            group.trajectories = [
                episode for episode in group.trajectories if _can_be_used(episode)
            ]
        return groups, stats

    def _check_task(self, task: Task) -> None:
        """Raise UserError if this is not a Task, or if its kind is not allowed."""
        if not (isinstance(task, Task) and isinstance(task.id, str) and isinstance(task.kind, str)):
            name = type(self.factory).__name__
            raise UserError(
                f"{name}: {short_repr(task)} is among the tasks; "
                "each must be a Task whose id and kind are strings"
            )
        check_kind(task, self.factory)

    def _own_groups(self, tasks: list[Task], group_size: int) -> list[Group]:
        """Return this rank's share of the episodes, not played yet, in groups.

        The share is one block of all episodes in the order of tasks and members. So the members of
        a group stay together and share their prompt in the engine's cache, except at the ends of
        the block.
        """
        rank = self.ranks.rank if self.ranks else 0
        world_size = self.ranks.world_size if self.ranks else 1
        episode_count = len(tasks) * group_size
        first_episode = episode_count * rank // world_size
        end_episode = episode_count * (rank + 1) // world_size

        groups: list[Group] = []
        for episode_index in range(first_episode, end_episode):
            task_index, member = divmod(episode_index, group_size)
            if not groups or groups[-1].index != task_index:
                groups.append(Group(tasks[task_index], [], task_index))
            groups[-1].trajectories.append(Trajectory(tasks[task_index], member))
        return groups

    def _report_cut_texts(self, count: int) -> None:
        if count and not self._cut_is_reported:
            self._cut_is_reported = True
            max_text = self.config.env.max_text
            to_stderr(
                f"{count} texts of the environment were cut to env.max_text = {max_text} "
                "(reported once)"
            )

    def run_episodes(
        self,
        episodes: Sequence[Episode],
        make_model: Callable[[EnvHandle], Model] | None = None,
        *,
        at_once: int = 0,
        on_end: Callable[[Episode], None] | None = None,
    ) -> None:
        """Play the episodes to their ends, `at_once` of them in parallel (0: all).

        If an agent has an attribute `at_once`, it also limits how many of the agent's episodes run
        in parallel. `make_model`, if given, makes an episode's model, which is otherwise that of
        the engine. `on_end` is called with each episode as it ends. An error of an environment or
        an agent fails only its episode. KeyboardInterrupt, UserError, and any error of the engine
        or `on_end` end the play.
        """
        self._state = PlayState(unfinished=len(episodes))
        at_once = at_once or len(episodes) or 1
        slots = asyncio.Semaphore(at_once)
        agents = [self.agent, *self._own_agents.values()]
        agent_slots = {
            id(agent): asyncio.Semaphore(getattr(agent, "at_once", at_once)) for agent in agents
        }
        make_model = make_model or self._make_engine_model

        tasks: list[asyncio.Task[None]] = []
        for episode in episodes:
            agent = self._agent_of(episode)
            both_slots = (agent_slots[id(agent)], slots)
            coroutine = self._run_in_slots(episode, make_model, both_slots, on_end)
            tasks.append(self.loop.create_task(coroutine))
        driver = self.loop.create_task(self._drive())
        try:
            with rarer_collections(min(at_once, len(episodes))):
                self.loop.run_until_complete(driver)
        finally:
            self.end(asyncio.CancelledError())
            self._cancel([*tasks, driver])

    def _make_engine_model(self, env: EnvHandle) -> Model:
        return EngineModel(env, self)

    def _agent_of(self, episode: Episode) -> Agent:
        return self._own_agents.get(episode.trajectory.task.env, self.agent)

    async def _run_in_slots(
        self,
        episode: Episode,
        make_model: Callable[[EnvHandle], Model],
        slots: tuple[asyncio.Semaphore, asyncio.Semaphore],
        on_end: Callable[[Episode], None] | None,
    ) -> None:
        """Play an episode once its agent has a free slot and then the whole play has one.

        An error that is not the episode's own failure ends the play.
        """
        state = self._state
        try:
            async with slots[0], slots[1]:
                self.loop.enter(episode.trajectory)
                state.live += 1
                await self._run_episode(episode, make_model)
                state.live -= 1
                if on_end and not state.error:
                    on_end(episode)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.end(error)
        state.unfinished -= 1
        state.changed.set()

    def _cancel(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel tasks that have not ended, and give them and their calls STOP_S to end."""
        cancelled: list[asyncio.Task[Any]] = []
        for task in tasks:
            if not task.done() and task.cancel():
                cancelled.append(task)
        if cancelled:
            self.loop.run_until_complete(asyncio.wait(cancelled, timeout=STOP_S))
            for pool in self.pools.values():
                self.loop.run_until_complete(pool.loop_calls.settle(STOP_S))

    async def sample(
        self,
        episode: Episode,
        prompt_ids: list[int],
        seed: int,
        stopped: Callable[[list[int]], bool] | None,
        max_tokens: int,
    ) -> Completion:
        """Return what the engine samples for a prompt of an episode.

        Raises EnvironmentFailure if it could not sample.
        """
        completion: asyncio.Future[Completion] = self.loop.create_future()
        order = (episode.index, episode.trajectory.member)
        request = Request(
            key=next(self._request_keys),
            prompt_ids=prompt_ids,
            seed=seed,
            temperature=episode.temperature,
            max_tokens=max_tokens,
            stopped=stopped,
            episode=order,
        )
        self._state.queue.append(QueuedRequest(order, request, completion))
        self._state.changed.set()
        return await completion

    def close(self) -> None:
        """Close the environments and the loop.

        Errors and hangs of environments no longer matter.
        """
        for pool in self.pools.values():
            pool.threads.close(*pool.closing_calls())
        self._judges.close()
        self._patient_judges.close()
        if not (self.loop.is_closed() or self.loop.is_running()):
            self.loop.close()

    def closing_calls(self, *, busy: bool = False) -> list[Callable[[], None]]:
        """Return functions that close all environments, see `EnvPool.closing_calls`."""
        calls: list[Callable[[], None]] = []
        for pool in self.pools.values():
            calls += pool.closing_calls(busy=busy)
        return calls

    def end(self, error: BaseException) -> None:
        """End the play with this error, unless an earlier error already ends it."""
        self._state.error = self._state.error or error
        self._state.changed.set()

    async def _drive(self) -> None:
        """Step the engine until all episodes have ended. Raises the error that stopped it."""
        state = self._state
        while state.unfinished and not state.error:
            await _let_others_run()
            if self._engine_may_step():
                if self._step() and any(pool.threads.count for pool in self.pools.values()):
                    await _let_others_run()
                    if any(pool.threads.open_calls for pool in self.pools.values()):
                        time.sleep(MOMENT_S)
            elif state.unfinished and not state.error:
                state.changed.clear()
                await state.changed.wait()
        if state.error:
            raise state.error

    def _engine_may_step(self) -> bool:
        """Whether there are requests and the step need not wait for more.

        An engine that takes no requests while it runs waits for all live episodes, including those
        whose environment is being made. Other engines do not wait.
        """
        state = self._state
        waiting = len(state.queue) + len(state.in_flight)
        if not self.engine or not waiting:
            return False
        return self.engine.continuous or waiting >= state.live

    def _step(self) -> bool:
        """Submit the queued requests and step the engine. Returns whether any were completed."""
        state = self._state
        if not self.engine.continuous:
            # Batches must not depend on which environment was faster.
            state.queue.sort(key=lambda queued: queued.order)
        for queued in state.queue:
            self.engine.submit(queued.request)
            state.in_flight[queued.request.key] = queued.completion
        state.queue.clear()

        self.is_stepping = True
        try:
            completions = self.engine.step()
        finally:
            self.is_stepping = False
        for completion in completions:
            future = state.in_flight.pop(completion.key, None)
            if future is None or future.done():
                continue
            if completion.failure:
                future.set_exception(EnvironmentFailure(completion.failure))
            else:
                future.set_result(completion)
        return bool(completions)

    async def _run_episode(
        self, episode: Episode, make_model: Callable[[EnvHandle], Model]
    ) -> None:
        """Play one episode in a new or idle environment.

        Whatever goes wrong counts as the episode's failure. Raises only the errors in `OURS`.
        """
        trajectory = episode.trajectory
        started = time.monotonic()
        pool = self.pools[trajectory.task.env]
        environment: CheckedEnv | None = None
        try:
            environment = await pool.take()
            await self._run_in_environment(pool.handle(environment, episode), make_model)
        except OURS:
            raise
        except BaseException as error:
            trajectory.failure = trajectory.failure or describe(error)

        episode.seconds = time.monotonic() - started
        episode.stats.failed = [trajectory] if trajectory.failure is not None else []
        if environment:
            episode.stats.texts_cut = environment.texts_cut
            environment.texts_cut = 0
            if trajectory.failure is None:
                pool.put_back(environment)
            else:
                await pool.drop(environment)

    async def _run_in_environment(
        self, env: EnvHandle, make_model: Callable[[EnvHandle], Model]
    ) -> None:
        """Let the agent play the episode of this environment, and judge it.

        Raises an exception that says what is wrong with the episode.
        """
        episode = env.episode
        trajectory = episode.trajectory
        model = make_model(env)
        try:
            async with env.patience.limit():
                await self._agent_of(episode)(env, model)
        except ContextFull:
            episode.context_full = True
            episode.stats.context_full = 1
        model.on_end()

        if _lacks_turns(episode):
            raise RuntimeError("the agent ended without a call of the model")
        rewards = self._own_rewards.get(trajectory.task.env, self._rewards)
        if rewards and trajectory.turns and trajectory.failure is None:
            await self._judge(episode, rewards)
        if _lacks_turns(episode):
            raise RuntimeError("its turns were taken away")
        problem = turns_problem(trajectory.turns, with_tokens=isinstance(model, EngineModel))
        if problem:
            raise RuntimeError(problem)

    @property
    def _threads_lost(self) -> int:
        return sum(pool.threads.given_up for pool in self.pools.values())

    @property
    def _processes_lost(self) -> int:
        return getattr(self.factory, "processes_lost", 0)

    async def _judge(self, episode: Episode, rewards: Sequence[Reward]) -> None:
        """Give the last turn these rewards of the recipe instead of the environment's own.

        The other turns get 0.
        """
        trajectory = episode.trajectory
        values: dict[str, float] = {}
        try:
            for reward in rewards:
                threads = self._patient_judges if reward.limits_itself else self._judges
                values[reward.label] = await threads.run(reward.value, trajectory)
        except OURS:
            raise
        except BaseException:
            episode.stats.rewards_failed = 1
            raise

        weighted_sum = sum(reward.weight * values[reward.label] for reward in rewards)
        # A single reward has no label, because it is the episode's return.
        trajectory.rewards = {label: value for label, value in values.items() if label}
        for turn in trajectory.turns:
            is_last = turn is trajectory.turns[-1]
            turn.outcome = replace(turn.outcome, reward=weighted_sum if is_last else 0.0)


async def _let_others_run() -> None:
    """Let other tasks run, until an agent with a thread's answer has made its next request."""
    for _ in range(LOOP_ROUNDS):
        await asyncio.sleep(0)


def _can_be_used(trajectory: Trajectory) -> bool:
    """Whether an episode has not failed and has turns."""
    return trajectory.failure is None and bool(trajectory.turns)


def _lacks_turns(episode: Episode) -> bool:
    """Whether an episode that neither failed nor ran out of context has no turn."""
    return not (episode.trajectory.turns or episode.trajectory.failure or episode.context_full)


def split_by_variance(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Return (groups whose members' returns differ, groups whose returns are all equal).

    A group of one member is in the first list.
    """
    varied: list[Group] = []
    uniform: list[Group] = []
    for group in groups:
        returns = {trajectory.episode_return for trajectory in group.trajectories}
        if len(group.trajectories) > 1 and len(returns) == 1:
            uniform.append(group)
        else:
            varied.append(group)
    return varied, uniform
