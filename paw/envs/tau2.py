"""tau2-bench of Sierra Research (arXiv 2506.07982) through its gymnasium interface, `tau2.gym.gym_agent.AgentGymEnv`.

The agent serves a customer whom an LLM plays: it calls tools or writes to the customer, and a
policy says what it may do. Written against tau2-bench 1.0.1. What breaks there (the user's LLM is
down) costs the episode, never the run.
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

from paw.config import EnvConfig
from paw.envs.base import EnvFactory, Tasks
from paw.envs.conversation import Message, Retold
from paw.envs.threads import Threads
from paw.errors import OURS, EnvironmentFailure, UserError, describe, quietly
from paw.types import Outcome, Reply, Task, ToolCall
from paw.values import Only

INSTALL = (
    "git clone https://github.com/sierra-research/tau2-bench && pip install -e './tau2-bench[gym]'"
)
BROKEN = ("user_error", "infrastructure_error", "unexpected_error")
"""Ends of a simulation that are no fault of the agent."""
DONE = '{"name": "done", "arguments": {}}'
ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)

PROMPT = """
You are a customer service agent. You help the user by the policy below, with tools, and with nothing else.

# Policy
{policy}

# Tools
{tools}

# Conversation
{conversation}

Now it's your turn. {think}
Give one action within <action> </action> tags: either a tool call, as JSON {{"name": ..., "arguments": {{...}}}}, or a
message to the user, as plain text. Never both. When nothing is left to do, call the tool "done".
"""
CHAT = """\
You are a customer service agent. You help the user by the policy below, with tools, and with nothing else. In each turn
either call one tool or write to the user, never both. When nothing is left to do, call the tool "done".

# Policy
{policy}"""
SPEAKER = re.compile(r"(?:user|tool): ")
THINK = "You should first reason step-by-step within <think> </think> tags."


class Tau2Config(EnvConfig):
    """tau2-bench of Sierra Research: a conversation with a simulated customer."""

    name: str = "tau2"
    """Which environment."""
    domain: str = "retail"
    """Domain of tau2-bench."""
    user_model: str = "gpt-4.1"
    """LLM that plays the customer, as litellm names it."""
    style: Literal["paper", "chat"] = "paper"
    """paper: one prompt with all that was said, actions in tags. chat: a conversation, calls in the model's format."""
    think: Annotated[bool, Only("env.style", ("paper",))] = True
    """Whether a valid response needs <think>...</think>."""


class Tau2Factory(EnvFactory):
    """The tasks of one domain.

    UserError: tau2-bench is not installed, or has no such domain or split.
    """

    Config = Tau2Config
    name = "tau2"
    may_block = True
    distinct_eval = False

    def __init__(self, config: Tau2Config) -> None:
        self.config = config
        self.reward_max, self.invalid_penalty = config.reward, config.invalid_penalty
        self._gym, registry = _import()
        domains = sorted({*registry.get_domains()} & {*registry.get_task_sets()})
        if config.domain not in domains:
            raise UserError(f"env.domain = '{config.domain}': tau2-bench has {', '.join(domains)}")
        load_splits = registry.get_task_splits_loader(config.domain)
        try:
            self._tasks = {task.id: task for task in registry.get_tasks_loader(config.domain)()}
            self._splits: dict[str, list[str]] = (
                load_splits() if load_splits else {"base": list(self._tasks)}
            )
        except OSError as error:
            raise UserError(
                f"env.domain = '{config.domain}': {error}; set TAU2_DATA_DIR to the folder 'data' of tau2-bench"
            ) from None
        for split in (config.train_split, config.eval_split):
            self._ids(split)

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': tau2 has no oracle to warm it up on; take an instruct model"
            )
        return [Task(f"{self.config.domain}/{i}", self.config.domain, i) for i in self._ids(split)]

    def make(self) -> "Tau2Env | Tau2Chat":
        game = Tau2Env(self._gym, self.config)
        return Tau2Chat(game) if self.config.style == "chat" else game

    def fingerprint(self) -> str:
        splits = (self.config.train_split, self.config.eval_split)
        tasks = [self._tasks[i].model_dump_json() for split in splits for i in self._ids(split)]
        digest = hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:16]
        return f"tau2 {metadata.version('tau2')} {self.config.domain} {digest}, user {self.config.user_model}"

    def _ids(self, split: str) -> list[str]:
        """Task ids of a split; UserError where there is none that the gymnasium interface can start."""
        playable = {
            name: ids for name, ids in self._splits.items() if ids and self._tasks.keys() >= {*ids}
        }
        if split not in playable:
            raise UserError(
                f"env.domain = '{self.config.domain}' has no split '{split}' to play; env.train_split and "
                f"env.eval_split can be {', '.join(playable)}"
            )
        return playable[split]


