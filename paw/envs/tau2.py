"""Sierra Research's tau2-bench (arXiv 2506.07982) through its gymnasium interface,
`tau2.gym.gym_agent.AgentGymEnv`.

The agent serves a customer who is played by an LLM. It calls tools or writes to the customer, and a
policy says what it may do. Written against tau2-bench 1.0.1. A failure there (for example, the
customer's LLM is down) ends only the episode, never the run.
"""

import functools
import hashlib
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from paw.config.sections import EnvConfig
from paw.config.values import Only
from paw.envs.base import EnvFactory, Tasks
from paw.envs.conversation import ConversationWrapper, Message
from paw.errors import OURS, EnvironmentFailure, UserError, describe, quietly
from paw.io.threads import Threads
from paw.types import Outcome, Reply, Task, ToolCall

INSTALL = (
    "git clone https://github.com/sierra-research/tau2-bench && pip install -e './tau2-bench[gym]'"
)
BROKEN = ("user_error", "infrastructure_error", "unexpected_error")
"""Reasons for the end of a simulation that are not the agent's fault."""
DONE = '{"name": "done", "arguments": {}}'
"""The action that ends a conversation."""
ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)

PROMPT = """
You are a customer service agent. You help the user by the policy below, with tools, and with \
nothing else.

# Policy
{policy}

# Tools
{tools}

# Conversation
{conversation}

Now it's your turn. {think}
Give one action within <action> </action> tags: either a tool call, as JSON \
{{"name": ..., "arguments": {{...}}}}, or a
message to the user, as plain text. Never both. When nothing is left to do, call the tool "done".
"""
CHAT = """\
You are a customer service agent. You help the user by the policy below, with tools, and with \
nothing else. In each turn
either call one tool or write to the user, never both. When nothing is left to do, call the \
tool "done".

# Policy
{policy}"""
SPEAKER = re.compile(r"(?:user|tool): ")
THINK = "You should first reason step-by-step within <think> </think> tags."


class Tau2Config(EnvConfig):
    """Sierra Research's tau2-bench: a conversation with a simulated customer."""

    name: str = "tau2"
    """Which environment."""
    domain: str = "retail"
    """Domain of tau2-bench."""
    user_model: str = "gpt-4.1"
    """LLM that plays the customer, as litellm names it."""
    style: Literal["paper", "chat"] = "paper"
    """paper: one prompt with the conversation so far, and actions in tags. chat: a conversation,
    with calls in the model's format."""
    think: Annotated[bool, Only("env.style", ("paper",))] = True
    """Whether a valid response needs <think>...</think>."""


class Tau2Factory(EnvFactory):
    """The tasks of one domain.

    Raises UserError if tau2-bench is not installed, or has no such domain or split.
    """

    Config = Tau2Config
    name = "tau2"
    may_block = True
    distinct_eval = False

    def __init__(self, config: Tau2Config) -> None:
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        self._gym_class, registry = _import_tau2()
        domains = sorted({*registry.get_domains()} & {*registry.get_task_sets()})
        if config.domain not in domains:
            raise UserError(f"env.domain = '{config.domain}': tau2-bench has {', '.join(domains)}")
        load_tasks = registry.get_tasks_loader(config.domain)
        load_splits = registry.get_task_splits_loader(config.domain)
        try:
            self._tasks = {task.id: task for task in load_tasks()}
            splits = load_splits() if load_splits else {"base": list(self._tasks)}
        except OSError as error:
            raise UserError(
                f"env.domain = '{config.domain}': {error}; "
                "set TAU2_DATA_DIR to the folder 'data' of tau2-bench"
            ) from None

        self._playable: dict[str, list[str]] = {}
        """Task ids by split, for the splits that the gymnasium interface can start."""
        for split, ids in splits.items():
            if ids and self._tasks.keys() >= {*ids}:
                self._playable[split] = ids
        for split in (config.train_split, config.eval_split):
            self._ids(split)

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': tau2 has no oracle to warm it up on; "
                "use an instruct model"
            )
        domain = self.config.domain
        return [Task(f"{domain}/{id_}", domain, id_) for id_ in self._ids(split)]

    def make(self) -> "Tau2Env | Tau2Chat":
        game = Tau2Env(self._gym_class, self.config)
        return Tau2Chat(game) if self.config.style == "chat" else game

    def fingerprint(self) -> str:
        tasks = []
        for split in (self.config.train_split, self.config.eval_split):
            tasks += [self._tasks[id_].model_dump_json() for id_ in self._ids(split)]
        digest = hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:16]
        version = metadata.version("tau2")
        return f"tau2 {version} {self.config.domain} {digest}, user {self.config.user_model}"

    def _ids(self, split: str) -> list[str]:
        """Return a split's task ids. Raises UserError if gymnasium cannot start it."""
        if split not in self._playable:
            raise UserError(
                f"env.domain = '{self.config.domain}' has no split '{split}' to play; "
                f"env.train_split and env.eval_split can be {', '.join(self._playable)}"
            )
        return self._playable[split]


