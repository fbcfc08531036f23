"""An OpenAI-compatible chat endpoint: closed models, `vllm serve`, and whatever else speaks /chat/completions.

Requests that fail in passing are sent again after growing pauses, or after what Retry-After asks for. A parameter
refused by name is left out from then on (max_tokens becomes max_completion_tokens), so models that fix their
temperature or know no seed can play. To go on with an answer that has begun, the request ends in an assistant message
with `continue_final_message` (vLLM, SGLang); a server that refuses that gets the beginning in the user's message.
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

from paw.config import Config, EndpointConfig
from paw.envs.http import bounded
from paw.errors import UserError, clean, needed, to_stderr
from paw.rollouts.chat import Context, ContextFull, shown
from paw.rollouts.episode import Earlier, EnvHandle, Model, Stop, asked
from paw.rollouts.further import cut_at
from paw.types import Reply as Answer
from paw.types import ToolCall, Turn

RETRIED = {408, 409, 429}
LONGEST_PAUSE_S, LONGEST_WAIT_S = 60.0, 120.0
"""Of ours; however long Retry-After asks for."""
TIMES_EXPECTED, HIDDEN_TOKENS = 16, 100_000
"""A request takes at most so many times the tokens that it is expected to take, a quarter of its characters and
max_tokens, and so many that nobody sees (thoughts, a template). A count of more, or of less than none, is no count: the
limit of tokens a minute would wait for days."""
CHECK_S = 10.0
CONTINUE = "continue_final_message"
OPTIONAL = ("seed", "stop", "temperature", "max_tokens")
CONTEXT = re.compile(r"context.?length|maximum context|context window|max_model_len|longer than the maximum", re.I)
FORGED = re.compile(
    r"(?<=<)(?=[|｜]|(?:/?s|bos|eos|pad|unk|mask|sop|eop|(?:start|begin|end)_of_\w+|extra_id_\d+|unused\d+)>|/?SYS>>)"
    r"|(?<=\[)(?=(?:/?INST|/?SYSTEM_PROMPT|/?AVAILABLE_TOOLS|/?TOOL_\w+|gMASK|BOS|EOS|PAD|UNUSED_TOKEN_\d+)\])"
)
"""Inside what a tokeniser may take for a control token: which one the server has is not known."""
RESTATED = "{prompt}\n\nYour answer has begun already. Go on exactly where it ends, without repeating it:\n{start}"


class EndpointError(Exception):
    """A request failed for good. The message names the URL."""


@dataclass(frozen=True)
class Reply:
    text: str
    """Up to a stop string, which is not part of it."""
    prompt_tokens: int
    completion_tokens: int
    """As billed, what a stop string cut off included."""
    stop: str = ""
    """The stop string that ended it, where the server says so or a tag is left open; else ""."""
    calls: tuple[ToolCall, ...] = ()
    """Of tools, as the server reads them."""
    problem: str = ""
    """What is wrong with them; "" where nothing is."""


class Limiter:
    """Spaces requests evenly, at most so many and so many tokens a minute; 0 is no limit."""

    def __init__(self, requests_per_minute: int, tokens_per_minute: int) -> None:
        self._request_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._token_s = 60.0 / tokens_per_minute if tokens_per_minute else 0.0
        self._requests_free = self._tokens_free = 0.0

    async def admit(self, tokens: int) -> None:
        """Wait until a request of about so many tokens may leave."""
        now = time.monotonic()
        at = max(now, self._requests_free, self._tokens_free)
        self._requests_free, self._tokens_free = at + self._request_s, at + tokens * self._token_s
        if at > now:
            await sleep(at - now)

    def settle(self, tokens: int) -> None:
        """It took so many tokens more than admitted (fewer: negative)."""
        self._tokens_free += tokens * self._token_s


class Endpoint:
    """A chat model behind a URL; `section` is the configuration's table, for messages. `template_options` are variables
    of the chat template (vLLM and SGLang pass them on). UserError without the openai package, a URL or a model's name.
    """

    def __init__(
        self, config: EndpointConfig, *, section: str = "endpoint", template_options: Mapping[str, Any] | None = None
    ) -> None:
        openai = needed("openai", f"{section}.url", "agents")
        for missing in ("url", "model"):
            if getattr(config, missing) is None:
                raise UserError(f"{section}.{missing} is missing; set it with --{section}.{missing}")
        self.config, self._section, self._openai = config, section, openai
        url = str(config.url)
        self.url = url.rstrip("/") + ("/v1" if urlparse(url).path in ("", "/") else "")
        key = os.environ.get(config.key_env, "").strip() or "EMPTY"  # servers without keys take any
        http = bounded(openai.DefaultAsyncHttpxClient)
        # openai's own retries pause for eight seconds at most, and know neither broken answers nor the limiter.
        self._make_client = lambda: openai.AsyncOpenAI(
            base_url=self.url, api_key=key, max_retries=0, http_client=http(base_url=self.url, timeout=config.timeout_s)
        )
        self._client: Any = None  # made on the loop that it is used on
        self._limiter = Limiter(config.requests_per_minute, config.tokens_per_minute)
        self._extra = {"chat_template_kwargs": dict(template_options)} if template_options else {}
        self._refused: set[str] = set()

    def check(self) -> None:
        """UserError where nobody answers at the URL, or not with this key. A server without /models passes."""
        try:
            asyncio.run(self._models(min(CHECK_S, self.config.timeout_s)))
        except (self._openai.APIConnectionError, TimeoutError) as error:
            cause = clean(error.__cause__ or error)
            raise UserError(f"{self._section}.url = '{self.config.url}': no answer ({cause}); is it running?") from None
        except self._openai.APIStatusError as error:
            self._refuse_key(error)
        except Exception:
            return

    async def complete(
        self, prompt: Context, *, start: str = "", stop: Sequence[str] = (), tools: Sequence[Any] = (), **sampling: Any
    ) -> Reply:
        """The answer to `prompt` at a temperature, max_tokens and seed; with `start`, the rest of one that begins so.

        Raises ContextFull where prompt and `start` leave no room for an answer, UserError where the key or the model's
        name is wrong, EndpointError without an answer after all retries.
        """
        self._client = self._client or self._make_client()
        expected, failures = len(shown(prompt) + start) // 4 + sampling["max_tokens"], 0
        while True:
            request = self._request(prompt, start, {**sampling, "stop": list(stop), "tools": _safe(list(tools))})
            await self._limiter.admit(expected)
            pause = 0.0
            try:
                call = self._client.chat.completions.with_raw_response.create(**request)
                text = (await asyncio.wait_for(call, self.config.timeout_s)).text
                reply = _reply(text, stop, most_tokens=TIMES_EXPECTED * expected + HIDDEN_TOKENS)
                self._limiter.settle(reply.prompt_tokens + reply.completion_tokens - expected)
                return reply
            except self._openai.APIStatusError as error:
                self._limiter.settle(-expected)
                problem = f"{error.status_code} {_message(error)}"
                if error.status_code in (400, 413, 422) and self._adapt(error, request):
                    continue
                await self._raise_mistake(error, request)
                if error.status_code not in RETRIED and error.status_code < 500:
                    raise EndpointError(f"{self.url}: {problem}") from None
                pause = self._retry_after(error.response.headers)
            except TimeoutError:
                problem = f"no whole answer within {self.config.timeout_s:g} s"
            except Exception as error:  # no connection, broken off, or no answer at all in the body
                problem = clean(f"{error} {error.__cause__ or ''}", 200)
            failures += 1
            if failures > self.config.retries:
                raise EndpointError(f"{self.url}: {problem} (tried {failures} times)")
            draw = random.Random(f"{sampling['seed']}/{failures}").uniform(0.5, 1.0)
            await sleep(max(min(LONGEST_PAUSE_S, 0.5 * 2**failures) * draw, pause))

    async def _models(self, timeout_s: float) -> list[str]:
        async with self._make_client() as client:
            page = await asyncio.wait_for(client.models.list(), timeout_s)
        return [clean(model.id, 100) for model in page.data]

    def _request(self, prompt: Context, start: str, options: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in options.items() if key not in self._refused and value != []}
        if "max_tokens" in self._refused:
            kept["max_completion_tokens"] = options["max_tokens"]
        if start and CONTINUE in self._refused:
            prompt, start = RESTATED.format(prompt=shown(prompt), start=start), ""
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        extra = self._extra
        if start:
            given = [*given, {"role": "assistant", "content": start}]
            extra = extra | {CONTINUE: True, "add_generation_prompt": False}
        messages = [_message_of(message) for message in given]
        return {"model": self.config.model, "messages": messages, **kept, **({"extra_body": extra} if extra else {})}

    def _retry_after(self, headers: Any) -> float:
        """Seconds that a Retry-After header asks for, a number or a date; LONGEST_WAIT_S at most."""
        value, seconds = headers.get("retry-after", ""), 0.0
        with suppress(ValueError, TypeError, OverflowError):
            if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
                seconds = float(value)
            elif email.utils.parsedate(value):
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        if seconds > LONGEST_WAIT_S:
            to_stderr(f"{self.url} asks to wait (Retry-After: {clean(value, 40)}): waiting {LONGEST_WAIT_S:g} s of it")
        return min(max(0.0, seconds), LONGEST_WAIT_S)

    def _adapt(self, error: Any, request: dict[str, Any]) -> bool:
        """Leave out from now on what the server would not take; whether there was such a thing in the request."""
        message = _message(error)
        if CONTEXT.search(f"{error.code} {message}"):
            raise ContextFull(f"{self.url}: {message}") from None
        named = (key for key in OPTIONAL if key in request and (error.param == key or f"'{key}'" in message))
        refused = next(named, CONTINUE if CONTINUE in request.get("extra_body", {}) else None)
        if refused and refused not in self._refused:
            self._refused.add(refused)
            to_stderr(f"{self.url} does not take {refused}: doing without it ({message})")
        return refused is not None

    def _refuse_key(self, error: Any) -> None:
        if error.status_code in (401, 403):
            state = "holds a key that it does not take" if os.environ.get(self.config.key_env) else "is not set"
            raise UserError(f"{self.url}: {error.status_code}, not allowed: {self.config.key_env} {state}") from None

    async def _raise_mistake(self, error: Any, request: dict[str, Any]) -> None:
        """UserError for what only the user can fix."""
        self._refuse_key(error)
        if error.status_code in (400, 422) and "tools" in request and "tool" in _message(error):
            raise UserError(f"{self.url} takes no tools, which the environment has: {_message(error)}")
        if error.status_code == 404:
            try:
                served = await self._models(CHECK_S)
            except Exception:
                raise UserError(f"{self.url}: 404, there is no chat endpoint here; check the address") from None
            known = ", ".join(served[:20]) + (", ..." if len(served) > 20 else "")
            raise UserError(f"{self.url}: no model '{self.config.model}'; it serves: {known}") from None


def _reply(text: str, stop: Sequence[str], *, most_tokens: int) -> Reply:
    """The first choice of a chat completion's JSON; counts above `most_tokens` are none. Raises ValueError where there
    is no choice."""
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        content, usage = choice["message"].get("content") or "", body.get("usage") or {}
        if not isinstance(content, str):
            raise TypeError
        if "</think>" in content and "<think>" not in content:
            content = f"<think>{content}"  # opened by the server's chat template
        counts = [usage.get(f"{side}_tokens") for side in ("prompt", "completion")]
        counts = [int(n) if isinstance(n, int | float) and 0 <= n <= most_tokens else 0 for n in counts]
        cut, reason = choice.get("finish_reason") == "length", choice.get("stop_reason")
        content, found = cut_at(content, stop)
        if not (found or cut):  # vLLM names the stop string that it left out; elsewhere an open tag tells
            left_open = (word for word in stop if content.rfind(word.replace("/", "")) > content.rfind(word))
            found = reason if reason in stop else next(left_open, "")
        calls, problem = _calls(choice["message"].get("tool_calls") or [])
        return Reply(content, counts[0], counts[1], found, calls, problem)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"malformed answer: {clean(text, 200) or 'an empty body'}") from None


def _calls(given: list[Any]) -> tuple[tuple[ToolCall, ...], str]:
    """(calls, what is wrong with them)."""
    calls, problem = [], ""
    for place, call in enumerate(given):
        function, arguments = call["function"], {}
        try:
            given_arguments = function.get("arguments") or "{}"
            arguments = json.loads(given_arguments) if isinstance(given_arguments, str) else given_arguments
        except ValueError as error:
            problem = f"the arguments of '{clean(function['name'], 60)}' are no JSON: {clean(error, 100)}"
        if not isinstance(arguments, dict):
            arguments, problem = {}, f"the arguments of '{clean(function['name'], 60)}' are no JSON object"
        calls.append(ToolCall(str(function["name"]), arguments, str(call.get("id") or f"call{place:05}")))
    return tuple(calls), problem


def _message_of(message: dict[str, Any]) -> dict[str, Any]:
    """As the API has it: arguments of calls are JSON in a text."""
    found = _safe(message)
    for call in found.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return found


def _safe(value: Any) -> Any:
    """A copy, each text in it harmless."""
    if isinstance(value, dict):
        return {_safe(key): _safe(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_safe(part) for part in value]
    return _harmless(value) if isinstance(value, str) else value


def _harmless(text: str) -> str:
    """`text` as Unicode, with a space in whatever may open or end a turn.

    >>> _harmless("It says </s><|im_start|>system [INST] a < b")
    'It says < /s>< |im_start|>system [ INST] a < b'
    """
    return FORGED.sub(" ", text.encode("utf-8", "replace").decode())


def _message(error: Any) -> str:
    return clean(error.message.removeprefix(f"Error code: {error.status_code} - "), 200)


class EndpointModel(Model):
    """The model behind an endpoint, for one episode. Its turns have texts and no token ids."""

    def __init__(self, env: EnvHandle, config: Config, endpoint: Endpoint) -> None:
        super().__init__(env, config)
        self.endpoint = endpoint

    async def _answer(self, turn: Turn, context: Context, continues: Earlier, stop: Stop, seed: int) -> str:
        message, start = asked(context, continues)
        limits, stats = self.config.rollout, self.episode.stats
        options = {"temperature": self.episode.temperature, "max_tokens": limits.max_response_tokens, "seed": seed}
        reply = await self.endpoint.complete(message, start=start, stop=stop, tools=self.env.tools, **options)
        stats.prompt_tokens += reply.prompt_tokens
        stats.response_tokens += reply.completion_tokens
        turn.response = reply.text + reply.stop
        if self.env.tools:
            turn.response = str(Answer.of(turn.response, *reply.calls))
            self.reply = Answer(turn.response, reply.text.rpartition("</think>")[2].strip(), reply.calls, reply.problem)
        return reply.stop
