"""OpenEnv environments (https://github.com/huggingface/OpenEnv), played over a server's WebSocket.

Each connection is a session, which plays one episode. Written against openenv 0.10.0.

The openenv package itself is not used. It needs mcp 1 and vLLM needs mcp 2, so the two cannot be
installed together. The protocol is

    {"type": "reset" | "step" | "close", "data": {...}}
    -> {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": false}}
    -> {"type": "error", "data": {"message": "...", "code": "CAPACITY_REACHED"}}
"""

import functools
import hashlib
import itertools
import json
import random
import subprocess
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NoReturn

from pydantic import Field, field_validator

from paw.config.values import listed
from paw.envs.base import Endless, EnvFactory, Sized, Tasks, seeds
from paw.envs.checked import Strict, checked
from paw.envs.conversation import Conversation, Message, invalid, opening
from paw.envs.settings import ConversationConfig
from paw.errors import EnvironmentFailure, UserError, clean, describe, quietly
from paw.io.http import MAX_BYTES, BadAnswer, HttpClient, Loop
from paw.types import Outcome, Task, ToolCall

CONNECT_S = 10.0
"""Time limit for connecting to a server."""
RETRY_S = 5.0
"""Seconds to keep asking for a session while the server is unavailable or full."""
CLOSE_S = 1.0
"""Time limit for ending a session."""
START_S = 120.0
"""Time limit for a new container to answer."""
MOST_TASKS = 1_000_000
"""Maximum tasks of a split that is played in epochs. Those of a larger one are drawn at random."""
COMMON = ("metadata", "done", "reward")
"""Fields that any action or observation may have."""
WHOLE = "*"
"""Value of env.action_field with which the model writes the whole action, as JSON."""
AUTO = "auto"
EVALUATED = ("test", "validation", "valid", "dev", "eval", "valid_unseen")
"""Splits that env.eval_split = "auto" looks for, in this order."""
JsonObject = dict[str, Any]
_watchers: list[subprocess.Popen[bytes]] = []
"""The processes that remove our containers. They are kept, because garbage collection would close
their pipes."""


class OpenenvConfig(ConversationConfig):
    """An OpenEnv environment, on a server."""

    name: str = "openenv"
    """Which environment."""
    eval_split: str = "auto"
    """Split to evaluate on. auto takes test, validation or valid_unseen, otherwise the server's
    only split beside env.train_split."""
    url: list[Annotated[str, Field(pattern=r"^(https?|wss?)://[^/\s]+")]] = []
    """Servers of the same environment, which share the episodes. Give one http:// or ws:// address,
    or a list."""
    image: str = ""
    """Docker image to start instead of `url`. Its container ends with the command."""
    action_field: str = ""
    """Field of the action that gets the response, without its thought. If unset, the only text
    field. If the field has another type, the response is parsed as JSON. With "*", the response is
    the whole action, as JSON."""
    observation_field: str = ""
    """Field of the observation that is shown. If unset, the only text field or the one called
    `text`, otherwise the whole observation as JSON."""
    prompt_field: str = ""
    """Field of the observation that has a turn's whole prompt. If unset, the turns are a
    conversation."""
    options: dict[str, bool | int | float | str] = {}
    """Further arguments of reset."""

    _one_or_more = field_validator("url", mode="before")(listed)


class ServerMessage(Strict):
    """A server's answer to a request."""

    type: str
    data: JsonObject = {}


class StepResult(Strict):
    """The data of a server's message of type "observation"."""

    observation: JsonObject
    reward: bool | float | None = None
    done: bool = False


@dataclass(frozen=True)
class ServerInfo:
    """The environment that a server offers. Field types are those of JSON schema, or "text"."""

    action: dict[str, str]
    """Types of the fields of an action."""
    observation: dict[str, str]
    """Types of the fields of an observation."""
    splits: dict[str, int | None]
    """Number of tasks by split, None if endless. Empty if tasks are only seeds."""


class ConnectionLost(EnvironmentFailure):
    """There is no connection, or it was lost."""


class ServerFull(ConnectionLost):
    """The server cannot accept another session."""


