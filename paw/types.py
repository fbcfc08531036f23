"""What flows through one update, in order: Task -> Turn -> Trajectory -> Group -> Sample -> Batch.

Suffix legend of the package: T tokens of a batch, N samples of an update, G groups, B of them in a
micro-batch, L padded length, V vocabulary, D hidden size.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One game or question. A group plays the same task `group_size` times."""

    id: str
    """Unique within the split, stable across runs (a game's path, or generator split and index)."""
    kind: str = "task"
    """The key under which success is reported (ALFWorld: pick, look, clean, heat, cool, two)."""
    payload: Any = field(default=None, repr=False)
    """What the environment needs to start it; read-only, shared by the members of a group."""


THINKING = ("<think>", "</think>")
"""What a model writes around its thought."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool that the environment has."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Of the call within its conversation: the tool message that answers it has this `tool_call_id`."""

    def __str__(self) -> str:
        return f"{self.name}({json.dumps(self.arguments, ensure_ascii=False)})"

    def answer(self, text: str) -> dict[str, Any]:
        """The message of a tool with its result."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": text}


class Reply(str):
    """A model's answer in an environment with tools: the raw text, and what its format's parser found in it.

    >>> Reply.of("I look it up.", ToolCall("search", {"query": "Nile"})).calls[0].name
    'search'
    """

    content: str
    """The text without calls and without <think> block."""
    calls: list[ToolCall]
    problem: str
    """What is wrong with the calls, in one line; "" where nothing is."""

    def __new__(
        cls,
        text: str,
        content: str | None = None,
        calls: Iterable[ToolCall] = (),
        problem: str = "",
    ) -> "Reply":
        reply = super().__new__(cls, text)
        reply.content, reply.calls, reply.problem = (
            text if content is None else content,
            [*calls],
            problem,
        )
        return reply

    @classmethod
    def of(cls, content: str, *calls: ToolCall) -> "Reply":
        """One that no model wrote, its text in the most common form of calls (Hermes, Qwen)."""
        written = [
            json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False)
            for c in calls
        ]
        text = "\n".join(
            part
            for part in (content, *(f"<tool_call>\n{one}\n</tool_call>" for one in written))
            if part
        )
        return cls(text, content, calls)

    def message(self) -> dict[str, Any]:
        """As a message of a conversation."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.calls
        ]
        return {
            "role": "assistant",
            "content": self.content,
            **({"tool_calls": calls} if calls else {}),
        }


@dataclass(frozen=True)
class Outcome:
    """What an environment answers to one response."""

    observation: str
    """Raw text the environment returned: the world-model target o_{t+1}. Empty: no target."""
    reward: float
    """Environment reward of this step, without penalties; finite, at most a million in size."""
    done: bool
    won: bool
    action: str = ""
    """The action that was played, after projection from the response."""
    valid: bool = True
    """Whether the response was well-formed; an invalid one costs `invalid_penalty` on its sample."""
    score: float | None = None
    """The environment's own score of the episode so far, in [0, 1], where it has one (WebShop)."""
    results: list[str] = field(default_factory=list)
    """Of an answer with several calls the result of each, a tool message each; the observation is all of them."""


@dataclass
class Turn:
    """One prompt, one sampled response, one answer of the environment: one training sample."""

    prompt_ids: list[int]
    response_ids: list[int]
    """As sampled, up to and including the end token. Never re-encoded."""
    sampled_logp: list[float]
    """Log-probability of each response token under the sampler, at its temperature."""
    entropy: list[float] | None
    """Entropy of the sampler's distribution at each response token, nats; None where the engine cannot tell (vLLM)."""
    prompt: str
    response: str
    outcome: Outcome
    anchor: str
    """Text of the observation the action answered; equal anchors of a group form GiGPO's clusters."""
    version: int
    """Weight version the response was sampled from: the number of updates done.

    The oldest, where it changed.
    """
    versions: list[int] | None = None
    """Of each response token, where it changed."""
    observation_ids: list[int] | None = None
    """Of the outcome's observation, where they are known: of several results, or where the rank
    that played it has encoded it."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Of several results: where each stands in them, between what the template writes."""
    server: str = ""
    """URL of the server that sampled it, where there are servers."""
    separator_ids: list[int] | None = None
    """Between the response and the observation, if that is not only what begins a user message:
    first the end token that a response lacks which was cut, or what begins a tool's result."""
    rendered_observation: str | None = None
    """The observation as the next prompt writes it, where that differs (JSON)."""

    @property
    def observation(self) -> str:
        """What the world model learns to predict."""
        if self.rendered_observation is not None:
            return self.rendered_observation
        return self.outcome.observation


