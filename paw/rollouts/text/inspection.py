"""Finds what a chat template writes around texts, by rendering it with known texts."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from paw.errors import UserError, clean, describe
from paw.rollouts.text.encoder import any_of, control_words
from paw.rollouts.text.marks import PROBE
from paw.rollouts.text.template import REPLY, USER, USER_AGAIN, ChatTemplate, TemplateLimitError
from paw.types import THINKING

SPACED = f" \n{USER}\n "
FIX = "fix chat_template.jinja in the model's folder, or use another model"


@dataclass(frozen=True)
class TemplateFacts:
    """What a template writes around the texts of a conversation."""

    prefix: str
    """The prompt before the text of the only user message."""
    suffix: str
    """The prompt after that text, up to where the answer begins."""
    between: str
    """From the end of an answer's text to the next user's text."""
    trim: Callable[[str], str]
    """Changes the white space around a text as the template does (Llama 3 strips it)."""
    opened: str
    """How it begins every answer: "", or the text from <think> on."""
    shows_tools: bool
    turn_control: frozenset[int]
    """Control tokens in conversations without tools."""
    control: frozenset[int]
    """`turn_control` plus those that tools need, without the <think> tags."""
    markers: frozenset[str]
    """Ordinary words that mark turns ("[INST]"), if no control token marks them."""


def inspect_template(
    template: ChatTemplate, tokenizer: Any, backend: Tokenizer, *, name: str
) -> TemplateFacts:
    """Find what the template of `tokenizer` writes around texts. `backend` encodes.

    Raises UserError if it cannot be rendered, does not show the user's text exactly once or
    rewrites it. `name` is the model's name in that message.
    """
    try:
        template.try_out()
        turns = template.render_turns(USER, REPLY, USER_AGAIN, opens_answer=False)
        prompt = template.render_turns(USER)
        spaced_prompt = template.render_turns(SPACED)
    except Exception as error:  # a template may raise any error
        problem = error if isinstance(error, TemplateLimitError) else describe(error)
        raise UserError(
            f"the chat template of '{name}' cannot be rendered: {clean(problem, 300)}; {FIX}"
        ) from None

    literals = re.sub(f"{USER}|{REPLY}|{USER_AGAIN}", "", turns)
    texts_with_tools = template.render_with_tools()
    turn_control = _control_ids(tokenizer, backend, literals)
    tool_control = _control_ids(tokenizer, backend, "".join(texts_with_tools))
    control = turn_control | (tool_control - thinking_ids(backend))

    user_count = prompt.count(USER)
    if user_count != 1:
        raise UserError(
            f"the chat template of '{name}' shows a user message {user_count} times; expected once"
        )
    prefix, suffix = prompt.split(USER)
    between = turns.partition(REPLY)[2].partition(USER_AGAIN)[0]
    opening_start = suffix.find(THINKING[0])

    return TemplateFacts(
        prefix=prefix,
        suffix=suffix,
        between=between,
        trim=_trim(prefix, spaced_prompt, suffix, name=name),
        opened=suffix[opening_start:] if opening_start >= 0 else "",
        shows_tools=bool(texts_with_tools) and PROBE.name in texts_with_tools[0],
        turn_control=turn_control,
        control=control,
        markers=_markers(any_of(control_words(backend, control)), prefix, suffix, between),
    )


def thinking_ids(backend: Tokenizer) -> set[int | None]:
    """Return ids of the <think> tags; None for a tag that is not a single token."""
    return {backend.token_to_id(tag) for tag in THINKING}


def _control_ids(tokenizer: Any, backend: Tokenizer, literals: str) -> frozenset[int]:
    """Return special tokens, and the added tokens that the template builds turns from."""
    added_tokens = tokenizer.added_tokens_decoder
    control = {token_id for token_id, token in added_tokens.items() if token.special}
    control |= set(tokenizer.all_special_ids)
    for token_id in backend.encode(literals, add_special_tokens=False).ids:
        if token_id in added_tokens:
            control.add(token_id)

    of_turns = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if tokenizer.unk_token_id not in of_turns:
        control.discard(tokenizer.unk_token_id)  # unknown words become this; it opens no turn
    return frozenset(control)


def _trim(prefix: str, spaced_prompt: str, suffix: str, *, name: str) -> Callable[[str], str]:
    """Return the function that turns SPACED into what the template made of it."""
    for trim in (str, str.strip, str.lstrip, str.rstrip):
        if spaced_prompt == prefix + trim(SPACED) + suffix:
            return trim
    raise UserError(f"the chat template of '{name}' changes white space around a user message")


def _markers(
    control_pattern: re.Pattern[str], prefix: str, suffix: str, between: str
) -> frozenset[str]:
    """Return the ordinary words that mark turns.

    Returns none if a control token stands between prompt and answer. A part of several lines counts
    as one word, and its last line as another, because a system message may come before it.
    """
    if control_pattern.search(suffix):
        return frozenset()
    markers: set[str] = set()
    for text in (prefix, suffix, between):
        for part in control_pattern.split(text):
            stripped = part.strip()
            if stripped:
                markers.add(stripped)
                markers.add(stripped.splitlines()[-1])
    return frozenset(markers)
