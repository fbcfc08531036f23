"""Environments written with verifiers of Prime Intellect, from 0.4 on: a package has a taskset, and
may say how agents play a task of it. Tools, conversations and rewards are its own; the model that
is trained plays its agents.
"""

import contextlib
import copy
import hashlib
import json
import sys
from collections.abc import Callable
from importlib import metadata
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from paw.envs.base import EnvFactory, Tasks, every_tenth
from paw.envs.checked import problem
from paw.envs.http import Loop
from paw.envs.inverted import InvertedEnv, VerifiersConfig
from paw.errors import OURS, EnvironmentFailure, UserError, describe
from paw.types import Task

try:
    import aiohttp
    import verifiers.v1 as vf
    from verifiers.v1.configs.client import resolve_api_key
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
except ImportError as error:
    install = "pip install 'paw-trainer[verifiers]'"
    raise UserError(
        f"env.name = 'verifiers' needs verifiers 0.4 ({describe(error)}): {install}"
    ) from None

__all__ = ["Chat"]
LOCAL = ("localhost", "127.0.0.1", "::1")
START_S = 300.0
"""For the tool servers that all episodes share."""


class VerifiersFactory(EnvFactory):
    """The tasks of the package env.id.

    UserError: it is not installed, is no environment, or does not take env.args.
    """

    Config = VerifiersConfig
    name = "verifiers"
    may_block = runs_others_code = True

    def __init__(self, config: VerifiersConfig) -> None:
        self.config = config
        self.reward_max, self.invalid_penalty = config.reward, config.invalid_penalty
        if not config.id:
            raise UserError(
                "env.name = 'verifiers' needs env.id, the name of an environment's package: --env.id NAME"
            )
        self._split = "split" in self._made(vf.taskset_config_type, config.id).model_fields
        self._env: Any = self._made(lambda: vf.load_environment(self._resolve(config.train_split)))
        self._shared: dict[str, Any] | None = None
        self._tasks = {
            split: self._load(split) for split in (config.train_split, config.eval_split)
        }
        self._key = hashlib.sha256(
            json.dumps([[x.payload.key for x in s] for s in self._tasks.values()]).encode()
        )

    def tasks(self, split: str, seed: int) -> Tasks:
        """Of a taskset with the key `split` that split; of others eval_split is every tenth task."""
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': verifiers has no oracle to warm it up; take an instruct model"
            )
        if split not in self._tasks:
            self._tasks[split] = self._load(split)
        return self._tasks[split]

    def make(self) -> InvertedEnv:
        if self._shared is None:  # tool servers, which verifiers ends with the process
            self._servers, taskset = (
                self._env.shared_tools(),
                self._env.taskset,
            )  # kept: what nobody holds ends
            needed = self._made(taskset.toolsets, taskset.config)
            self._shared = (
                self._made(Loop().run, self._servers.__aenter__(), START_S) if needed else {}
            )
        return InvertedEnv(self._play, self.config)

    def fingerprint(self) -> str:
        digest, version = self._key.hexdigest()[:16], ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(_module(self.config.id))
        return " ".join(
            filter(
                None, ("verifiers", metadata.version("verifiers"), self.config.id, version, digest)
            )
        )

    def _load(self, split: str) -> list[Task]:
        config, kind = self.config, _module(self.config.id)
        taskset = self._made(lambda: vf.load_taskset(self._resolve(split).taskset))
        found = self._made(list, taskset if taskset.bounded else taskset.take(config.tasks))
        found = found if self._split else every_tenth(found, split == config.eval_split)
        if not found:
            raise UserError(f"env.id = '{config.id}' has no tasks in the split '{split}'")
        return [Task(f"{kind}/{split}/{i}", kind, task) for i, task in enumerate(found)]

    async def _play(self, task: vf.Task, url: str, model: str) -> float:
        """The reward of a task, played by the model of an endpoint.

        EnvironmentFailure: it broke.
        """
        env = copy.copy(self._env)  # what serves an episode lives on that episode's loop
        env.shared_tools = lambda: contextlib.nullcontext(self._shared)
        client = vf.EvalClientConfig(base_url=url, api_key_var="PAW_ENDPOINT_KEY")

        def only_trained(trace: vf.Trace) -> None:
            agent = trace.agent
            if agent and not agent.trainable and agent.config.client == client:
                raise UserError(
                    f"the agent '{agent.name}' is not to be trained: give it a client in env.args"
                )

        async with env.serving():
            episode = await env.run_episode(
                task, vf.ModelContext(model=model, client=client), on_trace=only_trained
            )
        if not episode.ok:
            errors = [
                *episode.errors,
                *(error for trace in episode.traces for error in trace.errors),
            ]
            raise EnvironmentFailure(f"{self.config.id}: {errors[-1].type}: {errors[-1].message}")
        return fmean(
            trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable
        )

    def _resolve(self, split: str) -> vf.EnvConfig:
        """The whole configuration; agents without a harness of their own are `Chat`."""
        data, name = copy.deepcopy(self.config.args), self.config.id
        data["taskset"] = {**data.get("taskset", {}), "id": name}
        if self._split:
            data["taskset"]["split"] = split
        chats = vf.default_harness_id(name) == "bash"
        kind = vf.env_config_type(name, data.get("id", ""))
        agents = {
            key: f.default
            for key, f in kind.model_fields.items()
            if isinstance(f.default, vf.AgentConfig)
        }
        for key, default in agents.items():
            given = data[key] = {**data.get(key, {})}
            if "harness" not in given and (
                default.harness.id == "null" if default.harness else chats
            ):
                data[key] = {"harness": {"id": "paw"}, "runtime": {"type": "subprocess"}} | given
            if default.max_turns is None:
                data[key].setdefault("max_turns", self.config.max_turns)
        resolved = vf.resolve_env_config(data)
        clients = [getattr(resolved, key).client for key in agents]
        for client in [*filter(None, clients), *resolved.taskset.task.judges]:
            if (
                urlsplit(client.base_url).hostname not in LOCAL
                and resolve_api_key(client) == "EMPTY"
            ):
                asked = f"env.id = '{name}' asks {client.base_url}"
                raise UserError(
                    f"{asked}, whose key is missing: set the environment variable {client.api_key_var}"
                )
        return resolved

    def _made(self, call: Callable[..., Any], *args: Any) -> Any:
        """What call(*args) returns.

        UserError where there is no such package, or it does not take env.args.
        """
        try:
            return call(*args)
        except ValidationError as error:
            raise UserError(f"env.args of env.id = '{self.config.id}': {problem(error)}") from None
        except ModuleNotFoundError as error:
            fix = "install its package, or give its folder in PYTHONPATH"
            raise UserError(
                f"env.id = '{self.config.id}': {describe(error.__cause__ or error)}; {fix}"
            ) from None
        except OURS:
            raise
        except BaseException as error:
            old = hasattr(sys.modules.get(_module(self.config.id)), "load_environment")
            hint = (
                "; it is for verifiers before 0.4 (load_environment), which verifiers 0.4 cannot load"
                if old
                else ""
            )
            raise UserError(f"env.id = '{self.config.id}': {describe(error)}{hint}") from error