class OpenenvFactory(EnvFactory):
    """The environment of the servers `env.url`, or of a container of `env.image`.

    Raises UserError if nobody answers there, if it is not an OpenEnv server, if the servers differ,
    or if a field or split does not exist.
    """

    Config = OpenenvConfig
    name = "openenv"
    may_block = True

    def __init__(self, config: OpenenvConfig) -> None:
        _websockets()
        if bool(config.url) == bool(config.image):
            raise UserError(
                "env.name = 'openenv' needs either env.url = 'http://...' or env.image = 'NAME'"
            )
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        urls = [_base(url) for url in config.url] or [container(config.image)]
        self._first_url = urls[0]
        self._urls = itertools.cycle(urls)
        self._server = _ask_all(urls)
        self._eval_split = self._choose_eval_split()
        self._check_splits()
        self._check_fields()

        actions = self._server.action
        self.calls_tools = not actions or {"tool_name", "arguments"} <= {*actions}
        """Whether the actions are calls of tools."""
        self.shown_field = self._choose_shown_field()
        """Field of an observation that is shown; "" for all of it."""
        self.action_field = self._choose_action_field()
        """Field of an action that gets the response."""
        self.action_is_text = actions.get(self.action_field) == "text"

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the server's tasks, or an endless supply of seeds if it lists none.

        Tasks are drawn at random if there are too many for epochs.

        Raises UserError if the split is empty.
        """
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': openenv has no oracle to warm it up on; "
                "use an instruct model"
            )
        if split == AUTO:
            split = self._eval_split
        if not self._server.splits:
            return seeds(split, seed)

        task_count = self._server.splits[split]

        def task(i: int) -> Task:
            name = f"{split}/{seed}/{i}"
            task_index = i
            if task_count is not None and task_count > MOST_TASKS:
                task_index = random.Random(name).randrange(task_count)
            return Task(name, payload={"split": split, "index": task_index, "seed": seed})

        if task_count is None or task_count > MOST_TASKS:
            return Endless(task)
        if task_count < 1:
            raise UserError(
                f"env.url: {self._first_url} says that its split '{split}' has "
                f"{clean(task_count, 40)} tasks; name another (env.train_split, env.eval_split)"
            )
        return Sized(task, task_count)

    def make(self) -> "OpenenvEnv":
        return OpenenvEnv(self.config, self, next(self._urls))

    def fingerprint(self) -> str:
        content = json.dumps([asdict(self._server), self.config.options], sort_keys=True)
        return f"openenv {hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def _choose_eval_split(self) -> str:
        if self.config.eval_split != AUTO:
            return self.config.eval_split
        others = [split for split in self._server.splits if split != self.config.train_split]
        usual_splits = [split for split in EVALUATED if split in others]
        if usual_splits:
            return usual_splits[0]
        if not others:
            return "test"
        if len(others) > 1:
            raise UserError(
                f"env.eval_split is not set: {self._first_url} has {', '.join(others)}; name one"
            )
        return others[0]

    def _check_splits(self) -> None:
        splits = self._server.splits
        for split in (self.config.train_split, self._eval_split):
            if splits and split not in splits:
                raise UserError(
                    f"{self._first_url} has no split '{split}'; "
                    f"env.train_split and env.eval_split can be {', '.join(splits)}"
                )

    def _check_fields(self) -> None:
        """Raise UserError if a configured field does not exist."""
        fields_of_key = {
            "action_field": self._server.action,
            "observation_field": self._server.observation,
            "prompt_field": self._server.observation,
        }
        for key, fields in fields_of_key.items():
            name = getattr(self.config, key)
            if name not in ("", WHOLE, *fields):
                raise UserError(
                    f"env.{key} = '{name}' is not a field of {self._first_url}, "
                    f"which has {_listed(fields)}"
                )

    def _choose_shown_field(self) -> str:
        if self.config.observation_field:
            return self.config.observation_field
        texts = _text_fields(self._server.observation)
        if len(texts) == 1:
            return texts[0]
        return "text" if "text" in texts else ""

    def _choose_action_field(self) -> str:
        if self.config.action_field:
            return self.config.action_field
        actions = self._server.action
        texts = _text_fields(actions)
        if len(texts) != 1 and not self.calls_tools:
            raise UserError(
                f"env.action_field is not set: the action of {self._first_url} has "
                f"{_listed(actions)}; '{WHOLE}' lets the model write all of it as JSON"
            )
        return texts[0] if texts else ""


class OpenenvEnv(Conversation):
    """One episode at a time, each in its own session."""

    def __init__(self, config: OpenenvConfig, factory: OpenenvFactory, url: str) -> None:
        self.config = config
        self._factory = factory
        self._url = url
        self._socket: Any = None
        self.close: Callable[[], object] = lambda: None
        """Ends the session; replaced by each connection."""
        # The episode: set by `begin`.
        self._reset_arguments: JsonObject = {}
        self._first: StepResult
        """The answer to reset."""
        self._prompt: Any = None
        """The value of env.prompt_field in the last observation."""
        self._turns = 0
        self._has_played = False
        """Whether the server has played an action of this episode."""
        self._return = 0.0

    def begin(self, task: Task) -> list[Message]:
        """Reset a new session.

        Raises EnvironmentFailure if there is none within RETRY_S, and UserError if the server is
        full.
        """
        self._reset_arguments = {**self.config.options, **task.payload}
        self._turns = 0
        self._has_played = False
        self._return = 0.0
        self._first = self._start()
        if self._factory.calls_tools and not self.tools:
            self.tools = self._list_tools()
        return opening(self.config.instruction, self._look(self._first))

    def context(self) -> Any:
        return self._prompt or super().context()

    def step(self, response: str) -> Outcome:
        outcome = super().step(response)
        self._turns += 1
        if outcome.done or self._turns >= self.config.max_turns:
            self.close()
        return outcome

    def say(self, text: str) -> Outcome:
        if self.tools:
            return invalid("call a tool", text)
        if not text:
            return invalid("there is none", text)
        value: Any = text
        if not self._factory.action_is_text:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                return invalid("it must be JSON", text)
        field = self._factory.action_field
        if field == WHOLE and isinstance(value, dict):
            return self._play(value, text)
        return self._play({field: value}, text)

    def call(self, call: ToolCall) -> Outcome:
        action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        return self._play(action, str(call))

    def _list_tools(self) -> list[JsonObject]:
        """Return the server's tools as function schemas. Raises UserError if it lists none."""
        result = self._ask("step", {"type": "list_tools"})
        tools = []
        for tool in result.observation.get("tools") or ():
            tools.append({"parameters": tool.pop("input_schema", None), **tool})
        if not tools:
            raise UserError(f"{self._url}: its actions are tool calls, but it lists no tools")
        return tools

    def _play(self, action: JsonObject, text: str) -> Outcome:
        """Play `action`. The outcome names it by its `text`."""
        try:
            result = self._send_action(action)
        except ValueError as error:
            return invalid(str(error), text)
        self._has_played = True
        reward = float(result.reward or 0.0)
        self._return += reward

        won = result.observation.get("won")
        if not isinstance(won, bool):
            won = result.done and self._return >= self.config.reward
        score = result.observation.get("score")
        if not (isinstance(score, int | float) and 0 <= score <= 1):
            score = None
        return Outcome(
            self._look(result),
            reward,
            done=result.done,
            won=won,
            action=text,
            valid=result.observation.get("valid") is not False,
            score=score,
        )

    def _send_action(self, action: JsonObject) -> StepResult:
        """Send `action` and return the server's answer.

        If the connection was lost before the first action, an equal session is started for it.
        Raises ValueError if the server refuses the action.
        """
        try:
            return self._ask("step", action)
        except ConnectionLost:
            if self._has_played:
                raise
        if self._start() != self._first:
            self._fail("the connection was lost, and the same reset began another episode")
        return self._ask("step", action)

    def _look(self, result: StepResult) -> str:
        """Return the observation as text. Keeps its prompt for `context`."""
        observation = result.observation
        fields = {name: value for name, value in observation.items() if name not in COMMON}
        fields = fields or observation.get("metadata") or {}
        self._prompt = fields.get(self.config.prompt_field)
        if self._factory.calls_tools and "tool_name" in fields:
            return _tool_result(fields)
        return _as_text(fields.get(self._factory.shown_field, fields))

    def _start(self) -> StepResult:
        """Reset a new session. Retries for RETRY_S while the server is unavailable or full."""
        self.close()
        deadline = time.monotonic() + RETRY_S
        pause = 0.1
        while True:
            try:
                self._connect()
                return self._ask("reset", self._reset_arguments)
            except ConnectionLost as error:
                self.close()
                is_last_try = time.monotonic() + pause > deadline
                if is_last_try and isinstance(error, ServerFull):
                    raise UserError(
                        f"{error}; raise max_concurrent_envs there, give more servers (env.url "
                        "takes a list) or play fewer at once (rollout.tasks, rollout.group_size)"
                    ) from None
                if is_last_try:
                    raise
            time.sleep(pause)
            pause *= 2

    def _connect(self) -> None:
        connect, errors = _websockets()
        try:
            socket = connect(
                f"ws{self._url[4:]}/ws",
                open_timeout=CONNECT_S,
                close_timeout=CLOSE_S,
                max_size=MAX_BYTES,
                proxy=None,  # addresses within a cluster bypass the proxy
            )
        except (OSError, EOFError, errors.WebSocketException) as error:
            status: int = getattr(getattr(error, "response", None), "status_code", 0)
            if 400 <= status < 500:
                raise UserError(
                    f"{self._url}/ws: status {status} instead of an OpenEnv session"
                ) from None
            raise ConnectionLost(f"{self._url}/ws: {describe(error)}") from None
        self._socket = socket
        finalizer = weakref.finalize(self, _end_session, socket)
        # When the process ends, the server sees the connection end.
        finalizer.atexit = False  # type: ignore[attr-defined]
        self.close = finalizer

    def _ask(self, kind: str, data: JsonObject) -> StepResult:
        """Send a request and return the server's answer.

        Raises ValueError if the server does not accept `data` as an action, ConnectionLost,
        ServerFull, and EnvironmentFailure for any other error.
        """
        errors = _websockets()[1]
        message = json.dumps({"type": kind, "data": data})
        try:
            # If the server has closed the connection, its reason may still be unread.
            with suppress(errors.ConnectionClosed):
                self._socket.send(message)
            raw = self._socket.recv(self.config.step_timeout_s)
        except TimeoutError:
            self._fail(
                f"no answer to {kind} within env.step_timeout_s = {self.config.step_timeout_s:g}"
            )
        except (OSError, errors.ConnectionClosed) as error:
            raise ConnectionLost(
                f"{self._url}/ws: the connection was lost in {kind} ({clean(error)})"
            ) from None

        if isinstance(raw, str):
            raw = raw.encode()
        try:
            answer = checked(ServerMessage, raw, "not a message of OpenEnv")
            if answer.type == "observation":
                return checked(StepResult, answer.data, "not an observation of OpenEnv")
        except UserError as error:
            self._fail(f"{kind}: {error}")
        self._raise_error(kind, answer)

    def _raise_error(self, kind: str, answer: ServerMessage) -> NoReturn:
        """Raise what `_ask` documents for an answer that is an error."""
        reason = clean(answer.data.get("message", answer.type))
        error_code = answer.data.get("code")
        if error_code == "CAPACITY_REACHED":
            raise ServerFull(f"{self._url}/ws: {reason}")
        if error_code == "VALIDATION_ERROR" and kind == "step":
            problems = [error.get("msg") for error in answer.data.get("errors", ())]
            raise ValueError(clean(problems or reason))
        self._fail(f"{kind}: {reason} ({clean(error_code)})")

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise EnvironmentFailure(f"{self._url}/ws: {reason}")


