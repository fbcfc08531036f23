"""An agent that is a separate, unchanged program. It asks the model through OpenAI's interface.

The program is started for each episode. It gets the address of an endpoint and a task, and its last
line of output is the episode's reward. It contains no code of PaW.
"""

import json
import math
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from paw.config.sections import AgentConfig
from paw.config.values import Count, Seconds
from paw.errors import EnvironmentFailure, UserError, clean, describe, short_repr
from paw.gateway.server import Gateway
from paw.processes.program import ProgramEnd, run_program
from paw.rollouts.episode import EnvHandle, Model
from paw.rollouts.guard import MAX_REWARD
from paw.rollouts.session import Notes, Session
from paw.rollouts.text.chat import ContextFull

MAX_VARIABLE = 100_000
"""Maximum bytes of the task in PAW_TASK. Linux allows at most 128 KiB for a variable."""
LOCAL = "127.0.0.1,localhost"
"""Hosts that the program must reach without a proxy."""


@dataclass(frozen=True)
class Result:
    """What a program's last line says: a reward, or an answer that the environment judges."""

    reward: float | None = None
    answer: str | None = None


class Command:
    """Plays an episode by running agent.command.

    Raises UserError if the command is not set, or its program does not exist.
    """

    class Config(AgentConfig):
        """An agent that is a program of its own (docs/gateway.md)."""

        type: str = "command"
        """Which agent."""
        command: str = ""
        """The program and its arguments. It is started for each episode. OPENAI_BASE_URL and
        OPENAI_API_KEY have the address and the key of the model in training; PAW_TASK and standard
        input have the task as JSON. Its last line of output is the reward: {"reward": 0.5}."""
        timeout_s: Seconds = 600.0
        """Seconds that an episode may take."""
        at_once: Count = 64
        """Maximum number of programs that run at the same time, per rank."""
        failure_reward: float | None = None
        """Reward of an episode whose program fails, hangs or prints no reward. If unset, such an
        episode is dropped."""

    def __init__(self, config: "Command.Config") -> None:
        self.config = config
        self.at_once = config.at_once
        self._words = _checked_words(config.command)
        self._notes = Notes()
        self._gateway = Gateway(user="agent.type = 'command'")

    async def __call__(self, env: EnvHandle, model: Model) -> None:
        await env.reset()
        session = Session(env, model, self._notes)
        with env.patience.pause():  # the program has its own time limit
            async with self._gateway.session(session.complete) as (url, key):
                task = self._describe_task(env)
                end = await self._run(task, session, url=url, key=key, model=model)
                session.end()
        try:
            rewards = model.config.reward_types(env.episode.trajectory.task.env)
            result = self._result(end, session, needs_reward="env" in rewards)
        except EnvironmentFailure:
            if self.config.failure_reward is None or not session.turns:
                raise
            result = Result(reward=self.config.failure_reward)
        await self._end(env, result)

    @staticmethod
    def _describe_task(env: EnvHandle) -> str:
        """Return the task as one line of JSON."""
        task = {"id": env.task.id, "kind": env.task.kind, **env.agent_task}
        return json.dumps(task, default=str)

    async def _run(
        self, task: str, session: Session, *, url: str, key: str, model: Model
    ) -> ProgramEnd:
        variables = os.environ | {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,  # its name in older versions of LangChain
            "OPENAI_API_KEY": key,
            # They would send what the model reads and writes to OpenAI.
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "PAW_MODEL": model.config.model.path,
        }
        for name in ("NO_PROXY", "no_proxy"):
            variables[name] = ",".join(filter(None, [os.environ.get(name), LOCAL]))
        if len(task.encode()) <= MAX_VARIABLE:
            variables["PAW_TASK"] = task
        try:
            return await run_program(
                self._words,
                variables=variables,
                stdin=f"{task}\n",
                timeout_s=self.config.timeout_s,
                interrupt=session.failed,
            )
        except OSError as error:  # no more processes, or a variable that is too long
            raise EnvironmentFailure(f"agent.command: {describe(error)}") from None

    def _result(self, end: ProgramEnd, session: Session, *, needs_reward: bool) -> Result:
        """Return what the program's last line says.

        If the program failed because its context was full or its turns were used up, the reward
        is 0. Raises ContextFull or EnvironmentFailure, which say why there is no result.
        """
        if not session.turns and session.too_long:
            raise EnvironmentFailure(f"agent.command: {session.too_long}")
        if not session.turns:
            raise EnvironmentFailure(
                f"agent.command ended without asking the model{_because(end)}; "
                "does it use OPENAI_BASE_URL?"
            )
        if end.problem:
            if session.too_long:
                raise ContextFull(end.problem)
            if session.is_at_limit:
                return Result(reward=0.0)
            raise EnvironmentFailure(f"agent.command: {end.problem}{_error_line(end)}")
        try:
            return parse_result(end.last_line)
        except ValueError as error:
            if needs_reward:
                raise EnvironmentFailure(f"agent.command: {error}{_error_line(end)}") from None
            return Result(reward=0.0)

    @staticmethod
    async def _end(env: EnvHandle, result: Result) -> None:
        if result.answer is not None:
            await env.step(result.answer)
            return
        assert result.reward is not None
        largest = env.config.reward
        env.finish(
            reward=result.reward,
            won=result.reward >= largest,
            score=min(1.0, max(0.0, result.reward / largest)),
        )


def parse_result(line: str) -> Result:
    """Return what a program's last line says.

    It must be a number, {"reward": NUMBER} or {"answer": TEXT}. Raises ValueError, with one line
    that says so, for anything else.

    >>> parse_result('{"reward": 0.5}')
    Result(reward=0.5, answer=None)
    """
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict) and isinstance(value.get("answer"), str):
        return Result(answer=value["answer"])
    reward = value.get("reward") if isinstance(value, dict) else value
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        reward = math.nan
    if not abs(reward) <= MAX_REWARD:
        raise ValueError(
            f"the last line of its output is {short_repr(line)}; it must be a number, "
            '{"reward": 0.5} or {"answer": "..."}'
        )
    return Result(reward=float(reward))


def _because(end: ProgramEnd) -> str:
    return f" ({end.problem}{_error_line(end)})" if end.problem else ""


def _error_line(end: ProgramEnd) -> str:
    """Return ": " and the last line of standard error; "" if there is none."""
    return f": {clean(end.last_error, 200)}" if end.last_error else ""


def _checked_words(command: str) -> list[str]:
    """Return the words of a command. Raises UserError if it cannot be started."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"agent.command = {short_repr(command)}: {error}") from None
    if not words:
        raise UserError(
            "agent.type = 'command' needs agent.command, the program to start: "
            "--agent.command 'python my_agent.py'"
        )
    program = words[0]
    if shutil.which(program) is None:
        raise UserError(
            f"agent.command = {short_repr(command)}: there is no program {short_repr(program)}"
        )
    is_python = Path(program).name.startswith("python")
    if is_python and len(words) > 1 and words[1].endswith(".py") and not Path(words[1]).is_file():
        raise UserError(
            f"agent.command = {short_repr(command)}: there is no file {short_repr(words[1])}; "
            "paths are relative to the current folder"
        )
    return words
