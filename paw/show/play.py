"""`paw play`: a game at the terminal, or line by line for a program.

A person sees what the agent sees, types an action or its number, and can ask for the exact prompt. With `--json` every
line read is one command and every line written one object with the keys feedback, admissible, won, reward and done; the
first stands for the start. It ends with the episode or the input.
"""

import argparse
import io
import json
import sys
from contextlib import closing

from paw.config import EnvConfig
from paw.errors import to_stderr
from paw.experience.envs.alfworld.difficulty import DIFFICULTIES
from paw.experience.envs.alfworld.generator import generate
from paw.experience.envs.alfworld.problem import Game
from paw.experience.envs.alfworld.suite import AlfworldEnv, AlfworldSuite
from paw.experience.envs.worker import EnvironmentFailure
from paw.types import Outcome, Task

HELP = "Type an action or its number; 'prompt' shows what the agent reads, 'quit' leaves."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", choices=["alfworld"], help="the environment to play")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--game", metavar="PATH", help="a game.tw-pddl file")
    source.add_argument("--seed", type=int, default=0, metavar="N", help="a generated game (default: 0)")
    parser.add_argument("--difficulty", choices=DIFFICULTIES, default="full", help="size of a generated game")
    parser.add_argument("--backend", choices=["native", "textworld"], default="native", help="the engine that plays")
    parser.add_argument("--style", choices=["paper", "compact"], default="paper", help="the prompt that 'prompt' shows")
    parser.add_argument("--json", action="store_true", help="one command a line in, one JSON object a line out")


def run(args: argparse.Namespace) -> int:
    """Play one game as `args` say; returns the exit status, 1 if the engine broke.

    Raises UserError where the game file is unreadable or the back end is not installed.
    """
    game = Game.load(args.game) if args.game else generate(args.seed, difficulty=args.difficulty)
    suite = AlfworldSuite(EnvConfig(backend=args.backend, style="compact" if args.json else args.style))
    talk = _json if args.json else _terminal
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is not text is no action either
    with closing(suite.make()) as environment:
        try:
            talk(environment, Task(game.name, game.kind, game))
        except EnvironmentFailure as error:
            to_stderr(f"paw play: {error}")
            return 1
    return 0


def _json(environment: AlfworldEnv, task: Task) -> None:
    outcome = Outcome(environment.reset(task), reward=0.0, done=False, won=False, action="", valid=True)
    while True:
        message = {"feedback": outcome.observation, "admissible": environment.admissible}
        message |= {"won": outcome.won, "reward": outcome.reward, "done": outcome.done}
        print(json.dumps(message), flush=True)
        line = "" if outcome.done else sys.stdin.readline()
        if not line:
            return
        outcome = environment.step(environment.style.answer(line.strip()))


def _terminal(environment: AlfworldEnv, task: Task) -> None:
    print(f"{environment.reset(task)}\n\n{HELP}")
    turns = 0
    while True:
        actions = [action for action in environment.admissible if action != "help"]
        print("\n" + "\n".join(f"{number:4}  {action}" for number, action in enumerate(actions, start=1)))
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        command = line.strip()
        if not line or command == "quit":
            print()
            return
        if command in ("", "prompt"):
            print(environment.prompt() if command else HELP)
            continue
        if command.isdecimal() and 1 <= int(command) <= len(actions):
            command = actions[int(command) - 1]
            print(command)
        outcome = environment.step(environment.style.answer(command))
        turns += 1
        print(f"\n{outcome.observation}")
        if outcome.done:
            steps = f"{turns} step{'s' if turns > 1 else ''}"
            print(f"\nWon in {steps}, reward {outcome.reward:g}." if outcome.won else f"\nNot won in {steps}.")
            return