def _end_session(socket: Any) -> None:
    """Close the connection, and wait until the server confirms that the session is closed."""
    with quietly():
        socket.send('{"type": "close"}')
        socket.recv(CLOSE_S)
    with quietly():
        socket.close()


def _tool_result(fields: JsonObject) -> str:
    """Return a tool's error or result as text, or the texts of its content if it has any."""
    result = fields.get("error") or fields.get("result")
    content = result.get("content") if isinstance(result, dict) else None
    content_parts = [
        content_part for content_part in content or () if isinstance(content_part, dict)
    ]
    if content_parts:
        return "\n".join(
            str(content_part.get("text", content_part)) for content_part in content_parts
        )
    return _as_text(result)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fields(schema: JsonObject) -> dict[str, str]:
    """Return the type of each field, without COMMON and constants. Strings are "text"."""
    fields = {}
    for name, field in schema["properties"].items():
        if name in COMMON or "const" in field:
            continue
        types = [option.get("type") for option in (field, *field.get("anyOf", ()))]
        if "string" in types:
            fields[name] = "text"
        else:
            fields[name] = types[-1] or "object"
    return fields


def _text_fields(fields: dict[str, str]) -> list[str]:
    return [name for name, type_ in fields.items() if type_ == "text"]


def _listed(fields: dict[str, str]) -> str:
    return ", ".join(f"{name} ({type_})" for name, type_ in fields.items()) or "none"


