"""One episode: an agent, an environment and a model.

An agent is a coroutine like `plain` below. Every `generate` becomes a Turn with the engine's own
token ids and log-probs, and `step` gives that turn its outcome. So every agent can be trained.
"""

import asyncio
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paw.config import plugins
from paw.config.sections import AgentConfig, Config, EnvConfig
from paw.errors import OURS, EnvironmentFailure, UserError, describe, others_code, quietly
from paw.io.threads import Threads
from paw.rollouts.base import RolloutStats
from paw.rollouts.coroutine_env import CoroutineEnv, LoopCalls
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.text.chat import Context, context_text
from paw.rollouts.text.stops import text_before
from paw.rollouts.turns import checked_stop
from paw.types import Outcome, Reply, Trajectory, Turn, no_ids, no_values

PLAYS = {"search-r1": "search", "zerosearch": "search"}
"""Agents that answer questions, with the environment that asks them."""
CALLS_PER_TURN = 100
"""Model calls allowed per env.max_turns. An agent that makes more counts as endless."""
LATE_S = 0.02
"""Seconds that a timer may be late.

If a timer is later than this, the engine's batch or another agent held it up, so the wait restarts.
"""


@dataclass
class Episode:
    """One task in play: what identifies its random draws, and what has happened so far."""

    trajectory: Trajectory
    index: int
    """Index of its task among the tasks of all ranks."""
    seed: int
    stream: str
    """Names the draw ("train/12", "eval"), so that no two share random numbers."""
    temperature: float
    stats: RolloutStats = field(default_factory=RolloutStats)
    outcome: Outcome | None = None
    """The outcome of the last step of this trial."""
    trials: int = 0
    """How often the agent has started the task."""
    steps: list[tuple[int, str, Outcome]] = field(default_factory=list)
    """(trial, response, outcome)."""
    notes: list[str] = field(default_factory=list)
    """Reflexion's plans."""
    context_full: bool = False
    """Whether it ended because the next prompt did not fit."""
    seconds: float = 0.0


class Patience:
    """Limits how long an agent waits for anything except the model and the environment.

    Those have their own limits. Only an agent that awaits can be ended. One that blocks also blocks
    the loop.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pauses = 0
        """Calls of the model or the environment in progress."""
        self._since = 0.0
        """When the current wait began, on the clock of the loop."""
        self._expired = False
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Checks whether the current wait is too long; set during a play."""

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Wrap an agent's whole play. Raises TimeoutError if one of its waits is too long."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(self.seconds, self._check_wait)
        try:
            yield
        except asyncio.CancelledError:
            if not (self._expired and self._task):
                raise
            self._task.uncancel()
            raise TimeoutError(
                f"the agent waited longer than env.step_timeout_s = {self.seconds:g} "
                "for something other than the model and the environment"
            ) from None
        finally:
            self._task = None
            self._timer.cancel()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Wrap calls of the model or the environment, whose time does not count."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._task and not self._pauses:
                self._since = self._task.get_loop().time()

    def _check_wait(self) -> None:
        """Cancel the agent if its wait is too long. Otherwise check again at its deadline."""
        assert self._task and self._timer
        loop = self._task.get_loop()
        now = loop.time()
        if self._pauses or now - self._timer.when() > LATE_S:
            # A pause has not ended, or the engine's batch or another agent delayed this timer.
            self._since = now
        remaining_s = self._since + self.seconds - now
        if remaining_s > 0:
            self._timer = loop.call_later(remaining_s, self._check_wait)
            return
        self._expired = True
        self._task.cancel()


