"""One episode: an agent, which is a coroutine like `plain` below, between an environment and a model.

Every `generate` becomes a Turn with the engine's own token ids and log-probs, and `step` gives that turn its outcome:
so each agent can be trained.
"""

import asyncio
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paw import plugins
from paw.config import Config, EnvConfig
from paw.envs.threads import Threads
from paw.errors import OURS, EnvironmentFailure, UserError, describe, others_code, quietly
from paw.rollouts.chat import Context, shown
from paw.rollouts.guard import Guarded
from paw.rollouts.turns import checked_stop
from paw.types import Group, Outcome, Reply, Trajectory, Turn

if TYPE_CHECKING:
    from paw.rollouts.scheduler import Rollouts

PLAYS = {"search-r1": "search", "zerosearch": "search"}
"""Agents that answer questions: the environment that asks them."""
CALLS_PER_TURN = 100
"""Calls of the model for each of env.max_turns, after which an agent counts as one that never ends."""
LATE_S = 0.02
"""A timer that is later than this was held up, by a batch of the engine or another agent: who waits begins anew."""
HEALTH = ("groups_dropped", "prompts_truncated", "texts_cut", "threads_lost")


@dataclass
class RolloutStats:
    """What happened besides the episodes themselves, in one of them or in many."""

    groups_dropped: int = 0
    prompts_truncated: int = 0
    texts_cut: int = 0
    """Texts of environments longer than env.max_text."""
    threads_lost: int = 0
    """Calls of environments given up after env.step_timeout_s, each with its thread."""
    context_full: int = 0
    """Episodes that ended because no further prompt fits."""
    processes_lost: int = 0
    """Processes of environments that died or hung (env.processes)."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    """As sampled or billed, what a stop string cut off included."""
    cached_tokens: int = 0
    failed: list[Trajectory] = field(default_factory=list)
    """Episodes whose environment or agent failed: they are in no group."""
    uniform: list[Group] = field(default_factory=list)
    """Groups whose returns are all equal, where others take their place."""

    @property
    def failures(self) -> list[str]:
        return [f"{trajectory.task.id}: {trajectory.failure}" for trajectory in self.failed]

    @classmethod
    def sum(cls, parts: Iterable["RolloutStats"]) -> "RolloutStats":
        total = cls()
        for part in parts:
            for name, value in vars(part).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def metrics(self) -> dict[str, float]:
        counts = {f"health/{name}": getattr(self, name) for name in HEALTH}
        cached = {"perf/cached_frac": self.cached_tokens / self.prompt_tokens} if self.cached_tokens else {}
        refilled = {"health/groups_refilled": len(self.uniform)} if self.uniform else {}
        lost = {"health/processes_lost": self.processes_lost} if self.processes_lost else {}
        return {"health/env_failures": len(self.failed)} | counts | cached | refilled | lost


Played = tuple[list[Group], RolloutStats]


@dataclass
class Episode:
    """One task in play, and what it took."""

    trajectory: Trajectory
    index: int
    """Of its task among those of all ranks."""
    seed: int
    stream: str
    """Names the draw ("train/12", "eval"): no two share random numbers."""
    temperature: float
    stats: RolloutStats = field(default_factory=RolloutStats)
    outcome: Outcome | None = None
    """Of the last step of this trial."""
    trials: int = 0
    """Times that the agent has begun the task."""
    steps: list[tuple[int, str, Outcome]] = field(default_factory=list)
    """(trial, what was said, outcome)."""
    notes: list[str] = field(default_factory=list)
    """Reflexion's plans."""
    context_full: bool = False
    seconds: float = 0.0