def _base(url: str) -> str:
    """Return an address in the form http(s)://HOST:PORT."""
    url = url.rstrip("/").removesuffix("/ws")
    return f"http{url[2:]}" if url.startswith("ws") else url


def _ask_all(urls: list[str]) -> ServerInfo:
    """Return the environment of all `urls`. Raises UserError if they differ or one fails."""
    servers = [ask_server(url) for url in urls]
    for url, server in zip(urls, servers, strict=True):
        if server != servers[0]:
            raise UserError(f"env.url: {url} serves a different environment from {urls[0]}")
    return servers[0]


def ask_server(url: str) -> ServerInfo:
    """Return the environment that the server at `url` offers.

    Raises UserError if nobody answers there, or if it is not a server of OpenEnv.
    """
    client = HttpClient(f"env.url = '{url}'", timeout_s=CONNECT_S)
    loop = Loop()
    try:
        return loop.run(_read_server(client, url), 2 * CONNECT_S)
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"env.url = '{url}': nobody answers there ({describe(error)}); start the server"
        ) from None
    except (BadAnswer, UserError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"env.url = '{url}': that is not a server of OpenEnv: {clean(error)}"
        ) from None
    finally:
        loop.close()


async def _read_server(client: HttpClient, url: str) -> ServerInfo:
    async def request(method: str, path: str, kind: Any, body: Any = None) -> Any:
        answer = await client.ask(method, f"{url.rstrip('/')}{path}", body)
        if answer.status != 200:
            return None
        return checked(kind, answer.body, path)

    try:
        schema = await request("GET", "/schema", JsonObject)
        if not schema:
            raise BadAnswer("it has no /schema")

        splits: dict[str, int | None] = {}
        for environment in await request("GET", "/list_environments", list[str]) or ():
            path = f"/{environment}/splits"
            for split in await request("GET", path, list[JsonObject]) or ():
                name = split["name"]
                answer = await request(
                    "POST", f"/{environment}/num_tasks", dict[str, int], {"split": name}
                )
                splits[name] = None if answer is None else answer["num_tasks"]
    finally:
        await client.close()

    return ServerInfo(
        action=_fields(schema["action"]),
        observation=_fields(schema["observation"]),
        splits=splits,
    )