class EnvHandle:
    """The environment of one episode, as its agent sees it.

    If a method raises an error, the episode fails.
    """

    def __init__(
        self,
        environment: CheckedEnv,
        threads: Threads,
        loop_calls: LoopCalls,
        episode: Episode,
        config: EnvConfig,
    ) -> None:
        self.episode = episode
        self.config = config
        self.task = episode.trajectory.task.own
        self.observation = ""
        """The last observation."""
        self.anchor = ""
        """The last observation in the form that GiGPO compares."""
        self.patience = Patience(config.step_timeout_s)
        self._environment = environment
        self._threads = threads
        self._loop_calls = loop_calls
        self._coroutines: CoroutineEnv | None = None
        """The environment's methods, if they are awaited on the event loop."""
        if environment.is_coroutine_env:
            self._coroutines = CoroutineEnv(environment, threads)
        self._context: Context = ""

    def with_episode(self, episode: Episode) -> "EnvHandle":
        """Return a handle of the same environment for another episode."""
        return EnvHandle(self._environment, self._threads, self._loop_calls, episode, self.config)

    @property
    def instruction(self) -> str:
        """The task in words: the environment's member `task`, or the last observation."""
        text = getattr(self._environment, "task", None)
        return text if isinstance(text, str) else self.observation

    @property
    def agent_task(self) -> dict[str, Any]:
        """The task for a program: the environment's member `agent_task`, or the context."""
        fields = getattr(self._environment, "agent_task", None)
        return {"prompt": self._context} if fields is None else dict(fields)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The environment's tools in this episode, as OpenAI function schemas."""
        return self._environment.tools

    @property
    def done(self) -> bool:
        return self.episode.outcome is not None and self.episode.outcome.done

    @property
    def won(self) -> bool:
        return self.episode.outcome is not None and self.episode.outcome.won

    async def reset(self) -> str:
        """Begin a trial of the task. Returns the first observation."""
        self.episode.trials += 1
        self.episode.outcome = None
        self.observation = await self._call("reset", self.task, updates_context=True)
        return self.observation

    def context(self) -> Context:
        """What the environment shows the model in this turn; "" after the end."""
        return self._context

    async def step(self, response: str) -> Outcome:
        """Play the action that the environment reads from `response`, the model's last answer.

        The last turn gets the outcome. If several steps follow one call of the model, their rewards
        are added up.
        """
        episode = self.episode
        turns = episode.trajectory.turns
        if not episode.trials or self.done:
            raise RuntimeError("env.step() before env.reset() or after the end")
        if isinstance(response, Response):
            response = str(response) if response.reply is None else response.reply

        outcome = await self._call("step", response, updates_context=True)
        self.observation = outcome.observation
        episode.outcome = outcome
        if turns:
            last_turn = turns[-1]
            episode.steps.append((episode.trials, last_turn.response, outcome))
            last_turn.outcome = replace(outcome, reward=last_turn.outcome.reward + outcome.reward)
        else:
            episode.steps.append((episode.trials, response, outcome))
        return outcome

    def finish(self, *, reward: float, won: bool, score: float) -> None:
        """End the episode of an agent that has not played in the environment.

        The last turn gets the reward.
        """
        episode = self.episode
        last_turn = episode.trajectory.turns[-1]
        last_turn.outcome = replace(
            last_turn.outcome, reward=reward, done=True, won=won, score=score
        )
        for turn in episode.trajectory.turns:
            episode.steps.append((episode.trials, turn.response, turn.outcome))
        episode.outcome = last_turn.outcome

    async def admissible_actions(self) -> list[str]:
        """Return the bare actions that have an effect now; [] if any text may be an action."""
        return await self._call("admissible_actions")

    async def format_action(self, action: str) -> str:
        """Return a well-formed response that plays the bare `action`."""
        return await self._call("format_action", action)

    async def _call(self, method: str, *args: Any, updates_context: bool = False) -> Any:
        """Call a method of the environment with a deadline: on the event loop or in a thread.

        With `updates_context`, also gets what the model sees next. Raises EnvironmentFailure if
        that fails. An environment in a thread that raised an error is closed there.
        """
        trajectory = self.episode.trajectory
        try:
            with self.patience.pause():
                if self._coroutines:
                    call = partial(
                        self._call_on_loop, self._coroutines, method, args, updates_context
                    )
                    return await self._loop_calls.run(self._coroutines, call)
                return await self._threads.run(self._call_in_thread, method, args, updates_context)
        except (*OURS, asyncio.CancelledError):
            raise
        except BaseException as error:
            trajectory.failure = trajectory.failure or describe(error)
            raise EnvironmentFailure(trajectory.failure) from None

    def _call_in_thread(self, method: str, args: tuple[Any, ...], updates_context: bool) -> Any:
        environment = self._environment
        environment.is_busy = True
        try:
            result = getattr(environment, method)(*args)
            if updates_context and _is_end(result):
                self._show("", "")
            elif updates_context:
                self._show(environment.context(), environment.anchor())
        except BaseException:
            with quietly():  # it is already broken
                environment.close()
            raise
        environment.is_busy = False
        return result

    async def _call_on_loop(
        self, environment: CoroutineEnv, method: str, args: tuple[Any, ...], updates_context: bool
    ) -> Any:
        result = await getattr(environment, method)(*args)
        if updates_context and _is_end(result):
            self._show("", "")
        elif updates_context:
            self._show(await environment.context(), await environment.anchor())
        return result

    def _show(self, context: Context, anchor: str) -> None:
        """Set what the model sees."""
        self._context = context
        self.anchor = anchor


