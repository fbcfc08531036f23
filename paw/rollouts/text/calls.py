"""Reads tool calls in a model's answer, using other projects' parsers.

If the tokenizer has a `response_template`, transformers reads them. Otherwise vLLM's parser for the
model's family reads them or, without vLLM, one of `transformers serve`. The right parser is found
by trial: it must read back a call that the chat template wrote.
"""

import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any

from paw.errors import UserError, clean, nearest
from paw.io.threads import Daemons
from paw.rollouts.text.marks import PROBE, TOOLS
from paw.types import THINKING, Reply, ToolCall

Reader = Callable[[str, list[Any], int], Reply]
"""(text, tools, number of the first call) -> the answer. Calls are numbered per episode."""
Parsed = tuple[str, list[tuple[str, Any]]]
"""(text without its calls, (name, arguments) of each call)."""
Parser = Callable[[str, list[Any]], Parsed]
"""(text, tools) -> the parsed text. May raise any error if the text cannot be parsed."""
PARSE_S = 60.0
"""Maximum seconds to parse an answer, which normally takes less than a millisecond."""
TRIED_FIRST = ("hermes", "qwen3_coder", "mistral", "llama3_json", "pythonic")
"""vLLM's parsers to try first. Those of a distinct format precede those that accept any JSON."""


def make_reader(tokenizer: Any, name: str, *, written_call: str, model_name: str) -> Reader:
    """Make a reader of answers; `name` is model.tool_parser.

    `written_call` is a call of the tool PROBE as the model's chat template writes it, or "" if the
    template takes no calls. Raises UserError if no parser has that name, or if none can read that
    call.
    """
    response_template = getattr(tokenizer, "response_template", None)
    if response_template and name in ("auto", "transformers"):
        return _reader(_by_transformers(tokenizer, response_template), written_call)

    vllm_names = _vllm_parsers(name)
    needs_trial = name in ("auto", "transformers")
    for make_parser in _candidates(tokenizer, name, vllm_names):
        # A parser may raise any error for another model's tokenizer or format.
        with suppress(Exception):
            parser = make_parser()
            if not needs_trial or parser(written_call, TOOLS)[1] == [(PROBE.name, PROBE.arguments)]:
                return _reader(parser, written_call)

    fix = "see vLLM's --tool-call-parser"
    if not vllm_names:
        fix = "vLLM has more parsers: pip install 'paw-trainer[vllm]'"
    raise UserError(
        f"model.tool_parser = '{name}' finds no parser for calls "
        f"as the chat template of '{model_name}' writes them; "
        f"name the model's with --model.tool_parser NAME ({fix})"
    )


def _candidates(tokenizer: Any, name: str, vllm_names: list[str]) -> list[Callable[[], Parser]]:
    """Return makers of the parsers to try, in this order.

    Raises UserError if there is no parser of that name.
    """
    if name != "transformers" and vllm_names:
        if name not in ("auto", *vllm_names):
            hint = nearest(name, vllm_names)
            raise UserError(
                f"model.tool_parser = '{name}' is not a parser of vLLM; {hint}".removesuffix("; ")
            )
        names = [name]
        if name == "auto":
            others = [other_name for other_name in vllm_names if other_name not in TRIED_FIRST]
            names = [*TRIED_FIRST, *others]
        return [partial(_by_vllm, tokenizer, candidate) for candidate in names]

    if name in ("auto", "transformers"):
        return [partial(_by_transformers, tokenizer, template) for template in _served_templates()]

    raise UserError(
        f"model.tool_parser = '{name}' is vLLM's, which is not installed; "
        "pip install 'paw-trainer[vllm]'"
    )


def _vllm_parsers(name: str) -> list[str]:
    """Return names of vLLM's parsers; none without vLLM, or if `name` asks for transformers."""
    if name == "transformers":
        return []
    try:
        manager = _vllm_manager()
    except ImportError:
        return []
    # The parsers log a traceback for every broken call.
    for logger in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return [*manager.lazy_parsers, *manager.tool_parsers]