@functools.cache
def _websockets() -> tuple[Any, Any]:
    """Return (the function `connect`, the module of exceptions) of the library websockets."""
    try:
        from websockets import exceptions
        from websockets.sync.client import connect
    except ImportError:
        raise UserError("env.name = 'openenv' needs websockets: pip install websockets") from None
    return connect, exceptions


@functools.cache
def container(image: str) -> str:
    """Return the URL of a new container of `image`. It is removed however this process ends.

    Raises UserError if docker fails or the container does not answer within START_S.
    """

    def docker(*words: str) -> str:
        try:
            result = subprocess.run(["docker", *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or error
            raise UserError(f"env.image = '{image}': docker {words[0]}: {clean(reason)}") from None
        return result.stdout.strip()

    output = docker(
        "run",
        "--detach",
        "--rm",
        "--publish=127.0.0.1::8000",
        "--env=MAX_CONCURRENT_ENVS=1024",
        image,
    )
    container_id = output.split()[-1]
    deadline = time.monotonic() + START_S
    _remove_at_exit(container_id)
    url = f"http://{docker('port', container_id, '8000/tcp').split()[0]}"
    while True:
        try:
            ask_server(url)
            return url
        except UserError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"env.image = '{image}': not up within {START_S:g} s ({error})"
                ) from None
        time.sleep(0.5)


def _remove_at_exit(container_id: str) -> None:
    """Start a process that removes the container once this process is gone."""
    # It reads from a pipe. The other end closes when this process ends.
    watcher = subprocess.Popen(
        ["sh", "-c", 'read _; exec docker rm --force "$0"', container_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _watchers.append(watcher)