def _is_end(result: object) -> bool:
    """Whether what reset() or step() returned ends the trial, so that nothing is shown any more."""
    return isinstance(result, Outcome) and result.done


class Response(str):
    """What the model wrote in one call, up to but excluding the stop string."""

    turn: Turn
    stop: str
    """The stop string that ended it; "" without one."""
    message: Context
    """The context that the response answers."""
    answer: str
    """The whole answer so far, including stop strings.

    A call that `continues` this response continues after it.
    """
    reply: Reply | None
    """The response with its tool calls, if the call had tools."""
    cut: bool
    """Whether it ended at its maximum length."""

    @classmethod
    def of(
        cls,
        text: str,
        *,
        turn: Turn,
        stop: str,
        message: Context,
        answer: str,
        reply: Reply | None,
        cut: bool,
    ) -> "Response":
        response = cls(text)
        response.turn = turn
        response.stop = stop
        response.message = message
        response.answer = answer
        response.reply = reply
        response.cut = cut
        return response


Stop = Sequence[str]
Tools = list[dict[str, Any]]


class Model(ABC):
    """The model of one episode, as its agent sees it. Subclasses decide who answers."""

    def __init__(self, env: EnvHandle, config: Config) -> None:
        self.env = env
        self.episode = env.episode
        self.config = config
        self.tools: Tools = []
        """The tools of the last call, as OpenAI function schemas."""
        self.max_tokens = config.rollout.max_response_tokens
        """The maximum number of tokens of the last answer."""
        self.reply: Reply | None = None
        """The last answer with its tool calls, if the call had tools."""
        self.cut = False
        """Whether the last answer ended at its maximum length."""

    async def generate(
        self,
        context: Context,
        *,
        stop: Stop = (),
        continues: Response | None = None,
        tools: Tools | None = None,
        max_tokens: int | None = None,
    ) -> Response:
        """Return the response to `context`. It ends before the first of the `stop` strings.

        `tools` are by default the environment's. A response has at most `max_tokens` tokens, and
        never more than rollout.max_response_tokens.

        With `continues`, the text `context` is put after that response. It becomes part of the
        answer, or another user message if the model had ended its turn. The prompt_ids are then
        exactly the previous turn's prompt_ids + response_ids + the ids of the added text. Raises
        ContextFull beyond rollout.max_prompt_tokens.
        """
        stop = checked_stop(stop)
        turns = self.episode.trajectory.turns
        if len(turns) == CALLS_PER_TURN * self.env.config.max_turns:
            raise RuntimeError(f"the agent does not end: {len(turns)} calls of the model")

        self.tools = self.env.tools if tools is None else tools
        limit = self.config.rollout.max_response_tokens
        self.max_tokens = limit if max_tokens is None else min(limit, max_tokens)
        message, answer_so_far = message_and_prefix(context, continues)
        turn = self._new_turn(context_text(message) + answer_so_far)
        with self.env.patience.pause():
            stop_string = await self._answer(turn, context, continues, stop, self._next_seed())
        turns.append(turn)

        return Response.of(
            text_before(turn.response, stop_string),
            turn=turn,
            stop=stop_string,
            message=message,
            answer=answer_so_far + turn.response,
            reply=self.reply,
            cut=self.cut,
        )

    def take_back(self) -> None:
        """Remove the last turn, whose answer nobody has read."""
        self.episode.trajectory.turns.pop()

    def token_texts(self, turn: Turn) -> list[str]:
        """Return the text of each token of a turn's response; [] if they are not known."""
        return []

    def _next_seed(self) -> int:
        """Return the seed of the next call, derived from the coordinates of its draw."""
        episode = self.episode
        trajectory = episode.trajectory
        return derive_seed(
            episode.seed, episode.stream, episode.index, trajectory.member, len(trajectory.turns)
        )

    def _new_turn(self, prompt: str) -> Turn:
        """Return a turn for `_answer` to fill."""
        return Turn(
            prompt_ids=no_ids(),
            response_ids=no_ids(),
            sampled_logp=no_values(),
            entropy=None,
            prompt=prompt,
            response="",
            outcome=Outcome("", reward=self._unclaimed_reward(), done=False, won=False),
            anchor=self.env.anchor,
            version=0,
        )

    def _unclaimed_reward(self) -> float:
        """Return the rewards earned before the first turn, which gets them; 0 for later turns."""
        if self.episode.trajectory.turns:
            return 0.0
        return sum((outcome.reward for _, _, outcome in self.episode.steps), 0.0)

    def on_end(self) -> None:
        """Called when the agent has ended the episode."""
        return

    @abstractmethod
    async def _answer(
        self, turn: Turn, context: Context, continues: Response | None, stop: Stop, seed: int
    ) -> str:
        """Fill `turn` with what the model writes, including the stop string that ended it.

        Returns that stop string, or "". If the call has `tools`, also sets `reply`. Sets `cut` if
        the answer was cut at `max_tokens`.
        """


