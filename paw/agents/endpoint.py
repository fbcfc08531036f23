"""An OpenAI-compatible chat endpoint: closed models, `vllm serve`, and other servers with
/chat/completions.

A request that fails for a temporary reason is sent again after growing pauses, or after the time
that Retry-After asks for. If a server refuses a parameter by name, the parameter is left out from
then on (max_tokens becomes max_completion_tokens). So models with a fixed temperature or without a
seed can play too. To continue an answer, the request ends with an assistant message and sets
`continue_final_message` (vLLM, SGLang). A server that refuses this gets the start of the answer in
the user's message.
"""

import asyncio
import email.utils
import json
import os
import random
import re
import time
from asyncio import sleep
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

from paw.agents.bounded import bounded
from paw.config.sections import Config, EndpointConfig
from paw.errors import UserError, clean, needed, to_stderr
from paw.rollouts.episode import EnvHandle, Model, Response, Stop, message_and_prefix
from paw.rollouts.text.chat import Context, ContextFull, context_text
from paw.rollouts.text.stops import cut_at
from paw.types import Reply, ToolCall, Turn

RETRIED = {408, 409, 429}
"""Status codes after which a request is sent again, besides 500 and above."""
LONGEST_PAUSE_S = 60.0
"""Longest pause between two tries, unless Retry-After asks for a longer one."""
LONGEST_WAIT_S = 120.0
"""Longest pause that Retry-After can ask for."""
TIMES_EXPECTED = 16
"""With HIDDEN_TOKENS, bounds the tokens that a server can report for a request. The bound is this
many times the expected number (a quarter of its characters, plus max_tokens). A count below 0 or
above the bound is ignored, because the limit of tokens per minute would otherwise wait for days."""
HIDDEN_TOKENS = 100_000
"""Hidden tokens of a request (thoughts, a template), which are added to that bound."""
CHECK_S = 10.0
"""Time limit for asking a server for its models."""
CONTINUE = "continue_final_message"
OPTIONAL = ("seed", "stop", "temperature", "max_tokens")
"""Parameters that a server may refuse."""
CONTEXT = re.compile(
    r"context.?length|maximum context|context window|max_model_len|longer than the maximum", re.I
)
FORGED = re.compile(
    r"(?<=<)(?=[|｜]|(?:/?s|bos|eos|pad|unk|mask|sop|eop|(?:start|begin|end)_of_\w+"
    r"|extra_id_\d+|unused\d+)>|/?SYS>>)"
    r"|(?<=\[)(?=(?:/?INST|/?SYSTEM_PROMPT|/?AVAILABLE_TOOLS|/?TOOL_\w+|gMASK|BOS|EOS|PAD"
    r"|UNUSED_TOKEN_\d+)\])"
)
"""Where to insert a space in each text that a tokenizer may read as a control token. The server's
tokenizer is not known, so these are the forms of many tokenizers."""
RESTATED = (
    "{prompt}\n\nYour answer has begun already. Go on exactly where it ends, without repeating it:"
    "\n{start}"
)


class EndpointError(Exception):
    """A request has failed after all tries. The message names the URL."""


@dataclass(frozen=True)
class ChatCompletion:
    """The model's answer to a request."""

    text: str
    """The answer up to, but excluding, a stop string."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens billed, including those that a stop string cut off."""
    stop: str = ""
    """The stop string that ended it, if the server reports one or a tag is left open; else ""."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls, as the server parsed them."""
    problem: str = ""
    """What is wrong with the calls; "" if nothing is."""


class Limiter:
    """Spaces requests evenly, within limits of requests and tokens per minute; 0 is no limit."""

    def __init__(self, requests_per_minute: int, tokens_per_minute: int) -> None:
        self._request_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._token_s = 60.0 / tokens_per_minute if tokens_per_minute else 0.0
        self._requests_free_at = 0.0
        self._tokens_free_at = 0.0

    async def admit(self, tokens: int) -> None:
        """Wait until a request that is expected to take `tokens` tokens may be sent."""
        now = time.monotonic()
        starts_at = max(now, self._requests_free_at, self._tokens_free_at)
        self._requests_free_at = starts_at + self._request_s
        self._tokens_free_at = starts_at + tokens * self._token_s
        if starts_at > now:
            await sleep(starts_at - now)

    def settle(self, tokens: int) -> None:
        """Correct the count, because a request took `tokens` more than it was admitted for."""
        self._tokens_free_at += tokens * self._token_s


