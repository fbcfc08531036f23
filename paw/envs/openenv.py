"""Environments of OpenEnv (https://github.com/huggingface/OpenEnv), played over a server's
WebSocket: a connection is a session, and one episode. Written against openenv 0.10.0.

The package is not needed: it wants mcp 1 and vLLM mcp 2, so the two cannot be installed together.
The protocol is

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
from contextlib import suppress
from typing import Annotated, Any, NoReturn

from pydantic import Field, field_validator

from paw.envs.base import Endless, EnvFactory, Made, Tasks, seeds
from paw.envs.checked import Strict, checked
from paw.envs.conversation import Conversation, Message, invalid, opening
from paw.envs.http import MAX_BYTES, BadAnswer, Loop, bounded, import_httpx
from paw.envs.settings import SpokenConfig
from paw.errors import EnvironmentFailure, UserError, clean, describe, quietly
from paw.tool_config import listed
from paw.types import Outcome, Task, ToolCall

CONNECT_S, RETRY_S, CLOSE_S, START_S = 10.0, 5.0, 1.0, 120.0
"""Seconds for a connection, for a session while the server is away or full, for its end, for a container to answer."""
MOST_TASKS = 1_000_000
"""Of a split that is played in epochs.

Of a larger one, or one that says so, tasks are drawn at random, without end.
"""
COMMON = ("metadata", "done", "reward")
"""Fields of every action or observation."""
WHOLE = "*"
"""In place of an action's field: the model writes the whole action, as JSON."""
JsonObject = dict[str, Any]
_watches: list[Any] = []


class OpenenvConfig(SpokenConfig):
    """An environment of OpenEnv, on a server."""

    name: str = "openenv"
    """Which environment."""
    url: list[Annotated[str, Field(pattern=r"^(https?|wss?)://[^/\s]+")]] = []
    """Servers of the same environment, which share the episodes: one http:// or ws:// address or a list."""
    image: str = ""
    """Docker image to start in place of `url`; its container ends with the command."""
    action_field: str = ""
    """Field of the action that gets the response, after a thought; unset, the only one of text. Of
    another type it is read as JSON, and so is the whole action with "*"."""
    observation_field: str = ""
    """Field of the observation that is shown; unset, the only one of text or `text`, else all of it as JSON."""
    prompt_field: str = ""
    """Field of the observation that is a turn's whole prompt; unset, the turns are a conversation."""
    options: dict[str, bool | int | float | str] = {}
    """Further arguments of reset."""

    _one_or_more = field_validator("url", mode="before")(listed)


class Answer(Strict):
    type: str
    data: JsonObject = {}


class Seen(Strict):
    observation: JsonObject
    reward: bool | float | None = None
    done: bool = False


class Dropped(EnvironmentFailure):
    """There is no connection, or no longer."""


class Full(Dropped):
    """The server has no room for another session."""


