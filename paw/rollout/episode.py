"""One episode: an agent, which is a coroutine, between an environment and a model.

    async def plain(env: EnvHandle, model: Model) -> None:      # the agent of the paper
        await env.reset()
        while not env.done:
            response = await model.generate(env.context())
            await env.step(response)

Every `generate` becomes a Turn with the engine's own token ids and log-probs, whatever the agent shows the model, and
`step` gives that turn its outcome. So each agent can be trained.
"""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from paw import plugins
from paw.config import Config, EnvConfig
from paw.errors import OURS, EnvironmentFailure, UserError, describe, quietly
from paw.rollout.chat import Chat
from paw.rollout.engines.base import Completion
from paw.rollout.guard import Guarded
from paw.rollout.threads import Threads
from paw.types import Outcome, Task, Trajectory, Turn

Context = str | list[dict[str, str]]
"""One user message, or a conversation of messages {"role", "content"}."""
PLAYS = {"search-r1": "search", "zerosearch": "search"}
"""Agents that answer questions: the environment that asks them."""
CALLS_PER_TURN = 100
"""Calls of the model for each of env.max_turns, after which an agent counts as one that never ends."""


TAIL = 8
"""Tokens looked at beyond as many as a stop string has characters: a character may have several."""


class ContextFull(Exception):
    """What the model is to go on with does not fit its context. The episode is over, with what it has."""


class Response(str):
    """What the model wrote in one call, up to a stop string, which is not part of it."""

    turn: Turn
    stop: str
    """The stop string that ended it; "" where none did."""
    message: Context
    """What it answers, ..."""
    answer: str
    """... and the whole answer so far, stop strings included: what a call that `continues` this one goes on with."""

    def __new__(cls, text: str, turn: Turn, stop: str, message: Context, answer: str) -> "Response":
        made = super().__new__(cls, text)
        made.turn, made.stop, made.message, made.answer = turn, stop, message, answer
        return made


Agent = Callable[["EnvHandle", "Model"], Awaitable[None]]


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
    outcome: Outcome | None = None
    """Of the last step of this trial."""
    trials: int = 0
    """Times that the agent has begun the task."""
    steps: list[tuple[int, str, Outcome]] = field(default_factory=list)
    """(trial, what was said, outcome) of each step."""
    notes: list[str] = field(default_factory=list)
    """What the agent wrote down: Reflexion's plans."""
    context_full: bool = False
    seconds: float = 0.0
    prompts_truncated: int = 0
    texts_cut: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    """As sampled or billed, what a stop string cut off included."""
    cached_tokens: int = 0

    carried: float = 0.0
    """Rewards of steps before the model's first turn, which counts them."""

    def stepped(self, response: str, outcome: Outcome) -> None:
        """Give the last turn its outcome. Steps that the model was not asked about add their rewards to it."""
        self.outcome, turns = outcome, self.trajectory.turns
        self.steps.append((self.trials, turns[-1].response if turns else response, outcome))
        if turns:
            turns[-1].outcome = replace(outcome, reward=turns[-1].outcome.reward + outcome.reward)
        else:
            self.carried += outcome.reward


