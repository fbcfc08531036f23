"""Text to token ids and back, through a model's own chat template, so that environment text cannot forge turns.

A prompt is one user message, or a conversation with tools, plus the generation prompt. Benign text
gets exactly the ids of `tokenizer.apply_chat_template`; text that spells a control token
("<|im_end|>") is encoded as the ordinary characters it consists of, so the only control tokens of a
prompt are the template's own. Where turns are marked by ordinary text ("[INST]"), such text in a
prompt loses its first character. The template is rendered with markers in place of texts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from tokenizers import Tokenizer

from paw.errors import EnvironmentFailure, UserError, clean, describe
from paw.rollouts.marks import PROBE, TOOLS, Marks
from paw.rollouts.template import TURN_S, TemplateLimitError, try_template, within
from paw.types import THINKING, Reply, ToolCall

AWAITS_RESULT = "<|eom_id|>"
"""How Llama 3 ends an answer that calls a tool, where it does not end its turn; in its generation config, too."""
LONGEST = 1_000_000
"""Characters that a template may write."""
MARK, REPLY, AGAIN = "QxUserTextxQ", "QxReplyTextxQ", "QxUserAgainxQ"
SPACED = f" \n{MARK}\n "
Context = str | list[dict[str, Any]]
"""One user message, or a conversation of messages {"role", "content"} (paw/envs/base.py)."""


class ContextFull(Exception):
    """What the model is to go on with does not fit its context.

    The episode is over, with what it has.
    """


def shown(context: Context) -> str:
    """A context as one text."""
    if isinstance(context, str):
        return context
    lines: list[str] = []
    for message in context:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        lines += [message["content"]] * bool(message["content"] or not functions)
        lines += [str(ToolCall(function["name"], function["arguments"])) for function in functions]
    return "\n".join(lines)


class Chat:
    """Encoder and decoder of one fast Hugging Face tokenizer; `options` are variables of its chat
    template, `tool_parser` is model.tool_parser (see `paw.rollouts.calls`).

    Raises UserError for one without a chat template or `tokenizers` back end, and for a template
    that does not show the user's text exactly once or does not know one of the options.
    """

    def __init__(
        self, tokenizer: Any, options: Mapping[str, Any] | None = None, tool_parser: str = "auto"
    ):
        self.name = tokenizer.name_or_path or "this model"
        if not getattr(tokenizer, "chat_template", None):
            fix = "use an instruct model, or add a chat_template.jinja to the model's folder"
            raise UserError(f"the tokenizer of '{self.name}' has no chat template; {fix}")
        template = str(tokenizer.chat_template)
        for key, value in (options or {}).items():
            if key == "enable_thinking" and value is False and "think" not in template.lower():
                continue  # so it is without asking
            if not re.search(rf"\b{re.escape(key)}\b", template):
                fix = "leave it out, or --model.chat_template_kwargs '{}' where a recipe sets it"
                raise UserError(
                    f"model.chat_template_kwargs: the template of '{self.name}' has no '{key}'; {fix}"
                )
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(
                f"the tokenizer of '{self.name}' is not a fast one (no tokenizer.json); convert it first"
            )
        self._backend = Tokenizer.from_str(
            backend.to_str()
        )  # the owner's changes its settings with every call
        self._backend.no_truncation()
        self._backend.no_padding()

        self._tokenizer, self._options, self._tool_parser = (
            tokenizer,
            dict(options or {}),
            tool_parser,
        )
        self._read: Callable[[str, list[Any], int], Reply] | None = None

        def render(*contents: str, ask: bool = True) -> str:
            roles = ("user", "assistant", "user")
            messages = [
                {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
            ]
            return self.render(messages, ask=ask)

        try:
            try_template(self._trials())
            turns = render(MARK, REPLY, AGAIN, ask=False)
            rendered, spaced = render(MARK), render(SPACED)
        except Exception as error:  # a template raises what it likes
            fix = "fix chat_template.jinja in the model's folder, or take another model"
            why = (
                clean(error, 300)
                if isinstance(error, TemplateLimitError)
                else clean(describe(error), 300)
            )
            raise UserError(
                f"the chat template of '{self.name}' cannot be rendered: {why}; {fix}"
            ) from None
        between = turns.partition(REPLY)[2].partition(AGAIN)[0]
        unsaid = self._control_ids(tokenizer, re.sub(f"{MARK}|{REPLY}|{AGAIN}", "", turns))
        thinking = {self._backend.token_to_id(word) for word in THINKING}
        self._control = unsaid | (self._control_ids(tokenizer, self._with_tools()) - thinking)
        words = {self._backend.id_to_token(i) or "" for i in self._control} - {""}
        control, self._forged, self._markers = _any(words), _forged(words), _any([])
        self._words = control
        if (count := rendered.count(MARK)) != 1:
            raise UserError(
                f"the chat template of '{self.name}' shows a user message {count} times; expected once"
            )
        self._whole = prefix, suffix = rendered.split(MARK)
        if not control.search(suffix):
            parts = [
                part.strip() for text in (prefix, suffix, between) for part in control.split(text)
            ]
            self._markers = _any(
                {word for part in parts for word in (part, *part.splitlines()[-1:]) if word}
            )
        self.opened: str = suffix[start:] if (start := suffix.find(THINKING[0])) >= 0 else ""
        """How the template begins every answer: "", or from <think> on.

        Part of the answer, not of what is sampled.
        """
        trims = (str, str.strip, str.lstrip, str.rstrip)
        fits = [trim for trim in trims if spaced == prefix + trim(SPACED) + suffix]
        if not fits:
            raise UserError(
                f"the chat template of '{self.name}' rewrites white space around a user message"
            )
        self.trim: Callable[[str], str] = fits[0]
        """What the template does to white space around the content (Llama 3 strips it)."""

        ids = self.encode(between)
        turn_end = next((i for i in ids if i in self._control), tokenizer.eos_token_id)
        self._turn_end: list[int] = [] if turn_end is None else [turn_end]
        ends = {tokenizer.eos_token_id, turn_end, self._backend.token_to_id(AWAITS_RESULT)}
        self.end_ids: frozenset[int] = frozenset(ends - {None})
        """Tokens that end a response."""
        self._unsaid = (unsaid | self.end_ids) - thinking
        self.separator_ids: list[int] = ids[
            next((n + 1 for n, i in enumerate(ids) if i in self.end_ids), 0) :
        ]
        """From a response's end token to the next user text (ChatML: newline, <|im_start|>, "user", newline)."""

        last = max((found.end() for found in control.finditer(prefix)), default=0)
        self._head, self._lead = self.encode(prefix[:last]), prefix[last:]
        first = found.start() if (found := control.search(suffix)) else len(suffix)
        self._tail_lead, self._tail = suffix[:first], self.encode(suffix[first:])
        self._expected = [i for i in self._head + self._tail if i in self._control]
        self.reply_ids: list[int] = self._plain(self._tail_lead) + self._tail
        """From user text to the response (ChatML: <|im_end|>, newline, <|im_start|>, "assistant", newline)."""

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of `text` as the one user message, ready for a response."""
        text = self.trim(self._harmless(text))
        ids = self.encode(text.join(self._whole))
        if [i for i in ids if i in self._control] == self._expected:
            return ids
        return self._head + self._plain(self._lead + text + self._tail_lead) + self._tail

    def fit_prompt(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """(`prompt_ids` without the text's first tokens beyond `max_tokens`, the number of tokens cut).

        Raises UserError when the template alone is too long.
        """
        ids = self.prompt_ids(text)
        if len(ids) <= max_tokens:
            return ids, 0
        head = self._head + self._plain(self._lead)
        room = max_tokens - len(head) - len(self._tail)
        if room <= 0:
            raise UserError(
                f"rollout.max_prompt_tokens = {max_tokens} leaves no room beside the {len(head) + len(self._tail)}"
                f" tokens of the chat template of '{self.name}'"
            )
        content = self._plain(self.trim(self._harmless(text)) + self._tail_lead)
        return head + content[-room:] + self._tail, max(0, len(content) - room)

    def render(
        self, messages: list[Any], tools: list[Any] | None = None, *, ask: bool = True
    ) -> str:
        """The template's text, with the model's turn begun if `ask`. Raises whatever the template
        raises, and TemplateLimitError if it does not end or writes too much."""
        variables = {"tokenize": False, "add_generation_prompt": ask, **self._options}
        template = partial(
            self._tokenizer.apply_chat_template, messages, tools=tools or None, **variables
        )
        text = str(within(TURN_S, template))
        if len(text) > LONGEST:
            raise TemplateLimitError(f"it writes more than {LONGEST:,} characters")
        return text

    def _trials(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Conversations without tools and with them, for `try_template`."""
        user = {"role": "user", "content": MARK}
        turns = [user, {"role": "assistant", "content": REPLY}] * 8
        called = [user, Reply.of("", PROBE).message(), PROBE.answer(REPLY)]
        trials = []
        for tools, conversations in (
            (None, ([user], [*turns, user])),
            (TOOLS, ([user], called * 4)),
        ):
            common = {
                **self._tokenizer.special_tokens_map,
                **self._options,
                "tools": tools,
                "documents": None,
            }
            template = str(self._tokenizer.get_chat_template(tools=tools))
            asked = [
                common | {"messages": messages, "add_generation_prompt": True}
                for messages in conversations
            ]
            trials.append((template, asked))
        return trials

    def conversation_ids(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        """Ids of a whole conversation as the template renders it, ready for a response.

        Raises UserError for tools that the template does not show, EnvironmentFailure for messages
        it does not take.
        """
        if tools and not self._shows_tools:
            raise UserError(
                f"the chat template of '{self.name}' has no tools: take a model whose template has (Qwen, Llama 3, "
                "Mistral), or an environment without, such as --env.style paper where it has one"
            )
        marks = Marks(self._is_harmless)
        try:
            rendered = self.render(
                [marks.message(message) for message in messages], marks.rest(tools)
            )
            literals, texts, _ = marks.split(rendered, self._harmless)
        except Exception as error:
            raise self._refused(messages, error) from None
        woven = list(zip(literals, [*texts, ""], strict=True))
        ids, pieces, buffer = self.encode("".join(map("".join, woven))), list[int](), ""
        for literal, text in woven:
            if found := [match.span() for match in self._words.finditer(literal)]:
                start, end = found[0][0], found[-1][1]
                pieces += self._plain(buffer + literal[:start]) + self.encode(literal[start:end])
                buffer, literal = "", literal[end:]
            buffer += literal + text
        pieces += self._plain(buffer)
        return ids if self._controls(ids) == self._controls(pieces) else pieces

    def added(
        self, answer: dict[str, Any], messages: list[dict[str, Any]]
    ) -> list[tuple[list[int], str]]:
        """What follows the end of an `answer`: of each of `messages` (ids that come before its
        text, the text as the template writes it), then (ids up to the next response, "").

        It is the template's own where it renders a user message, the answer and those; earlier ones
        take no part, so that what it drops or merges there stays as the model had it. Raises
        EnvironmentFailure for messages that the template does not take.
        """
        if [message["role"] for message in messages] == ["user"]:
            return [(self.separator_ids, messages[0]["content"]), (self.reply_ids, "")]
        problem: Exception | None = None
        plain = {"role": "assistant", "content": REPLY}
        for said in (
            answer | plain,
            answer | {"content": ""},
            plain,
        ):  # not all take a text with calls, or many calls
            marks = Marks(self._is_harmless)
            asked = [{"role": "user", "content": MARK}, marks.rest(said)]
            try:
                rendered = self.render(
                    asked + [marks.message(message, spaces=False) for message in messages]
                )
                literals, texts, numbers = marks.split(rendered, lambda text: text)
                places = [-1, *sorted(map(numbers.index, marks.needed)), len(texts)]
                pieces = [
                    (
                        self._each(literals[before + 1 : at + 1], texts[before + 1 : at]),
                        [*texts, ""][at],
                    )
                    for before, at in pairwise(places)
                ]
                ends = [place for place, i in enumerate(pieces[0][0]) if i in self.end_ids]
                if not ends:
                    raise ValueError("it ends an answer with no token")
                return [(pieces[0][0][ends[-1] + 1 :], pieces[0][1]), *pieces[1:]]
            except Exception as error:
                problem = problem or error
        raise self._refused([answer, *messages], problem)

    def observation_ids(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Ids of raw text without any control token, the first `max_tokens` of them (world-model target)."""
        return self._plain(self._harmless(text))[:max_tokens]

    def observation_spans(self, text: str, max_tokens: int) -> list[tuple[int, int]]:
        """The characters [start, end) of `text` that each of its `observation_ids` stands for."""
        return [span for _, span in self._pieces(self._harmless(text))][:max_tokens]

    def response_ids(self, text: str) -> list[int]:
        """Ids of a demonstrated response after `opened`, the turn's end token included (what a
        warm-up imitates); of a Reply with calls as the template writes them. Raises
        EnvironmentFailure for calls that it does not take."""
        if isinstance(text, Reply) and text.calls:
            marks, user = Marks(self._is_harmless), {"role": "user", "content": MARK}
            try:
                told, asked = (
                    self.render([user, marks.message(text.message())], ask=False),
                    self.render([user]),
                )
                ids = self._each(*marks.split(told.removeprefix(asked), lambda text: text)[:2])
            except Exception as error:
                raise self._refused([user, text.message()], error) from None
            return ids[
                : next((place for place, i in enumerate(ids) if i in self.end_ids), len(ids)) + 1
            ]
        sampled = text.removeprefix(self.opened).removeprefix(self.opened.rstrip())
        return self._plain(_encodable(sampled)) + self._turn_end

    def missing_end(self, response_ids: Sequence[int]) -> list[int]:
        """The end token for a response that has none: it was cut at rollout.max_response_tokens, or by a stop string.

        It stands before what follows the response, in the next prompt and in training, and is no
        part of the response. Empty if the response has ended, or the model has no end token.
        """
        ended = len(response_ids) > 0 and response_ids[-1] in self.end_ids
        return [] if ended else self._turn_end

    def decode(self, ids: Iterable[int], *, calls: bool = False) -> str:
        """Text of sampled tokens, without the end token and any other control token (with `calls`
        those stay: the call of a tool may begin with one)."""
        unsaid = self.end_ids if calls else self._unsaid
        return self._backend.decode([i for i in ids if i not in unsaid], skip_special_tokens=False)

    def reply(self, text: str, tools: list[Any], called: int = 0) -> Reply:
        """An answer with the calls that the parser of the model's format finds, numbered from
        `called` on. UserError where there is none."""
        if self._read is None:
            from paw.rollouts.calls import make_reader

            self._read = make_reader(self._tokenizer, self._tool_parser, self)
        return self._read(text, tools, called)

    def _each(self, literals: list[str], texts: list[str]) -> list[int]:
        """Ids of each piece on its own, control tokens in what the template wrote alone."""
        pieces = zip(
            map(self.encode, literals), [*map(self.observation_ids, texts), []], strict=True
        )
        return [i for literal, text in pieces for i in (*literal, *text)]

    def _controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control]

    def _is_harmless(self, text: str) -> bool:
        return not self._controls(self.encode(text)) and self._harmless(text) == text

    def _refused(
        self, messages: list[dict[str, Any]], error: Exception | None
    ) -> EnvironmentFailure:
        roles = ", ".join(message["role"] for message in messages)
        return EnvironmentFailure(
            f"the chat template of '{self.name}' does not take {roles}: {clean(error, 200)}"
        )

    def _with_tools(self) -> str:
        """The template's text of a conversation with tools, as much of it as it takes; whether it shows them."""
        user, texts = {"role": "user", "content": MARK}, []
        for messages in ([user], [user, Reply.of("", PROBE).message(), PROBE.answer(REPLY)]):
            with suppress(Exception):
                texts.append(self.render(messages, TOOLS))
        self._shows_tools = any(PROBE.name in text for text in texts[:1])
        return "".join(texts)

    def _harmless(self, text: str) -> str:
        """`text` as a tokenizer takes it, no marker of a turn in it; of the same length."""
        text, before = _encodable(text), ""
        while text != before:  # a marker may appear where another one was
            text, before = self._markers.sub(lambda found: " " + found[0][1:], text), text
        return text

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _plain(self, text: str) -> list[int]:
        return [i for i, _ in self._pieces(text)]

    def _pieces(self, text: str) -> Iterator[tuple[int, tuple[int, int]]]:
        """(id, characters it stands for) of `text`, every control token in it spelt out."""
        start = 0
        for piece in self._forged.split(text):
            encoding = self._backend.encode(piece, add_special_tokens=False)
            for i, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
                if (
                    i not in self._control
                ):  # of one character, or met only after normalisation: it cannot be spelt out
                    yield i, (start + first, start + last)
            start += len(piece)

    def _control_ids(self, tokenizer: Any, literals: str) -> frozenset[int]:
        """Special tokens, and whatever added tokens the template builds turns from."""
        added = tokenizer.added_tokens_decoder
        control = {i for i, token in added.items() if token.special} | set(
            tokenizer.all_special_ids
        )
        control |= {i for i in self.encode(literals) if i in added}
        if tokenizer.unk_token_id not in (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        ):
            control.discard(tokenizer.unk_token_id)  # what unknown words become: it opens no turn
        return frozenset(control)


def _any(words: Iterable[str]) -> re.Pattern[str]:
    """Any of the words, the longest first; without words nothing."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")


def _forged(control: Iterable[str]) -> re.Pattern[str]:
    """Where to cut text so that no piece holds a control token: after the first character of each.
    (The tokenizer's `split_special_tokens` leaves those that were added without the special
    flag.)"""
    longer = sorted(word for word in control if len(word) > 1)
    cuts = [
        f"(?<={re.escape(first)})(?={'|'.join(re.escape(word[1:]) for word in words)})"
        for first, words in groupby(longer, key=itemgetter(0))
    ]
    return re.compile("|".join(cuts) or r"(?!)")


def _encodable(text: str) -> str:
    """Lone surrogates, which no tokenizer takes, become question marks."""
    return text.encode("utf-8", "replace").decode()
