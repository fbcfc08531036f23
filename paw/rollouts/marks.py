"""Conversations with marks in place of texts: a chat template is rendered around them, so no text takes part in it.

A mark holds a quotation mark. So it tells where the template writes JSON, in which the text is then escaped as often.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from paw.types import THINKING, ToolCall

PROBE = ToolCall("probe_tool", {"key": "QxValue"}, "call00000")
"""A call that tells how a template writes one."""
TOOLS = [{"type": "function", "function": {"name": PROBE.name, "description": "a tool", "parameters": {}}}]
TAGS = re.compile("(" + "|".join(map(re.escape, THINKING)) + ")")
MARK = re.compile(r'QxText(\\*)"(\d+)\1"xQ')
PLAIN = re.compile(r"[\w .,:;()/+-]*")
"""Text that a template may see: it decides by names and types."""


class Marks:
    """Texts by number; `harmless(text)` says whether a name or a word of a schema may stand as it is."""

    def __init__(self, harmless: Callable[[str], bool]) -> None:
        self.texts: list[str] = []
        self.needed: dict[int, str] = {}
        """Texts that the template has to show, and whose they are."""
        self._harmless = harmless

    def mark(self, text: str, role: str = "") -> str:
        """What is rendered in place of `text`; of a message's `role` it must be shown."""
        if role:
            self.needed[len(self.texts)] = role
        self.texts.append(text)
        return f'QxText"{len(self.texts) - 1}"xQ'

    def message(self, message: dict[str, Any], *, spaces: bool = True) -> dict[str, Any]:
        """A message with marks. `spaces` around a content, and <think> tags of an answer, stay for the template to act
        on; so does an empty content."""
        role, content, others = message["role"], message["content"], dict(message)
        del others["content"]
        if not spaces:
            content = self.mark(content, role)
        elif role != "assistant":
            content = self._spaced(content, role)
        else:
            *thought, said = TAGS.split(content)
            content = "".join(part if part in THINKING else self._spaced(part) for part in thought)
            content += self._spaced(said, "" if "tool_calls" in message else role)  # Llama 3, Mistral: calls alone
        return self.rest({**others, "content": None}) | {"content": content}

    def rest(self, value: Any) -> Any:
        """Names, ids, arguments and schemas, with marks where a text could do harm."""
        if isinstance(value, dict):
            return {self.rest(key): self.rest(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.rest(part) for part in value]
        plain = not isinstance(value, str) or (PLAIN.fullmatch(value) and self._harmless(value))
        return value if plain else self.mark(value)

    def split(self, rendered: str, harmless: Callable[[str], str]) -> tuple[list[str], list[str], list[int]]:
        """(what the template wrote, n + 1 pieces; the n texts between them, made harmless and escaped as there; their
        numbers).

        Raises ValueError where a text that it has to show is not there.
        """
        parts = MARK.split(rendered)
        numbers = [int(number) for number in parts[2::3]]
        if hidden := [role for number, role in self.needed.items() if number not in numbers]:
            raise ValueError(f"it does not show the {hidden[0]} message")
        texts = []
        for slashes, number in zip(parts[1::3], numbers, strict=True):
            text = harmless(self.texts[number])
            for _ in range((len(slashes) + 1).bit_length() - 1):  # 1, 3, 7, ...: JSON in JSON
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            texts.append(text)
        return parts[::3], texts, numbers

    def _spaced(self, text: str, role: str = "") -> str:
        core = text.strip()
        return text.replace(core, self.mark(core, role), 1) if core else text


def conversation(context: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A context as messages."""
    return [{"role": "user", "content": context}] if isinstance(context, str) else context


def stands_for(message: dict[str, Any], response: str, answer: dict[str, Any] | None) -> bool:
    """Whether `message` is the model's last answer: its raw text, or what was read of it, calls included."""
    if message["role"] != "assistant":
        return False
    said = message["content"].strip()
    if said == response.strip():
        return True
    return answer is not None and said == answer["content"].strip() and _calls(message) == _calls(answer)


def _calls(message: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]