class OpenenvFactory(EnvFactory):
    """The environment of the servers `env.url`, or of a container of `env.image`.

    UserError: nobody answers there, it is no OpenEnv server, servers differ, or a field or split
    does not exist.
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
        self.config, self.reward_max, self.invalid_penalty = (
            config,
            config.reward,
            config.invalid_penalty,
        )
        urls = [_base(url) for url in config.url] or [container(config.image)]
        known = [ask_server(url) for url in urls]
        if other := [url for url, server in zip(urls, known, strict=True) if server != known[0]]:
            raise UserError(f"env.url: {other[0]} serves another environment than {urls[0]}")
        self._where = urls[0]
        self._urls = itertools.cycle(urls)
        self._known = known[0]
        self._splits: dict[str, int | None] = self._known["splits"]
        for split in (config.train_split, config.eval_split):
            if self._splits and split not in self._splits:
                has = ", ".join(self._splits)
                raise UserError(
                    f"{urls[0]} has no split '{split}'; env.train_split and env.eval_split can be {has}"
                )
        actions, seen = self._known["action"], self._known["observation"]
        texts = [name for name, kind in seen.items() if kind == "text"]
        self.calls_tools = not actions or {"tool_name", "arguments"} <= {*actions}
        for key, fields in (
            ("action_field", actions),
            ("observation_field", seen),
            ("prompt_field", seen),
        ):
            if (name := getattr(config, key)) not in ("", WHOLE, *fields):
                raise UserError(
                    f"env.{key} = '{name}' is no field of {urls[0]}, which has {_listed(fields)}"
                )
        self.shown = config.observation_field or next(
            (x for x in texts if x == "text" or len(texts) == 1), ""
        )
        choice = (
            [config.action_field]
            if config.action_field
            else [x for x, kind in actions.items() if kind == "text"]
        )
        if len(choice) != 1 and not self.calls_tools:
            fix = f"'{WHOLE}' lets the model write all of it as JSON"
            raise UserError(
                f"env.action_field is not set: the action of {urls[0]} has {_listed(actions)}; {fix}"
            )
        self.action = choice[0] if choice else ""
        self.plain = actions.get(self.action) == "text"

    def tasks(self, split: str, seed: int) -> Tasks:
        """Of a server with the task interface its tasks, drawn at random if they are too many to go
        through; else seeds, endlessly many. UserError if it says that it has none."""
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': openenv has no oracle to warm it up on; take an instruct model"
            )
        if not self._splits:
            return seeds(split, seed)

        count = self._splits[split]

        def task(i: int) -> Task:
            name = f"{split}/{seed}/{i}"
            index = random.Random(name).randrange(count) if count and count > MOST_TASKS else i
            return Task(name, payload={"split": split, "index": index, "seed": seed})

        if count is None or count > MOST_TASKS:
            return Endless(task)
        if count < 1:
            says = f"says that its split '{split}' has {clean(count, 40)} tasks"
            raise UserError(
                f"env.url: {self._where} {says}; name another (env.train_split, env.eval_split)"
            )
        return Made(task, count)

    def make(self) -> "OpenenvEnv":
        return OpenenvEnv(self.config, self, next(self._urls))

    def fingerprint(self) -> str:
        told = json.dumps([self._known, self.config.options], sort_keys=True)
        return f"openenv {hashlib.sha256(told.encode()).hexdigest()[:16]}"


class OpenenvEnv(Conversation):
    """One episode at a time, each in a session of its own."""

    def __init__(self, config: OpenenvConfig, factory: OpenenvFactory, url: str) -> None:
        self.config, self._factory, self._url = config, factory, url
        self.close = lambda: None

    def begin(self, task: Task) -> list[Message]:
        """Raises EnvironmentFailure: no session within RETRY_S; UserError: the server has no room for it."""
        self._arguments = {**self.config.options, **task.payload}
        self._turns, self._played, self._return = 0, False, 0.0
        self._first = self._start()
        if self._factory.calls_tools and not self.tools:
            listed = self._ask("step", {"type": "list_tools"}).observation.get("tools") or ()
            self.tools = [{"parameters": tool.pop("input_schema", None), **tool} for tool in listed]
            if not self.tools:
                raise UserError(f"{self._url}: its actions are calls of tools, and it lists none")
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
        if self.tools or not text:
            return invalid("call a tool" if self.tools else "there is none", text)
        field, value = self._factory.action, text
        if not self._factory.plain:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                return invalid("it must be JSON", text)
        return self._play(
            value if field == WHOLE and isinstance(value, dict) else {field: value}, text
        )

    def call(self, call: ToolCall) -> Outcome:
        return self._play(
            {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}, str(call)
        )

    def _play(self, data: JsonObject, action: str) -> Outcome:
        try:
            try:
                seen = self._ask("step", data)
            except Dropped:
                if self._played:
                    raise
                if self._start() != self._first:
                    self._fail("the connection was lost, and the same reset began another episode")
                seen = self._ask("step", data)
        except ValueError as error:
            return invalid(str(error), action)
        self._played = True
        reward = float(seen.reward or 0.0)
        self._return += reward
        won, valid, score = (seen.observation.get(key) for key in ("won", "valid", "score"))
        return Outcome(
            self._look(seen),
            reward,
            done=seen.done,
            won=won if isinstance(won, bool) else seen.done and self._return >= self.config.reward,
            action=action,
            valid=valid is not False,
            score=score if isinstance(score, int | float) and 0 <= score <= 1 else None,
        )

    def _look(self, seen: Seen) -> str:
        """The observation as text; of a tool's result what its content says."""
        fields = {name: value for name, value in seen.observation.items() if name not in COMMON}
        fields = fields or seen.observation.get("metadata") or {}
        self._prompt = fields.get(self.config.prompt_field)
        shown = fields.get(self._factory.shown, fields)
        if self._factory.calls_tools and "tool_name" in fields:
            shown = fields.get("error") or fields.get("result")
            told = shown if isinstance(shown, dict) else {}
            if parts := [part for part in told.get("content") or () if isinstance(part, dict)]:
                shown = "\n".join(str(part.get("text", part)) for part in parts)
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

    def _start(self) -> Seen:
        """The reset of a new session, tried for RETRY_S where there is none."""
        self.close()
        late, pause = time.monotonic() + RETRY_S, 0.1
        while True:
            try:
                self._connect()
                return self._ask("reset", self._arguments)
            except Dropped as error:
                self.close()
                if time.monotonic() + pause > late and isinstance(error, Full):
                    fix = "raise max_concurrent_envs there, give more servers (env.url takes a list) or play less"
                    raise UserError(
                        f"{error}; {fix} at once (rollout.tasks, rollout.group_size)"
                    ) from None
                if time.monotonic() + pause > late:
                    raise
            time.sleep(pause)
            pause *= 2

    def _connect(self) -> None:
        connect, errors = _websockets()
        options: JsonObject = {
            "max_size": MAX_BYTES,
            "proxy": None,
        }  # an address of the cluster is not asked of one
        try:
            socket = connect(
                f"ws{self._url[4:]}/ws", open_timeout=CONNECT_S, close_timeout=CLOSE_S, **options
            )
        except (OSError, EOFError, errors.WebSocketException) as error:
            status: int = getattr(getattr(error, "response", None), "status_code", 0)
            if 400 <= status < 500:
                raise UserError(
                    f"{self._url}/ws: no sessions of OpenEnv there, but status {status}"
                ) from None
            raise Dropped(f"{self._url}/ws: {describe(error)}") from None
        self._socket, self.close = socket, weakref.finalize(self, _end, socket)
        self.close.atexit = False  # then the server sees the connections end

    def _ask(self, kind: str, data: JsonObject) -> Seen:
        """ValueError: the server does not take `data` as an action."""
        errors = _websockets()[1]
        try:
            with suppress(errors.ConnectionClosed):  # why it was closed may still wait to be read
                self._socket.send(json.dumps({"type": kind, "data": data}))
            raw = self._socket.recv(self.config.step_timeout_s)
        except TimeoutError:
            self._fail(
                f"no answer to {kind} within env.step_timeout_s = {self.config.step_timeout_s:g}"
            )
        except (OSError, errors.ConnectionClosed) as error:
            raise Dropped(
                f"{self._url}/ws: the connection was lost in {kind} ({clean(error)})"
            ) from None
        try:
            answer = checked(
                Answer, raw.encode() if isinstance(raw, str) else raw, "no message of OpenEnv"
            )
            if answer.type == "observation":
                return checked(Seen, answer.data, "no observation of OpenEnv")
        except UserError as error:
            self._fail(f"{kind}: {error}")
        reason, code = clean(answer.data.get("message", answer.type)), answer.data.get("code")
        if code == "CAPACITY_REACHED":
            raise Full(f"{self._url}/ws: {reason}")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ValueError(
                clean([error.get("msg") for error in answer.data.get("errors", ())] or reason)
            )
        self._fail(f"{kind}: {reason} ({clean(code)})")

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise EnvironmentFailure(f"{self._url}/ws: {reason}")


