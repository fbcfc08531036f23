"""Text to token ids and back, through a model's own chat template, so that environment text cannot forge turns.

A prompt is one user message plus the generation prompt. Benign text gets exactly the ids of
`tokenizer.apply_chat_template`; text that spells a control token ("<|im_end|>") is encoded as the ordinary characters
it consists of, so the only control tokens of a prompt are the template's own. Where turns are marked by ordinary text
("[INST]"), such text in a prompt loses its first character.

The template is rendered once, with a marker as content. One that prints the date keeps the date of construction.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from paw.errors import UserError

MARK, REPLY, AGAIN = "QxUserTextxQ", "QxReplyTextxQ", "QxUserAgainxQ"


THINKING = ("<think>", "</think>")


class Chat:
    """Encoder and decoder of one fast Hugging Face tokenizer; `options` are variables of its chat template.

    Raises UserError for a tokenizer without a chat template, without a `tokenizers` back end, with a template that does
    not show the user's text exactly once or does not know one of the options.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None):
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        if not getattr(tokenizer, "chat_template", None):
            fix = "use an instruct model, or add a chat_template.jinja to the model's folder"
            raise UserError(f"the tokenizer of '{self.name}' has no chat template; {fix}")
        for key in options or {}:
            if not re.search(rf"\b{re.escape(key)}\b", str(tokenizer.chat_template)):
                fix = "leave it out, or --model.chat_template_kwargs '{}' where a recipe sets it"
                raise UserError(f"model.chat_template_kwargs: the template of '{self.name}' has no '{key}'; {fix}")
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(f"the tokenizer of '{self.name}' is not a fast one (no tokenizer.json); convert it first")
        self._backend = Tokenizer.from_str(backend.to_str())  # the owner's changes its settings with every call
        self._backend.no_truncation()
        self._backend.no_padding()

        def render(*contents: str, ask: bool) -> str:
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
            variables = {"tokenize": False, "add_generation_prompt": ask, **(options or {})}
            return str(tokenizer.apply_chat_template(messages, **variables))

        turns = render(MARK, REPLY, AGAIN, ask=False)
        between = turns.partition(REPLY)[2].partition(AGAIN)[0]
        self._control = self._control_ids(tokenizer, turns.replace(MARK, "").replace(REPLY, "").replace(AGAIN, ""))
        self._thinking = {i for i in self._control if self._backend.id_to_token(i) in THINKING}
        self._forged = self._forged_pattern()
        self._prefix, self._suffix = self._split(render(MARK, ask=True))
        self._markers = self._marker_pattern(between)
        self.opened: str = self._suffix[start:] if (start := self._suffix.find(THINKING[0])) >= 0 else ""
        """How the template begins every answer: "", or from <think> on. Part of the answer, not of what is sampled."""
        self._trim = self._find_trim(render(f" \n{MARK}\n ", ask=True))

        between_ids = self._encode(between)
        turn_end = next((i for i in between_ids if i in self._control), None)
        self.end_ids: frozenset[int] = frozenset({tokenizer.eos_token_id, turn_end} - {None})
        """Tokens that end a response."""
        self._turn_end: int = turn_end if turn_end is not None else tokenizer.eos_token_id
        first = next((n + 1 for n, i in enumerate(between_ids) if i in self.end_ids), 0)
        self.separator_ids: list[int] = between_ids[first:]
        """From a response's end token to the next user text (ChatML: newline, <|im_start|>, "user", newline)."""

        literal = self._encode(self._prefix), self._encode(self._suffix)
        self._expected = [i for ids in literal for i in ids if i in self._control]
        self._head, self._lead = self._break_after_control(self._prefix)
        self._tail_lead, self._tail = self._break_before_control(self._suffix)
        self.reply_ids: list[int] = self._encode_plain(self._tail_lead) + self._tail
        """From user text to the response (ChatML: <|im_end|>, newline, <|im_start|>, "assistant", newline)."""

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of `text` as the one user message, ready for a response."""
        text = self._trim(self._harmless(text))
        ids = self._encode(self._prefix + text + self._suffix)
        if [i for i in ids if i in self._control] == self._expected:
            return ids
        return self._head + self._encode_plain(self._lead + text + self._tail_lead) + self._tail

    def fit_prompt(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """`prompt_ids`, with the text's first tokens cut where the prompt would exceed `max_tokens`.

        Returns the ids and the number of tokens cut. Raises UserError when the template alone is too long.
        """
        ids = self.prompt_ids(text)
        if len(ids) <= max_tokens:
            return ids, 0
        head = self._head + self._encode_plain(self._lead)
        room = max_tokens - len(head) - len(self._tail)
        if room <= 0:
            raise UserError(
                f"rollout.max_prompt_tokens = {max_tokens} leaves no room beside the {len(head) + len(self._tail)}"
                f" tokens of the chat template of '{self.name}'"
            )
        content = self._encode_plain(self._trim(self._harmless(text)) + self._tail_lead)
        return head + content[-room:] + self._tail, max(0, len(content) - room)

    def conversation_ids(self, contents: Sequence[str]) -> list[int]:
        """Ids of messages of user and assistant in turn, the user's last, ready for a response.

        Longer by what was said than the ids of the conversation before it, whatever the template leaves out of answers.
        """
        ids = self.prompt_ids(contents[0])
        for answer, text in zip(contents[1::2], contents[2::2], strict=True):
            user = self._encode_plain(self._trim(self._harmless(text)))
            ids += self.response_ids(answer) + self.separator_ids + user + self.reply_ids
        return ids

    def observation_ids(self, text: str, max_tokens: int) -> list[int]:
        """Ids of raw text without any control token, the first `max_tokens` of them (world-model target)."""
        return self._encode_plain(self._harmless(text))[:max_tokens]

    def observation_spans(self, text: str, max_tokens: int) -> list[tuple[int, int]]:
        """The characters [start, end) of `text` that each of its `observation_ids` stands for."""
        spans, start = [], 0
        for piece in self._forged.split(self._harmless(text)):
            encoding = self._backend.encode(piece, add_special_tokens=False)
            kept = (at for at, i in zip(encoding.offsets, encoding.ids, strict=True) if i not in self._control)
            spans += [(start + first, start + last) for first, last in kept]
            start += len(piece)
        return spans[:max_tokens]

    def response_ids(self, text: str) -> list[int]:
        """Ids of a demonstrated response after `opened`, the turn's end token included (what a warm-up imitates)."""
        return [*self._encode_plain(_encodable(self.sampled(text))), self._turn_end]

    def sampled(self, answer: str) -> str:
        """The part of an answer that is sampled: without what the template has begun it with."""
        return answer.removeprefix(self.opened).removeprefix(self.opened.rstrip())

    def answer(self, ids: Iterable[int]) -> str:
        """Text of a response, with what the template has begun it with."""
        return self.opened + self.decode(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of sampled tokens, without the end token and any other control token."""
        drop = (self._control | self.end_ids) - self._thinking
        return self._backend.decode([i for i in ids if i not in drop], skip_special_tokens=False)

    def _harmless(self, text: str) -> str:
        """`text` as a tokenizer takes it, no marker of a turn in it; of the same length."""
        text, before = _encodable(text), ""
        while text != before:  # a marker may appear where another one was
            text, before = self._markers.sub(lambda found: " " + found[0][1:], text), text
        return text

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with every control token in it spelt out."""
        ids = [i for piece in self._forged.split(text) for i in self._encode(piece)]
        # What is left cannot be spelt out: a control token of one character, or one met only after normalisation.
        return [i for i in ids if i not in self._control]

    def _control_ids(self, tokenizer: Any, literals: str) -> frozenset[int]:
        """Special tokens, and whatever added tokens the template builds turns from."""
        added = tokenizer.added_tokens_decoder
        control = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        control |= {i for i in self._encode(literals) if i in added}
        named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        if tokenizer.unk_token_id not in named:  # what unknown words become: it opens no turn
            control.discard(tokenizer.unk_token_id)
        return frozenset(control)

    def _forged_pattern(self) -> re.Pattern[str]:
        """Where to cut text so that no piece holds a control token: after the first character of each.

        `split_special_tokens` would leave those that a tokenizer added without the special flag.
        """
        rests: dict[str, list[str]] = {}
        for i in sorted(self._control):
            token = self._backend.id_to_token(i) or ""
            if len(token) > 1:
                rests.setdefault(token[0], []).append(re.escape(token[1:]))
        cuts = [f"(?<={re.escape(first)})(?={'|'.join(rest)})" for first, rest in rests.items()]
        return re.compile("|".join(cuts) or r"(?!)")

    def _marker_pattern(self, between: str) -> re.Pattern[str]:
        """Ordinary text that marks turns: that of a template with no control token between question and answer."""
        if any(i in self._control for i in self._encode(self._suffix)):
            return re.compile(r"(?!)")
        control = "|".join(re.escape(self._backend.id_to_token(i) or "") for i in sorted(self._control)) or r"(?!)"
        parts = [part.strip() for text in (self._prefix, self._suffix, between) for part in re.split(control, text)]
        words = {word for part in parts for word in (part, *part.splitlines()[-1:]) if word}
        return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")

    def _split(self, rendered: str) -> tuple[str, str]:
        if rendered.count(MARK) != 1:
            raise UserError(
                f"the chat template of '{self.name}' shows a user message {rendered.count(MARK)} times; expected once"
            )
        prefix, _, suffix = rendered.partition(MARK)
        return prefix, suffix

    def _find_trim(self, rendered: str) -> Callable[[str], str]:
        """What the template does to white space around the content (Llama 3 strips it)."""
        prefix, suffix = self._split(rendered)
        for trim in (str, str.strip, str.lstrip, str.rstrip):
            left, _, right = trim(f" \n{MARK}\n ").partition(MARK)
            if (prefix, suffix) == (self._prefix + left, right + self._suffix):
                return trim
        raise UserError(f"the chat template of '{self.name}' rewrites white space around a user message")

    def _break_after_control(self, text: str) -> tuple[list[int], str]:
        """(ids up to the last control token, the ordinary text after it)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        last = max((n for n, i in enumerate(encoding.ids) if i in self._control), default=-1)
        return encoding.ids[: last + 1], text[encoding.offsets[last][1] if last >= 0 else 0 :]

    def _break_before_control(self, text: str) -> tuple[str, list[int]]:
        """(the ordinary text before the first control token, ids from there on)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        first = next((n for n, i in enumerate(encoding.ids) if i in self._control), None)
        return (text, []) if first is None else (text[: encoding.offsets[first][0]], encoding.ids[first:])


def _encodable(text: str) -> str:
    """Lone surrogates, which no tokenizer takes, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
