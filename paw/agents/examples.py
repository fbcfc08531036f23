"""ReAct's example episodes: our experts play generated tasks, and rules put in the thoughts, in the style of the paper
(arXiv 2210.03629); or `agent.examples`, a file of the ReAct authors' repository: alfworld_3prompts.json, WebShop.ipynb,
or prompts_naive.json (HotpotQA)."""

import json
import re
from pathlib import Path
from typing import Any

from paw.config import Config
from paw.envs import make_factory
from paw.envs.alfworld.generator import games
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.oracle import oracle
from paw.envs.alfworld.problem import REQUIRED_STATE, Game
from paw.envs.alfworld.tables import TREATMENTS
from paw.envs.base import warmup_tasks
from paw.errors import UserError

FILE_KEYS = {"pick": "put", "look": "examine", "clean": "clean", "heat": "heat", "cool": "cool", "two": "puttwo"}
PUT = re.compile(r"\bput (the )?(.+? \d+) (?:in/on|in|on) (?:the )?(.+? \d+)\b")
DETOURS = 2
"""Places that an example looks into first: the expert knows where the object is, a player has to search."""
OK = "OK."
HOTPOTQA = "webthink_simple6"
"""Key of prompts_naive.json whose episodes the authors show in HotpotQA."""
FORM = {
    "search": [
        (r"^Thought \d+: (.*)\nAction \d+: ", rf"> think: \1\n{OK}\n> "),
        (r"^Observation \d+: ", ""),
    ],
    "webshop": [
        (r"^Action: think\[(.*)\]$", r"> think: \1"),
        (r"^Action: ", "> "),
        (r"^Observation:\s*", ""),
        (r"^Instruction:\s*", "Instruction: "),
        (r"\s+$", ""),
    ],
}
"""Rules that bring the authors' transcripts of other environments into the form of ALFWorld's."""


def move_for_put(text: str) -> str:
    """Releases before json_2.1.2 said "put X in/on Y" for what is "move X to Y" now.

    >>> move_for_put("> put mug 1 in/on desk 2\\nYou put the mug 1 in/on the desk 2.")
    '> move mug 1 to desk 2\\nYou move the mug 1 to the desk 2.'
    """
    return PUT.sub(r"move \1\2 to \1\3", text)


def alfworld_examples(kind: str) -> list[str]:
    """Two episodes of a task type, in generated households that neither training nor evaluation plays."""
    return [household_example(game) for game in games("warmup", 0, 2, seed=1, difficulty="medium", kinds=[kind])]


def household_example(game: Game) -> str:
    """The expert's episode of `game`, with a thought wherever it turns to something new."""
    household = Household(game)
    lines = [opening("alfworld", "", household.reset())]
    thing, place = game.goal.object.removesuffix("type"), game.goal.target.removesuffix("type")
    treat = game.kind in REQUIRED_STATE and f"{game.kind} it with a {TREATMENTS[game.kind][0].lower()}, then "
    goal = "find and use a desklamp" if game.kind == "look" else f"{treat or ''}put it in {place}"
    again = f", then do the same with a second {thing}" if game.kind == "two" else ""

    def think(text: str) -> None:
        lines.extend([f"> think: {text}", OK])

    def play(action: str) -> None:
        lines.extend([f"> {action}", household.step(action)])

    think(f"To solve the task, I need to find and take a {thing}, then {goal}{again}.")
    detours = [
        action
        for action, receptacle in game.destinations.items()
        if action in household.admissible and not game.candidates & set(game.contents.get(receptacle, ()))
    ][:DETOURS]
    if detours:
        first = detours[0].removeprefix("go to ")
        think(f"First I need to find a {thing}. I check one place after another, beginning with {first}.")
    for action in detours:
        play(action)
        if household.is_shut(game.destinations[action]):
            play(action.replace("go to", "open"))
    before = held = ""
    while not household.won:
        action = oracle(household)
        verb, name = action.split()[0], " ".join(action.split()[1:3])
        if before == "take":
            think(f"Now I have {held}. Next, I need to {goal}.")
        elif before in REQUIRED_STATE:
            think(f"Now {held} is {REQUIRED_STATE[before]}. Next, I need to put it in {place}.")
        elif before == "move":
            think(f"Now the first {thing} is in its place. Next, I need to find the second one.")
        if verb in ("take", "use"):
            think(f"Now I see {name}. Next, I need to {verb} it.")
        held, before = name if verb == "take" else held, verb
        play(action)
    return "\n".join(lines) + "\n"


