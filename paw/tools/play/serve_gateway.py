"""`paw serve gateway`: a model behind an OpenAI-compatible endpoint that records sessions.

Any name is a session: an agent that somebody starts by hand with the base URL
http://HOST:PORT/NAME/v1 plays it. `POST /NAME/reward` ends the session and writes its turns, in the
format of `paw rollout`.
"""

import argparse
import asyncio
import itertools
import math
import re
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from paw.agents.endpoint import Endpoint, EndpointModel
from paw.config.recipe import load
from paw.config.sections import AgentConfig, Config, RewardConfig
from paw.envs.base import EnvFactory, Tasks
from paw.envs.task_files import TaskEnv
from paw.errors import UserError, clean, short_repr, to_stderr
from paw.gateway.messages import ChatAnswer, RequestError
from paw.gateway.server import Complete, Gateway, Incoming
from paw.io.files import writing
from paw.io.serving import listen
from paw.processes import watcher
from paw.rollouts.engine_model import EngineModel
from paw.rollouts.episode import EnvHandle, Episode, Model
from paw.rollouts.guard import MAX_REWARD
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.session import Notes, Session
from paw.tools.evaluate.turns import write_turns
from paw.types import Group, Task, Trajectory

RECIPE = "own-agent"
"""The recipe for a model that has none."""
NAME = re.compile(r"[\w.-]{1,100}")
"""Pattern of a session's name."""
MAX_OPEN = 10_000
"""Maximum number of open sessions, each of which is kept until it has a reward."""


class BatchInterrupted(BaseException):
    """A signal arrived while the engine was computing a whole batch of answers."""


class SessionsFactory(EnvFactory):
    """Stands for the environment of sessions, which have none."""

    name = "gateway"
    reward_max = 1.0
    invalid_penalty = 0.0

    def tasks(self, split: str, seed: int) -> Tasks:
        return [Task("gateway")]

    def make(self) -> TaskEnv:
        return TaskEnv()

    def fingerprint(self) -> str:
        return self.name


class OpenSession:
    """A session that has no reward yet."""

    def __init__(self, env: EnvHandle, session: Session) -> None:
        self.env = env
        self.session = session