class Chat(vf.Harness[vf.HarnessConfig]):
    """A conversation with MCP tools, as verifiers' own `null` has it, but in this process: no program to start."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        """Until the model calls nothing, or the endpoint refuses: the rollout is stopped, or broken."""
        system, prompt = self.resolve_prompt(data)
        prompt = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages: list[dict] = [{"role": "system", "content": system}] if system else []
        messages += [message_to_wire(message) for message in prompt]
        headers, limit = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout(total=None)
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with contextlib.AsyncExitStack() as stack:
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            http = await stack.enter_async_context(
                aiohttp.ClientSession(headers=headers, timeout=limit)
            )
            while True:
                asked = {"model": ctx.model, "messages": messages} | (
                    {"tools": tools} if tools else {}
                )
                async with http.post(f"{endpoint}/chat/completions", json=asked) as answer:
                    if not answer.ok:
                        raise vf.HarnessError(
                            f"the model's endpoint says {answer.status}: {await answer.text()}"
                        )
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(0, "", "")
                for call in calls:
                    name, given = call["function"]["name"], call["function"]["arguments"]
                    result = {"role": "tool", "tool_call_id": call["id"], "name": name}
                    try:
                        arguments = json.loads(given)
                    except ValueError:
                        text = f"Invalid call: {given}"
                    else:
                        known = name in places and isinstance(arguments, dict)
                        text = (
                            await call_mcp(connections, places, name, arguments)
                            if known
                            else f"No tool '{name}'."
                        )
                    messages.append(result | {"content": text})


def _module(name: str) -> str:
    """Of an id, OWNER/NAME@VERSION at most, as verifiers imports it."""
    return name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


sys.modules["verifiers.v1.harnesses.paw"] = sys.modules[
    __name__
]  # where verifiers looks for a harness