@dataclass
class Trajectory:
    """One episode."""

    task: Task
    member: int
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None
    """Why the environment broke, if it did.

    Such an episode is left out of its group, never rewarded.
    """

    @property
    def episode_return(self) -> float:
        """R(tau): sum of environment rewards, penalties not included."""
        return sum((turn.outcome.reward for turn in self.turns), 0.0)

    @property
    def won(self) -> bool:
        return bool(self.turns) and self.turns[-1].outcome.won


@dataclass
class Group:
    """The episodes of one task, played by the same weights."""

    task: Task
    trajectories: list[Trajectory]
    place: int = 0
    """Index of the task among those of the update."""


@dataclass
class Sample:
    """One turn as the learner sees it: prompt h_t, response a_t, separator, observation o_{t+1}.

    Example, with made-up ids: prompt [1, 5, 6], response [7, 2], separator [1], observation [8, 9]
    is the sequence 1 5 6 7 2 1 8 9, with a policy loss on 7 2, a world-model loss on 8 9, and none
    on the rest.
    """

    group: int
    trajectory: int
    """Index over all trajectories of the update."""
    step: int
    prompt_ids: list[int]
    response_ids: list[int]
    separator_ids: list[int] = field(default_factory=list)
    """No loss, whatever it holds: the end token that a response lacks which was cut, then the template's separator."""
    observation_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) of `observation_ids` that are targets, where not all are: the results of several calls."""
    sampled_logp: list[float] = field(default_factory=list)
    sampled_entropy: list[float] | None = None
    versions: list[int] = field(default_factory=list)
    """Weight version that each response token was sampled from."""
    server: str = ""
    """URL of the server that sampled the response, where there are servers."""
    score: float = 0.0
    """Episode return less this sample's own invalid penalty."""
    episode_return: float = 0.0
    reward: float = 0.0
    penalty: float = 0.0
    anchor: str = ""
    continues: bool = False
    """Whether the prompt begins with the prompt and the response of the turn before: they can share a sequence."""
    advantage: float = 0.0
    """One scalar a sample, broadcast to its response tokens."""
    token_advantage: list[float] | None = None
    """PPO: the advantage of each response token, in place of `advantage`."""
    values: list[float] = field(default_factory=list)
    """PPO: the critic's value before each response token, when the sample was played."""
    returns: list[float] = field(default_factory=list)
    """PPO: what the critic learns to tell before each response token."""
    old_logp: list[float] = field(default_factory=list)
    """log pi_old of each response token, from the scoring pass or the engine."""
    ref_logp: list[float] | None = None
    """log pi_ref of each response token, when kl_coef > 0."""
    entropy: float = 0.0
    """Action entropy H: mean over the response tokens, nats (selection, PaW Eq. (8))."""
    token_weight: float = 0.0
    """1 / (G * response tokens of the group in the update): of a response token, with policy.loss_norm = "group"."""
    wm_weight: float = 0.0
    """lambda_g / (G |S_g|) for a selected sample with a target, else 0 (PaW Eq. (11))."""

    @property
    def targets(self) -> list[tuple[int, list[int]]]:
        """(place in `observation_ids`, ids) of what the world model learns."""
        return [
            (a, self.observation_ids[a:b])
            for a, b in self.spans or [(0, len(self.observation_ids))]
        ]

    @property
    def advantages(self) -> list[float]:
        """Of each response token."""
        return self.token_advantage or [self.advantage] * len(self.response_ids)
