"""`paw serve env NAME`: serve a built-in environment, or a user's own, over OpenEnv's protocol.

docs/environments.md describes it.
"""

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

from paw.config.sections import EnvConfig
from paw.envs import make_factory
from paw.envs.base import EnvFactory, read_tasks, size
from paw.errors import UserError, quietly
from paw.io.serving import LimitedBodies, listen, make_server, run_server
from paw.rollouts.guard import CheckedEnv, make_threads
from paw.tools.evaluate.played import load_played


class Session:
    """The environment of one client. It is made at the first reset, and again after a failure."""

    def __init__(self, factory: EnvFactory, config: EnvConfig) -> None:
        self.factory = factory
        self.config = config
        self.environment: CheckedEnv | None = None

    def start(self, split: str, seed: int, index: int | None) -> dict[str, Any]:
        """Start a task. Returns the fields of the first observation.

        It is task `index` of those of `split` and `seed`. Without an index, it is number `seed` of
        those of seed 0.
        """
        with read_tasks(self.factory, split, 0 if index is None else seed) as tasks:
            if index is None:
                index = seed % (size(tasks) or 2**63)
            task = tasks[index]
        if self.environment is None:
            self.environment = CheckedEnv(self.factory.make(), self.config)
        observation = self.environment.reset(task)
        return _fields(self.environment, observation, done=False)

    def play(self, environment: CheckedEnv, text: str) -> dict[str, Any]:
        """Play a turn. Returns the fields of its observation."""
        response = text
        if text.strip() in environment.admissible_actions():
            response = environment.format_action(text.strip())
        outcome = environment.step(response)
        return _fields(environment, outcome.observation, done=outcome.done) | {
            "reward": outcome.reward,
            "won": outcome.won,
            "valid": outcome.valid,
            "score": outcome.score,
        }

    def count_tasks(self, split: str) -> int | None:
        """Return the number of tasks of a split; None if they are endless."""
        with read_tasks(self.factory, split, 0) as tasks:
            return size(tasks)

    def close(self) -> None:
        if self.environment:
            with quietly():
                self.environment.close()


def _fields(environment: CheckedEnv, observation: str, *, done: bool) -> dict[str, Any]:
    """Return the observation, with the next turn's prompt and actions (empty at the end)."""
    prompt = ""
    actions: list[str] = []
    if not done:
        context = environment.context()
        if not isinstance(context, str):
            context = "\n\n".join(message["content"] for message in context)
        prompt = context
        actions = environment.admissible_actions()
    return {"text": observation, "prompt": prompt, "admissible_actions": actions, "done": done}


def make_app(factory: EnvFactory, config: EnvConfig, sessions: int) -> Any:
    """Make the FastAPI application, for up to `sessions` simultaneous episodes.

    Raises UserError if openenv is not installed.
    """
    try:
        from fastapi import HTTPException
        from openenv.core.env_server import (
            Action,
            Environment,
            Observation,
            State,
            create_fastapi_app,
        )
    except ImportError as error:
        raise UserError(
            f"paw serve env: {error}: pip install 'paw-trainer[openenv]', "
            "in a Python environment without vLLM, which needs another version of mcp"
        ) from None
    threads = make_threads(factory, config, sessions)
    splits = list(dict.fromkeys((config.train_split, config.eval_split)))

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

    class PawEnvironment(Environment[PawAction, PawObservation, State]):
        # OpenEnv's view of a session.

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._session = Session(factory, config)
            self._state = State()

        @property
        def state(self) -> State:
            return self._state

        async def reset_async(
            self,
            seed: int | None = None,
            episode_id: str | None = None,
            split: str = splits[0],
            index: int | None = None,
            **_: Any,
        ) -> Any:
            self._state = State(episode_id=episode_id)
            self._check_split(split)
            return await self._observe(lambda: self._session.start(split, seed or 0, index))

        async def step_async(
            self, action: PawAction, timeout_s: float | None = None, **_: Any
        ) -> Any:
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
            return splits

        def num_tasks(self, split: str) -> int:
            self._check_split(split)
            count = self._session.count_tasks(split)
            if count is None:
                raise HTTPException(501, f"the tasks of '{split}' do not end")
            return count

        def _check_split(self, split: str) -> None:
            if split not in splits:
                raise HTTPException(404, f"there is no split '{split}', only {', '.join(splits)}")

        async def _observe(self, call: Callable[[], dict[str, Any]]) -> PawObservation:
            """Run a call in a thread. If it fails, the next reset makes another environment."""
            try:
                return PawObservation(**await threads.run(call))
            except BaseException:
                self._session.environment = None
                raise

    app = create_fastapi_app(
        PawEnvironment, PawAction, PawObservation, sessions, env_name=factory.name
    )
    app.add_middleware(LimitedBodies, timeout_s=config.step_timeout_s)
    return app


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Serve `options.env` until Ctrl-C or SIGTERM. Returns 0."""
    listener, url = listen(options.host, options.port, f"paw serve env {options.env}")
    overrides = {"env.name": options.env, **overrides}
    config = load_played(options.recipe, overrides, {"env.data": "none"})
    factory = make_factory(config)
    app = make_app(factory, config.env, options.sessions)
    server = make_server(app, timeout_s=config.env.step_timeout_s, websockets=True)
    line = f"{url}: {factory.fingerprint()}, up to {options.sessions} sessions"
    return run_server(server, listener, line)
