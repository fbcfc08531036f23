"""Environments written with Prime Intellect's verifiers, version 0.4 or later.

An environment's package has a taskset, and may define how agents play one of its tasks. Tools,
conversations and rewards come from the package. The model in training plays its agents.
"""

import contextlib
import copy
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from paw.envs.base import EnvFactory, Tasks, every_tenth
from paw.envs.checked import problem
from paw.envs.inverted import InvertedEnv, VerifiersConfig
from paw.errors import OURS, EnvironmentFailure, UserError, describe
from paw.io.http import Loop
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
"""Hosts that need no key."""
START_S = 300.0
"""Time limit for starting the tool servers that all episodes share."""


class VerifiersFactory(EnvFactory):
    """The tasks of the package env.id.

    Raises UserError if it is not installed, is not an environment, or does not accept env.args.
    """

    Config = VerifiersConfig
    name = "verifiers"
    may_block = True
    runs_others_code = True

    def __init__(self, config: VerifiersConfig) -> None:
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        if not config.id:
            raise UserError(
                "env.name = 'verifiers' needs env.id, the name of an environment's package: "
                "--env.id NAME"
            )
        taskset_config = self._call(vf.taskset_config_type, config.id)
        self._has_splits = "split" in taskset_config.model_fields
        """Whether the taskset has the key `split`."""
        self._env: Any = self._call(lambda: vf.load_environment(self._resolve(config.train_split)))
        self._servers: Any = None
        """The context of the tool servers, which end when it is garbage-collected."""
        self._shared_tools: dict[str, Any] | None = None
        """The tools of these servers; None until they are started."""
        self._starting = threading.Lock()
        """Held while the servers are started, since environments are made in many threads."""
        self._tasks: dict[str, list[Task]] = {}
        """Tasks of the splits that are loaded."""
        for split in (config.train_split, config.eval_split):
            self._tasks[split] = self._load(split)
        keys = [[task.payload.key for task in tasks] for tasks in self._tasks.values()]
        self._digest = hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:16]

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the tasks of the taskset's own split if it has the key `split`.

        Otherwise, env.eval_split is every tenth task, and any other split is the rest.
        """
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': verifiers has no oracle to warm it up on; "
                "use an instruct model"
            )
        if split not in self._tasks:
            self._tasks[split] = self._load(split)
        return self._tasks[split]

    def make(self) -> InvertedEnv:
        with self._starting:
            if self._shared_tools is None:
                self._shared_tools = self._start_servers()
        return InvertedEnv(self._play, self.config)

    def fingerprint(self) -> str:
        parts = ["verifiers", metadata.version("verifiers"), self.config.id]
        with contextlib.suppress(metadata.PackageNotFoundError):
            parts.append(metadata.version(_module(self.config.id)))
        parts.append(self._digest)
        return " ".join(parts)

    def _start_servers(self) -> dict[str, Any]:
        """Start the tool servers that all episodes share; verifiers ends them with the process."""
        taskset = self._env.taskset
        self._servers = self._env.shared_tools()
        if not self._call(taskset.toolsets, taskset.config):
            return {}
        return self._call(Loop().run, self._servers.__aenter__(), START_S)

    def _load(self, split: str) -> list[Task]:
        """Load the tasks of a split. Raises UserError if there are none."""
        config = self.config
        taskset = self._call(lambda: vf.load_taskset(self._resolve(split).taskset))
        items = self._call(list, taskset if taskset.bounded else taskset.take(config.tasks))
        if not self._has_splits:
            items = every_tenth(items, held_out=split == config.eval_split)
        if not items:
            raise UserError(f"env.id = '{config.id}' has no tasks in the split '{split}'")
        kind = _module(config.id)
        return [Task(f"{kind}/{split}/{i}", kind, item) for i, item in enumerate(items)]

    async def _play(self, task: vf.Task, url: str, model: str) -> float:
        """Return the reward of a task that the model of an endpoint plays.

        Raises EnvironmentFailure if the episode broke.
        """
        env = copy.copy(self._env)  # the parts that serve an episode live on its event loop
        env.shared_tools = lambda: contextlib.nullcontext(self._shared_tools)
        client = vf.EvalClientConfig(base_url=url, api_key_var="PAW_ENDPOINT_KEY")

        def check_agent(trace: vf.Trace) -> None:
            agent = trace.agent
            if agent and not agent.trainable and agent.config.client == client:
                raise UserError(
                    f"the agent '{agent.name}' is not trained; give it a client in env.args"
                )

        async with env.serving():
            context = vf.ModelContext(model=model, client=client)
            episode = await env.run_episode(task, context, on_trace=check_agent)
        if not episode.ok:
            errors = list(episode.errors)
            for trace in episode.traces:
                errors += trace.errors
            raise EnvironmentFailure(f"{self.config.id}: {errors[-1].type}: {errors[-1].message}")
        return fmean(
            trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable
        )

    def _resolve(self, split: str) -> vf.EnvConfig:
        """Return the full configuration. Agents without their own harness get `Chat`.

        Raises UserError if the key of a model other than the trained one is missing.
        """
        package = self.config.id
        arguments = copy.deepcopy(self.config.args)
        arguments["taskset"] = {**arguments.get("taskset", {}), "id": package}
        if self._has_splits:
            arguments["taskset"]["split"] = split

        config_type = vf.env_config_type(package, arguments.get("id", ""))
        agents: list[str] = []
        for key, field in config_type.model_fields.items():
            if isinstance(field.default, vf.AgentConfig):
                agents.append(key)
                arguments[key] = self._agent_settings(field.default, arguments.get(key, {}))
        resolved = vf.resolve_env_config(arguments)

        clients = [getattr(resolved, key).client for key in agents]
        for client in [*filter(None, clients), *resolved.taskset.task.judges]:
            is_local = urlsplit(client.base_url).hostname in LOCAL
            if not is_local and resolve_api_key(client) == "EMPTY":
                raise UserError(
                    f"env.id = '{package}' uses {client.base_url}, but its key is missing; "
                    f"set the environment variable {client.api_key_var}"
                )
        return resolved

    def _agent_settings(self, default: Any, configured: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of an agent: those in env.args, completed by ours."""
        settings = dict(configured)
        is_chat = vf.default_harness_id(self.config.id) == "bash"
        if default.harness:
            is_chat = default.harness.id == "null"
        if is_chat and "harness" not in configured:
            settings = {"harness": {"id": "paw"}, "runtime": {"type": "subprocess"}} | settings
        if default.max_turns is None:
            settings.setdefault("max_turns", self.config.max_turns)
        return settings

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments), for a function that runs the package's code.

        Raises UserError if there is no such package, if it does not accept env.args, or if anything
        else fails.
        """
        try:
            return function(*arguments)
        except ValidationError as error:
            raise UserError(f"env.args of env.id = '{self.config.id}': {problem(error)}") from None
        except ModuleNotFoundError as error:
            raise UserError(
                f"env.id = '{self.config.id}': {describe(error.__cause__ or error)}; "
                "install its package, or put its folder on PYTHONPATH"
            ) from None
        except OURS:
            raise
        except BaseException as error:
            hint = ""
            if hasattr(sys.modules.get(_module(self.config.id)), "load_environment"):
                hint = (
                    "; it is for verifiers before 0.4 (load_environment), "
                    "which verifiers 0.4 cannot load"
                )
            raise UserError(f"env.id = '{self.config.id}': {describe(error)}{hint}") from error


class Chat(vf.Harness[vf.HarnessConfig]):
    """A conversation with MCP tools, like verifiers' own harness `null`, but in this process.

    It starts no program.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        """Play until the model makes no call, or until the endpoint refuses.

        A refusal means that the rollout was stopped or broke.
        """
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        messages: list[dict] = [{"role": "system", "content": system}] if system else []
        messages += [message_to_wire(message) for message in prompt or []]
        servers = {}
        for name, url in mcp_urls.items():
            servers[name] = {"url": url, "timeout": self.config.tool_timeout}
        async with contextlib.AsyncExitStack() as stack:
            tools, server_of_tool, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {secret}"},
                timeout=aiohttp.ClientTimeout(total=None),
            )
            await stack.enter_async_context(client)
            request = {"model": ctx.model, "messages": messages}
            if tools:
                request["tools"] = tools
            while True:
                async with client.post(f"{endpoint}/chat/completions", json=request) as answer:
                    if not answer.ok:
                        raise vf.HarnessError(
                            f"the model's endpoint says {answer.status}: {await answer.text()}"
                        )
                    completion = await answer.json()
                message = completion["choices"][0]["message"]
                messages.append(message)
                tool_calls = message.get("tool_calls") or []
                if not tool_calls:
                    return vf.ProgramResult(0, "", "")
                for tool_call in tool_calls:
                    text = await _result_of_call(tool_call["function"], connections, server_of_tool)
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": tool_call["id"],
                            "name": tool_call["function"]["name"],
                            "content": text,
                        }
                    )


async def _result_of_call(
    function: dict[str, Any], connections: Any, server_of_tool: dict[str, Any]
) -> Any:
    """Return the result of a call, or what is wrong with it."""
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return f"Invalid call: {function['arguments']}"
    if name not in server_of_tool or not isinstance(arguments, dict):
        return f"No tool '{name}'."
    return await call_mcp(connections, server_of_tool, name, arguments)


def _module(package: str) -> str:
    """Return the module that verifiers imports for an id, OWNER/NAME@VERSION or a part of that."""
    return package.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


# verifiers looks for the harness "paw" under this name.
sys.modules["verifiers.v1.harnesses.paw"] = sys.modules[__name__]
