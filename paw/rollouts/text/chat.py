"""Text to token ids and back, through a model's own chat template. No text can forge a turn.

A prompt is one user message, or a conversation with tools, plus the generation prompt. Harmless
text gets exactly the ids of `tokenizer.apply_chat_template`. Text that spells a control token
("<|im_end|>") is encoded as the ordinary characters it consists of, so the template writes all
control tokens of a prompt. If ordinary text marks turns ("[INST]"), such text in a prompt loses its
first character. The template is rendered with markers instead of texts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

from paw.errors import EnvironmentFailure, UserError, clean
from paw.rollouts.text.calls import Reader, make_reader
from paw.rollouts.text.encoder import Encoder, encodable
from paw.rollouts.text.inspection import TemplateFacts, inspect_template, thinking_ids
from paw.rollouts.text.marks import PROBE, TOOLS, Marks
from paw.rollouts.text.template import REPLY, USER, ChatTemplate
from paw.types import THINKING, Ids, Reply, ToolCall

AWAITS_RESULT = "<|eom_id|>"
"""How Llama 3 ends an answer that calls a tool but does not end its turn.

Its generation config also has this token.
"""
Context = str | list[dict[str, Any]]
"""One user message, or a conversation of messages {"role", "content"} (paw/envs/base.py)."""


class ContextFull(Exception):
    """The next prompt does not fit the model's context. The episode ends with its current turns."""


class FirstPromptTooLong(EnvironmentFailure):
    """The first prompt of an episode does not fit, so the episode has no turn to keep."""


def context_text(context: Context) -> str:
    """Return a context as one text."""
    if isinstance(context, str):
        return context
    lines: list[str] = []
    for message in context:
        tool_calls = message.get("tool_calls", ())
        if message["content"] or not tool_calls:
            lines.append(message["content"])
        for tool_call in tool_calls:
            function = tool_call["function"]
            lines.append(str(ToolCall(function["name"], function["arguments"])))
    return "\n".join(lines)


