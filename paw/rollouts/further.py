"""Prompts that go on from what was said before, and answers that end at a stop string: what `plain` does not need."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paw.envs.conversation import unread
from paw.errors import EnvironmentFailure
from paw.rollouts.chat import Chat, Context, ContextFull, shown
from paw.rollouts.marks import conversation, stands_for
from paw.types import Reply, Turn

if TYPE_CHECKING:
    from paw.rollouts.episode import Earlier, EngineModel

TAIL = 8
"""Tokens looked at beyond as many as a stop string has characters: a character may have several."""


def further(model: "EngineModel", context: Context, continues: "Earlier") -> tuple[list[int], str]:
    """(ids of a conversation or of what continues a response, how the template opens the answer).

    Of what goes on from an earlier turn, that turn's own ids come first: whatever the template would drop of earlier
    answers (Qwen3 drops their thoughts) or render otherwise, stays as the model wrote it. A conversation that does not
    go on from the last one (the first, or an environment that rewrites an answer) is rendered as a whole. Raises
    ContextFull where there are too many.
    """
    chat, turns, limit = model.player.chat, model.episode.trajectory.turns, model.config.rollout.max_prompt_tokens
    if continues is not None:
        ids, opened = _after(chat, continues.turn, shown(context))
    else:
        messages, n, opened = conversation(context), len(model.said), chat.opened
        answer = model.reply.message() if model.reply is not None else None
        goes_on = 0 < n < len(messages) - 1 and messages[:n] == model.said
        if goes_on and stands_for(messages[n], turns[-1].response, answer):
            ids = _ended(chat, turns[-1])
            ids += _added(chat, turns[-1], answer or messages[n], messages[n + 1 :], model.config.wm.max_tokens)
        else:
            ids = chat.conversation_ids(messages, model.env.tools)
        if len(ids) > limit and not turns:
            fix = "raise it: of a conversation nothing is left out"
            raise EnvironmentFailure(f"rollout.max_prompt_tokens = {limit}, the first prompt has {len(ids)}; {fix}")
    if len(ids) > limit:
        raise ContextFull(f"rollout.max_prompt_tokens = {limit}")
    return ids, opened


def add_result(chat: Chat, turn: Turn, reply: Reply, limit: int) -> None:
    """The observation of a last turn, which called tools, is their results or the first one's: no prompt shows it."""
    results = turn.outcome.results or [turn.outcome.observation]
    messages = [call.answer(text) for call, text in zip(reply.calls or [unread(0)], results, strict=False)]
    _added(chat, turn, reply.message(), messages, limit)


def _added(chat: Chat, turn: Turn, answer: dict[str, Any], messages: list[dict[str, Any]], limit: int) -> list[int]:
    """Ids of what follows a turn's answer, each text encoded on its own: so it is found as a target of the world model.
    The turn learns where its observation stands there, and how; of several results at most `limit` tokens."""
    pieces, results = chat.added(answer, messages), turn.outcome.results or [turn.outcome.observation]
    ids, spans = list[int](), list[tuple[int, int]]()
    for written, text in pieces:
        start = len(ids) + len(written)
        ids += written + chat.observation_ids(text)
        spans.append((start, len(ids)))
    (separator, first), (start, _) = pieces[0], spans[0]
    separator = chat.missing_end(turn.response_ids) + separator
    turn.separator_ids = separator if separator != chat.separator_ids else None
    if [message["content"] for message in messages[: len(results)]] == [*results]:
        turn.shown = first if first != results[0] else None
        if len(results) > 1:
            turn.spans = [(a - start, min(b - start, limit)) for a, b in spans[: len(results)] if a - start < limit]
            turn.observation_ids = ids[start:][: turn.spans[-1][1]]
    return ids


def _after(chat: Chat, turn: Turn, text: str) -> tuple[list[int], str]:
    ids, opened = chat.observation_ids(text), ""
    if turn.response_ids[-1] in chat.end_ids:
        ids, opened = chat.separator_ids + ids + chat.reply_ids, chat.opened
    return turn.prompt_ids + turn.response_ids + ids, opened


def _ended(chat: Chat, turn: Turn) -> list[int]:
    """Ids of a turn up to the end of its answer, which may have been cut at rollout.max_response_tokens."""
    return turn.prompt_ids + turn.response_ids + chat.missing_end(turn.response_ids)


class Ends:
    """Whether the last tokens of a response hold one of the `stop` strings: engines then sample no further."""

    def __init__(self, chat: Chat, stop: Sequence[str]) -> None:
        self.chat, self.stop = chat, stop

    def __call__(self, ids: list[int]) -> bool:
        return bool(cut_at(self.chat.decode(ids[-max(map(len, self.stop)) - TAIL :]), self.stop)[1])

    def first(self, ids: list[int]) -> tuple[int, str]:
        """(tokens up to the first that completes a stop string, that string); all of them, "" without one."""
        found = cut_at(self.chat.decode(ids), self.stop)[1]
        low, high = (0, len(ids)) if found else (len(ids) - 1, len(ids))
        while high - low > 1:  # decode(ids[:low]) does not have it, decode(ids[:high]) has
            middle = (low + high) // 2
            low, high = (low, middle) if found in self.chat.decode(ids[:middle]) else (middle, high)
        return high, found


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the first of the stop strings, and that string; all of it and "" without one.

    >>> cut_at("go on<end> or <stop>", ["<stop>", "<end>"])
    ('go on', '<end>')
    """
    ends = [(place, word) for word in stop if (place := text.find(word)) >= 0]
    return (text[: min(ends)[0]], min(ends)[1]) if ends else (text, "")
