"""One agent's requests to an OpenAI-compatible endpoint, as the turns of an episode.

Token in, token out: if a request's messages are those of an earlier one, then the model's answer to
it, then others, the new prompt begins with the ids that the model read and sampled. Any other
request, such as an edited conversation or that of a sub-agent, begins a new sequence in the same
episode. The messages that a request adds after an answer are that turn's observation.
"""

import asyncio
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from paw.config.sections import Config
from paw.envs.tools import Tool, checked_reply, checked_tools
from paw.errors import clean, to_stderr
from paw.gateway.messages import (
    ChatAnswer,
    ChatRequest,
    Message,
    RequestError,
    TokenLogprob,
    answer_message,
    parse_request,
    problem_of,
    reply_message,
)
from paw.gateway.server import Incoming
from paw.rollouts.episode import EnvHandle, Model, Response
from paw.rollouts.text.chat import ContextFull, FirstPromptTooLong
from paw.types import Reply, Turn

LARGE = 100_000
"""Maximum characters of a request's tools that are kept for the next request."""


class Notes:
    """Prints each note once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, key: str, line: str) -> None:
        if key not in self._said:
            self._said.add(key)
            to_stderr(f"{line} (reported once)")


@dataclass
class AnsweredRequest:
    """A request that has been answered, and what the model read instead of its messages."""

    received: list[Message]
    """The messages as the client sent them, then the answer as it was sent."""
    read: list[Message]
    """The messages as the model read them, then the answer as it wrote it."""
    tools: list[Tool]
    turn: Turn
    is_observed: bool = False
    """Whether the turn has its observation."""

    def is_continued_by(self, messages: list[Message], tools: list[Tool]) -> bool:
        """Whether `messages` are the messages and the answer of this request, then others."""
        length = len(self.received)
        if len(messages) <= length or tools != self.tools:
            return False
        if messages[: length - 1] != self.received[:-1]:
            return False
        return _is_same_answer(messages[length - 1], self.received[-1])


class Session:
    """Answers the requests of an episode, one at a time, in the order of their arrival.

    The episode's temperature and env.max_turns apply, whatever a request asks for.
    """

    def __init__(self, env: EnvHandle, model: Model, notes: Notes) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception if the episode cannot go on."""
        self.is_at_limit = False
        """Whether a request was refused because of env.max_turns."""
        self.too_long = ""
        """Why a prompt was refused as too long; "" if none was."""
        self._has_ended = False
        self._env = env
        self._model = model
        self._config: Config = model.config
        self._notes = notes
        self._answered: list[AnsweredRequest] = []
        self._answering = asyncio.Lock()

    async def complete(self, incoming: Incoming) -> ChatAnswer:
        """Answer a request with what the model writes. Raises RequestError to refuse it."""
        request = parse_request(incoming.body)
        try:
            tools = _tools_of(request)
        except ValueError as error:
            raise RequestError(clean(error), param="tools") from None
        self._check_fits(request)
        self._report_ignored(request)
        async with self._answering:
            self._check_may_go_on()
            try:
                return await self._answer(request, tools, incoming)
            except RequestError:
                raise
            except (ContextFull, FirstPromptTooLong) as error:
                raise self._refuse_length(str(error)) from None
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                    self.failed.exception()  # asyncio need not report it
                raise RequestError(problem_of(error), status=500) from None

    def end(self) -> None:
        """Refuse further requests. An answer in progress does not become a turn of the episode."""
        self._has_ended = True

    @property
    def turns(self) -> list[Turn]:
        return self._env.episode.trajectory.turns

    def _check_fits(self, request: ChatRequest) -> None:
        """Refuse texts that are too long for any prompt.

        Tokenising them would take seconds, and all episodes would have to wait.
        """
        limit = self._env.config.max_text
        if sum(len(message["content"]) for message in request.messages) > limit:
            raise self._refuse_length(f"env.max_text = {limit} characters")

    def _refuse_length(self, reason: str) -> RequestError:
        """Return the refusal of a prompt that is too long."""
        self.too_long = reason
        return RequestError(
            f"this is more than the model's maximum context length ({reason})",
            param="messages",
            code="context_length_exceeded",
        )

    def _check_may_go_on(self) -> None:
        if self._has_ended:
            raise RequestError("the episode has ended", status=404)
        if self.failed.done():
            raise RequestError("the episode has failed", status=500)
        if len(self.turns) >= self._config.env.max_turns:
            self.is_at_limit = True
            raise RequestError(
                f"env.max_turns = {self._config.env.max_turns}: the episode has no requests left",
                code="max_turns",
            )

    async def _answer(
        self, request: ChatRequest, tools: list[Tool], incoming: Incoming
    ) -> ChatAnswer:
        earlier = self._continued(request.messages, tools)
        received = request.messages
        read = request.messages
        if earlier is not None:
            answer_position = len(earlier.received) - 1
            added_messages = request.messages[answer_position + 1 :]
            # The same request, but with the answer as the client writes it, because its next
            # request will have it in that form.
            received = [*earlier.received[:-1], *request.messages[answer_position:]]
            read = [*earlier.read, *added_messages]
            _observe(earlier, added_messages)
        self._env.anchor = request.messages[-1]["content"]

        response = await self._model.generate(
            read, stop=request.stop, tools=tools, max_tokens=request.max_tokens
        )
        if self._has_ended:
            self._model.take_back()
            raise RequestError("the episode has ended", status=404)
        if not incoming.is_open():
            # Nobody reads this answer. The client may ask again.
            self._model.take_back()
            raise RequestError("the client has closed the connection", status=499)

        reply = await self._checked(response, tools)
        turn = response.turn
        action = "; ".join(map(str, reply.calls)) or reply.content
        is_valid = bool(action.strip()) and not reply.problem
        turn.outcome = replace(turn.outcome, action=action, valid=is_valid)

        message = answer_message(response) if not request.reads_calls else reply_message(reply)
        if response.reply is None:
            written: Message = {"role": "assistant", "content": turn.response}
        else:
            written = response.reply.message()
        self._answered.append(AnsweredRequest([*received, message], [*read, written], tools, turn))
        return self._chat_answer(request, response, message)

    def _continued(self, messages: list[Message], tools: list[Tool]) -> AnsweredRequest | None:
        """Return the latest answered request that these messages continue."""
        for answered in reversed(self._answered):
            if answered.is_continued_by(messages, tools):
                return answered
        return None

    async def _checked(self, response: Response, tools: list[Tool]) -> Reply:
        """Return the response with its calls, and what is wrong with them."""
        reply = response.reply
        if reply is None:
            return Reply(str(response))
        if not reply.calls:
            return reply
        return await asyncio.to_thread(checked_reply, reply, tools)

    def _chat_answer(
        self, request: ChatRequest, response: Response, message: Message
    ) -> ChatAnswer:
        finish_reason = "stop"
        if message.get("tool_calls"):
            finish_reason = "tool_calls"
        elif response.cut:
            finish_reason = "length"
        turn = response.turn
        logprobs = None
        if request.logprobs:
            texts = self._model.token_texts(turn)
            logprobs = [
                TokenLogprob(text, logp)
                for text, logp in zip(texts, turn.sampled_logp.tolist(), strict=True)
            ]
        return ChatAnswer(
            message,
            finish_reason,
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.response_ids),
            logprobs=logprobs,
        )

    def _report_ignored(self, request: ChatRequest) -> None:
        """Say, once for each parameter, that the run's own sampling is used instead."""
        temperature = self._env.episode.temperature
        for name, value in request.sampling.items():
            if name == "temperature" and value == temperature:
                continue
            self._notes.say(
                name,
                f"the agent asks for {name} = {clean(value, 60)}, which is ignored: the model "
                f"samples from its own distribution at temperature {temperature:g}",
            )


