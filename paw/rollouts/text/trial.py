"""A program that renders conversations with a chat template, to see whether it finishes.

It reads JSON from stdin (see `try_template` in template.py) and imports only Jinja. It exits with
EXCEEDED if it needs more memory than allowed. If it needs more time, the kernel ends it. Other
errors of a template are ignored, because `Chat` renders the same conversations with the tokenizer's
own method.
"""

import json
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

EXCEEDED = 3
"""Exit code if it needs too much memory."""


class Generation(Extension):
    """The tag that transformers puts around what the model says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja as transformers sets it up for chat templates."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    jinja.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    names = cast(dict[str, Any], jinja.globals)
    names["raise_exception"] = _refuse
    names["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja


def _refuse(message: str) -> None:
    raise TemplateError(message)


def main(trial: dict[str, Any]) -> int:
    """Render within the limits of `trial`; returns the exit code."""
    memory = trial["memory"]
    seconds = trial["seconds"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # some systems cannot limit it
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        for template, conversations in trial["templates"]:
            _render(template, conversations)
    except MemoryError:
        return EXCEEDED
    return 0


def _render(template: str, conversations: Sequence[dict[str, Any]]) -> None:
    jinja = environment()
    for variables in conversations:
        try:
            jinja.from_string(template).render(variables)
        except MemoryError:
            raise
        except Exception:
            continue


if __name__ == "__main__":
    sys.exit(main(json.load(sys.stdin)))
