"""`paw serve env NAME`: an environment of ours, or a user's own, as a server of OpenEnv (docs/environments.md)."""

import argparse
import asyncio
from typing import Any

from paw.config import EnvConfig
from paw.envs import make_factory
from paw.envs.base import EnvFactory, read_tasks, size
from paw.envs.serving import LimitedBodies, listen, make_server, run_server
from paw.errors import UserError, quietly
from paw.rollouts.guard import CheckedEnv, make_threads
from paw.tools.played import load_played


def make_app(factory: EnvFactory, config: EnvConfig, sessions: int) -> Any:
    """The FastAPI application, for as many episodes at once.

    Raises UserError where openenv is not installed.
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
        apart = "in a Python environment without vLLM, which needs another version of mcp"
        raise UserError(
            f"paw serve env: {error}: pip install 'paw-trainer[openenv]', {apart}"
        ) from None
    threads = make_threads(factory, config, sessions)
    splits = [*dict.fromkeys((config.train_split, config.eval_split))]

    class PawAction(Action):
        text: str
        """A response as `prompt` asks for it, or one of `admissible_actions` alone."""

    class PawObservation(Observation):
        text: str
        prompt: str
        """What a model reads in this turn."""
        admissible_actions: list[str]
        won: bool = False
        valid: bool = True
        score: float | None = None

    class PawEnvironment(Environment[PawAction, PawObservation, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._guarded: CheckedEnv | None = None
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
            """Task `index` of those of `split` and `seed`; without an index task number `seed`."""
            self._state = State(episode_id=episode_id)
            self._check_split(split)

            def begin() -> Any:
                with read_tasks(factory, split, 0 if index is None else seed or 0) as tasks:
                    number = (seed or 0) % (size(tasks) or 2**63) if index is None else index
                    task = tasks[number]
                self._guarded = self._guarded or CheckedEnv(factory.make(), config)
                return self._look(self._guarded, text=self._guarded.reset(task))

            return await self._run(begin)

        async def step_async(
            self, action: PawAction, timeout_s: float | None = None, **_: Any
        ) -> Any:
            def play(env: CheckedEnv, text: str) -> Any:
                outcome = env.step(
                    env.format_action(text.strip())
                    if text.strip() in env.admissible_actions()
                    else text
                )
                told = {
                    key: getattr(outcome, key)
                    for key in ("reward", "done", "won", "valid", "score")
                }
                return self._look(env, text=outcome.observation, **told)

            if self._guarded is None:
                raise ValueError("there is no episode; reset first")
            self._state.step_count += 1
            return await self._run(play, self._guarded, action.text)

        def reset(self, *given: Any, **named: Any) -> Any:
            return asyncio.run(self.reset_async(*given, **named))

        def step(self, *given: Any, **named: Any) -> Any:
            return asyncio.run(self.step_async(*given, **named))

        def close(self) -> None:
            if self._guarded:
                with quietly():
                    self._guarded.close()

        def list_splits(self) -> list[str]:
            return splits

        def num_tasks(self, split: str) -> int:
            self._check_split(split)
            with read_tasks(factory, split, 0) as tasks:
                count = size(tasks)
            if count is None:
                raise HTTPException(501, f"the tasks of '{split}' do not end")
            return count

        def _check_split(self, split: str) -> None:
            if split not in splits:
                raise HTTPException(404, f"there is no split '{split}', but {', '.join(splits)}")

        async def _run(self, *call: Any) -> Any:
            """An environment that fails plays no more."""
            try:
                return await threads.run(*call)
            except BaseException:
                self._guarded = None
                raise

        def _look(self, env: CheckedEnv, *, done: bool = False, **told: Any) -> Any:
            context = "" if done else env.context()
            prompt = (
                context
                if isinstance(context, str)
                else "\n\n".join(message["content"] for message in context)
            )
            actions = [] if done else env.admissible_actions()
            return PawObservation(prompt=prompt, admissible_actions=actions, done=done, **told)

    app = create_fastapi_app(
        PawEnvironment, PawAction, PawObservation, sessions, env_name=factory.name
    )
    app.add_middleware(LimitedBodies, timeout_s=config.step_timeout_s)
    return app


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Serve `options.env` until Ctrl-C or SIGTERM; returns 0."""
    what = f"paw serve env {options.env}"
    listener, url = listen(options.host, options.port, what)
    config = load_played(
        options.recipe, {"env.name": options.env, **overrides}, {"env.data": "none"}
    )
    factory = make_factory(config)
    app = make_app(factory, config.env, options.sessions)
    server = make_server(app, timeout_s=config.env.step_timeout_s, websockets=True)
    return run_server(
        server, listener, f"{url}: {factory.fingerprint()}, up to {options.sessions} sessions"
    )
