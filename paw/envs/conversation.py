"""What environments share that are conversations: the messages so far, calls of tools, and answers to broken calls."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paw.files import reading
from paw.types import THINKING, Outcome, Reply, Task, ToolCall

Message = dict[str, Any]


class Conversation(ABC):
    """One conversation at a time. A subclass begins it, answers what the model says, and plays the calls of `tools`.

    A broken call (`Reply.problem`) is answered by a tool message that says what is wrong with it;
    none of that answer's calls is played, and the turn is invalid.
    """

    tools: Sequence[dict[str, Any]] = ()
    """OpenAI function schemas, the same for the whole episode."""
    one_call = False
    """Whether an answer with several calls is broken."""
    messages: list[Message]

    @abstractmethod
    def begin(self, task: Task) -> list[Message]:
        """The first messages: instructions, examples, and what is asked, which comes last."""

    @abstractmethod
    def say(self, text: str) -> Outcome:
        """The model says `text` (after its thought) and calls nothing; unless that ends the
        episode, the user answers the observation."""

    def call(self, call: ToolCall) -> str | Outcome:
        """The result of a call, or an outcome whose observation that is."""
        raise AssertionError(f"{type(self).__name__} has no call()")

    def reset(self, task: Task) -> str:
        """Returns the last of the first messages."""
        self.messages = self.begin(task)
        return self.messages[-1]["content"]

    def context(self) -> list[Message]:
        return list(self.messages)

    def step(self, response: str) -> Outcome:
        reply = self.hear(response)
        if reply.problem:
            return self.refuse(reply)
        if reply.calls:
            return self.answer(reply, [self.call(call) for call in reply.calls])
        said = reply.content.rpartition(THINKING[1])[2].strip()
        outcome = self.say(said)
        if not said:  # neither a call nor a word
            outcome = replace(outcome, valid=False)
        if not outcome.done:
            self.messages.append({"role": "user", "content": outcome.observation})
        return outcome

    def hear(self, response: str) -> Reply:
        """The model's answer, which is the next message from now on."""
        reply = response if isinstance(response, Reply) else Reply(response)
        self.messages.append(reply.message())
        if self.one_call and len(reply.calls) > 1 and not reply.problem:
            return Reply(reply, reply.content, reply.calls, "call one tool at a time")
        return reply

    def refuse(self, reply: Reply) -> Outcome:
        """Nothing is played: the model is told what is wrong."""
        text = f"Invalid call: {reply.problem}."
        self.messages += [call.answer(text) for call in reply.calls or [unread(len(self.messages))]]
        return Outcome(text, 0.0, done=False, won=False, action=_action(reply), valid=False)

    def answer(self, reply: Reply, results: Sequence[str | Outcome]) -> Outcome:
        """The results of the calls of `reply` are the next messages; together they are its outcome."""
        outcomes = [
            Outcome(one, 0.0, done=False, won=False) if isinstance(one, str) else one
            for one in results
        ]
        texts = [outcome.observation for outcome in outcomes]
        self.messages += [call.answer(text) for call, text in zip(reply.calls, texts, strict=True)]
        return Outcome(
            "\n".join(texts),
            sum(outcome.reward for outcome in outcomes),
            done=any(outcome.done for outcome in outcomes),
            won=any(outcome.won for outcome in outcomes),
            action=_action(reply),
            valid=all(outcome.valid for outcome in outcomes),
            score=next(
                (outcome.score for outcome in reversed(outcomes) if outcome.score is not None), None
            ),
            results=texts if len(texts) > 1 else [],
        )


class Retold(Conversation):
    """An environment of one message a turn as a conversation, with one call an answer."""

    one_call = True

    def __init__(self, game: Any) -> None:
        self._game = game

    @property
    def task(self) -> str:
        return self._game.task


def _action(reply: Reply) -> str:
    return "; ".join(map(str, reply.calls)) or reply.content


def unread(place: int) -> ToolCall:
    """What could not be read as a call, as one: with an id that nothing else has at that place of a conversation."""
    return ToolCall("", {}, f"none{place:05}")


def opening(instruction: Path | None, text: str) -> list[Message]:
    """The first messages: the system's from a file, where there is one, and the user's `text`.

    UserError: no file.
    """
    with reading(f"env.instruction = '{instruction}'"):
        system = (
            [{"role": "system", "content": instruction.expanduser().read_text()}]
            if instruction
            else []
        )
    return [*system, {"role": "user", "content": text}]


def invalid(problem: str, action: str) -> Outcome:
    """Of an action that was not played."""
    return Outcome(
        f"Invalid action: {problem}.", 0.0, done=False, won=False, action=action, valid=False
    )
