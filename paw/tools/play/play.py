"""`paw play`: plays a game at the terminal, or line by line for a program.

With `--json`, every input line is one action, and every output line is one object. The first object
describes the start of the game.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paw.config.sections import EnvConfig
from paw.envs import make_factory
from paw.envs.base import EnvFactory, eval_tasks
from paw.errors import OURS, EnvironmentFailure, clean, describe, quietly, to_stderr, user_location
from paw.rollouts.guard import CheckedEnv, TimedEnv
from paw.rollouts.text.chat import context_text
from paw.tools.evaluate.played import load_played
from paw.types import Outcome, Task

MAX_SHOWN = 100_000
"""Maximum number of characters of a text that are shown."""
HELP = "Type an action or its number; 'prompt' shows what the agent reads, 'quit' leaves."


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play one game. Returns the exit status, which is 1 if the environment broke."""
    config = load_played(
        options.recipe, {"env.name": options.env, **overrides}, {"env.data": "none"}
    )
    factory = make_factory(config)
    task = eval_tasks(factory, config.env.eval_split, 1, options.seed)[0]
    play = _play_json if options.json else _play_at_terminal
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are not text are an invalid action
    try:
        environment = PlayedGame(factory, config.env)
        try:
            play(environment, task)
        finally:
            with quietly():
                environment.close()
    except EnvironmentFailure as error:
        to_stderr(f"paw play: {error}")
        return 1
    return 0


class PlayedGame(TimedEnv):
    """An environment whose calls raise EnvironmentFailure for any problem inside it.

    This includes SystemExit, and calls that hang.
    """

    def __init__(self, factory: EnvFactory, config: EnvConfig) -> None:
        with _as_environment_failure():
            super().__init__(factory, config)

    def _run(self, function: Callable[[], Any]) -> Any:
        with _as_environment_failure():
            return super()._run(function)


@contextmanager
def _as_environment_failure() -> Iterator[None]:
    """Turn errors of the block into EnvironmentFailure, except errors for the user."""
    try:
        yield
    except (*OURS, EnvironmentFailure):
        raise
    except BaseException as error:
        raise EnvironmentFailure(f"{describe(error)}{user_location(error)}") from error


def _task_text(environment: CheckedEnv, first_observation: str) -> str:
    """Return the task in words; "" if the first observation contains it."""
    text = getattr(environment, "task", "")
    return "" if text in first_observation else text


def _play_json(environment: CheckedEnv, task: Task) -> None:
    """Play with JSON objects on stdout and actions on stdin, until the game or the input ends."""
    observation = environment.reset(task)
    outcome = Outcome(observation, reward=0.0, done=False, won=False, action="", valid=True)
    message: dict[str, Any] = {}
    task_text = _task_text(environment, observation)
    if task_text:
        message["task"] = task_text
    while True:
        message["feedback"] = outcome.observation
        message["admissible"] = environment.admissible_actions()
        message["won"] = outcome.won
        message["reward"] = outcome.reward
        message["done"] = outcome.done
        if outcome.score is not None:
            message["score"] = outcome.score
        print(json.dumps(message), flush=True)
        if outcome.done:
            return

        line = sys.stdin.readline()
        if not line:
            return
        outcome = environment.step(environment.format_action(line.strip()))
        message = {}


def _play_at_terminal(environment: CheckedEnv, task: Task) -> None:
    """Play with text on stdout and actions or their numbers on stdin, until the end or "quit"."""
    observation = environment.reset(task)
    task_text = _task_text(environment, observation)
    if task_text:
        _say(task_text, observation, HELP)
    else:
        _say(observation, HELP)
    turns = 0
    while True:
        actions = environment.admissible_actions()
        lines = [f"{number:4}  {clean(action)}" for number, action in enumerate(actions, start=1)]
        print("\n" + "\n".join(lines))
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        command = line.strip()
        if not line or command == "quit":
            print()
            return
        if command == "":
            _say(HELP)
            continue
        if command == "prompt":
            tools = [json.dumps(tool["function"], ensure_ascii=False) for tool in environment.tools]
            _say(*tools, context_text(environment.context()))
            continue

        if command.isdecimal() and 1 <= int(command) <= len(actions):
            command = actions[int(command) - 1]
            _say(command)
        outcome = environment.step(environment.format_action(command))
        turns += 1
        _say(f"\n{outcome.observation}")
        if outcome.done:
            print(_ending(outcome, turns))
            return


def _say(*texts: str) -> None:
    """Print texts of an environment, without control characters except line breaks."""
    print(*(clean(text, MAX_SHOWN, lines=True) for text in texts), sep="\n\n")


def _ending(outcome: Outcome, turns: int) -> str:
    """Return the last line of a game."""
    result = f"Not won by turn {turns}"
    if outcome.won:
        result = f"Won in turn {turns}, reward {outcome.reward:g}"
    score = "" if outcome.score is None else f", score {outcome.score:.2f}"
    return f"\n{result}{score}."