def _vllm_manager() -> Any:
    """Return the class with vLLM's parsers. Raises ImportError without vLLM."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager


def _served_templates() -> list[dict[str, Any]]:
    """Return how `transformers serve` reads answers if a tokenizer has no `response_template`."""
    with suppress(ImportError):
        from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as templates

        return [*templates.values()]
    return []


def _reader(parser: Parser, written_call: str) -> Reader:
    """Make a reader of answers from `parser`. `written_call` is a call the template wrote."""
    opening = _opening(written_call)

    def read(text: str, tools: list[Any], first_number: int) -> Reply:
        body = text.rpartition(THINKING[1])[2]
        if THINKING[0] in body:  # the thought never ended
            return Reply(text, "")
        try:
            content, parsed_calls = parser(body, tools)
        except UserError:
            raise
        except Exception as error:
            return Reply(text, body.strip(), (), f"the call cannot be read: {clean(error, 200)}")

        if not parsed_calls and _begins_call(body, opening):
            problem = f"the call cannot be read{_json_problem(body, opening)}"
            return Reply(text, body.strip(), (), problem)
        calls, problem = _numbered(parsed_calls, first_number)
        return Reply(text, content.strip(), calls, problem)

    return read


def _opening(written_call: str) -> str:
    """Return how a call begins in this format ("<tool_call>", "{").

    Text that begins this way but is not parsed is a broken call.
    """
    before_name = written_call.partition(PROBE.name)[0].strip()
    match = re.match(r'[^\s{"]+|\{', before_name)
    return match[0] if match else ""


def _begins_call(body: str, opening: str) -> bool:
    """Whether a call begins in the text of an answer.

    If calls open with a single character, only the start of the text counts.
    """
    if not opening:
        return False
    if len(opening) == 1:
        return body.lstrip().startswith(opening)
    return opening in body


def _numbered(parsed_calls: list[tuple[str, Any]], first_number: int) -> tuple[list[ToolCall], str]:
    """Return (the calls, the first problem with their arguments or "")."""
    numbered_calls: list[ToolCall] = []
    problem = ""
    for number, (name, arguments) in enumerate(parsed_calls, first_number):
        if not isinstance(name, str) or not isinstance(arguments, dict):
            problem = problem or f"the arguments of '{clean(name, 60)}' are not a JSON object"
            arguments = {}
        call_id = f"call{number:05}"  # nine characters, as Mistral's templates require
        numbered_calls.append(ToolCall(str(name), arguments, call_id))
    return numbered_calls, problem


def _json_problem(body: str, opening: str) -> str:
    """Say what is wrong with the JSON of the first call in `body`, after ": ".

    Returns "" if the call is not JSON, or nothing is wrong.
    """
    _, found_opening, rest_of_call = body.partition(opening)
    text = rest_of_call.strip()
    if found_opening == "{":
        text = found_opening + text
    try:
        json.JSONDecoder().raw_decode(text)
    except ValueError as error:
        if text.startswith(("{", "[")):
            return f": {error}"
    return ""


def _by_transformers(tokenizer: Any, template: dict[str, Any]) -> Parser:
    def parse(text: str, tools: list[Any]) -> Parsed:
        # In a thread, because the patterns are the model's own, and `regex` releases the
        # interpreter's lock while it matches.
        parsing = Daemons().submit(tokenizer.parse_response, text, template, prefix="", tools=tools)
        try:
            message = parsing.result(PARSE_S)
        except FutureTimeoutError:
            raise UserError(
                "the tokenizer's response_template has not read an answer "
                f"of {len(text)} characters in {PARSE_S:g} s: "
                "its patterns do not finish; name another parser with --model.tool_parser"
            ) from None

        named_calls: list[tuple[str, Any]] = []
        for tool_call in message.get("tool_calls") or []:
            function = tool_call.get("function", tool_call)
            named_calls.append((function.get("name"), _arguments(function.get("arguments"))))
        return message.get("content") or "", named_calls

    return parse


def _by_vllm(tokenizer: Any, name: str) -> Parser:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    make_parser = _vllm_manager().get_tool_parser(name)
    make_parser(tokenizer)  # raises if the vocabulary lacks the tokens that it looks for
    make_request: Any = ChatCompletionRequest

    def parse(text: str, tools: list[Any]) -> Parsed:
        request = make_request(messages=[], model="", tools=tools)
        extracted = make_parser(tokenizer, request.tools).extract_tool_calls(text, request)
        named_calls = [
            (tool_call.function.name, _arguments(tool_call.function.arguments))
            for tool_call in extracted.tool_calls
        ]
        return extracted.content or "", named_calls

    return parse


def _arguments(value: Any) -> Any:
    """Return the arguments of a call, parsed if they are JSON in a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
