"""Calls of tools in a model's answer, read by the parsers of others.

transformers' where the tokenizer says how (`response_template`), else vLLM's for the model's family, or without vLLM
those that `transformers serve` has. Which one is found by trial: it reads back a call as the chat template writes it.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from paw.envs.threads import Daemons
from paw.errors import UserError, clean, nearest
from paw.rollouts.marks import PROBE, TOOLS
from paw.types import THINKING, Reply, ToolCall

if TYPE_CHECKING:
    from paw.rollouts.chat import Chat

Reader = Callable[[str, list[Any], int], Reply]
"""Of a text, the tools, and the number of the first call, in an episode one after another."""
Found = tuple[str, list[tuple[str, Any]]]
"""(text without calls, (name, arguments) of each call)."""
Read = Callable[[str, list[Any]], Found]
PARSE_S = 60.0
"""Seconds for an answer to be read, which takes less than a millisecond."""
KNOWN = ("hermes", "qwen3_coder", "mistral", "llama3_json", "pythonic")
"""Tried first, those of a form that is all their own before those that take any JSON."""


def make_reader(tokenizer: Any, name: str, chat: "Chat") -> Reader:
    """A reader of answers, by model.tool_parser = `name`. UserError where there is no parser of that name, or none that
    reads what the chat template writes.
    """
    written, own = _written(chat), getattr(tokenizer, "response_template", None)
    if own and name in ("auto", "transformers"):
        return _reader(_by_transformers(tokenizer, own), written)
    known = _vllm_parsers(name)
    if name != "transformers" and known:
        if name not in ("auto", *known):
            raise UserError(
                f"model.tool_parser = '{name}' is no parser of vLLM; {nearest(name, known)}".removesuffix("; ")
            )
        names = [name] if name != "auto" else [*KNOWN, *(one for one in known if one not in KNOWN)]
        tried: Iterator[Callable[[], Read]] = (partial(_by_vllm, tokenizer, one) for one in names)
    elif name in ("auto", "transformers"):
        tried = (partial(_by_transformers, tokenizer, template) for template in _served())
    else:
        raise UserError(
            f"model.tool_parser = '{name}' is vLLM's, which is not installed; pip install 'paw-trainer[vllm]'"
        )
    for make in tried:
        with suppress(Exception):
            read = make()
            if name not in ("auto", "transformers") or read(written, TOOLS)[1] == [(PROBE.name, PROBE.arguments)]:
                return _reader(read, written)
    fix = "vLLM has more parsers: pip install 'paw-trainer[vllm]'" if not known else "see vLLM's --tool-call-parser"
    raise UserError(
        f"model.tool_parser = '{name}' finds no parser of calls as the chat template of '{chat.name}' writes them; "
        f"name the model's with --model.tool_parser NAME ({fix})"
    )


def _vllm_parsers(name: str) -> list[str]:
    """Names of vLLM's parsers; none where it is not installed, or not wanted."""
    if name == "transformers":
        return []
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        return []
    for logger in ("vllm.tool_parsers", "vllm.parser"):  # a traceback for every broken call
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return [*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers]


def _served() -> list[dict[str, Any]]:
    """How `transformers serve` reads answers of models whose tokenizers do not say so."""
    with suppress(ImportError):
        from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as served

        return [*served.values()]
    return []


def _written(chat: "Chat") -> str:
    """A call as the template writes it, after what opens an answer; "" where it takes none."""
    user = {"role": "user", "content": "QxUser"}
    with suppress(Exception):
        asked = chat.render([user], TOOLS)
        told = chat.render([user, Reply.of("", PROBE).message()], TOOLS, ask=False)
        text = told.removeprefix(asked) if told.startswith(asked) else told.rpartition("QxUser")[2]
        return chat.decode(chat.encode(text), calls=True).rpartition(THINKING[1])[2]
    return ""


def _reader(read: Read, written: str) -> Reader:
    head = written.partition(PROBE.name)[0].strip()
    opening = (re.match(r'[^\s{"]+|\{', head) or [""])[0]
    """How a call begins in this format ("<tool_call>", "{"): what begins so and is not found to be one is broken."""

    def reply(text: str, tools: list[Any], called: int) -> Reply:
        body = text.rpartition(THINKING[1])[2]
        if THINKING[0] in body:  # it never ended its thought
            return Reply(text, "")
        try:
            content, found = read(body, tools)
        except UserError:
            raise
        except Exception as error:
            return Reply(text, body.strip(), (), f"the call cannot be read: {clean(error, 200)}")
        begun = bool(opening) and (opening in body if len(opening) > 1 else body.lstrip().startswith(opening))
        if begun and not found:
            return Reply(text, body.strip(), (), f"the call cannot be read{_json_problem(body.partition(opening))}")
        calls, problem = [], ""
        for number, (name, arguments) in enumerate(found, called):
            if not isinstance(name, str) or not isinstance(arguments, dict):
                problem = problem or f"the arguments of '{clean(name, 60)}' are no JSON object"
                arguments = {}
            calls.append(ToolCall(str(name), arguments, f"call{number:05}"))  # nine, as Mistral's templates ask
        return Reply(text, content.strip(), calls, problem)

    return reply


def _json_problem(parts: tuple[str, str, str]) -> str:
    text = (parts[1] if parts[1] == "{" else "") + parts[2].strip()
    try:
        json.JSONDecoder().raw_decode(text)
    except ValueError as error:
        return f": {error}" if text[:1] in ("{", "[") else ""
    return ""


def _by_transformers(tokenizer: Any, template: dict[str, Any]) -> Read:
    def read(text: str, tools: list[Any]) -> Found:
        # In a thread: the patterns are the model's own, and `regex` frees the interpreter's lock while it matches.
        parse = Daemons().submit(tokenizer.parse_response, text, template, prefix="", tools=tools)
        try:
            message = parse.result(PARSE_S)
        except FutureTimeoutError:
            slow = (
                f"the tokenizer's response_template has not read an answer of {len(text)} characters in {PARSE_S:g} s"
            )
            fix = "its patterns do not come to an end; name another parser with --model.tool_parser"
            raise UserError(f"{slow}: {fix}") from None
        functions = [call.get("function", call) for call in message.get("tool_calls") or []]
        calls = [(one.get("name"), _arguments(one.get("arguments"))) for one in functions]
        return message.get("content") or "", calls

    return read


def _by_vllm(tokenizer: Any, name: str) -> Read:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    parser: Any = ToolParserManager.get_tool_parser(name)
    parser(tokenizer)  # raises where the vocabulary lacks what it looks for

    request_of: Any = ChatCompletionRequest

    def read(text: str, tools: list[Any]) -> Found:
        request = request_of(messages=[], model="", tools=tools)
        seen = parser(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, _arguments(call.function.arguments)) for call in seen.tool_calls]
        return seen.content or "", calls

    return read


def _arguments(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given
