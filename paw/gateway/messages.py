"""Chat completions in OpenAI's format: what a request asks for, and what answers it."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paw.errors import UserError, clean, short_repr
from paw.types import THINKING, Reply, ToolCall

Message = dict[str, Any]
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role in a request -> role in a chat template."""
NEUTRAL: dict[str, Any] = {
    "temperature": None,
    "seed": None,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
"""Parameters that shape the distribution of tokens -> the value that leaves it unchanged.

The model learns from samples of its own distribution at the run's temperature, so requests cannot
change it.
"""
NO_RESPONSES = (
    "only chat completions are served here, not the Responses API; "
    "OpenAI Agents SDK: call set_default_openai_api('chat_completions')"
)


class RequestError(Exception):
    """A request that is refused. The message is one line, sent in OpenAI's format."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class ChatRequest:
    """What the body of a request asks for."""

    messages: list[Message]
    """Each has "role" and "content", a string. An assistant's message may have "tool_calls", whose
    "arguments" are objects. A tool's has "tool_call_id", and "name" if the call is known."""
    tools: list[dict[str, Any]]
    stop: list[str]
    max_tokens: int | None
    reads_calls: bool
    """Whether tool calls in the answer are parsed. With tool_choice "none" they are text."""
    logprobs: bool
    sampling: dict[str, Any]
    """The parameters among NEUTRAL that are set to another value."""


class TokenLogprob(NamedTuple):
    text: str
    logp: float


@dataclass(frozen=True)
class ChatAnswer:
    """The only choice of a chat completion."""

    message: Message
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: Sequence[TokenLogprob] | None = None
    """The sampled tokens, if the request asks for them."""


# --- requests
# -------------------------------------------------------------------------------------------------


def parse_request(body: Any) -> ChatRequest:
    """Return what a body asks for. Raises RequestError, which names the parameter that is wrong."""
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    if body.get("n") not in (None, 1):
        raise RequestError(f"n = {short_repr(body['n'])}: only n = 1 is supported", param="n")
    if body.get("functions"):
        raise RequestError("functions are not supported, use tools", param="functions")

    sampling: dict[str, Any] = {}
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value != neutral:
            sampling[name] = value
    reads_calls = sampling.get("tool_choice") != "none"
    if not reads_calls:
        del sampling["tool_choice"]
    return ChatRequest(
        messages=_parse_messages(body.get("messages")),
        tools=_parse_tools(body.get("tools")),
        stop=_parse_stop(body.get("stop")),
        max_tokens=_parse_max_tokens(body),
        reads_calls=reads_calls,
        logprobs=bool(body.get("logprobs")),
        sampling=sampling,
    )


def text_of(content: Any) -> str:
    """Return a message's content as one text. It may be a text, None or a list of parts.

    Raises ValueError if it contains anything else, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(content_part, dict) for content_part in content
    ):
        raise ValueError(f"content is {short_repr(content)}; it must be a string")
    other_types = {str(content_part.get("type")) for content_part in content} - {"text", "refusal"}
    if other_types:
        raise ValueError(
            f"content of type {', '.join(sorted(other_types))}; only text is supported"
        )
    return "\n".join(
        str(content_part.get("text") or content_part.get("refusal") or "")
        for content_part in content
    )


def _parse_messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    parsed: list[Message] = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        try:
            parsed.append(_parse_message(message, names))
        except ValueError as error:
            param = f"messages[{number}]"
            raise RequestError(f"{param}: {error}", param=param) from None
    if parsed[-1]["role"] == "assistant":
        raise RequestError("the last message must not be the assistant's", param="messages")
    return parsed


def _parse_message(message: Any, names: dict[str, str]) -> Message:
    """Return a message. `names` has the tools' names by the ids of earlier calls."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"the role is {short_repr(role)}; it must be one of {', '.join(ROLES)}")
    parsed: Message = {"role": ROLES[role], "content": text_of(message.get("content"))}
    if role == "assistant" and message.get("tool_calls"):
        tool_calls = message["tool_calls"]
        if not isinstance(tool_calls, list):
            raise ValueError(f"tool_calls is {short_repr(tool_calls)}; it must be a list")
        parsed["tool_calls"] = [_parse_call(tool_call) for tool_call in tool_calls]
        for tool_call in parsed["tool_calls"]:
            names[tool_call["id"]] = tool_call["function"]["name"]
    if role == "tool":
        call_id = str(message.get("tool_call_id") or "")
        parsed["tool_call_id"] = call_id
        name = message.get("name") or names.get(call_id)
        if name:
            parsed["name"] = str(name)
    return parsed


def _parse_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call is {short_repr(call)}; only functions are supported")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"the arguments of the call of {short_repr(function['name'])} are not a JSON object"
        )
    call_id = str(call.get("id") or "")
    function = {"name": function["name"], "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _parse_tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError(f"tools is {short_repr(tools)}; it must be a list", param="tools")
    for tool in tools:
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind != "function":
            raise RequestError(
                f"tools: {short_repr(tool)} is not of type 'function'", param="tools"
            )
    return tools


def _parse_stop(stop: Any) -> list[str]:
    if stop is None:
        return []
    stop_strings = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stop_strings, list)
    if not is_list or not all(isinstance(string, str) and string for string in stop_strings):
        raise RequestError(
            f"stop is {short_repr(stop)}; it must be a string or a list of strings", param="stop"
        )
    return stop_strings