def _end(socket: Any) -> None:
    """Say goodbye and wait for the server's, which has then closed the session."""
    with quietly():
        socket.send('{"type": "close"}')
        socket.recv(CLOSE_S)
    with quietly():
        socket.close()


def _fields(schema: JsonObject) -> dict[str, str]:
    """Name -> type of the fields of a JSON schema that not every one has; texts are "text"."""
    found = {}
    for name, field in schema["properties"].items():
        kinds = [kind.get("type") for kind in (field, *field.get("anyOf", ()))]
        if name not in COMMON and "const" not in field:
            found[name] = "text" if "string" in kinds else kinds[-1] or "object"
    return found


def _listed(fields: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in fields.items()) or "none"


def _base(url: str) -> str:
    """http(s)://HOST:PORT of an address in any of its forms."""
    url = url.rstrip("/").removesuffix("/ws")
    return f"http{url[2:]}" if url.startswith("ws") else url


def ask_server(url: str) -> JsonObject:
    """Of `url` the fields of its "action" and "observation", and the number of tasks (None:
    endless) of its "splits", which has none where there are seeds alone.

    UserError: nobody answers, or something else does.
    """
    httpx = import_httpx(f"env.url = '{url}'")

    async def ask() -> JsonObject:
        async with bounded(httpx.AsyncClient)(
            base_url=url, timeout=CONNECT_S, trust_env=False
        ) as client:

            async def get(path: str, kind: Any, **request: Any) -> Any:
                answer = await client.request("POST" if request else "GET", path, **request)
                return checked(kind, answer.content, path) if answer.status_code == 200 else None

            if not (schema := await get("/schema", JsonObject)):
                raise BadAnswer("it has no /schema")
            splits: dict[str, int | None] = {}
            for name in await get("/list_environments", list[str]) or ():
                for split in await get(f"/{name}/splits", list[JsonObject]) or ():
                    counted = await get(
                        f"/{name}/num_tasks", dict[str, int], json={"split": split["name"]}
                    )
                    splits[split["name"]] = counted and counted["num_tasks"]
            return {"splits": splits} | {
                key: _fields(schema[key]) for key in ("action", "observation")
            }

    loop = Loop()
    try:
        return loop.run(ask(), 2 * CONNECT_S)
    except (httpx.TransportError, TimeoutError) as error:
        raise UserError(
            f"env.url = '{url}': nobody answers there ({describe(error)}); start the server"
        ) from None
    except (
        BadAnswer,
        UserError,
        LookupError,
        TypeError,
        AttributeError,
        httpx.InvalidURL,
    ) as error:
        raise UserError(
            f"env.url = '{url}': that is no server of OpenEnv: {clean(error)}"
        ) from None
    finally:
        loop.close()


