"""Prompts that go on from what was said before, and answers that end at a stop string: what `plain` does not need."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paw.rollout.chat import Chat, Context, ContextFull, shown
from paw.types import Turn

if TYPE_CHECKING:
    from paw.rollout.episode import Earlier, EngineModel

TAIL = 8
"""Tokens looked at beyond as many as a stop string has characters: a character may have several."""


def further(model: "EngineModel", context: Context, continues: "Earlier") -> tuple[list[int], str]:
    """(ids of a conversation or of what continues a response, how the template opens the answer).

    Of what goes on from an earlier turn, that turn's own ids come first. Raises ContextFull where there are too many.
    """
    chat, turns, limit = model.player.chat, model.episode.trajectory.turns, model.config.rollout.max_prompt_tokens
    if continues is not None:
        ids, opened = _after(chat, continues.turn, shown(context))
    else:
        assert not isinstance(context, str)
        roles, contents = [message["role"] for message in context], [message["content"] for message in context]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise ValueError(f"a conversation is user, assistant, ..., user in turn; its roles are {', '.join(roles)}")
        goes_on = model.said and contents[:-1] == model.said and turns[-1].response_ids[-1] in chat.end_ids
        ids, opened = _after(chat, turns[-1], contents[-1]) if goes_on else (_whole(chat, contents), chat.opened)
    if len(ids) > limit:
        raise ContextFull(f"rollout.max_prompt_tokens = {limit}")
    return ids, opened


def _after(chat: Chat, turn: Turn, text: str) -> tuple[list[int], str]:
    ids, opened = chat.observation_ids(text), ""
    if turn.response_ids[-1] in chat.end_ids:
        ids, opened = chat.separator_ids + ids + chat.reply_ids, chat.opened
    return turn.prompt_ids + turn.response_ids + ids, opened


def _whole(chat: Chat, contents: list[str]) -> list[int]:
    """The ids of a conversation begin with those of the one before, whatever the template leaves out of answers."""
    ids = chat.prompt_ids(contents[0])
    for answer, text in zip(contents[1::2], contents[2::2], strict=True):
        ids += chat.response_ids(answer) + chat.separator_ids + chat.observation_ids(chat.trim(text)) + chat.reply_ids
    return ids


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