class Tau2Env:
    """One conversation at a time.

    An instance of AgentGymEnv plays one task, so each episode has its own.
    """

    task: str = ""
    """The customer's first message."""

    def __init__(self, gym_class: Callable[..., Any], config: Tau2Config) -> None:
        self.config = config
        self._gym_class = gym_class
        self._gym: Any = None
        """The AgentGymEnv of the episode; None before `reset` and after the end."""
        self._threads = Threads(1, config.step_timeout_s)
        # Set by `reset`.
        self.schemas: list[dict[str, Any]] = []
        """OpenAI function schemas of the tools."""
        self.policy = ""
        self._tools: dict[str, str] = {}
        """Function schemas of tools as JSON, by name."""
        self._conversation: list[str] = []
        """The messages so far, each preceded by its speaker's name."""
        self._turns = 0

    def reset(self, task: Task) -> str:
        """Start a conversation.

        Raises EnvironmentFailure if that fails or takes longer than env.step_timeout_s.
        """
        self.close()
        make_gym = functools.partial(
            self._gym_class,
            self.config.domain,
            task.payload,
            user_llm=self.config.user_model,
            max_steps=4 * self.config.max_turns,
        )
        gym = self._call(make_gym)
        text, info = self._call(gym.reset)
        if not text:
            raise EnvironmentFailure(f"tau2 task {task.id} ended before it began; its log says why")
        self._gym = gym
        self.task = text
        self.schemas = []
        self._tools = {}
        for tool in info["tools"]:
            self.schemas.append(tool.openai_schema)
            self._tools[tool.name] = json.dumps(tool.openai_schema["function"])
        self.policy = info["policy"].strip()
        self._conversation = [text]
        self._turns = 0
        return text

    def context(self) -> str:
        return PROMPT.format(
            policy=self.policy,
            tools="\n".join(self._tools.values()),
            conversation="\n".join(self._conversation),
            think=THINK if self.config.think else "",
        )

    def step(self, response: str) -> Outcome:
        """Play an action. An invalid one goes neither to the tools nor to the user."""
        action, problem = self._parse_action(response)
        return self.play(action, problem)

    def play(self, action: str, problem: str = "") -> Outcome:
        """Play a tool call (as JSON) or a message to the user. With a `problem` it is not sent."""
        assert self._gym is not None, "step() before reset() or after the end"
        self._turns += 1
        text = f"Invalid action: {problem}."
        score = 0.0
        has_ended = False
        if not problem:
            text, score, has_ended = self._play_valid(action)
        self._conversation.append(f"assistant: {action}")
        self._conversation.append(text)
        if not has_ended and self._turns >= self.config.max_turns:
            has_ended = True
            self.close()
        return Outcome(
            text,
            reward=self.config.reward * score,
            done=has_ended,
            won=score >= 1.0,
            action=action,
            valid=not problem,
            score=score,
        )

    def format_action(self, action: str) -> str:
        thought = "<think>I know what to do.</think>" if self.config.think else ""
        return f"{thought}<action>{action}</action>"

    def close(self) -> None:
        """End whatever is still running.

        AgentGymEnv has no `close`: its simulation waits in a thread for the next action.
        """
        self._threads.close()
        gym = self._gym
        self._gym = None
        if gym is not None:
            threading.Thread(target=_end_simulation, args=(gym,), daemon=True).start()

    def _play_valid(self, action: str) -> tuple[str, float, bool]:
        """Return (the answer to `action`, score in [0, 1], whether the conversation has ended).

        Raises EnvironmentFailure if the simulation broke.
        """
        text, score, has_ended, _, info = self._call(self._gym.step, action)
        if has_ended:
            self._gym = None
            run = json.loads(info["simulation_run"])
            if not run or run.get("termination_reason") in BROKEN:
                raise EnvironmentFailure(
                    f"the simulation of tau2 broke: {run.get('termination_reason', 'error')}"
                )
        return text, float(score), has_ended

    def _parse_action(self, response: str) -> tuple[str, str]:
        """Return (action, problem of the response or "").

        Only the name and the arguments of a tool call are kept, because the agent must not make
        calls in the user's name.
        """
        match = ACTION.search(response)
        action = match[1].strip() if match else ""
        if not action:
            return action, "write it within <action> </action> tags"
        if self.config.think and not ("<think>" in response and "</think>" in response):
            return action, "reason within <think> </think> tags first"
        if not action.startswith("{"):
            return action, ""
        try:
            call = json.loads(action)
        except (ValueError, RecursionError):
            return action, "what begins with { must be a tool call in JSON"
        if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
            return action, 'a tool call has a "name" and "arguments"'
        if call["name"] not in self._tools:
            return action, f"there is no tool '{call['name']}'"
        return json.dumps({"name": call["name"], "arguments": call["arguments"]}), ""

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what function(*arguments) returns.

        Raises EnvironmentFailure if it raises, or takes longer than env.step_timeout_s.
        """
        try:
            return self._threads.call(function, *arguments)
        except OURS:
            raise
        except BaseException as error:
            self._gym = None
            raise EnvironmentFailure(f"tau2 {self.config.domain}: {describe(error)}") from error


class Tau2Chat(ConversationWrapper):
    """Plays it as a conversation: the policy is the system message, the customer is the user."""

    def begin(self, task: Task) -> list[Message]:
        first = self._game.reset(task)
        self.tools = self._game.schemas
        system = CHAT.format(policy=self._game.policy)
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": _without_speaker(first)},
        ]

    def receive(self, response: str) -> Reply:
        reply = super().receive(response)
        if reply.problem or reply.calls:
            return reply
        if not reply.content or reply.content.startswith("{"):
            # tau2-bench would take this for a call.
            reply.problem = "call a tool, or write to the user, who reads no JSON"
        return reply

    def refuse(self, reply: Reply) -> Outcome:
        super().refuse(reply)
        outcome = self._game.play(str(reply), reply.problem)
        return replace(outcome, observation=self.messages[-1]["content"])

    def call(self, call: ToolCall) -> Outcome:
        outcome = self._game.play(json.dumps({"name": call.name, "arguments": call.arguments}))
        return replace(outcome, observation=_without_speaker(outcome.observation))

    def say(self, text: str) -> Outcome:
        outcome = self._game.play(text)
        return replace(outcome, observation=_without_speaker(outcome.observation))

    def close(self) -> None:
        self._game.close()


def _without_speaker(text: str) -> str:
    """Return a message without the name of its speaker, which its role already gives."""
    return SPEAKER.sub("", text, count=1)


def _end_simulation(gym: Any) -> None:
    with quietly():
        gym.step(DONE)


def _import_tau2() -> tuple[Callable[..., Any], Any]:
    """Return (AgentGymEnv, the registry of domains and tasks).

    Raises UserError if tau2-bench cannot be imported.
    """
    spec = importlib.util.find_spec("tau2")
    if spec is None:
        problem = ""
        if sys.version_info < (3, 12):
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            problem = f"; it needs Python 3.12 or 3.13, this is {version}"
        raise UserError(f"env.name = 'tau2' needs Sierra Research's tau2-bench{problem}: {INSTALL}")
    if not any((Path(folder) / "gym").is_dir() for folder in spec.submodule_search_locations or ()):
        raise UserError(
            "env.name = 'tau2': the installed package 'tau2' has no tau2.gym: on PyPI that name is "
            f"an unrelated chemistry program. pip uninstall tau2, then {INSTALL}"
        )
    with suppress(ImportError):
        # tau2-bench logs every line of every conversation with loguru. Only the reason why a
        # simulation broke is kept, because nothing else reports it.
        from loguru import logger

        logger.remove()
        logger.add(sys.stderr, level="ERROR", filter="tau2.gym")
    try:
        from tau2.gym.gym_agent import AgentGymEnv
        from tau2.registry import registry
    except ImportError as error:
        raise UserError(
            f"env.name = 'tau2': tau2-bench cannot be imported: {error}; {INSTALL}"
        ) from None
    return AgentGymEnv, registry