class Recorder:
    """The agent of one endless episode, beside which all sessions are played.

    `make_model` makes the model of a session, `name` is the model's name, and `file` gets the
    sessions that have ended.
    """

    def __init__(
        self, config: Config, make_model: Callable[[EnvHandle], Model], name: str, file: TextIO
    ) -> None:
        self._config = config
        self._model_name = name
        self._make_model = make_model
        self._file = file
        self._notes = Notes()
        self._sessions: dict[str, OpenSession] = {}
        self._numbers = itertools.count()
        self._members: dict[str, int] = {}
        """Number of sessions of each name that have been opened."""
        self._make_env: Callable[[Episode], EnvHandle]

    async def serve(self, env: EnvHandle, listener: socket.socket, stopped: asyncio.Event) -> None:
        """Serve until `stopped` is set, then write the sessions that are open, without reward."""
        self._make_env = env.with_episode
        gateway = Gateway(
            self._model_name,
            user="paw serve gateway",
            open_unknown=self._open,
            control=self._control,
        )
        await gateway.start(listener)
        try:
            await stopped.wait()
        finally:
            await gateway.stop()
            for name in list(self._sessions):
                self._end(name, reward=0.0)

    def _open(self, name: str) -> Complete:
        """Return the function that answers a session's requests. Opens the session if it is new."""
        name = name or "default"
        if not NAME.fullmatch(name):
            raise RequestError(
                f"{short_repr(name)} is not a session's name: letters, digits, . _ -", status=404
            )
        if name not in self._sessions:
            if len(self._sessions) >= MAX_OPEN:
                raise RequestError(
                    f"{MAX_OPEN:,} sessions are open; end some with POST /NAME/reward", status=429
                )
            member = self._members.get(name, 0)
            self._members[name] = member + 1
            episode = Episode(
                Trajectory(Task(name, "session"), member),
                index=next(self._numbers),
                seed=self._config.run.seed,
                stream="gateway",
                temperature=self._config.rollout.temperature,
            )
            env = self._make_env(episode)
            self._sessions[name] = OpenSession(
                env, Session(env, self._make_model(env), self._notes)
            )
        session = self._sessions[name].session

        async def complete(incoming: Incoming) -> ChatAnswer:
            try:
                return await session.complete(incoming)
            except RequestError:
                opened = self._sessions.get(name)
                if session.failed.done() and opened and opened.session is session:
                    # The next request opens another session. This one has no reward.
                    to_stderr(f"session {name}: {clean(session.failed.exception())}")
                    self._end(name, reward=0.0)
                raise

        return complete

    def _control(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """Answer POST /sessions and POST /NAME/reward."""
        name, _, action = path.strip("/").rpartition("/")
        if (method, name, action) == ("POST", "", "sessions"):
            name = f"session-{secrets.token_hex(8)}"
            return {"session": name, "path": f"/{name}/v1"}
        if method != "POST" or action != "reward":
            raise RequestError(
                f"there is no {method} /{clean(path)}; POST /sessions and /NAME/reward, and "
                "OpenAI's interface at /NAME/v1, are there",
                status=404,
            )
        reward = body.get("reward") if isinstance(body, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            reward = math.nan
        if not abs(reward) <= MAX_REWARD:
            raise RequestError(
                f'the body is {short_repr(body)}; it must be {{"reward": NUMBER}}', param="reward"
            )
        if name not in self._sessions or not self._sessions[name].session.turns:
            raise RequestError(
                f"there is no session {short_repr(name)} that has asked the model", status=404
            )
        return {"session": name, "turns": self._end(name, reward=float(reward))}

    def _end(self, name: str, *, reward: float) -> int:
        """Write a session's turns and forget it. Returns their number."""
        opened = self._sessions.pop(name)
        opened.session.end()
        env = opened.env
        trajectory = env.episode.trajectory
        if trajectory.turns:
            largest = self._config.env.reward
            env.finish(
                reward=reward,
                won=reward >= largest,
                score=min(1.0, max(0.0, reward / largest)),
            )
            write_turns([Group(trajectory.task, [trajectory])], self._file)
            self._file.flush()
        return len(trajectory.turns)


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Serve a model until Ctrl-C or SIGTERM. Returns 0."""
    endpoint_options = {key for key in overrides if key.startswith("endpoint.")}
    if (options.model is None) == (not endpoint_options):
        raise UserError(
            "paw serve gateway: say which model answers: MODEL, or --endpoint URL --model NAME"
        )
    listener, url = listen(options.host, options.port, "paw serve gateway")
    with ExitStack() as stack:
        stack.enter_context(closing(listener))
        with writing(options.out, "; set --out"):
            file = stack.enter_context(Path(options.out).open("a", encoding="utf-8"))
        if options.model is None:
            config = _without_agent(load(options.recipe or RECIPE, overrides))
            endpoint = Endpoint(config.endpoint, template_options=config.model.chat_template_kwargs)
            endpoint.check()
            rollouts = Rollouts(SessionsFactory(), None, None, config)
            stack.enter_context(closing(rollouts))
            recorder = Recorder(
                config,
                lambda env: EndpointModel(env, config, endpoint),
                str(config.endpoint.model),
                file,
            )
        else:
            from paw.tools.evaluate.player import open_player, resolve  # loads torch

            recipe = options.recipe
            if recipe is None and not (Path(options.model) / "config.toml").is_file():
                recipe = RECIPE
            config, path = resolve(options.model, recipe, overrides)
            config = _without_agent(config)
            rollouts = stack.enter_context(open_player(config, path, SessionsFactory()))
            recorder = Recorder(
                config, lambda env: EngineModel(env, rollouts), str(options.model), file
            )
        _serve(rollouts, recorder, listener, f"{url}/NAME/v1: sessions go to {options.out}")
    return 0


def _without_agent(config: Config) -> Config:
    """Return a configuration without agents and rewards, which come from the client."""
    plain = {
        "agent": AgentConfig(type="plain"),
        "reward": RewardConfig(),
        "rewards": [],
        "envs": [],
    }
    return config.model_copy(update=plain)


def _serve(rollouts: Rollouts, recorder: Recorder, listener: socket.socket, banner: str) -> None:
    """Serve until a signal comes."""
    stopped = asyncio.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        watcher.say_heard()
        rollouts.loop.call_soon_threadsafe(stopped.set)
        if rollouts.is_stepping and rollouts.engine and not rollouts.engine.continuous:
            raise BatchInterrupted

    async def keep(env: EnvHandle, model: Model) -> None:
        with env.patience.pause():
            await recorder.serve(env, listener, stopped)

    rollouts.agent = keep
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    to_stderr(banner)
    try:
        rollouts.run_episodes([Episode(Trajectory(Task("gateway"), 0), 0, 0, "gateway", 1.0)])
    except BatchInterrupted:
        pass  # the sessions have been written by now
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
