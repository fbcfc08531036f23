"""The data of one update, in order: Task -> Turn -> Trajectory -> Group -> Sample -> Batch.

Shapes in docstrings: T tokens of a batch, N samples or response tokens, G groups, V vocabulary,
D hidden size.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic_core import core_schema

from paw.away import Away, away


@dataclass(frozen=True)
class Task:
    """One game or question. A group plays the same task `group_size` times."""

    id: str
    """Unique in the split and the same in every run: a game's path, or generator, split and
    index."""
    kind: str = "task"
    """The kind of task, used to report success (ALFWorld: pick, look, clean, heat, cool, two)."""
    payload: Any = field(default=None, repr=False)
    """What the environment needs to start the task; read-only, shared by the members of a group."""
    env: str = ""
    """In a run with several environments ([[envs]]), the label of the task's own; otherwise ""."""

    def in_env(self, label: str) -> "Task":
        """Return the task as one of several environments has it.

        Its id and kind begin with the environment's label, so no two environments share any.
        """
        return Task(f"{label}/{self.id}", f"{label}/{self.kind}", self.payload, label)

    @property
    def own(self) -> "Task":
        """The task as its environment made it, see `in_env`."""
        if not self.env:
            return self
        prefix = f"{self.env}/"
        return Task(self.id.removeprefix(prefix), self.kind.removeprefix(prefix), self.payload)


THINKING = ("<think>", "</think>")
"""What a model writes around its thoughts."""


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the environment's tools."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Identifies the call in its conversation. The message that answers it has this
    `tool_call_id`."""

    def __str__(self) -> str:
        return f"{self.name}({json.dumps(self.arguments, ensure_ascii=False)})"

    def answer(self, text: str) -> dict[str, Any]:
        """The tool message with the result of this call."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": text}