def _tools_of(request: ChatRequest) -> list[Tool]:
    """Return the tools of a request. Raises ValueError if they are malformed."""
    if not request.tools:
        return []
    text = json.dumps(request.tools)
    return _known_tools(text) if len(text) <= LARGE else checked_tools(request.tools)


@lru_cache(256)
def _known_tools(text: str) -> list[Tool]:
    """Check tools given as JSON. Cached, because all requests of an agent have the same tools."""
    return checked_tools(json.loads(text))


def _observe(answered: AnsweredRequest, added: list[Message]) -> None:
    """Record the messages that follow an answer as its observation."""
    if answered.is_observed:
        return
    answered.is_observed = True
    results: list[str] = []
    for message in added:
        if message["role"] == "assistant":
            break
        results.append(message["content"])
    turn = answered.turn
    turn.outcome = replace(
        turn.outcome,
        observation="\n".join(results),
        results=results if len(results) > 1 else [],
    )


def _is_same_answer(message: Message, sent: Message) -> bool:
    """Whether a message is the answer that was sent.

    Clients may write it differently: with other spaces in calls, or without the thought or the text
    beside calls.
    """
    if message["role"] != "assistant":
        return False
    text = message["content"].strip()
    sent_calls = sent.get("tool_calls", [])
    is_same_text = text == (sent["content"] or "").strip()
    if not sent_calls:
        return is_same_text and not message.get("tool_calls")
    if not is_same_text and text:
        return False
    returned = [_call_key(tool_call) for tool_call in message.get("tool_calls", [])]
    return returned == [_call_key(tool_call) for tool_call in sent_calls]


def _call_key(call: dict[str, Any]) -> tuple[str, Any]:
    """Return a call's name and arguments."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return function["name"], arguments
