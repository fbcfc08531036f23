"""A tokenizer's chat template, rendered within limits.

The template is a program written by whoever made the model, and may never end. Before it is first
rendered here, a process with limits renders the same conversations (`try_template`). Later
renderings are limited only in time and length.
"""

import ctypes
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from paw.rollouts.text import trial
from paw.rollouts.text.marks import PROBE, TOOLS
from paw.types import Reply

T = TypeVar("T")
# The texts of trial conversations. Everything around them comes from the template.
USER = "QxUserTextxQ"
REPLY = "QxReplyTextxQ"
USER_AGAIN = "QxUserAgainxQ"
RENDER_S = 5
"""CPU seconds for the trial of a template."""
PATIENCE_S = 60.0
"""Wall-clock seconds for the trial. A template never waits, but the machine may be busy."""
TURN_S = 20.0
"""Wall-clock seconds for each later conversation, which normally takes a few milliseconds."""
MEMORY = 1 << 30
"""Bytes for the trial, including its program."""
LONGEST = 1_000_000
"""Characters that a template may write."""


class TemplateLimitError(Exception):
    """A template takes too much time or memory. The message is one line and says which."""


class ChatTemplate:
    """Renders conversations with a tokenizer's template. `options` are its variables."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)

    def render(
        self, messages: list[Any], tools: list[Any] | None = None, *, opens_answer: bool = True
    ) -> str:
        """Return the template's text. With `opens_answer`, it ends where the model's answer begins.

        Raises any error of the template, and TemplateLimitError if it does not end or writes too
        much.
        """
        variables = {"tokenize": False, "add_generation_prompt": opens_answer, **self._options}

        def apply() -> Any:
            return self._tokenizer.apply_chat_template(messages, tools=tools or None, **variables)

        text = str(within(TURN_S, apply))
        if len(text) > LONGEST:
            raise TemplateLimitError(f"it writes more than {LONGEST:,} characters")
        return text

    def render_turns(self, *contents: str, opens_answer: bool = True) -> str:
        """Return the text of a conversation with alternating turns, the user first."""
        messages: list[dict[str, Any]] = []
        for turn_index, content in enumerate(contents):
            role = "user" if turn_index % 2 == 0 else "assistant"
            messages.append({"role": role, "content": content})
        return self.render(messages, opens_answer=opens_answer)

    def render_with_tools(self) -> list[str]:
        """Return the texts of a prompt with tools and of a conversation that calls one.

        Texts that the template does not accept are missing.
        """
        user = {"role": "user", "content": USER}
        rendered_texts: list[str] = []
        for messages in ([user], [user, Reply.of("", PROBE).message(), PROBE.answer(REPLY)]):
            with suppress(Exception):  # a template may raise any error
                rendered_texts.append(self.render(messages, TOOLS))
        return rendered_texts

    def try_out(self) -> None:
        """Render conversations without and with tools, in a process with limits.

        Raises TemplateLimitError if that takes too much time or memory.
        """
        user = {"role": "user", "content": USER}
        turns = [user, {"role": "assistant", "content": REPLY}] * 8
        calls = [user, Reply.of("", PROBE).message(), PROBE.answer(REPLY)] * 4
        try_template(
            [
                self._trial(None, [user], [*turns, user]),
                self._trial(TOOLS, [user], calls),
            ]
        )

    def _trial(
        self, tools: list[Any] | None, *conversations: list[dict[str, Any]]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return (template for these tools, variables of each conversation) for `try_template`."""
        template = str(self._tokenizer.get_chat_template(tools=tools))
        variables: list[dict[str, Any]] = []
        for messages in conversations:
            variables.append(
                {
                    **self._tokenizer.special_tokens_map,
                    **self._options,
                    "tools": tools,
                    "documents": None,
                    "messages": messages,
                    "add_generation_prompt": True,
                }
            )
        return template, variables


def try_template(templates: Sequence[tuple[str, list[dict[str, Any]]]]) -> None:
    """Render (template, variables of several conversations) in another process.

    Raises TemplateLimitError if that takes too much time or memory. Ignores other errors of a
    template.
    """
    limits = {"memory": MEMORY, "seconds": RENDER_S, "templates": templates}
    problem = _trial_problem(json.dumps(limits, default=str))
    if problem:
        raise TemplateLimitError(problem)


@lru_cache(64)
def _trial_problem(limits: str) -> str:
    """Say which limit the trial exceeded; "" if none."""
    command = [sys.executable, "-P", trial.__file__]
    try:
        process = subprocess.run(
            command, input=limits, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {PATIENCE_S:g} s"
    if process.returncode == trial.EXCEEDED:
        return f"it takes more than {MEMORY >> 20:,} MiB of memory"
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {RENDER_S} s of CPU time"
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        last_line = lines[-1] if lines else f"exit code {process.returncode}"
        return f"its trial failed ({last_line})"
    return ""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call `call()` in a thread of its own. Returns what it returns, or raises what it raises.

    Raises TemplateLimitError if it takes longer. The thread is then told to end, and does so at its
    next Python instruction.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
        raise TemplateLimitError(f"it takes more than {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
