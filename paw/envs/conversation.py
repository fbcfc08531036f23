"""Shared parts of conversational environments: messages so far, tool calls, replies to broken
calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paw.io.files import reading
from paw.types import THINKING, Outcome, Reply, Task, ToolCall

Message = dict[str, Any]


class Conversation(ABC):
    """One conversation at a time.

    A subclass begins the conversation, answers what the model says, and plays the calls of `tools`.
    A tool message answers a broken call (`Reply.problem`) and names the problem. None of the calls
    in that reply is then played, and the turn is invalid.
    """

    tools: Sequence[dict[str, Any]] = ()
    """OpenAI function schemas, the same for the whole episode."""
    one_call = False
    """Whether a reply may have only one call."""
    messages: list[Message]
    """The conversation so far; set by `reset`."""

    @abstractmethod
    def begin(self, task: Task) -> list[Message]:
        """Return the first messages: instructions, examples and, last, the question."""

    @abstractmethod
    def say(self, text: str) -> Outcome:
        """Return the outcome if the model says `text` (its reply without thought), without calls.

        The observation is the user's answer, unless the episode ends.
        """

    def call(self, call: ToolCall) -> str | Outcome:
        """Return the result of a call, or an outcome whose observation is the result."""
        raise AssertionError(f"{type(self).__name__} has no call()")

    def reset(self, task: Task) -> str:
        """Begin a conversation. Returns the last of its first messages."""
        self.messages = self.begin(task)
        return self.messages[-1]["content"]

    def context(self) -> list[Message]:
        return list(self.messages)

    def step(self, response: str) -> Outcome:
        reply = self.receive(response)
        if reply.problem:
            return self.refuse(reply)
        if reply.calls:
            return self.answer(reply, [self.call(tool_call) for tool_call in reply.calls])

        text = reply.content.rpartition(THINKING[1])[2].strip()
        outcome = self.say(text)
        if not text:  # neither a call nor a word
            outcome = replace(outcome, valid=False)
        if not outcome.done:
            self.messages.append({"role": "user", "content": outcome.observation})
        return outcome

    def receive(self, response: str) -> Reply:
        """Add the model's reply to the messages. Returns it, with the problem of its calls."""
        reply = response if isinstance(response, Reply) else Reply(response)
        self.messages.append(reply.message())
        if self.one_call and len(reply.calls) > 1 and not reply.problem:
            return Reply(reply, reply.content, reply.calls, "call one tool at a time")
        return reply

    def refuse(self, reply: Reply) -> Outcome:
        """Tell the model what is wrong with its reply. Nothing of the reply is played."""
        text = f"Invalid call: {reply.problem}."
        tool_calls = reply.calls or [unread(len(self.messages))]
        self.messages += [tool_call.answer(text) for tool_call in tool_calls]
        return Outcome(text, 0.0, done=False, won=False, action=_action(reply), valid=False)

    def answer(self, reply: Reply, results: Sequence[str | Outcome]) -> Outcome:
        """Add the results of the reply's calls to the messages. Returns them as one outcome."""
        outcomes = []
        for result in results:
            if isinstance(result, str):
                result = Outcome(result, 0.0, done=False, won=False)
            outcomes.append(result)

        texts = [outcome.observation for outcome in outcomes]
        self.messages += [
            tool_call.answer(text) for tool_call, text in zip(reply.calls, texts, strict=True)
        ]
        scores = [outcome.score for outcome in outcomes if outcome.score is not None]
        return Outcome(
            "\n".join(texts),
            sum(outcome.reward for outcome in outcomes),
            done=any(outcome.done for outcome in outcomes),
            won=any(outcome.won for outcome in outcomes),
            action=_action(reply),
            valid=all(outcome.valid for outcome in outcomes),
            score=scores[-1] if scores else None,
            results=texts if len(texts) > 1 else [],
        )


class ConversationWrapper(Conversation):
    """Plays an environment with one message per turn as a conversation, with one call per reply."""

    one_call = True

    def __init__(self, game: Any) -> None:
        self._game = game

    @property
    def task(self) -> str:
        return self._game.task


def _action(reply: Reply) -> str:
    return "; ".join(map(str, reply.calls)) or reply.content


def unread(position: int) -> ToolCall:
    """Return a stand-in for an unreadable call in message number `position` of a conversation.

    Its id is unique within the conversation.
    """
    return ToolCall("", {}, f"none{position:05}")


def opening(instruction: Path | None, text: str) -> list[Message]:
    """Return a system message from the file `instruction`, if set, and the user's `text`.

    Raises UserError if the file cannot be read.
    """
    messages = []
    if instruction:
        with reading(f"env.instruction = '{instruction}'"):
            system = instruction.expanduser().read_text()
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": text})
    return messages


def invalid(problem: str, action: str) -> Outcome:
    """Return the outcome of an action that was not played because of a `problem`."""
    return Outcome(
        f"Invalid action: {problem}.", 0.0, done=False, won=False, action=action, valid=False
    )