def _parse_max_tokens(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or value < 1:
            raise RequestError(f"{name} = {short_repr(value)}; it must be at least 1", param=name)
        return value
    return None


# --- answers
# -------------------------------------------------------------------------------------------------


def answer_message(text: str, calls: Sequence[ToolCall] = ()) -> Message:
    """Return the message of an answer. A thought at its start goes into its own field."""
    message: Message = {"role": "assistant"}
    thought, end_of_thought, content = text.rpartition(THINKING[1])
    if end_of_thought:
        message["content"] = content.lstrip()
        message["reasoning_content"] = thought.replace(THINKING[0], "").strip()
    else:
        message["content"] = text
    if calls:
        message["tool_calls"] = [
            call_message(tool_call.id, tool_call.name, to_json(tool_call.arguments))
            for tool_call in calls
        ]
    return message


def reply_message(reply: Reply) -> Message:
    """Return the message of a parsed reply. The thought comes from its raw text."""
    content = reply.content
    if THINKING[1] not in content and THINKING[1] in reply:
        content = reply.rpartition(THINKING[1])[0] + THINKING[1] + content
    return answer_message(content, reply.calls)


def call_message(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def completion(answer: ChatAnswer, model: str) -> dict[str, Any]:
    """Return the body of a chat completion."""
    choice = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "message": answer.message,
        "logprobs": _logprobs(answer),
    }
    return {
        "id": _new_id(),
        "created": 0,
        "model": model,
        "object": "chat.completion",
        "choices": [choice],
        "usage": _usage(answer),
    }


def events(answer: ChatAnswer, model: str, *, with_usage: bool = False) -> str:
    """Return a chat completion as the server-sent events of a stream."""
    message = {key: value for key, value in answer.message.items() if key != "tool_calls"}
    deltas: list[dict[str, Any]] = [message]
    tool_calls = answer.message.get("tool_calls", [])
    if tool_calls:
        numbered = [
            {"index": call_index, **tool_call} for call_index, tool_call in enumerate(tool_calls)
        ]
        deltas.append({"tool_calls": numbered})

    chunk = {"id": _new_id(), "created": 0, "model": model, "object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = []
    for number, delta in enumerate(deltas):
        logprobs = _logprobs(answer) if number == 0 else None
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        chunks.append({**chunk, "choices": [choice]})
    last_choice = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
    chunks.append({**chunk, "choices": [last_choice]})
    if with_usage:
        chunks.append({**chunk, "choices": [], "usage": _usage(answer)})
    lines = [*map(to_json, chunks), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines)


def to_json(value: Any) -> str:
    """Return `value` as JSON. Lone surrogates, which JSON parsers reject, become question marks."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    tokens = []
    for token in answer.logprobs:
        encoded = list(token.text.encode("utf-8", "replace"))
        tokens.append(
            {"token": token.text, "logprob": token.logp, "bytes": encoded, "top_logprobs": []}
        )
    return {"content": tokens, "refusal": None}


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(8)}"


def problem_of(error: BaseException) -> str:
    """Return the message to answer for an unexpected error."""
    if isinstance(error, UserError):
        return clean(error, 300)
    return f"{type(error).__name__}: {clean(error, 300)}"
