"""The application of `paw serve env`. Importing this module needs fastapi and openenv."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import HTTPException
from openenv.core.env_server import (
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)

from paw.config.sections import EnvConfig
from paw.envs.base import EnvFactory
from paw.io.serving import LimitedBodies
from paw.io.threads import Threads
from paw.rollouts.guard import make_threads
from paw.tools.play.env_session import Session


class Games(NamedTuple):
    """What all clients play."""

    factory: EnvFactory
    config: EnvConfig
    threads: Threads
    splits: list[str]


class PawAction(Action):
    text: str
    """A response as `prompt` asks for it, or just one of `admissible_actions`."""


class PawObservation(Observation):
    text: str
    prompt: str
    """Text that a model reads in this turn."""
    admissible_actions: list[str]
    won: bool = False
    valid: bool = True
    score: float | None = None


class SessionEnvironment(Environment[PawAction, PawObservation, State]):
    """OpenEnv's view of a session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, games: Games) -> None:
        super().__init__()
        self._games = games
        self._session = Session(games.factory, games.config)
        self._state = State()

    @property
    def state(self) -> State:
        return self._state

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        **_: Any,
    ) -> Any:
        self._state = State(episode_id=episode_id)
        split = self._games.splits[0] if split is None else split
        self._check_split(split)
        return await self._observe(lambda: self._session.start(split, seed or 0, index))

    async def step_async(self, action: PawAction, timeout_s: float | None = None, **_: Any) -> Any:
        environment = self._session.environment
        if environment is None:
            raise ValueError("there is no episode; reset first")
        self._state.step_count += 1
        return await self._observe(lambda: self._session.play(environment, action.text))

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(self.reset_async(*args, **kwargs))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(self.step_async(*args, **kwargs))

    def close(self) -> None:
        self._session.close()

    def list_splits(self) -> list[str]:
        return self._games.splits

    def num_tasks(self, split: str) -> int:
        self._check_split(split)
        count = self._session.count_tasks(split)
        if count is None:
            raise HTTPException(501, f"the tasks of '{split}' do not end")
        return count

    def _check_split(self, split: str) -> None:
        splits = self._games.splits
        if split not in splits:
            raise HTTPException(404, f"there is no split '{split}', only {', '.join(splits)}")

    async def _observe(self, call: Callable[[], dict[str, Any]]) -> PawObservation:
        """Run a call in a thread. If it fails, the next reset makes another environment."""
        try:
            return PawObservation(**await self._games.threads.run(call))
        except BaseException:
            self._session.environment = None
            raise


def make_app(factory: EnvFactory, config: EnvConfig, sessions: int) -> Any:
    """Make the FastAPI application, for up to `sessions` simultaneous episodes."""
    games = Games(
        factory=factory,
        config=config,
        threads=make_threads(factory, config, sessions),
        splits=list(dict.fromkeys((config.train_split, config.eval_split))),
    )

    class PawEnvironment(SessionEnvironment):  # OpenEnv shows its name
        def __init__(self) -> None:
            super().__init__(games)

    app = create_fastapi_app(
        PawEnvironment, PawAction, PawObservation, sessions, env_name=factory.name
    )
    app.add_middleware(LimitedBodies, timeout_s=config.step_timeout_s)
    return app