class Tau2Env:
    """One conversation at a time.

    An instance of AgentGymEnv is one task, so each episode has its own.
    """

    task: str = ""
    """What the customer said first."""

    def __init__(self, make: Callable[..., Any], config: Tau2Config) -> None:
        self._make, self.config = make, config
        self._gym: Any = None
        self._threads = Threads(1, config.step_timeout_s)

    def reset(self, task: Task) -> str:
        """Start a conversation.

        Raises EnvironmentFailure if that fails or takes longer than env.step_timeout_s.
        """
        self.close()
        options = {"user_llm": self.config.user_model, "max_steps": 4 * self.config.max_turns}
        gym = self._within(
            functools.partial(self._make, self.config.domain, task.payload, **options)
        )
        text, info = self._within(gym.reset)
        if not text:
            raise EnvironmentFailure(f"tau2 task {task.id} ended before it began; its log says why")
        self._gym, self.task = gym, text
        self.schemas = [tool.openai_schema for tool in info["tools"]]
        self._tools = {
            tool.name: json.dumps(tool.openai_schema["function"]) for tool in info["tools"]
        }
        self.policy: str = info["policy"].strip()
        self._said = [text]
        self._turns = 0
        return text

    def context(self) -> str:
        tools, conversation = "\n".join(self._tools.values()), "\n".join(self._said)
        think = THINK if self.config.think else ""
        return PROMPT.format(
            policy=self.policy, tools=tools, conversation=conversation, think=think
        )

    def step(self, response: str) -> Outcome:
        """Play an action; an invalid one goes neither to the tools nor to the user."""
        return self.play(*self._parse_action(response))

    def play(self, action: str, problem: str = "") -> Outcome:
        """A tool call as JSON or a message to the user; where there is a `problem`, it goes to nobody."""
        assert self._gym is not None, "step() before reset() or after the end"
        self._turns += 1
        reward, done = 0.0, False
        if problem:
            text = f"Invalid action: {problem}."
        else:
            text, reward, done, _, info = self._within(self._gym.step, action)
            if done:
                self._gym = None
                run = json.loads(info["simulation_run"])
                if not run or run.get("termination_reason") in BROKEN:
                    raise EnvironmentFailure(
                        f"the simulation of tau2 broke: {run.get('termination_reason', 'error')}"
                    )
        self._said += [f"assistant: {action}", text]
        if not done and self._turns >= self.config.max_turns:
            done = True
            self.close()
        score, won = float(reward), reward >= 1.0
        reward = self.config.reward * score
        return Outcome(
            text, reward, done=done, won=won, action=action, valid=not problem, score=score
        )

    def format_action(self, action: str) -> str:
        thought = "<think>I know what to do.</think>" if self.config.think else ""
        return f"{thought}<action>{action}</action>"

    def close(self) -> None:
        """End what still runs: AgentGymEnv has no close, and its simulation waits in a thread for the next action."""
        self._threads.close()
        if self._gym is not None:
            gym, self._gym = self._gym, None
            threading.Thread(target=_end, args=(gym,), daemon=True).start()

    def _parse_action(self, response: str) -> tuple[str, str]:
        """(action, what is wrong with the response or ""). Of a tool call the name and arguments
        alone are kept: a call in the name of the user is not the agent's to make.
        """
        found = ACTION.search(response)
        action = found[1].strip() if found else ""
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

    def _within(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What function(*arguments) returns; EnvironmentFailure if it raises, or hangs for env.step_timeout_s."""
        try:
            return self._threads.call(function, *arguments)
        except OURS:
            raise
        except BaseException as error:
            self._gym = None
            raise EnvironmentFailure(f"tau2 {self.config.domain}: {describe(error)}") from error


class Tau2Chat(Retold):
    """The same as a conversation: the policy is the system message, the customer is the user."""

    def begin(self, task: Task) -> list[Message]:
        first = self._game.reset(task)
        self.tools = self._game.schemas
        system = CHAT.format(policy=self._game.policy)
        return [{"role": "system", "content": system}, {"role": "user", "content": _said(first)}]

    def hear(self, response: str) -> Reply:
        reply = super().hear(response)
        if (
            not reply.problem
            and not reply.calls
            and (not reply.content or reply.content.startswith("{"))
        ):
            # tau2-bench would take it for a call.
            reply.problem = "call a tool, or write to the user, who reads no JSON"
        return reply

    def refuse(self, reply: Reply) -> Outcome:
        super().refuse(reply)
        return replace(
            self._game.play(str(reply), reply.problem), observation=self.messages[-1]["content"]
        )

    def call(self, call: ToolCall) -> Outcome:
        outcome = self._game.play(json.dumps({"name": call.name, "arguments": call.arguments}))
        return replace(outcome, observation=_said(outcome.observation))

    def say(self, text: str) -> Outcome:
        outcome = self._game.play(text)
        return replace(outcome, observation=_said(outcome.observation))

    def close(self) -> None:
        self._game.close()


def _said(text: str) -> str:
    """Without the name of who says it, which the message's role is."""
    return SPEAKER.sub("", text, count=1)


def _end(gym: Any) -> None:
    with quietly():
        gym.step(DONE)


def _import() -> tuple[Callable[..., Any], Any]:
    """(AgentGymEnv, the registry of domains and tasks); UserError where they cannot be had."""
    spec = importlib.util.find_spec("tau2")
    if spec is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        old = (
            f"; it needs Python 3.12 or 3.13, this is {version}"
            if sys.version_info < (3, 12)
            else ""
        )
        raise UserError(f"env.name = 'tau2' needs tau2-bench of Sierra Research{old}: {INSTALL}")
    if not any((Path(folder) / "gym").is_dir() for folder in spec.submodule_search_locations or ()):
        raise UserError(
            "env.name = 'tau2': the installed package 'tau2' has no tau2.gym: on PyPI that name is an unrelated "
            f"chemistry program. pip uninstall tau2, then {INSTALL}"
        )
    with suppress(ImportError):
        from loguru import logger  # what tau2-bench logs with, line by line of every conversation

        logger.remove()
        logger.add(
            sys.stderr, level="ERROR", filter="tau2.gym"
        )  # why a simulation broke is said nowhere else
    try:
        from tau2.gym.gym_agent import AgentGymEnv
        from tau2.registry import registry
    except ImportError as error:
        raise UserError(
            f"env.name = 'tau2': tau2-bench cannot be imported: {error}; {INSTALL}"
        ) from None
    return AgentGymEnv, registry
