"""What the chat template writes after a turn, and where the turn's observation is in it.

The agent `plain` needs this only if its environment shows conversations.
"""

from dataclasses import dataclass
from typing import Any

from paw.envs.conversation import unread
from paw.rollouts.text.chat import Chat
from paw.types import Reply, Turn, as_ids


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model continues."""

    ids: list[int]
    opened: str
    """How the template opens the answer; "" if the model continues an answer."""


@dataclass(frozen=True)
class Continuation:
    """What follows an answer's end token: messages, then the opening of the next response."""

    messages: list[dict[str, Any]]
    ids: list[int]
    separator_ids: list[int]
    """The leading `ids`, up to the text of the first message."""
    first_text: str
    """The first message's text as the template writes it."""
    spans: list[tuple[int, int]]
    """[start, end) of each text in `ids`."""


def continue_after(
    chat: Chat, answer: dict[str, Any], messages: list[dict[str, Any]]
) -> Continuation:
    """Return what the template writes after an answer that `messages` follow.

    Each text is encoded on its own, so the world model finds it as a target.
    """
    pieces = chat.following(answer, messages)
    added_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for template_ids, text in pieces:
        added_ids += template_ids
        text_start = len(added_ids)
        added_ids += chat.observation_ids(text)
        spans.append((text_start, len(added_ids)))
    separator_ids, first_text = pieces[0]
    return Continuation(
        messages=messages,
        ids=added_ids,
        separator_ids=separator_ids,
        first_text=first_text,
        spans=spans,
    )


def ids_up_to_end(chat: Chat, turn: Turn) -> list[int]:
    """Ids of a turn through its answer's end token, which is added if the answer was cut."""
    return ids_of(turn) + chat.missing_end(turn.response_ids)


def ids_of(turn: Turn) -> list[int]:
    """Ids of a turn's prompt and response."""
    return turn.prompt_ids.tolist() + turn.response_ids.tolist()


def prompt_after_response(chat: Chat, turn: Turn, text: str) -> Prompt:
    """Return a prompt: a turn's own prompt and response, then `text`.

    If the response has ended, the text is a user message. Otherwise it continues the answer.
    """
    prompt_ids = ids_of(turn)
    text_ids = chat.observation_ids(text)
    if turn.response_ids[-1] in chat.end_ids:
        prompt_ids = prompt_ids + chat.separator_ids + text_ids + chat.reply_ids
        return Prompt(prompt_ids, chat.opened)
    return Prompt(prompt_ids + text_ids, opened="")


def add_result(chat: Chat, turn: Turn, reply: Reply, limit: int) -> None:
    """Record in an episode's last turn how a later prompt would show its observation.

    The turn called tools. Its observation is the results of all tools, or of the first one.
    `limit` is as for `record_observation`.
    """
    tool_calls = reply.calls or [unread(0)]
    messages: list[dict[str, Any]] = []
    for tool_call, result in zip(tool_calls, _results(turn), strict=False):
        messages.append(tool_call.answer(result))
    continuation = continue_after(chat, reply.message(), messages)
    record_observation(chat, turn, continuation, limit=limit)


def record_observation(chat: Chat, turn: Turn, continuation: Continuation, *, limit: int) -> None:
    """Record in a turn where its observation is in its `continuation`, and in what form.

    Sets separator_ids. Also sets rendered_observation if the messages after the turn begin with its
    results unchanged. For several results, sets observation_ids and spans of at most `limit`
    tokens, including what the template writes between the results.
    """
    separator_ids = chat.missing_end(turn.response_ids) + continuation.separator_ids
    turn.separator_ids = None
    if separator_ids != chat.separator_ids:
        turn.separator_ids = as_ids(separator_ids)

    if not shows_results(turn, continuation):
        return
    results = _results(turn)
    first_text = continuation.first_text
    turn.rendered_observation = first_text if first_text != results[0] else None
    if len(results) > 1:
        _record_results(turn, continuation, count=len(results), limit=limit)


def shows_results(turn: Turn, continuation: Continuation) -> bool:
    """Whether the messages after a turn begin with its results, unchanged."""
    results = _results(turn)
    contents = [message["content"] for message in continuation.messages[: len(results)]]
    return contents == results


def _record_results(turn: Turn, continuation: Continuation, *, count: int, limit: int) -> None:
    """Record at most `limit` tokens of `count` results, starting with the first result."""
    first_start = continuation.spans[0][0]
    turn.spans = []
    for span_start, span_end in continuation.spans[:count]:
        result_start = span_start - first_start
        result_end = span_end - first_start
        if result_start < limit:
            turn.spans.append((result_start, min(result_end, limit)))
    last_end = turn.spans[-1][1] if turn.spans else 0  # there are none if the limit is 0
    turn.observation_ids = as_ids(continuation.ids[first_start : first_start + last_end])


def _results(turn: Turn) -> list[str]:
    """Return the results of a turn's calls, or its observation if it made none."""
    return list(turn.outcome.results) or [turn.outcome.observation]
