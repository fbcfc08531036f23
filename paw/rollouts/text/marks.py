"""Conversations with marks in place of texts, so that a chat template never sees the texts.

A mark contains a quotation mark: how often it is escaped in the rendered text shows how deep in
JSON the template put it, and the text is then escaped as often.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from paw.types import THINKING, ToolCall

PROBE = ToolCall("probe_tool", {"key": "QxValue"}, "call00000")
"""A call to render, which shows how a template writes calls."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": PROBE.name, "description": "a tool", "parameters": {}},
    }
]
TAGS = re.compile("(" + "|".join(map(re.escape, THINKING)) + ")")
MARK = re.compile(r'QxText(\\*)"(\d+)\1"xQ')
PLAIN = re.compile(r"[\w .,:;()/+-]*")
"""Names and types, which a template may see, because it decides by them."""


class Marks:
    """The texts that marks stand for.

    `harmless(text)` says whether a name or a word of a schema needs no mark.
    """

    def __init__(self, harmless: Callable[[str], bool]) -> None:
        self.texts: list[str] = []
        """By the number in their mark."""
        self.needed: dict[int, str] = {}
        """Numbers of the texts that the template has to show, with the role of their message."""
        self._harmless = harmless

    def mark(self, text: str, role: str = "") -> str:
        """What is rendered in place of `text`.

        With the `role` of its message, the template has to show it.
        """
        number = len(self.texts)
        self.texts.append(text)
        if role:
            self.needed[number] = role
        return f'QxText"{number}"xQ'

    def message(self, message: dict[str, Any], *, spaces: bool = True) -> dict[str, Any]:
        """A message with marks.

        Empty content stays, because templates act on it. With `spaces`, so do white space around
        the content and the <think> tags of an answer.
        """
        role = message["role"]
        content = message["content"]
        if not spaces:
            content = self.mark(content, role)
        elif role != "assistant":
            content = self._spaced(content, role)
        else:
            content = self._marked_answer(content, calls="tool_calls" in message)

        others = dict(message)
        del others["content"]
        marked = self.rest({**others, "content": None})
        marked["content"] = content
        return marked

    def _marked_answer(self, content: str, *, calls: bool) -> str:
        """An answer with its thoughts and its text marked, <think> tags left as they are."""
        *thoughts, text = TAGS.split(content)
        marked = ""
        for part in thoughts:
            marked += part if part in THINKING else self._spaced(part)
        role = "" if calls else "assistant"  # Llama 3 and Mistral show the calls alone
        return marked + self._spaced(text, role)

    def rest(self, value: Any) -> Any:
        """Names, ids, arguments or schemas, with marks in place of texts that may do harm."""
        if isinstance(value, dict):
            return {self.rest(key): self.rest(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.rest(part) for part in value]
        if not isinstance(value, str):
            return value
        if PLAIN.fullmatch(value) and self._harmless(value):
            return value
        return self.mark(value)

    def split(
        self, rendered: str, harmless: Callable[[str], str]
    ) -> tuple[list[str], list[str], list[int]]:
        """(the n + 1 pieces that the template wrote, the n texts between them, their numbers).

        The texts are made `harmless`, and escaped as the template escaped their marks. Raises
        ValueError if a text that the template has to show is not there.
        """
        parts = MARK.split(rendered)
        pieces = parts[::3]
        escapes = parts[1::3]
        numbers = [int(number) for number in parts[2::3]]
        for number, role in self.needed.items():
            if number not in numbers:
                raise ValueError(f"it does not show the {role} message")

        texts: list[str] = []
        for backslashes, number in zip(escapes, numbers, strict=True):
            text = harmless(self.texts[number])
            # 1, 3, 7, ... backslashes: JSON, JSON in JSON, ...
            json_depth = (len(backslashes) + 1).bit_length() - 1
            for _ in range(json_depth):
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            texts.append(text)
        return pieces, texts, numbers

    def _spaced(self, text: str, role: str = "") -> str:
        """`text` with a mark in place of all but the white space around it.

        White space alone stays as it is.
        """
        core = text.strip()
        if not core:
            return text
        return text.replace(core, self.mark(core, role), 1)


def conversation(context: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A context as messages."""
    return [{"role": "user", "content": context}] if isinstance(context, str) else context


def stands_for(message: dict[str, Any], response: str, answer: dict[str, Any] | None) -> bool:
    """Whether `message` is the model's last answer.

    That is its raw text, or the parsed `answer`, calls included.
    """
    if message["role"] != "assistant":
        return False
    text = message["content"].strip()
    if text == response.strip():
        return True
    if answer is None:
        return False
    return text == answer["content"].strip() and _functions(message) == _functions(answer)


def _functions(message: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The functions that a message calls, with their arguments."""
    return [call["function"] for call in message.get("tool_calls", ())]
