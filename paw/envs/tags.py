"""What the paper-style prompts of ALFWorld and WebShop share: how past turns are shown, and the tags of an answer.

Source: verl-agent's `SimpleMemory.fetch`, `alfworld_projection` and `webshop_projection`.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

CJK = re.compile("[\u4e00-\u9fff]")
P = TypeVar("P")
C = TypeVar("C")


def history_text(past: Sequence[tuple[str, str]], shown: int) -> str:
    """The last `shown` of the (observation, action played on it) of every earlier turn, a line each."""
    first = len(past) - shown
    return "\n".join(
        f"[Observation {i + 1}: '{past[i][0]}', Action {i + 1}: '{past[i][1]}']" for i in range(first, len(past))
    )


def tagged_action(response: str, *, think: bool, unparsed: int) -> tuple[str, bool]:
    """(action to play, whether the response is well-formed).

    The action is the text between the first <action> and the first </action>, lower-cased; without them, the last
    `unparsed` characters. <think> is looked for as written, <action> in any case.
    """
    text = response.lower()
    start, end = text.find("<action>"), text.find("</action>")
    if start == -1 or end == -1:
        return text[-unparsed:], False
    thought = not think or ("<think>" in response and "</think>" in response)
    return text[start + len("<action>") : end].strip(), thought and not CJK.search(response)


class TaggedStyle:
    """Answers in tags. Whether an action is admissible does not matter for validity."""

    unparsed: int
    """See `tagged_action`."""

    def __init__(self, *, history: int = 2, think: bool = True) -> None:
        self.history, self.think = history, think

    def parse_action(self, response: str, admissible: Collection[str]) -> tuple[str, bool]:
        """(action to play, whether the response is well-formed)."""
        return tagged_action(response, think=self.think, unparsed=self.unparsed)

    def format_action(self, action: str) -> str:
        """A well-formed response that plays `action`."""
        return tagged_answer(action, think=self.think)


def tagged_answer(action: str, *, think: bool) -> str:
    """A well-formed response that plays `action`."""
    thought = f"<think>I should {action}.</think>" if think else ""
    return f"{thought}<action>{action}</action>"


def choose_style(style: str, paper: Callable[..., P], compact: Callable[..., C], *, history: int, think: bool) -> P | C:
    """The style that `env.style` names, "paper" or "compact" (`think` is the paper style's). ValueError for another."""
    if style == "paper":
        return paper(history=history, think=think)
    if style == "compact":
        return compact(history=history)
    raise ValueError(f"style must be 'paper' or 'compact', got {style!r}")