def file_examples(path: Path) -> tuple[str, dict[str, list[str]]]:
    """The environment whose episodes a file of the ReAct authors holds, and those of each task type ("" where an
    environment has none), in the order they use them. UserError for any other file."""
    try:
        given = json.loads(path.expanduser().read_text(encoding="utf-8"))
        if "cells" in given:
            code = "\n".join("".join(cell["source"]) for cell in given["cells"])
            if not (found := re.search(r'^prompt1 = """Webshop *\n(.*?)"""', code, re.M | re.S)):
                raise KeyError("prompt1")
            return "webshop", {"": [_transcript("webshop", found[1])]}
        if HOTPOTQA in given:
            texts = re.split(r"\n(?=Question: )", given[HOTPOTQA])
            return "search", {"": [_transcript("search", text) for text in texts if text and "Lookup[" not in text]}
        texts = {kind: [given[f"react_{key}_{i}"] for i in (1, 0)] for kind, key in FILE_KEYS.items()}
        return "alfworld", {kind: [move_for_put(text) for text in both] for kind, both in texts.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"agent.examples = '{path}': {error}") from None
    except KeyError as error:
        what = "ReAct's alfworld_3prompts.json, prompts_naive.json and WebShop.ipynb can be read"
        raise UserError(f"agent.examples = '{path}': there is no {error}; {what}") from None


def _transcript(name: str, text: str) -> str:
    """
    >>> _transcript("search", "Question: Who?\\nThought 1: Hm.\\nAction 1: Search[me]\\nObservation 1: You.\\n")
    'Question: Who?\\n> think: Hm.\\nOK.\\n> Search[me]\\nYou.\\n'
    """
    for pattern, form in FORM[name]:
        text = re.sub(pattern, form, text.strip(), flags=re.M)
    return text + "\n"


def expert_example(name: str) -> str:
    """One episode of the WebShop or search environment in a small generated world, by its own expert."""
    env = {"name": name, "eval_split": "test", "max_turns": 15}
    env |= {"webshop": {"products": 200}, "search": {"entities": 100}}[name]
    factory = make_factory(Config.model_validate({"model": {"path": "-"}, "env": env}))
    (task,) = warmup_tasks(factory, 0, 1, 1)
    environment: Any = factory.make()
    lines, done = [opening(name, environment.task, environment.reset(task))], False
    while not done:
        outcome = environment.step(environment.oracle())
        done = outcome.done
        action = outcome.action
        if env["name"] == "search":
            action = action.replace("answer[", "Finish[", 1).replace("search[", "Search[", 1)
        lines += [f"> think: {_thought(outcome.action)}", OK, f"> {action}"]
        lines += [outcome.observation] if outcome.observation else []
    return "\n".join(lines) + "\n"


def _thought(action: str) -> str:
    verb, _, text = action.rstrip("]").partition("[")
    if verb == "search":
        return f"Next, I need to find out about {text}, so I search for that."
    if verb == "answer":
        return f"Now I have found what the question asks for. The answer is {text}."
    if re.fullmatch("b[0-9a-z]{9}", text):
        return "Of these products this one looks most like what I am asked for. I open it to see its options."
    if text == "buy now":
        return "This is what I am asked for, the options are chosen, and the price is within the limit. I buy it."
    return f"I am asked for {text}, so I choose it."


def opening(name: str, task: str, observation: str) -> str:
    """The start of a transcript: the task, and what is seen first where that is not the task itself."""
    match name:
        case "alfworld":
            return observation.partition("\n\n")[2].replace("\n\n", "\n")  # task and room without the welcome
        case "webshop":
            return f"Instruction: {task}\n{observation}"
        case "search":
            return f"Question: {task}"
    return f"Task: {task}\n{observation}"
