"""The environments of one factory. Made when needed, kept for later use, closed at the end."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

from paw.config.sections import EnvConfig
from paw.envs.base import EnvFactory
from paw.errors import quietly
from paw.rollouts.coroutine_env import CoroutineEnv, LoopCalls
from paw.rollouts.episode import EnvHandle, Episode
from paw.rollouts.guard import CheckedEnv, make_threads
from paw.rollouts.loop import EpisodeLoop
from paw.types import Task, Trajectory

STOP_S = 1.0
"""Seconds that agents and calls are given to finish after an error, Ctrl-C or the end."""


class EnvPool:
    """The environments of a factory, some of which are processes, and the threads they run in.

    Coroutine environments are awaited on `loop`. Several pools may share it: whatever closes their
    environments there holds `closing`.
    """

    def __init__(
        self, factory: EnvFactory, config: EnvConfig, loop: EpisodeLoop, closing: threading.Lock
    ) -> None:
        self.factory = factory
        self.config = config
        self.threads = make_threads(factory, config, config.threads)
        self.loop_calls = LoopCalls(loop, config.step_timeout_s)
        self._loop = loop
        self._closing = closing
        self._idle: list[CheckedEnv] = []
        """Environments of episodes that have ended."""
        self._open: set[CheckedEnv] = set()
        """All environments that are not closed: idle, or in episodes."""

    async def take(self) -> CheckedEnv:
        """Return an idle environment, or a new one, while others are made and played."""
        if self._idle:
            return self._idle.pop()
        environment = CheckedEnv(await self.threads.run(self.factory.make), self.config)
        if environment.is_coroutine_env:
            self.threads.count = self.config.threads
        self._open.add(environment)
        return environment

    def handle(self, environment: CheckedEnv, episode: Episode) -> EnvHandle:
        """Return the environment as the agent of an episode sees it."""
        return EnvHandle(environment, self.threads, self.loop_calls, episode, self.config)

    def put_back(self, environment: CheckedEnv) -> None:
        """Keep the environment of an episode that has ended for a later one."""
        self._idle.append(environment)

    async def drop(self, environment: CheckedEnv) -> None:
        """Close the environment of an episode that failed, unless one of its calls hangs."""
        if environment.is_busy and not environment.is_closed:
            return
        if environment.is_coroutine_env:
            await self.loop_calls.close(CoroutineEnv(environment, self.threads))
        elif not environment.is_closed:
            with quietly():
                await self.threads.run(environment.close)
        self._open.discard(environment)

    def closing_calls(self, *, busy: bool = False) -> list[Callable[[], None]]:
        """Return functions that close the environments, to be called in any threads.

        All coroutine environments are closed by one of them, on the loop, which must not be running
        elsewhere. An environment with a thread in one of its methods is left alone unless `busy`,
        because closing it may wait for that thread.
        """
        on_loop: list[CheckedEnv] = []
        calls: list[Callable[[], None]] = []
        for environment in self._open:
            if environment.is_coroutine_env:
                on_loop.append(environment)
            elif busy or not environment.is_busy:
                calls.append(environment.close)
        self._open.clear()
        self._idle.clear()
        if on_loop or self.loop_calls.are_open:
            calls.append(partial(self._close_on_loop, on_loop))
        return calls

    def _close_on_loop(self, environments: Sequence[CheckedEnv]) -> None:
        async def close(environment: CheckedEnv) -> None:
            # As in an episode of its own, so that it cannot cancel how others are closed.
            self._loop.enter(Trajectory(Task("closing"), member=0))
            await self.loop_calls.close(CoroutineEnv(environment, self.threads))

        async def close_all() -> None:
            await asyncio.gather(*map(close, environments))
            await self.loop_calls.settle(STOP_S)

        with self._closing:
            self._loop.run_until_complete(close_all())