@functools.cache
def _websockets() -> tuple[Any, Any]:
    """(connect, exceptions)"""
    try:
        from websockets import exceptions
        from websockets.sync.client import connect
    except ImportError:
        raise UserError("env.name = 'openenv' needs websockets: pip install websockets") from None
    return connect, exceptions


@functools.cache
def container(image: str) -> str:
    """URL of a container of `image`, which is removed when this process has ended, however it ends."""

    def docker(*words: str) -> str:
        try:
            return subprocess.run(
                ["docker", *words], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            raise UserError(f"env.image = '{image}': docker {words[0]}: {clean(said)}") from None

    made = docker(
        "run",
        "--detach",
        "--rm",
        "--publish=127.0.0.1::8000",
        "--env=MAX_CONCURRENT_ENVS=1024",
        image,
    )
    name, late = made.split()[-1], time.monotonic() + START_S
    # It reads until this process is gone, which closes the other end of the pipe.
    watch = ["sh", "-c", 'read _; exec docker rm --force "$0"', name]
    void = subprocess.DEVNULL
    _watches.append(
        subprocess.Popen(
            watch, stdin=subprocess.PIPE, stdout=void, stderr=void, start_new_session=True
        )
    )
    url = f"http://{docker('port', name, '8000/tcp').split()[0]}"
    while True:
        try:
            ask_server(url)
            return url
        except UserError as error:
            if time.monotonic() > late:
                raise UserError(
                    f"env.image = '{image}': not up within {START_S:g} s ({error})"
                ) from None
        time.sleep(0.5)