Agent = Callable[[EnvHandle, Model], Awaitable[None]]


async def plain(env: EnvHandle, model: Model) -> None:
    """The paper's agent: the model answers contexts and the environment answers responses."""
    await env.reset()
    while not env.done:
        response = await model.generate(env.context())
        await env.step(response)


def find_agent(config: Config) -> Agent:
    """Return the agent that agent.type names, with its settings.

    It plays every environment without an agent of its own (`find_own_agents`). Raises UserError if
    it cannot play one of these.
    """
    own = config.own_agents
    for label, section in config.environments.items():
        if label not in own:
            _check_plays(config.agent, section, "agent.type", label)
    return _with_settings(config.agent, "agent.type")


def find_own_agents(config: Config) -> dict[str, Agent]:
    """Return the agents that single environments name ([envs.agent]), by the environment's label.

    Raises UserError if one cannot play its environment.
    """
    agents: dict[str, Agent] = {}
    for label, section in config.own_agents.items():
        key = f"envs.{label}.agent.type"
        _check_plays(section, config.environments[label], key, label)
        agents[label] = _with_settings(section, key)
    return agents


def _check_plays(agent: AgentConfig, env: EnvConfig, key: str, label: str) -> None:
    """Raise UserError if an agent cannot play an environment."""
    plays = PLAYS.get(agent.type, env.name)
    if plays != env.name:
        which = f"'{env.name}' (envs.{label})" if label else f"'{env.name}'"
        raise UserError(
            f"{key} = '{agent.type}' answers questions: it plays env.name = '{plays}', not {which}"
        )


def _with_settings(section: AgentConfig, key: str) -> Agent:
    agent = plugins.load("agents", section.type)
    with others_code(f"{key} = '{section.type}'"):
        return bind(agent, section)


def bind(plugin: Any, section: Any) -> Any:
    """Return a plug-in with its settings from `section`.

    A class is made with the section. A function gets its keyword-only parameters.
    """
    if isinstance(plugin, type):
        return plugins.make(plugin, section)
    settings: dict[str, Any] = {}
    for parameter in inspect.signature(plugin).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings[parameter.name] = getattr(section, parameter.name, parameter.default)
    return partial(plugin, **settings)


def derive_seed(*parts: int | str) -> int:
    """Make a 63-bit seed for a draw's coordinates, stable across platforms and Python versions."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def message_and_prefix(context: Context, continues: Response | None) -> tuple[Context, str]:
    """Return (the message to answer, the answer so far)."""
    if continues is None:
        return context, ""
    return continues.message, continues.answer + context_text(context)