class Patience:
    """Limits how long an agent waits for what is neither the model nor the environment, which have limits of their own.

    Only what awaits can be ended: an agent that blocks, blocks the loop.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._pending, self._expired = seconds, 0, False
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Of an agent's whole play. TimeoutError beyond it."""
        self._task = asyncio.current_task()
        self._restart()
        try:
            yield
        except asyncio.CancelledError:
            if not (self._expired and self._task):
                raise
            self._task.uncancel()
            what = "what is neither the model nor the environment"
            raise TimeoutError(f"the agent waited over env.step_timeout_s = {self.seconds:g} for {what}") from None
        finally:
            self._task = None
            self._restart()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While the model or the environment is at work."""
        self._pending += 1
        self._restart()
        try:
            yield
        finally:
            self._pending -= 1
            self._restart()

    def _restart(self) -> None:
        if self._timer:
            self._timer.cancel()
        loop = self._task.get_loop() if self._task and not self._pending else None
        self._timer = loop.call_later(self.seconds, self._end) if loop and not loop.is_closed() else None

    def _end(self) -> None:
        assert self._task and self._timer
        if self._task.get_loop().time() > self._timer.when() + LATE_S:
            self._restart()
            return
        self._expired = True
        self._task.cancel()


class EnvHandle:
    """The environment of one episode, as its agent sees it. What its methods raise is a failure of the episode."""

    def __init__(self, guarded: Guarded, threads: Threads, episode: Episode, config: EnvConfig) -> None:
        self.episode, self.config, self.task = episode, config, episode.trajectory.task
        self.observation = self.anchor = ""
        """The last observation, and as GiGPO compares it."""
        self.patience = Patience(config.step_timeout_s)
        self._guarded, self._threads = guarded, threads
        self._context: Context = ""

    @property
    def instruction(self) -> str:
        """The task in words, where the environment has a member `task`; else the first observation."""
        text = getattr(self._guarded, "task", None)
        return text if isinstance(text, str) else self.observation

    @property
    def tools(self) -> list[dict[str, Any]]:
        """What the environment offers in this episode, as OpenAI function schemas."""
        return self._guarded.tools

    @property
    def done(self) -> bool:
        return self.episode.outcome is not None and self.episode.outcome.done

    @property
    def won(self) -> bool:
        return self.episode.outcome is not None and self.episode.outcome.won

    async def reset(self) -> str:
        """Begin a trial of the task; returns the first observation."""
        self.episode.trials, self.episode.outcome = self.episode.trials + 1, None
        self.observation = await self._call(self._guarded.reset, self.task, looks=True)
        return self.observation

    def context(self) -> Context:
        """What the environment shows the model in this turn; "" after the end."""
        return self._context

    async def step(self, response: str) -> Outcome:
        """Play the action that the environment finds in `response`, the answer to the model's last turn.

        Steps that the model was not asked about add their rewards to that turn.
        """
        episode, turns = self.episode, self.episode.trajectory.turns
        if not episode.trials or self.done:
            raise RuntimeError("env.step() before env.reset() or after the end")
        if isinstance(response, Response):
            response = str(response) if response.reply is None else response.reply
        outcome = await self._call(self._guarded.step, response, looks=True)
        self.observation, episode.outcome = outcome.observation, outcome
        episode.steps.append((episode.trials, turns[-1].response if turns else response, outcome))
        if turns:
            turns[-1].outcome = replace(outcome, reward=turns[-1].outcome.reward + outcome.reward)
        return outcome

    async def admissible_actions(self) -> list[str]:
        """Actions that do something now, bare; [] where any text may be one."""
        return await self._call(self._guarded.admissible_actions)

    async def format_action(self, action: str) -> str:
        """A well-formed response that plays the bare `action`."""
        return await self._call(self._guarded.format_action, action)

    async def _call(self, method: Callable[..., Any], *args: Any, looks: bool = False) -> Any:
        """What a method returns, in a thread and with a deadline; `looks` at what the model is to see then."""

        def call() -> Any:
            try:
                answer = method(*args)
                if looks:
                    over = isinstance(answer, Outcome) and answer.done
                    self._context, self.anchor = ("", "") if over else (self._guarded.context(), self._guarded.anchor())
                return answer
            except BaseException:
                with quietly():  # it is broken already
                    self._guarded.close()
                raise

        try:
            with self.patience.pause():
                return await self._threads.run(call)
        except (*OURS, asyncio.CancelledError):
            raise
        except BaseException as error:
            self.episode.trajectory.failure = self.episode.trajectory.failure or describe(error)
            raise EnvironmentFailure(self.episode.trajectory.failure) from None


class Response(str):
    """What the model wrote in one call, up to a stop string, which is not part of it."""

    turn: Turn
    stop: str
    """The stop string that ended it; "" where none did."""
    message: Context
    """What it answers."""
    answer: str
    """The whole answer so far, stop strings included: what a call that `continues` this one goes on with."""
    reply: Reply | None
    """It with the calls in it, where the environment has tools."""


Earlier = Response | None
Stop = Sequence[str]


class Model(ABC):
    """The model of one episode, as its agent sees it. Subclasses say who answers."""

    def __init__(self, env: EnvHandle, config: Config) -> None:
        self.env, self.episode, self.config = env, env.episode, config
        self.reply: Reply | None = None
        """The last answer with its calls, where the environment has tools."""

    async def generate(self, context: Context, *, stop: Stop = (), continues: Earlier = None) -> Response:
        """The response to `context`; it ends before the first of the `stop` strings.

        With `continues`, the text `context` is put after that response, within the answer, or as a further user
        message where the model had ended its turn. Its prompt_ids then are exactly prompt_ids + response_ids of the
        turn before + the ids of what was put there. Raises ContextFull beyond rollout.max_prompt_tokens.
        """
        episode, turns = self.episode, self.episode.trajectory.turns
        if len(turns) == CALLS_PER_TURN * self.config.env.max_turns:
            raise RuntimeError(f"the agent does not end: {len(turns)} calls of the model")
        seed = derive_seed(episode.seed, episode.stream, episode.index, episode.trajectory.member, len(turns))
        stop = checked_stop(stop)
        message, begun = asked(context, continues)
        unasked = 0.0 if turns else sum((step.reward for _, _, step in episode.steps), 0.0)  # the first turn has them
        outcome = Outcome("", unasked, done=False, won=False)
        turn = Turn([], [], [], None, shown(message) + begun, "", outcome, self.env.anchor, version=0)
        with self.env.patience.pause():
            found = await self._answer(turn, context, continues, stop, seed)
        turns.append(turn)
        response = Response(turn.response.partition(found)[0] if found else turn.response)
        response.turn, response.stop, response.message, response.answer = turn, found, message, begun + turn.response
        response.reply = self.reply
        return response

    def ended(self) -> None:
        """The episode is over."""
        return

    @abstractmethod
    async def _answer(self, turn: Turn, context: Context, continues: Earlier, stop: Stop, seed: int) -> str:
        """Put what the model writes into `turn`, the stop string that ended it included; returns that, or "". With
        tools, `reply` is that answer too."""


class EngineModel(Model):
    def __init__(self, env: EnvHandle, player: "Rollouts") -> None:
        super().__init__(env, player.config)
        self.player = player
        self.said: list[dict[str, Any]] = []
        """The messages of the last conversation."""
        self.called = 0
        """Calls of tools so far."""

    async def _answer(self, turn: Turn, context: Context, continues: Earlier, stop: Stop, seed: int) -> str:
        chat, stats, limits, ends = self.player.chat, self.episode.stats, self.config.rollout, None
        opened, tools = chat.opened, self.env.tools
        if continues is None and isinstance(context, str) and not tools:
            turn.prompt_ids, cut = chat.fit_prompt(context, limits.max_prompt_tokens)
            stats.prompts_truncated += cut > 0
        else:
            from paw.rollouts.further import further

            turn.prompt_ids, opened = further(self, context, continues)
        if stop:
            from paw.rollouts.further import Ends

            ends = Ends(chat, stop)
        sampled = await self.player.sample(self.episode, turn.prompt_ids, seed, ends)
        stats.prompt_tokens += len(turn.prompt_ids)
        stats.response_tokens += len(sampled.token_ids)
        stats.cached_tokens += sampled.cached_tokens
        n, found = ends.first(sampled.token_ids) if ends else (len(sampled.token_ids), "")
        turn.response_ids, turn.sampled_logp = sampled.token_ids[:n], sampled.logp[:n]
        turn.entropy = sampled.entropy and sampled.entropy[:n]
        if missing_end := chat.missing_end(turn.response_ids):
            turn.separator_ids = missing_end + chat.separator_ids
        versions = sampled.versions and sampled.versions[:n]
        turn.version = min(versions) if versions else self.player.engine.version
        turn.versions = versions if versions and len(set(versions)) > 1 else None
        turn.server = sampled.server
        turn.response = opened + chat.decode(turn.response_ids, calls=bool(tools))
        if tools:
            text = turn.response.partition(found)[0] if found else turn.response
            self.reply = reply = chat.reply(text, tools, self.called)
            self.called += len(reply.calls)
        self.said = [] if isinstance(context, str) else context
        return found

    def ended(self) -> None:
        if self.reply is not None and (self.reply.calls or self.reply.problem):
            from paw.rollouts.further import add_result

            turn, limit = self.episode.trajectory.turns[-1], self.config.wm.max_tokens
            add_result(self.player.chat, turn, self.reply, limit)


Agent = Callable[[EnvHandle, Model], Awaitable[None]]


async def plain(env: EnvHandle, model: Model) -> None:
    """The agent of the paper: the environment's own context in each turn, the response to the environment."""
    await env.reset()
    while not env.done:
        response = await model.generate(env.context())
        await env.step(response)


def find_agent(config: Config) -> Agent:
    """The agent that agent.type names, with its settings. UserError where it cannot play this environment."""
    name, env = config.agent.type, config.env.name
    if PLAYS.get(name, env) != env:
        raise UserError(f"agent.type = '{name}' answers questions: it plays env.name = '{PLAYS[name]}', not '{env}'")
    agent = plugins.load("agents", name)
    with others_code(f"agent.type = '{name}'"):
        return bind(agent, config.agent)


def bind(plugin: Any, section: Any) -> Any:
    """A plug-in with its settings: a class made with the section, a function with its keyword-only parameters."""
    if isinstance(plugin, type):
        return plugins.make(plugin, section)
    settings = [p for p in inspect.signature(plugin).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return partial(plugin, **{p.name: getattr(section, p.name, p.default) for p in settings})


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the coordinates of a draw; stable across platforms and Python versions."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def asked(context: Context, continues: Earlier) -> tuple[Context, str]:
    """(the message that is to be answered, the answer so far)."""
    return (context, "") if continues is None else (continues.message, continues.answer + shown(context))