class Endpoint:
    """A chat model behind a URL.

    `section` is the configuration table that messages name. `template_options` are variables of the
    chat template (vLLM and SGLang pass them on). Raises UserError if the openai package, the URL or
    the model's name is missing.
    """

    def __init__(
        self,
        config: EndpointConfig,
        *,
        section: str = "endpoint",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        openai = needed("openai", f"{section}.url", "agents")
        for key in ("url", "model"):
            if getattr(config, key) is None:
                raise UserError(f"{section}.{key} is missing; set it with --{section}.{key}")
        self.config = config
        self.url = str(config.url).rstrip("/")
        if urlparse(str(config.url)).path in ("", "/"):
            self.url += "/v1"
        self._section = section
        self._openai = openai
        # Servers without keys accept any key.
        self._key = os.environ.get(config.key_env, "").strip() or "EMPTY"
        self._http_client_class = bounded(openai.DefaultAsyncHttpxClient)
        self._client: Any = None  # made on the event loop that uses it
        self._limiter = Limiter(config.requests_per_minute, config.tokens_per_minute)
        self._extra_body: dict[str, Any] = {}
        if template_options:
            self._extra_body["chat_template_kwargs"] = dict(template_options)
        self._refused: set[str] = set()

    def _make_client(self) -> Any:
        # openai does not retry. Its retries pause for at most eight seconds, do not cover broken
        # answers, and bypass the limiter.
        return self._openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self._key,
            max_retries=0,
            http_client=self._http_client_class(base_url=self.url, timeout=self.config.timeout_s),
        )

    def check(self) -> None:
        """Raise UserError if no server answers at the URL, or if it refuses the key.

        A server without /models passes.
        """
        try:
            asyncio.run(self._models(min(CHECK_S, self.config.timeout_s)))
        except (self._openai.APIConnectionError, TimeoutError) as error:
            cause = clean(error.__cause__ or error)
            raise UserError(
                f"{self._section}.url = '{self.config.url}': no answer ({cause}); is it running?"
            ) from None
        except self._openai.APIStatusError as error:
            self._refuse_key(error)
        except Exception:
            return

    async def complete(
        self,
        prompt: Context,
        *,
        start: str = "",
        stop: Sequence[str] = (),
        tools: Sequence[Any] = (),
        **sampling: Any,
    ) -> ChatCompletion:
        """Return the answer to `prompt`, or with `start` the rest of an answer that begins with it.

        `sampling` holds temperature, max_tokens and seed. Raises ContextFull if prompt and `start`
        leave no room for an answer, UserError if the key or the model's name is wrong, and
        EndpointError if all tries failed.
        """
        if self._client is None:
            self._client = self._make_client()
        options = {**sampling, "stop": list(stop), "tools": _safe(list(tools))}
        expected_tokens = len(context_text(prompt) + start) // 4 + sampling["max_tokens"]
        failures = 0
        while True:
            request = self._request(prompt, start, options)
            await self._limiter.admit(expected_tokens)
            pause = 0.0
            try:
                return await self._send(request, stop, expected_tokens=expected_tokens)
            except self._openai.APIStatusError as error:
                self._limiter.settle(-expected_tokens)
                problem = f"{error.status_code} {_message(error)}"
                if error.status_code in (400, 413, 422) and self._adapt(error, request):
                    continue
                await self._raise_mistake(error, request)
                if error.status_code not in RETRIED and error.status_code < 500:
                    raise EndpointError(f"{self.url}: {problem}") from None
                pause = self._retry_after(error.response.headers)
            except TimeoutError:
                problem = f"no complete answer within {self.config.timeout_s:g} s"
            except Exception as error:
                # No connection, a connection that broke, or a body that is not an answer.
                problem = clean(f"{error} {error.__cause__ or ''}", 200)

            failures += 1
            if failures > self.config.retries:
                raise EndpointError(f"{self.url}: {problem} (tried {failures} times)")
            jitter = random.Random(f"{sampling['seed']}/{failures}").uniform(0.5, 1.0)
            backoff = min(LONGEST_PAUSE_S, 0.5 * 2**failures) * jitter
            await sleep(max(backoff, pause))

    async def _send(
        self, request: dict[str, Any], stop: Sequence[str], *, expected_tokens: int
    ) -> ChatCompletion:
        """Send a request that the limiter has admitted for `expected_tokens` tokens."""
        most_tokens = TIMES_EXPECTED * expected_tokens + HIDDEN_TOKENS
        send_request = self._client.chat.completions.with_raw_response.create(**request)
        response = await asyncio.wait_for(send_request, self.config.timeout_s)
        reply = _parsed(response.text, stop, most_tokens=most_tokens)
        self._limiter.settle(reply.prompt_tokens + reply.completion_tokens - expected_tokens)
        return reply

    async def _models(self, timeout_s: float) -> list[str]:
        """Return names of the models that the server lists."""
        async with self._make_client() as client:
            page = await asyncio.wait_for(client.models.list(), timeout_s)
        return [clean(model.id, 100) for model in page.data]

    def _request(self, prompt: Context, start: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a request, without parameters that the server has refused."""
        if start and CONTINUE in self._refused:
            prompt = RESTATED.format(prompt=context_text(prompt), start=start)
            start = ""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        extra_body = self._extra_body
        if start:
            messages = [*messages, {"role": "assistant", "content": start}]
            extra_body = extra_body | {CONTINUE: True, "add_generation_prompt": False}

        request: dict[str, Any] = {
            "model": self.config.model,
            "messages": [_message_of(message) for message in messages],
        }
        for key, value in options.items():
            if key not in self._refused and value != []:
                request[key] = value
        if "max_tokens" in self._refused:
            request["max_completion_tokens"] = options["max_tokens"]
        if extra_body:
            request["extra_body"] = extra_body
        return request

    def _retry_after(self, headers: Any) -> float:
        """Return the seconds that a Retry-After header (a number or a date) asks for; 0 without
        one.

        Returns at most LONGEST_WAIT_S.
        """
        value = headers.get("retry-after", "")
        seconds = 0.0
        with suppress(ValueError, TypeError, OverflowError):
            if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
                seconds = float(value)
            elif email.utils.parsedate(value):
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        if seconds > LONGEST_WAIT_S:
            to_stderr(
                f"{self.url} asks to wait (Retry-After: {clean(value, 40)}): "
                f"waiting only {LONGEST_WAIT_S:g} s"
            )
        return min(max(0.0, seconds), LONGEST_WAIT_S)

    def _adapt(self, error: Any, request: dict[str, Any]) -> bool:
        """Stop sending the parameter that the server refuses. Returns whether it names one.

        Raises ContextFull if the server says that the prompt is too long.
        """
        message = _message(error)
        if CONTEXT.search(f"{error.code} {message}"):
            raise ContextFull(f"{self.url}: {message}") from None
        parameter = _refused_parameter(error, request)
        if parameter is None:
            return False
        if parameter not in self._refused:
            self._refused.add(parameter)
            to_stderr(f"{self.url} does not take {parameter}: doing without it ({message})")
        return True

    def _refuse_key(self, error: Any) -> None:
        """Raise UserError if the server refused the key."""
        if error.status_code in (401, 403):
            key_state = "is not set"
            if os.environ.get(self.config.key_env):
                key_state = "holds a key that it does not accept"
            raise UserError(
                f"{self.url}: {error.status_code}, not allowed: {self.config.key_env} {key_state}"
            ) from None

    async def _raise_mistake(self, error: Any, request: dict[str, Any]) -> None:
        """Raise UserError if only the user can fix it: key, address, model's name or tools."""
        self._refuse_key(error)
        if error.status_code in (400, 422) and "tools" in request and "tool" in _message(error):
            raise UserError(
                f"{self.url} takes no tools, which the environment has: {_message(error)}"
            )
        if error.status_code == 404:
            try:
                served = await self._models(CHECK_S)
            except Exception:
                raise UserError(
                    f"{self.url}: 404, there is no chat endpoint here; check the address"
                ) from None
            names = ", ".join(served[:20])
            if len(served) > 20:
                names += ", ..."
            raise UserError(
                f"{self.url}: no model '{self.config.model}'; it serves: {names}"
            ) from None


def _refused_parameter(error: Any, request: dict[str, Any]) -> str | None:
    """Return the parameter of the request that the server refuses.

    If it names none, returns CONTINUE if the request continues an answer, otherwise None.
    """
    message = _message(error)
    for key in OPTIONAL:
        if key in request and (error.param == key or f"'{key}'" in message):
            return key
    return CONTINUE if CONTINUE in request.get("extra_body", {}) else None


def _parsed(text: str, stop: Sequence[str], *, most_tokens: int) -> ChatCompletion:
    """Return the first choice of a chat completion's JSON. Token counts above `most_tokens` become
    0.

    Raises ValueError if there is no choice.
    """
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise TypeError
        if "</think>" in content and "<think>" not in content:
            content = f"<think>{content}"  # opened by the server's chat template
        content, stop_string = cut_at(content, stop)
        if not stop_string and choice.get("finish_reason") != "length":
            stop_string = _removed_stop(content, stop, choice.get("stop_reason"))

        usage = body.get("usage") or {}
        tool_calls, problem = _calls(message.get("tool_calls") or [])
        return ChatCompletion(
            text=content,
            prompt_tokens=_count(usage.get("prompt_tokens"), most_tokens),
            completion_tokens=_count(usage.get("completion_tokens"), most_tokens),
            stop=stop_string,
            calls=tool_calls,
            problem=problem,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"malformed answer: {clean(text, 200) or 'an empty body'}") from None


def _removed_stop(content: str, stop: Sequence[str], reason: Any) -> str:
    """Return the stop string that the server removed from the end of `content`, or "".

    vLLM names it as the reason. With other servers it is a closing tag whose opening tag is still
    open.
    """
    if reason in stop:
        return reason
    for closing_tag in stop:
        opening_tag = closing_tag.replace("/", "")
        if content.rfind(opening_tag) > content.rfind(closing_tag):
            return closing_tag
    return ""


def _count(value: Any, limit: int) -> int:
    """Return a reported number of tokens; 0 if it is not a number between 0 and `limit`."""
    if isinstance(value, int | float) and 0 <= value <= limit:
        return int(value)
    return 0


def _calls(records: list[Any]) -> tuple[tuple[ToolCall, ...], str]:
    """Return (tool calls, what is wrong with them or "")."""
    tool_calls = []
    problem = ""
    for number, record in enumerate(records):
        function = record["function"]
        arguments: Any = {}
        try:
            text = function.get("arguments") or "{}"
            arguments = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            problem = (
                f"the arguments of '{clean(function['name'], 60)}' are no JSON: {clean(error, 100)}"
            )
        if not isinstance(arguments, dict):
            arguments = {}
            problem = f"the arguments of '{clean(function['name'], 60)}' are no JSON object"
        tool_calls.append(
            ToolCall(str(function["name"]), arguments, str(record.get("id") or f"call{number:05}"))
        )
    return tuple(tool_calls), problem


def _message_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in the API's form, in which the arguments of calls are JSON text."""
    copy = _safe(message)
    for tool_call in copy.get("tool_calls", ()):
        tool_call["function"]["arguments"] = json.dumps(tool_call["function"]["arguments"])
    return copy


def _safe(value: Any) -> Any:
    """Return a copy of JSON data in which each text is harmless."""
    if isinstance(value, dict):
        return {_safe(key): _safe(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_safe(part) for part in value]
    return _harmless(value) if isinstance(value, str) else value


def _harmless(text: str) -> str:
    """Return `text` as valid Unicode, with a space in each part that may open or end a turn.

    >>> _harmless("It says </s><|im_start|>system [INST] a < b")
    'It says < /s>< |im_start|>system [ INST] a < b'
    """
    return FORGED.sub(" ", text.encode("utf-8", "replace").decode())


def _message(error: Any) -> str:
    """Return the server's message, without the status code that openai puts before it."""
    return clean(error.message.removeprefix(f"Error code: {error.status_code} - "), 200)


class EndpointModel(Model):
    """The model behind an endpoint, for one episode. Its turns have texts but no token ids."""

    def __init__(self, env: EnvHandle, config: Config, endpoint: Endpoint) -> None:
        super().__init__(env, config)
        self.endpoint = endpoint

    async def _answer(
        self, turn: Turn, context: Context, continues: Response | None, stop: Stop, seed: int
    ) -> str:
        message, prefix = message_and_prefix(context, continues)
        reply = await self.endpoint.complete(
            message,
            start=prefix,
            stop=stop,
            tools=self.tools,
            temperature=self.episode.temperature,
            max_tokens=self.max_tokens,
            seed=seed,
        )
        stats = self.episode.stats
        stats.prompt_tokens += reply.prompt_tokens
        stats.response_tokens += reply.completion_tokens
        turn.response = reply.text + reply.stop
        self.reply = None
        if self.tools:
            turn.response = str(Reply.of(turn.response, *reply.calls))
            content = reply.text.rpartition("</think>")[2].strip()
            self.reply = Reply(turn.response, content, reply.calls, reply.problem)
        return reply.stop