class EnvHandle:
    """The environment of one episode, as its agent sees it.

    Its methods run where `threads` says, each call with its deadline. Whatever they raise is a failure of the
    episode.
    """

    def __init__(self, guarded: Guarded, threads: Threads, episode: Episode, config: EnvConfig) -> None:
        self.episode, self.config = episode, config
        self.observation = ""
        """The last one."""
        self._guarded, self._threads = guarded, threads
        self._context: Context = ""
        self.anchor = ""

    @property
    def task(self) -> Task:
        return self.episode.trajectory.task

    @property
    def instruction(self) -> str:
        """The task in words, where the environment has a member `task`; else the first observation."""
        text = getattr(self._guarded, "task", None)
        return text if isinstance(text, str) else self.observation

    @property
    def outcome(self) -> Outcome | None:
        """Of the last step of this trial."""
        return self.episode.outcome

    @property
    def done(self) -> bool:
        return self.outcome is not None and self.outcome.done

    @property
    def won(self) -> bool:
        return self.outcome is not None and self.outcome.won

    async def reset(self) -> str:
        """Begin a trial of the task; returns the first observation."""
        self.episode.trials += 1
        self.episode.outcome = None
        self.observation, self._context, self.anchor = await self._call(self._reset)
        return self.observation

    def context(self) -> Context:
        """What the environment shows the model in this turn; "" after the end."""
        return self._context

    async def step(self, response: str) -> Outcome:
        """Play the action that the environment finds in `response`; it is the answer to the model's last turn."""
        if (self.outcome is None and not self.episode.trials) or self.done:
            raise RuntimeError("env.step() before env.reset() or after the end")
        outcome, self._context, self.anchor = await self._call(self._step, str(response))
        self.observation = outcome.observation
        self.episode.stepped(response, outcome)
        return outcome

    async def admissible_actions(self) -> list[str]:
        """Actions that do something now, bare; [] where any text may be one."""
        return await self._call(self._guarded.admissible_actions)

    async def format_action(self, action: str) -> str:
        """A well-formed response that plays the bare `action`."""
        return await self._call(self._guarded.format_action, action)

    def _reset(self) -> tuple[str, Context, str]:
        return self._guarded.reset(self.task), self._guarded.context(), self._guarded.anchor()

    def _step(self, response: str) -> tuple[Outcome, Context, str]:
        outcome = self._guarded.step(response)
        return (outcome, "", "") if outcome.done else (outcome, self._guarded.context(), self._guarded.anchor())

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        def call() -> Any:
            try:
                return function(*args)
            except BaseException:
                with quietly():  # it is broken already
                    self._guarded.close()
                raise

        found = await self._threads.settled(call)
        if (error := found.exception()) is None:
            return found.result()
        if isinstance(error, OURS):
            raise error
        failure = self.episode.trajectory.failure = self.episode.trajectory.failure or describe(error)
        raise EnvironmentFailure(failure)


