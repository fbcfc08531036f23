"""Prompts that continue an earlier turn, and responses that end at a stop string.

The agent `plain` needs neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paw.envs.conversation import unread
from paw.errors import EnvironmentFailure
from paw.rollouts.chat import Chat, Context, ContextFull, context_text
from paw.rollouts.marks import conversation, stands_for
from paw.types import Reply, Turn

if TYPE_CHECKING:
    from paw.rollouts.episode import Earlier, EngineModel

TAIL = 8
"""Tokens decoded beyond as many as a stop string has characters: a character may take several tokens."""


def further(model: "EngineModel", context: Context, continues: "Earlier") -> tuple[list[int], str]:
    """(prompt ids of a conversation or of text after a response, how the template opens the answer).

    A prompt that continues an earlier turn begins with that turn's own ids: whatever the template
    would drop from earlier answers (Qwen3 drops their thoughts) or render differently stays as the
    model wrote it. A conversation that does not continue the last one (the first, or one whose
    environment rewrites an answer) is rendered in full.

    Raises ContextFull if there are too many ids, and EnvironmentFailure if the first prompt of a
    conversation is too long already.
    """
    chat = model.player.chat
    limit = model.config.rollout.max_prompt_tokens

    if continues is not None:
        ids, opened = _after_response(chat, continues.turn, context_text(context))
    else:
        ids = _conversation_ids(model, conversation(context))
        opened = chat.opened
        is_first_turn = not model.episode.trajectory.turns
        if len(ids) > limit and is_first_turn:
            raise EnvironmentFailure(
                f"rollout.max_prompt_tokens = {limit}, the first prompt has {len(ids)}; "
                "raise it: of a conversation nothing is left out"
            )

    if len(ids) > limit:
        raise ContextFull(f"rollout.max_prompt_tokens = {limit}")
    return ids, opened


def add_result(chat: Chat, turn: Turn, reply: Reply, limit: int) -> None:
    """Record how the observation of an episode's last turn would be shown. The turn called tools, no prompt follows it.

    The observation is the tools' results, or that of the first one. `limit` as for
    `_record_observation`.
    """
    calls = reply.calls or [unread(0)]
    messages = [call.answer(result) for call, result in zip(calls, _results(turn), strict=False)]
    continuation = _continue(chat, reply.message(), messages)
    _record_observation(chat, turn, continuation, messages, limit)


def _conversation_ids(model: "EngineModel", messages: list[dict[str, Any]]) -> list[int]:
    """Ids of a conversation.

    If it continues the last one, that turn learns how its observation is shown here.
    """
    chat = model.player.chat
    turns = model.episode.trajectory.turns
    answer = model.reply.message() if model.reply is not None else None

    length = len(model.messages)  # of the last conversation, which the model's answer follows
    begins_the_same = 0 < length < len(messages) - 1 and messages[:length] == model.messages
    if not (begins_the_same and stands_for(messages[length], turns[-1].response, answer)):
        return chat.conversation_ids(messages, model.env.tools)

    last_turn = turns[-1]
    new_messages = messages[length + 1 :]
    continuation = _continue(chat, answer or messages[length], new_messages)
    ids = _ended(chat, last_turn) + continuation.ids
    _record_observation(chat, last_turn, continuation, new_messages, model.config.wm.max_tokens)
    return ids


@dataclass(frozen=True)
class Continuation:
    """What follows the end token of an answer: messages, then what opens the next response."""

    ids: list[int]
    separator_ids: list[int]
    """The first of `ids`, before the text of the first message."""
    first_text: str
    """The first message's text as the template writes it."""
    spans: list[tuple[int, int]]
    """[start, end) of each text in `ids`."""


def _continue(chat: Chat, answer: dict[str, Any], messages: list[dict[str, Any]]) -> Continuation:
    """What follows an answer.

    Each text is encoded on its own, so the world model finds it there as a target.
    """
    pieces = chat.added(answer, messages)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for template_ids, text in pieces:
        ids += template_ids
        start = len(ids)
        ids += chat.observation_ids(text)
        spans.append((start, len(ids)))
    separator_ids, first_text = pieces[0]
    return Continuation(ids=ids, separator_ids=separator_ids, first_text=first_text, spans=spans)


def _record_observation(
    chat: Chat, turn: Turn, continuation: Continuation, messages: list[dict[str, Any]], limit: int
) -> None:
    """Fill in where a turn's observation stands in what follows the turn, and how it is written there.

    `messages` are those that follow. Of several results at most `limit` tokens are recorded, those
    of what the template writes between them included.
    """
    separator_ids = chat.missing_end(turn.response_ids) + continuation.separator_ids
    turn.separator_ids = separator_ids if separator_ids != chat.separator_ids else None

    results = _results(turn)
    shown_results = [message["content"] for message in messages[: len(results)]]
    if shown_results != results:
        return

    turn.rendered_observation = (
        continuation.first_text if continuation.first_text != results[0] else None
    )
    if len(results) > 1:
        first_start = continuation.spans[0][0]
        turn.spans = []
        for start, end in continuation.spans[: len(results)]:
            if start - first_start < limit:
                turn.spans.append((start - first_start, min(end - first_start, limit)))
        last_end = turn.spans[-1][1]
        turn.observation_ids = continuation.ids[first_start : first_start + last_end]


def _results(turn: Turn) -> list[str]:
    """The results of a turn's calls; without any, its observation."""
    return list(turn.outcome.results) or [turn.outcome.observation]


def _after_response(chat: Chat, turn: Turn, text: str) -> tuple[list[int], str]:
    """(ids of a turn and the text after it, how the template opens the answer: "" within the turn's own answer)."""
    text_ids = chat.observation_ids(text)
    if turn.response_ids[-1] in chat.end_ids:
        ids = turn.prompt_ids + turn.response_ids + chat.separator_ids + text_ids + chat.reply_ids
        return ids, chat.opened
    return turn.prompt_ids + turn.response_ids + text_ids, ""


def _ended(chat: Chat, turn: Turn) -> list[int]:
    """Ids of a turn up to the end token of its answer, which may have been cut at rollout.max_response_tokens."""
    return turn.prompt_ids + turn.response_ids + chat.missing_end(turn.response_ids)


class Ends:
    """Whether the last tokens of a response contain one of the `stop` strings: engines then stop sampling."""

    def __init__(self, chat: Chat, stop: Sequence[str]) -> None:
        self.chat = chat
        self.stop = stop

    def __call__(self, ids: list[int]) -> bool:
        longest = max(len(word) for word in self.stop)
        tail = self.chat.decode(ids[-longest - TAIL :])
        return any(word in tail for word in self.stop)

    def first(self, ids: list[int]) -> tuple[int, str]:
        """(number of tokens up to the one that completes the first stop string, that string).

        (all tokens, "") if there is none.
        """
        _, stop = cut_at(self.chat.decode(ids), self.stop)
        if not stop:
            return len(ids), ""

        without = 0  # this many tokens do not contain the stop string
        containing = len(ids)  # this many do
        while containing - without > 1:
            middle = (without + containing) // 2
            if stop in self.chat.decode(ids[:middle]):
                containing = middle
            else:
                without = middle
        return containing, stop


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """(the text before the first stop string, that string); (all of it, "") if there is none.

    >>> cut_at("go on<end> or <stop>", ["<stop>", "<end>"])
    ('go on', '<end>')
    """
    matches = [(text.find(word), word) for word in stop if word in text]
    if not matches:
        return text, ""
    position, word = min(matches)
    return text[:position], word