class Reply(str):
    """A model's answer in an environment with tools: the raw text and what was parsed from it.

    >>> Reply.of("I look it up.", ToolCall("search", {"query": "Nile"})).calls[0].name
    'search'
    """

    content: str
    """The text without calls and without a <think> block."""
    calls: list[ToolCall]
    problem: str
    """Problem with the calls, in one line, or "" if there is none."""

    def __new__(
        cls,
        text: str,
        content: str | None = None,
        calls: Iterable[ToolCall] = (),
        problem: str = "",
    ) -> "Reply":
        reply = super().__new__(cls, text)
        reply.content = text if content is None else content
        reply.calls = list(calls)
        reply.problem = problem
        return reply

    @classmethod
    def of(cls, content: str, *calls: ToolCall) -> "Reply":
        """Make a reply without a model. Calls take the most common form (Hermes, Qwen)."""
        message_parts = [content] if content else []
        for tool_call in calls:
            function = {"name": tool_call.name, "arguments": tool_call.arguments}
            written = json.dumps(function, ensure_ascii=False)
            message_parts.append(f"<tool_call>\n{written}\n</tool_call>")
        return cls("\n".join(message_parts), content, calls)

    def message(self) -> dict[str, Any]:
        """Return the reply as a message of a conversation."""
        call_messages = [
            {
                "id": tool_call.id,
                "type": "function",
                "function": {"name": tool_call.name, "arguments": tool_call.arguments},
            }
            for tool_call in self.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if call_messages:
            message["tool_calls"] = call_messages
        return message


@dataclass(frozen=True)
class Outcome:
    """An environment's answer to one response."""

    observation: str
    """Raw text that the environment returned: the world-model target o_{t+1}. Empty: no target."""
    reward: float
    """Environment reward of this step, without penalties; finite, at most a million in size."""
    done: bool
    won: bool
    action: str = ""
    """The action played, as parsed from the response."""
    valid: bool = True
    """Whether the response was well-formed. If not, its sample's score loses `invalid_penalty`."""
    score: float | None = None
    """The environment's own score of the episode so far, in [0, 1], if it has one (WebShop)."""
    results: list[str] = field(default_factory=list)
    """If the answer made several calls, one tool message with the result of each. The observation
    is all of them together."""


def as_ids(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return integers (token ids, versions) as [n] int32.

    Raises TypeError for other numbers, and OverflowError for integers beyond int32.
    """
    if isinstance(numbers, np.ndarray):
        if numbers.dtype == np.int32:
            return numbers
        numbers = numbers.tolist()
    return np.array(array("i", numbers))  # much faster than from a list, and never rounds


def as_values(numbers: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return real numbers (log-probs, entropies) as [n] float64. Float32 arrays stay as they are.

    Raises TypeError for anything that is not a number.
    """
    if isinstance(numbers, np.ndarray):
        if numbers.dtype in (np.float32, np.float64):
            return numbers
        numbers = numbers.tolist()
    return np.array(array("d", numbers))


class _AsList:
    """Lets pydantic write an array as a list of numbers, and read it back."""

    def __init__(self, items: core_schema.CoreSchema, make_array: Any) -> None:
        self._items = items
        self._make_array = make_array

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(
            self._make_array,
            core_schema.list_schema(self._items),
            serialization=core_schema.plain_serializer_function_ser_schema(np.ndarray.tolist),
        )


Ids = Annotated[np.ndarray, _AsList(core_schema.int_schema(), as_ids)]
"""Token ids or versions, [n] int32."""
Values = Annotated[np.ndarray, _AsList(core_schema.float_schema(), as_values)]
"""A number of each token, [n] float64, or float32 if a model's pass of the trainer made it."""


def no_ids() -> Ids:
    return np.empty(0, np.int32)


def no_values() -> Values:
    return np.empty(0)


class WithArrays:
    """A record whose numbers of tokens are arrays. Lists that are assigned become arrays.

    Raises TypeError for a list of wrong numbers.
    """

    IDS: ClassVar[tuple[str, ...]]
    """Fields of integers."""
    VALUES: ClassVar[tuple[str, ...]]
    """Fields of real numbers."""
    _CONVERTERS: ClassVar[dict[str, Callable[[Any], np.ndarray]]]
    """The function that makes an array, by field."""

    def __init_subclass__(cls) -> None:
        cls._CONVERTERS = {name: as_ids for name in cls.IDS}
        cls._CONVERTERS |= {name: as_values for name in cls.VALUES}

    def __setattr__(self, name: str, value: Any) -> None:
        convert = self._CONVERTERS.get(name)
        if convert is not None and value is not None and not isinstance(value, Away):
            try:
                value = convert(value)
            except (TypeError, OverflowError) as error:
                raise TypeError(f"numbers of the wrong kind in {name} ({error})") from None
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        for each in fields(self):  # type: ignore[arg-type]
            mine = getattr(self, each.name)
            theirs = getattr(other, each.name)
            if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
                if mine is None or theirs is None or not np.array_equal(mine, theirs):
                    return False
            elif mine != theirs:
                return False
        return True

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class Turn(WithArrays):
    """One prompt, one sampled response and the environment's answer. Makes one training sample."""

    IDS = ("prompt_ids", "response_ids", "versions", "observation_ids", "separator_ids")
    VALUES = ("sampled_logp", "entropy")

    prompt_ids: Ids
    response_ids: Ids
    """As sampled, up to and including the end token. Never re-encoded."""
    sampled_logp: Values
    """Log-probability of each response token under the sampler, at its temperature."""
    entropy: Values | None
    """Entropy of the sampler's distribution at each response token, nats; None if the engine does
    not compute it (vLLM)."""
    prompt: str
    response: str
    outcome: Outcome
    anchor: str
    """Text of the observation that the action answered. Turns of a group with equal anchors form
    GiGPO's clusters."""
    version: int
    """Weight version that the response was sampled from: the number of updates done.

    If it changed within the response, this is the oldest one.
    """
    versions: Ids | None = None
    """Weight version of each response token, if it changed within the response."""
    observation_ids: Ids | None = None
    """Token ids of the outcome's observation, if known. They are known if it has several results,
    or if the rank that played the turn has encoded it."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) of each result in `observation_ids`, if there are several. The template writes
    the rest."""
    server: str = ""
    """URL of the server that sampled it; "" without servers."""
    separator_ids: Ids | None = None
    """Token ids between the response and the observation, if they are not just the opening of a
    user message. They may be the opening of a tool's result, or start with the end token that a cut
    response lacks."""
    rendered_observation: str | None = None
    """The observation as the next prompt writes it, if different (JSON)."""

    @property
    def observation(self) -> str:
        """The text that the world model learns to predict."""
        if self.rendered_observation is not None:
            return self.rendered_observation
        return self.outcome.observation


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """What every rank knows of an episode."""

    turns: int
    valid_turns: int
    response_tokens: int
    episode_return: float
    won: bool
    score: float | None
    """`Outcome.score` of the last turn."""
    rewards: dict[str, float] = field(default_factory=dict)
    """`Trajectory.rewards`."""


@dataclass
class Trajectory:
    """One episode."""

    task: Task
    member: int
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None
    """Why the environment broke, if it did.

    Such an episode is left out of its group and never rewarded.
    """
    rewards: dict[str, float] = field(default_factory=dict)
    """With [[rewards]], each of them without its weight, by label."""

    @property
    def episode_return(self) -> float:
        """R(tau): the sum of the environment's rewards, without penalties."""
        return sum((turn.outcome.reward for turn in self.turns), 0.0)

    @property
    def won(self) -> bool:
        return bool(self.turns) and self.turns[-1].outcome.won

    @property
    def summary(self) -> EpisodeSummary:
        """The episode in a few numbers."""
        return EpisodeSummary(
            turns=len(self.turns),
            valid_turns=sum(turn.outcome.valid for turn in self.turns),
            response_tokens=sum(len(turn.response_ids) for turn in self.turns),
            episode_return=self.episode_return,
            won=self.won,
            score=self.turns[-1].outcome.score if self.turns else None,
            rewards=self.rewards,
        )


class AwayTrajectory(Trajectory):
    """An episode that another rank has played. All but its summary is there.

    `len(turns)` is known, and reading them raises AwayError.
    """

    def __init__(
        self, task: Task, member: int, summary: EpisodeSummary, *, rank: int, failure: str | None
    ) -> None:
        super().__init__(task, member, away(summary.turns, rank), failure)
        self.rank = rank
        self._summary = summary

    @property
    def summary(self) -> EpisodeSummary:
        return self._summary

    @property
    def episode_return(self) -> float:
        return self._summary.episode_return

    @property
    def won(self) -> bool:
        return self._summary.won


@dataclass
class Group:
    """The episodes of one task, played with the same weights.

    With several ranks, those that another rank has played are of the class `AwayTrajectory`.
    """

    task: Task
    trajectories: list[Trajectory]
    index: int = 0
    """The index of the task among the tasks of the update."""


@dataclass(eq=False)
class Sample(WithArrays):
    """One turn as the learner sees it: prompt h_t, response a_t, separator, observation o_{t+1}.

    Example, with made-up ids: prompt [1, 5, 6], response [7, 2], separator [1], observation [8, 9]
    is the sequence 1 5 6 7 2 1 8 9. The policy loss is on 7 2, the world-model loss on 8 9, and the
    other tokens have none.
    """

    IDS = ("prompt_ids", "response_ids", "separator_ids", "observation_ids", "versions")
    VALUES = (
        "sampled_logp",
        "sampled_entropy",
        "token_advantage",
        "values",
        "returns",
        "old_logp",
        "ref_logp",
    )

    group: int
    trajectory: int
    """Index over all trajectories of the update."""
    step: int
    prompt_ids: Ids
    response_ids: Ids
    separator_ids: Ids = field(default_factory=no_ids)
    """The end token that a cut response lacks, then the template's separator; never in the loss."""
    observation_ids: Ids = field(default_factory=no_ids)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) of the `observation_ids` that are targets, if not all are. That is so for the
    results of several calls."""
    sampled_logp: Values = field(default_factory=no_values)
    sampled_entropy: Values | None = None
    versions: Ids = field(default_factory=no_ids)
    """Weight version that each response token was sampled from."""
    server: str = ""
    """URL of the server that sampled the response; "" without servers."""
    score: float = 0.0
    """Episode return minus this sample's own invalid penalty."""
    episode_return: float = 0.0
    reward: float = 0.0
    penalty: float = 0.0
    anchor: str = ""
    continues: bool = False
    """Whether the prompt begins with the previous turn's prompt and response, so that both turns
    fit in one sequence."""
    advantage: float = 0.0
    """One scalar per sample, broadcast to its response tokens. Not used with PPO."""
    token_advantage: Values | None = None
    """PPO: the advantage of each response token, which replaces `advantage`."""
    values: Values = field(default_factory=no_values)
    """PPO: the critic's value before each response token, when the sample was played."""
    returns: Values = field(default_factory=no_values)
    """PPO: the value that the critic learns to predict before each response token."""
    old_logp: Values = field(default_factory=no_values)
    """log pi_old of each response token, from the scoring pass or the engine."""
    ref_logp: Values | None = None
    """log pi_ref of each response token, when kl_coef > 0."""
    entropy: float = 0.0
    """Action entropy H: mean over the response tokens, nats (selection, PaW Eq. (8))."""
    token_weight: float = 0.0
    """Weight of a response token with policy.loss_norm = "group": 1 / (G * response tokens of the
    group in the update)."""
    wm_weight: float = 0.0
    """lambda_g / (G |S_g|) for a selected sample with a target, else 0 (PaW Eq. (11))."""

    @property
    def targets(self) -> list[tuple[int, Ids]]:
        """Return (index in `observation_ids`, ids) of each part that is a world-model target."""
        spans = self.spans or [(0, len(self.observation_ids))]
        return [
            (span_start, self.observation_ids[span_start:span_end])
            for span_start, span_end in spans
        ]

    @property
    def has_advantage(self) -> bool:
        """Whether any response token has an advantage other than 0."""
        if self.token_advantage is None:
            return self.advantage != 0.0
        return bool(self.token_advantage.any())

    @property
    def advantages(self) -> Values:
        """The advantage of each response token."""
        if self.token_advantage is None:
            return np.full(len(self.response_ids), self.advantage)
        return self.token_advantage
