"""Conversations with marks in place of texts, so that a chat template never sees the texts.

A mark contains a quotation mark. How often it is escaped in the rendered text shows how deep in
JSON the template put it. The text is then escaped as often.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from paw.types import THINKING, ToolCall

PROBE = ToolCall("probe_tool", {"key": "QxValue"}, "call00000")
"""A call that is rendered to show how a template writes calls."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": PROBE.name, "description": "a tool", "parameters": {}},
    }
]
TAGS = re.compile("(" + "|".join(map(re.escape, THINKING)) + ")")
MARK = re.compile(r'QxText(\\*)"(\d+)\1"xQ')
PLAIN = re.compile(r"[\w .,:;()/+-]*")
"""Keys of names and types. A template may see their values, because it depends on them."""


class Marks:
    """The texts that marks stand for.

    `harmless(text)` says whether a name or a word in a schema needs no mark.
    """

    def __init__(self, harmless: Callable[[str], bool]) -> None:
        self.texts: list[str] = []
        """Texts by the number in their mark."""
        self.needed: dict[int, str] = {}
        """Numbers of the texts that the template must show, with the role of their message."""
        self._harmless = harmless

    def mark(self, text: str, role: str = "") -> str:
        """Return what is rendered instead of `text`.

        If the `role` of its message is given, the template must show the text.
        """
        number = len(self.texts)
        self.texts.append(text)
        if role:
            self.needed[number] = role
        return f'QxText"{number}"xQ'

    def message(self, message: dict[str, Any], *, spaces: bool = True) -> dict[str, Any]:
        """Return a message with marks.

        Empty content stays, because templates depend on it. With `spaces`, white space around the
        content and the <think> tags of an answer stay too.
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
        """Mark the thoughts and the text of an answer, but not the <think> tags."""
        *thoughts, text = TAGS.split(content)
        marked = ""
        for thought in thoughts:
            marked += thought if thought in THINKING else self._spaced(thought)
        role = "" if calls else "assistant"  # Llama 3 and Mistral show the calls alone
        return marked + self._spaced(text, role)

    def rest(self, value: Any) -> Any:
        """Replace potentially harmful texts in names, ids, arguments or schemas with marks."""
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
        """Return (the n + 1 pieces that the template wrote, the n texts between them, their
        numbers).

        The texts are made `harmless`, and escaped as the template escaped their marks. Raises
        ValueError if a text that the template must show is missing.
        """
        split_text = MARK.split(rendered)
        pieces = split_text[::3]
        escapes = split_text[1::3]
        numbers = [int(number) for number in split_text[2::3]]
        for number, role in self.needed.items():
            if number not in numbers:
                raise ValueError(f"it does not show the {role} message")

        marked_texts: list[str] = []
        for backslashes, number in zip(escapes, numbers, strict=True):
            text = harmless(self.texts[number])
            # 1, 3, 7, ... backslashes: JSON, JSON in JSON, ...
            json_depth = (len(backslashes) + 1).bit_length() - 1
            for _ in range(json_depth):
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            marked_texts.append(text)
        return pieces, marked_texts, numbers

    def _spaced(self, text: str, role: str = "") -> str:
        """Replace all of `text`, except the white space around it, with a mark.

        Text that is only white space stays as it is.
        """
        core = text.strip()
        if not core:
            return text
        return text.replace(core, self.mark(core, role), 1)


def conversation(context: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a context as messages."""
    return [{"role": "user", "content": context}] if isinstance(context, str) else context


def stands_for(message: dict[str, Any], response: str, answer: dict[str, Any] | None) -> bool:
    """Whether `message` is the model's last answer.

    The answer is its raw text, or the parsed `answer`, including its calls.
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
    """Return the functions that a message calls, with their arguments."""
    return [tool_call["function"] for tool_call in message.get("tool_calls", ())]
