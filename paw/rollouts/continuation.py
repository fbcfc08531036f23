"""What the chat template writes after a turn, and where the turn's observation stands in it.

The agent `plain` needs this only if its environment shows conversations.
"""

from dataclasses import dataclass
from typing import Any

from paw.envs.conversation import unread
from paw.rollouts.text.chat import Chat
from paw.types import Reply, Turn


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model continues."""

    ids: list[int]
    opened: str
    """How the template opens the answer; "" if an answer goes on."""


@dataclass(frozen=True)
class Continuation:
    """What follows the end token of an answer: messages, then what opens the next response."""

    messages: list[dict[str, Any]]
    ids: list[int]
    separator_ids: list[int]
    """The first of `ids`, before the text of the first message."""
    first_text: str
    """The first message's text as the template writes it."""
    spans: list[tuple[int, int]]
    """[start, end) of each text in `ids`."""


def continue_after(
    chat: Chat, answer: dict[str, Any], messages: list[dict[str, Any]]
) -> Continuation:
    """What follows an answer when `messages` do.

    Each text is encoded on its own, so the world model finds it there as a target.
    """
    pieces = chat.following(answer, messages)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for template_ids, text in pieces:
        ids += template_ids
        start = len(ids)
        ids += chat.observation_ids(text)
        spans.append((start, len(ids)))
    separator_ids, first_text = pieces[0]
    return Continuation(
        messages=messages, ids=ids, separator_ids=separator_ids, first_text=first_text, spans=spans
    )


def ids_up_to_end(chat: Chat, turn: Turn) -> list[int]:
    """Ids of a turn up to the end token of its answer, which is added if the answer was cut."""
    return turn.prompt_ids + turn.response_ids + chat.missing_end(turn.response_ids)


def prompt_after_response(chat: Chat, turn: Turn, text: str) -> Prompt:
    """The prompt of a turn and its response, then `text`.

    The text is a user message if the response has ended. Otherwise the answer goes on after it.
    """
    ids = turn.prompt_ids + turn.response_ids
    text_ids = chat.observation_ids(text)
    if turn.response_ids[-1] in chat.end_ids:
        ids = ids + chat.separator_ids + text_ids + chat.reply_ids
        return Prompt(ids, chat.opened)
    return Prompt(ids + text_ids, opened="")


def add_result(chat: Chat, turn: Turn, reply: Reply, limit: int) -> None:
    """Record in an episode's last turn how a prompt after it would show its observation.

    The turn called tools. The observation is the tools' results, or that of the first one. `limit`
    as for `record_observation`.
    """
    calls = reply.calls or [unread(0)]
    messages: list[dict[str, Any]] = []
    for call, result in zip(calls, _results(turn), strict=False):
        messages.append(call.answer(result))
    continuation = continue_after(chat, reply.message(), messages)
    record_observation(chat, turn, continuation, limit=limit)


def record_observation(chat: Chat, turn: Turn, continuation: Continuation, *, limit: int) -> None:
    """Record in a turn where its observation stands in its `continuation`, and in what form.

    Sets separator_ids; rendered_observation too if the messages that follow the turn begin with its
    results as they are; and for several results observation_ids and spans, of `limit` tokens at
    most, including what the template writes between the results.
    """
    separator_ids = chat.missing_end(turn.response_ids) + continuation.separator_ids
    turn.separator_ids = separator_ids if separator_ids != chat.separator_ids else None

    results = _results(turn)
    contents = [message["content"] for message in continuation.messages[: len(results)]]
    if contents != results:
        return
    first_text = continuation.first_text
    turn.rendered_observation = first_text if first_text != results[0] else None
    if len(results) > 1:
        _record_results(turn, continuation, count=len(results), limit=limit)


def _record_results(turn: Turn, continuation: Continuation, *, count: int, limit: int) -> None:
    """Record the tokens of `count` results, the first `limit` of them from the first result on."""
    first_start = continuation.spans[0][0]
    turn.spans = []
    for span_start, span_end in continuation.spans[:count]:
        start = span_start - first_start
        end = span_end - first_start
        if start < limit:
            turn.spans.append((start, min(end, limit)))
    last_end = turn.spans[-1][1] if turn.spans else 0  # none with a limit of 0
    turn.observation_ids = continuation.ids[first_start : first_start + last_end]


def _results(turn: Turn) -> list[str]:
    """The results of a turn's calls; without any, its observation."""
    return list(turn.outcome.results) or [turn.outcome.observation]