@dataclass
class Answer:
    """What a model wrote in one call."""

    text: str
    """The stop string that ended it included."""
    stop: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Up to the first that completes the stop string; the log-probs and entropies are theirs."""
    logp: list[float] = field(default_factory=list)
    entropy: list[float] | None = None
    version: int = 0


class Model(ABC):
    """The model of one episode, as its agent sees it. Subclasses say who answers."""

    def __init__(self, env: EnvHandle, config: Config) -> None:
        self.env, self.episode, self.config = env, env.episode, config

    async def generate(
        self, context: Context, *, stop: Sequence[str] = (), continues: Response | None = None
    ) -> Response:
        """The response to `context`; it ends before the first of the `stop` strings.

        With `continues`, the text `context` is put after that response, and the model goes on: within its answer, or
        after a further user message where it had ended its turn. The turn's prompt_ids then are exactly prompt_ids +
        response_ids of the turn before + the ids of what was put there.

        Raises:
            ContextFull: what it is to go on with exceeds rollout.max_prompt_tokens.
        """
        episode, anchor, turns = self.episode, self.env.anchor, self.episode.trajectory.turns
        if len(turns) == CALLS_PER_TURN * self.config.env.max_turns:
            raise RuntimeError(f"the agent does not end: {len(turns)} calls of the model")
        seed = derive_seed(episode.seed, episode.stream, episode.index, episode.trajectory.member, len(turns))
        message, before = context, ""
        if continues is not None:
            message, before = continues.message, continues.answer + shown(context)
        found = await self._answer(context, stop, continues, seed)
        turn = Turn(
            prompt_ids=found.prompt_ids,
            response_ids=found.token_ids,
            sampled_logp=found.logp,
            entropy=found.entropy,
            prompt=shown(message) + before,
            response=found.text,
            outcome=Outcome("", episode.carried, done=False, won=False, action="", valid=True),
            anchor=anchor,
            version=found.version,
        )
        episode.carried = 0.0
        turns.append(turn)
        text = found.text.partition(found.stop)[0] if found.stop else found.text
        return Response(text, turn, found.stop, message, before + found.text)

    @abstractmethod
    async def _answer(self, context: Context, stop: Sequence[str], continues: Response | None, seed: int) -> Answer:
        """What the model writes; `generate` makes a turn of it."""


class EngineModel(Model):
    """A model behind an engine of ours; `sample` draws from it, with the fields of a Request from prompt_ids on."""

    def __init__(
        self, env: EnvHandle, config: Config, chat: Chat, sample: Callable[..., Awaitable[Completion]], version: int
    ) -> None:
        super().__init__(env, config)
        self.chat, self._sample, self._version = chat, sample, version
        self._last: tuple[list[str], str] | None = None
        """Contents of the last conversation, and the answer to it."""

    async def _answer(self, context: Context, stop: Sequence[str], continues: Response | None, seed: int) -> Answer:
        episode, chat, rollout, opened = self.episode, self.chat, self.config.rollout, self.chat.opened
        if continues is None and isinstance(context, str):
            prompt_ids, cut = chat.fit_prompt(context, rollout.max_prompt_tokens)
            episode.prompts_truncated += cut > 0
        else:
            if continues is not None:
                prompt_ids, opened = self._further(continues.turn, shown(context))
            else:
                prompt_ids = self._conversation(cast(list[dict[str, str]], context))
            if len(prompt_ids) > rollout.max_prompt_tokens:
                raise ContextFull(f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}")
        stopped = (lambda ids: self._just_stopped(ids, stop)) if stop else None
        sampled = await self._sample(prompt_ids, seed, episode.temperature, rollout.max_response_tokens, stopped)
        episode.prompt_tokens += len(prompt_ids)
        episode.response_tokens += len(sampled.token_ids)
        episode.cached_tokens += sampled.cached_tokens
        n, found = self._stopped(sampled.token_ids, stop)
        ids, entropy = sampled.token_ids[:n], sampled.entropy and sampled.entropy[:n]
        if not isinstance(context, str):
            self._last = [message["content"] for message in context], opened + chat.decode(ids)
        return Answer(opened + chat.decode(ids), found, prompt_ids, ids, sampled.logp[:n], entropy, self._version)

    def _conversation(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation; of one that goes on from the last turn, that turn's own ids, then the new message."""
        roles, contents = [message["role"] for message in messages], [message["content"] for message in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise ValueError(f"a conversation is user, assistant, ..., user in turn; its roles are {', '.join(roles)}")
        before, turns = ([], "") if self._last is None else self._last, self.episode.trajectory.turns
        if contents[:-1] == [*before[0], before[1]] and turns[-1].response_ids[-1] in self.chat.end_ids:
            return self._further(turns[-1], contents[-1])[0]
        return self.chat.conversation_ids(contents)

    def _further(self, turn: Turn, text: str) -> tuple[list[int], str]:
        """(the ids of what the model goes on with, how the template opens the answer) after `turn`."""
        chat = self.chat
        ids, opened = chat.observation_ids(text, self.config.rollout.max_prompt_tokens), ""
        if turn.response_ids[-1] in chat.end_ids:
            ids, opened = chat.separator_ids + ids + chat.reply_ids, chat.opened
        return turn.prompt_ids + turn.response_ids + ids, opened

    def _just_stopped(self, ids: list[int], stop: Sequence[str]) -> bool:
        """Whether the last tokens hold a stop string, so that engines need not sample on."""
        text = self.chat.decode(ids[-max(map(len, stop)) - TAIL :])
        return any(word in text for word in stop)

    def _stopped(self, ids: list[int], stop: Sequence[str]) -> tuple[int, str]:
        """(tokens up to the first that completes a stop string, that string); all of them, "" without one."""
        text = self.chat.decode(ids)
        places = [(place, word) for word in stop if (place := text.find(word)) >= 0]
        if not places:
            return len(ids), ""
        first = min(places)[1]
        low, high = 0, len(ids)  # decode(ids[:low]) has no stop string, decode(ids[:high]) has
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if first in self.chat.decode(ids[:middle]) else (middle, high)
        return high, first


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
    return bind(plugins.load("agents", name), config.agent)


def bind(plugin: Any, section: Any) -> Any:
    """A plug-in with its settings: a class made with the section, a function with its keyword-only parameters."""
    if isinstance(plugin, type):
        return plugin(section)
    settings = [p for p in inspect.signature(plugin).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return partial(plugin, **{p.name: getattr(section, p.name, p.default) for p in settings})


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the coordinates of a draw; stable across platforms and Python versions."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def shown(context: Context) -> str:
    """A context as one text."""
    return context if isinstance(context, str) else "\n".join(message["content"] for message in context)
