"""`paw play`: a game at the terminal, or line by line for a program.

With `--json` every line read is one command and every line written one object; the first stands for
the start.
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paw.config import EnvConfig
from paw.envs import make_factory
from paw.envs.base import EnvFactory, eval_tasks
from paw.errors import OURS, EnvironmentFailure, clean, describe, place, quietly, to_stderr
from paw.rollouts.chat import context_text
from paw.rollouts.guard import CheckedEnv, TimedGuard
from paw.tools.played import load_played
from paw.types import Outcome, Task

MOST_SHOWN = 100_000
"""Characters of a text."""
HELP = "Type an action or its number; 'prompt' shows what the agent reads, 'quit' leaves."


def run(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play one game as `args` say; returns the exit status, 1 if the environment broke."""
    config = load_played(args.recipe, {"env.name": args.env, **overrides}, {"env.data": "none"})
    factory = make_factory(config)
    task = eval_tasks(factory, config.env.eval_split, 1, args.seed)[0]
    talk = _json if args.json else _terminal
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is not text is no action either
    try:
        environment = PlayedGame(factory, config.env)
        try:
            talk(environment, task)
        finally:
            with quietly():
                environment.close()
    except EnvironmentFailure as error:
        to_stderr(f"paw play: {error}")
        return 1
    return 0


class PlayedGame(TimedGuard):
    """Raises EnvironmentFailure for whatever the environment raises, SystemExit included, or if it hangs."""

    def __init__(self, factory: EnvFactory, config: EnvConfig) -> None:
        with _failing():
            super().__init__(factory, config)

    def _call(self, name: str, *args: Any, default: Any = None) -> Any:
        with _failing():
            return super()._call(name, *args, default=default)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (*OURS, EnvironmentFailure):
        raise
    except BaseException as error:
        raise EnvironmentFailure(f"{describe(error)}{place(error)}") from error


def _task(environment: CheckedEnv, text: str) -> dict[str, Any]:
    """The task in words, where the first observation, `text`, does not tell it."""
    task = getattr(environment, "task", "")
    return {} if task in text else {"task": task}


def _json(environment: CheckedEnv, task: Task) -> None:
    outcome = Outcome(
        environment.reset(task), reward=0.0, done=False, won=False, action="", valid=True
    )
    message = _task(environment, outcome.observation)
    while True:
        message |= {"feedback": outcome.observation, "admissible": environment.admissible_actions()}
        message |= {"won": outcome.won, "reward": outcome.reward, "done": outcome.done}
        message |= {} if outcome.score is None else {"score": outcome.score}
        print(json.dumps(message), flush=True)
        message = {}
        line = "" if outcome.done else sys.stdin.readline()
        if not line:
            return
        outcome = environment.step(environment.format_action(line.strip()))


def _terminal(environment: CheckedEnv, task: Task) -> None:
    def say(*texts: str) -> None:
        """What an environment wrote, with its line ends and nothing else that moves the cursor."""
        print(*(clean(text, MOST_SHOWN, lines=True) for text in texts), sep="\n\n")

    text, turns = environment.reset(task), 0
    say(*_task(environment, text).values(), text, HELP)
    while True:
        actions = environment.admissible_actions()
        print(
            "\n"
            + "\n".join(
                f"{number:4}  {clean(action)}" for number, action in enumerate(actions, start=1)
            )
        )
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        command = line.strip()
        if not line or command == "quit":
            print()
            return
        if command in ("", "prompt"):
            tools = [json.dumps(tool["function"], ensure_ascii=False) for tool in environment.tools]
            say(*([*tools, context_text(environment.context())] if command else [HELP]))
            continue
        if command.isdecimal() and 1 <= int(command) <= len(actions):
            command = actions[int(command) - 1]
            say(command)
        outcome = environment.step(environment.format_action(command))
        turns += 1
        say(f"\n{outcome.observation}")
        if outcome.done:
            said = (
                f"Won in turn {turns}, reward {outcome.reward:g}"
                if outcome.won
                else f"Not won by turn {turns}"
            )
            score = "" if outcome.score is None else f", score {outcome.score:.2f}"
            print(f"\n{said}{score}.")
            return