class Chat:
    """Encoder and decoder of one fast Hugging Face tokenizer.

    `options` are variables of its chat template. `tool_parser` is model.tool_parser (see
    `paw.rollouts.text.calls`).

    Raises UserError if the tokenizer has no chat template or no `tokenizers` back end, or if the
    template does not show the user's text exactly once or does not know one of the options.
    """

    def __init__(
        self, tokenizer: Any, options: Mapping[str, Any] | None = None, tool_parser: str = "auto"
    ):
        self.name = tokenizer.name_or_path or "this model"
        _check_options(tokenizer, options or {}, name=self.name)
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._reader: Reader | None = None
        """Finds the calls in an answer. Made when first needed, so never if there are no tools."""
        self._backend = _own_backend(tokenizer, name=self.name)
        self._template = ChatTemplate(tokenizer, options or {})
        facts = inspect_template(self._template, tokenizer, self._backend, name=self.name)
        self._facts = facts
        self._encoder = Encoder(self._backend, control=facts.control, markers=facts.markers)
        self.opened = facts.opened
        """How the template begins every answer: "", or from <think> on.

        It is part of the answer, but it is not sampled.
        """
        self.trim = facts.trim
        """Changes the white space around content as the template does (Llama 3 strips it)."""

        between_ids = self.encode(facts.between)
        turn_end = _first(between_ids, facts.control)
        if turn_end is None:
            turn_end = tokenizer.eos_token_id
        self._turn_end: list[int] = [] if turn_end is None else [turn_end]
        end_ids = (tokenizer.eos_token_id, turn_end, self._backend.token_to_id(AWAITS_RESULT))
        self.end_ids = frozenset(token_id for token_id in end_ids if token_id is not None)
        """Tokens that end a response."""
        self.separator_ids = _after_first(between_ids, self.end_ids)
        """From a response's end token to the next user text.

        ChatML: newline, <|im_start|>, "user", newline.
        """
        self._never_decoded = (facts.turn_control | self.end_ids) - thinking_ids(self._backend)

        self._frame = PromptFrame(facts, self._encoder)
        self.reply_ids = self._encoder.plain_ids(self._frame.after_text) + self._frame.tail_ids
        """From user text to the response.

        ChatML: <|im_end|>, newline, <|im_start|>, "assistant", newline.
        """

    def render(
        self, messages: list[Any], tools: list[Any] | None = None, *, opens_answer: bool = True
    ) -> str:
        """Return the template's text, see `ChatTemplate.render`."""
        return self._template.render(messages, tools, opens_answer=opens_answer)

    def encode(self, text: str) -> list[int]:
        """Return ids of a text, including the control tokens that it spells."""
        return self._encoder.encode(text)

    # --- prompts
    # ---------------------------------------------------------------------------------------------

    def prompt_ids(self, text: str) -> list[int]:
        """Return ids of `text` as the only user message, ready for a response."""
        encoder = self._encoder
        frame = self._frame
        text = self.trim(encoder.harmless(text))
        ids = self.encode(self._facts.prefix + text + self._facts.suffix)
        if encoder.controls(ids) == frame.controls:
            return ids
        spelt_out = encoder.plain_ids(frame.before_text + text + frame.after_text)
        return frame.head_ids + spelt_out + frame.tail_ids

    def fit_prompt(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """Return (`prompt_ids` of at most `max_tokens` tokens, the number of tokens cut).

        The text loses its first tokens. Raises UserError if the template alone is too long.
        """
        prompt_ids = self.prompt_ids(text)
        if len(prompt_ids) <= max_tokens:
            return prompt_ids, 0

        encoder = self._encoder
        frame = self._frame
        head_ids = frame.head_ids + encoder.plain_ids(frame.before_text)
        template_tokens = len(head_ids) + len(frame.tail_ids)
        text_tokens = max_tokens - template_tokens
        if text_tokens <= 0:
            raise UserError(
                f"rollout.max_prompt_tokens = {max_tokens} leaves no room "
                f"beside the {template_tokens} tokens of the chat template of '{self.name}'"
            )
        text = self.trim(encoder.harmless(text))
        text_ids = encoder.plain_ids(text + frame.after_text)
        cut = max(0, len(text_ids) - text_tokens)
        return head_ids + text_ids[-text_tokens:] + frame.tail_ids, cut

    def conversation_ids(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        """Return ids of a whole conversation as the template renders it, ready for a response.

        Raises UserError if there are tools that the template does not show, and EnvironmentFailure
        for messages that it does not accept.
        """
        if tools and not self._facts.shows_tools:
            raise UserError(
                f"the chat template of '{self.name}' does not support tools; "
                "use a model whose template does (Qwen, Llama 3, Mistral), "
                "or an environment without tools, such as --env.style paper if it has one"
            )
        marks = Marks(self._encoder.is_harmless)
        try:
            marked = [marks.message(message) for message in messages]
            rendered = self.render(marked, marks.rest(tools))
            literals, texts, _ = marks.split(rendered, self._encoder.harmless)
        except Exception as error:
            raise self._refused(messages, error) from None

        # Encode it as the tokenizer does, unless a text then becomes a control token.
        whole_ids = self.encode(_interleaved(literals, texts))
        spelt_out = self._spell_out_texts(literals, texts)
        if self._encoder.controls(whole_ids) == self._encoder.controls(spelt_out):
            return whole_ids
        return spelt_out

    def _spell_out_texts(self, literals: list[str], texts: list[str]) -> list[int]:
        """Return ids of literals and the texts between them. No text becomes a control token."""
        spelt_ids: list[int] = []
        ordinary = ""  # texts and parts of literals since the last control token
        for literal, text in zip(literals, [*texts, ""], strict=True):
            matches = list(self._encoder.control_pattern.finditer(literal))
            if matches:
                texts_start = matches[0].start()
                texts_end = matches[-1].end()
                spelt_ids += self._encoder.plain_ids(ordinary + literal[:texts_start])
                spelt_ids += self.encode(literal[texts_start:texts_end])
                ordinary = literal[texts_end:]
            else:
                ordinary += literal
            ordinary += text
        return spelt_ids + self._encoder.plain_ids(ordinary)

    # --- what follows an answer
    # ---------------------------------------------------------------------------------------------

    def following(
        self, answer: dict[str, Any], messages: list[dict[str, Any]]
    ) -> list[tuple[list[int], str]]:
        """Return what the template writes after the end of an `answer` if `messages` follow it.

        Returns one pair for each message: (ids that come before its text, the text as the template
        writes it). The last pair is (ids up to the next response, "").

        Example: a tool's result "12 mugs" in ChatML gives
        [(ids of "\\n<|im_start|>user\\n<tool_response>\\n", "12 mugs"),
         (ids of "\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n", "")].

        Only a user message, the answer and those messages are rendered. Earlier messages are left
        out, so anything the template drops or merges there stays as the model saw it. Raises
        EnvironmentFailure for messages that the template does not accept.
        """
        if [message["role"] for message in messages] == ["user"]:
            return [(self.separator_ids, messages[0]["content"]), (self.reply_ids, "")]

        # Some templates do not accept a text beside calls, or several calls.
        text_alone = {"role": "assistant", "content": REPLY}
        with_text = answer | text_alone
        without_text = answer | {"content": ""}
        first_problem: Exception | None = None
        for candidate in (with_text, without_text, text_alone):
            try:
                return self._following_as_is(candidate, messages)
            except Exception as error:
                first_problem = first_problem or error
        raise self._refused([answer, *messages], first_problem)

    def _following_as_is(
        self, answer: dict[str, Any], messages: list[dict[str, Any]]
    ) -> list[tuple[list[int], str]]:
        """Do what `following` does, for an unchanged answer. Raises any error of the template."""
        marks = Marks(self._encoder.is_harmless)
        conversation = [{"role": "user", "content": USER}, marks.rest(answer)]
        for message in messages:
            conversation.append(marks.message(message, spaces=False))
        literals, texts, numbers = marks.split(self.render(conversation), lambda text: text)

        positions = sorted(numbers.index(number) for number in marks.needed)
        (ids_before_first, first_text), *others = self._cut_at_texts(literals, texts, positions)
        after_end = _after_last(ids_before_first, self.end_ids)
        if after_end is None:
            raise ValueError("it does not end an answer with a token")
        return [(after_end, first_text), *others]

    def _cut_at_texts(
        self, literals: list[str], texts: list[str], positions: list[int]
    ) -> list[tuple[list[int], str]]:
        """Cut n + 1 literals, and the n texts between them, at the texts at `positions`.

        Returns one pair for each of those texts, (ids of what comes before it, the text). The last
        pair is (ids of what follows the last text, "").

        Example: literals ["<tool>", ":", "<end>"], texts ["search", "12 mugs"] and positions [1]
        give [(ids of "<tool>" "search" ":", "12 mugs"), (ids of "<end>", "")].
        """
        pieces: list[tuple[list[int], str]] = []
        piece_start = 0
        for position in positions:
            piece_ids = self._ids_apart(
                literals[piece_start : position + 1], texts[piece_start:position]
            )
            pieces.append((piece_ids, texts[position]))
            piece_start = position + 1
        pieces.append((self._ids_apart(literals[piece_start:], texts[piece_start:]), ""))
        return pieces

    def _ids_apart(self, literals: list[str], texts: list[str]) -> list[int]:
        """Return ids of n + 1 literals and the n texts between them, each encoded on its own.

        Only literals may contain control tokens.
        """
        first_literal, *other_literals = literals
        joined_ids = self.encode(first_literal)
        for text, literal in zip(texts, other_literals, strict=True):
            joined_ids += self.observation_ids(text)
            joined_ids += self.encode(literal)
        return joined_ids

    def missing_end(self, response_ids: Sequence[int] | Ids) -> list[int]:
        """Return the end token for a response that has none.

        Such a response was cut at rollout.max_response_tokens or by a stop string. In the next
        prompt and in training the token follows the response but is not part of it. Returns [] if
        the response has ended, or the model has no end token.
        """
        has_ended = len(response_ids) > 0 and response_ids[-1] in self.end_ids
        return [] if has_ended else self._turn_end

    # --- observations
    # ---------------------------------------------------------------------------------------------

    def observation_ids(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the first `max_tokens` ids of raw text (a world-model target), spelt out."""
        return self._encoder.plain_ids(self._encoder.harmless(text))[:max_tokens]

    def observation_spans(self, text: str, max_tokens: int) -> list[tuple[int, int]]:
        """Return the characters [start, end) of `text` of each of its `observation_ids`."""
        tokens = self._encoder.plain_tokens(self._encoder.harmless(text))
        return [span for _, span in tokens][:max_tokens]

    # --- responses
    # ---------------------------------------------------------------------------------------------

    def response_ids(self, text: str) -> list[int]:
        """Return ids of a demonstrated response after `opened`, including its end token.

        A warm-up trains on these. A Reply with calls gets the ids that the template writes for it.
        Raises EnvironmentFailure for calls that the template does not accept.
        """
        if isinstance(text, Reply) and text.calls:
            return self._reply_with_calls_ids(text)
        sampled = text.removeprefix(self.opened).removeprefix(self.opened.rstrip())
        return self._encoder.plain_ids(encodable(sampled)) + self._turn_end

    def _reply_with_calls_ids(self, reply: Reply) -> list[int]:
        marks = Marks(self._encoder.is_harmless)
        user = {"role": "user", "content": USER}
        try:
            conversation = self.render([user, marks.message(reply.message())], opens_answer=False)
            prompt = self.render([user])
            written = conversation.removeprefix(prompt)
            literals, texts, _ = marks.split(written, lambda text: text)
            reply_ids = self._ids_apart(literals, texts)
        except Exception as error:
            raise self._refused([user, reply.message()], error) from None

        for position, token in enumerate(reply_ids):
            if token in self.end_ids:
                return reply_ids[: position + 1]
        return reply_ids

    def decode(self, ids: Iterable[int], *, calls: bool = False) -> str:
        """Return the text of sampled tokens, without the end token and any other control token.

        With `calls` only the end token is dropped, because a tool call may begin with a control
        token.
        """
        hidden = self.end_ids if calls else self._never_decoded
        decoded_ids = [token for token in ids if token not in hidden]
        return self._backend.decode(decoded_ids, skip_special_tokens=False)

    def raw_text(self, ids: Sequence[int]) -> str:
        """Return the text of any tokens, control tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def reply(self, text: str, tools: list[Any], first_number: int = 0) -> Reply:
        """Return an answer with the calls that the parser of the model's format finds.

        Calls are numbered from `first_number` on. Raises UserError if there is no such parser.
        """
        if self._reader is None:
            self._reader = make_reader(
                self._tokenizer,
                self._tool_parser,
                written_call=self._written_call(),
                model_name=self.name,
            )
        return self._reader(text, tools, first_number)

    def _written_call(self) -> str:
        """Return a call as the template writes it in an answer; "" if it takes no calls."""
        user = {"role": "user", "content": "QxUser"}
        call_message = Reply.of("", PROBE).message()
        with suppress(Exception):  # a template may raise any error
            prompt = self.render([user], TOOLS)
            with_call = self.render([user, call_message], TOOLS, opens_answer=False)
            written = with_call.rpartition("QxUser")[2]
            if with_call.startswith(prompt):
                written = with_call.removeprefix(prompt)
            decoded = self.decode(self.encode(written), calls=True)
            return decoded.rpartition(THINKING[1])[2]
        return ""

    def _refused(
        self, messages: list[dict[str, Any]], error: Exception | None
    ) -> EnvironmentFailure:
        roles = ", ".join(message["role"] for message in messages)
        return EnvironmentFailure(
            f"the chat template of '{self.name}' does not take {roles}: {clean(error, 200)}"
        )


class PromptFrame:
    """The parts around the text of a one-message prompt, cut where control tokens end.

    `head_ids` and `tail_ids` are encoded as they are. `before_text` and `after_text` lie between
    them and the message's text. They are ordinary words, so their tokens may merge with those of
    the text.
    """

    def __init__(self, facts: TemplateFacts, encoder: Encoder) -> None:
        last_end = 0
        for match in encoder.control_pattern.finditer(facts.prefix):
            last_end = match.end()
        first_start = len(facts.suffix)
        first_match = encoder.control_pattern.search(facts.suffix)
        if first_match:
            first_start = first_match.start()

        self.head_ids = encoder.encode(facts.prefix[:last_end])
        self.before_text = facts.prefix[last_end:]
        self.after_text = facts.suffix[:first_start]
        self.tail_ids = encoder.encode(facts.suffix[first_start:])
        self.controls = encoder.controls(self.head_ids + self.tail_ids)
        """The control tokens of a prompt whose text has none."""


def _check_options(tokenizer: Any, options: Mapping[str, Any], *, name: str) -> None:
    """Raise UserError if the tokenizer has no chat template, or its template lacks an option."""
    if not getattr(tokenizer, "chat_template", None):
        fix = "use an instruct model, or add a chat_template.jinja to the model's folder"
        raise UserError(f"the tokenizer of '{name}' has no chat template; {fix}")
    template = str(tokenizer.chat_template)
    for key, value in options.items():
        if key == "enable_thinking" and value is False and "think" not in template.lower():
            continue  # a model that does not think needs no such option
        if not re.search(rf"\b{re.escape(key)}\b", template):
            fix = "leave it out, or --model.chat_template_kwargs '{}' if a recipe sets it"
            raise UserError(
                f"model.chat_template_kwargs: the template of '{name}' has no '{key}'; {fix}"
            )


def _own_backend(tokenizer: Any, *, name: str) -> Tokenizer:
    """Copy the tokenizer's back end, because every call of the tokenizer changes its settings.

    Raises UserError if it has none.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UserError(
            f"the tokenizer of '{name}' is not a fast one (no tokenizer.json); convert it first"
        )
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _interleaved(literals: list[str], texts: list[str]) -> str:
    """Join n + 1 literals and the n texts between them."""
    joined = literals[0]
    for text, literal in zip(texts, literals[1:], strict=True):
        joined += text + literal
    return joined


def _first(ids: Sequence[int], wanted: frozenset[int]) -> int | None:
    """Return the first of `ids` that is in `wanted`."""
    for token in ids:
        if token in wanted:
            return token
    return None


def _after_first(ids: list[int], ends: frozenset[int]) -> list[int]:
    """Return the `ids` after the first of the `ends`; all of them if there is none."""
    for position, token in enumerate(ids):
        if token in ends:
            return ids[position + 1 :]
    return ids


def _after_last(ids: list[int], ends: frozenset[int]) -> list[int] | None:
    """Return the `ids` after the last of the `ends`; None if there is none."""
    for position in reversed(range(len(ids))):
        if ids[position] in ends:
            return ids[position + 1 :]
    return None
