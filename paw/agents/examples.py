"""ReAct's example episodes, played by our experts or read from a file of the ReAct authors.

Our experts play generated tasks, and rules add thoughts in the style of the paper (arXiv
2210.03629). The files that `agent.examples` can name are alfworld_3prompts.json, WebShop.ipynb and
prompts_naive.json (HotpotQA) from the authors' repository.
"""

import json
import re
from pathlib import Path
from typing import Any

from paw.config.sections import Config
from paw.envs import make_factory
from paw.envs.alfworld.generator import games
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.oracle import oracle
from paw.envs.alfworld.problem import REQUIRED_STATE, Game
from paw.envs.alfworld.tables import TREATMENTS
from paw.envs.base import warmup_tasks
from paw.errors import UserError

FILE_KEYS = {
    "pick": "put",
    "look": "examine",
    "clean": "clean",
    "heat": "heat",
    "cool": "cool",
    "two": "puttwo",
}
PUT = re.compile(r"\bput (the )?(.+? \d+) (?:in/on|in|on) (?:the )?(.+? \d+)\b")
DETOURS = 2
"""Number of places that an example searches in vain. The expert knows where the object is, but the
agent must search for it."""
OK = "OK."
HOTPOTQA = "webthink_simple6"
"""Key in prompts_naive.json for the episodes that the authors use for HotpotQA."""
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
"""Environment -> rules (pattern, replacement) that turn the authors' transcripts into the form of
ALFWorld's transcripts."""


def move_for_put(text: str) -> str:
    """Replace "put X in/on Y", the form before ALFWorld's release json_2.1.2, with "move X to Y".

    >>> move_for_put("> put mug 1 in/on desk 2\\nYou put the mug 1 in/on the desk 2.")
    '> move mug 1 to desk 2\\nYou move the mug 1 to the desk 2.'
    """
    return PUT.sub(r"move \1\2 to \1\3", text)


def alfworld_examples(kind: str) -> list[str]:
    """Return two episodes of a task type, in generated games that are used for nothing else."""
    example_games = games("warmup", 0, 2, seed=1, difficulty="medium", kinds=[kind])
    return [household_example(game) for game in example_games]


def household_example(game: Game) -> str:
    """Return the expert's episode of `game`, with a thought before each new part of the task."""
    household = Household(game)
    lines = [opening("alfworld", "", household.reset())]

    def think(text: str) -> None:
        lines.extend([f"> think: {text}", OK])

    def play(action: str) -> None:
        lines.extend([f"> {action}", household.step(action)])

    goal_object = game.goal.object.removesuffix("type")
    target = game.goal.target.removesuffix("type")
    goal = _goal(game, target)
    again = f", then do the same with a second {goal_object}" if game.kind == "two" else ""
    think(f"To solve the task, I need to find and take a {goal_object}, then {goal}{again}.")

    detours = _detours(game, household)
    if detours:
        first_detour = detours[0].removeprefix("go to ")
        think(
            f"First I need to find a {goal_object}. "
            f"I check one place after another, beginning with {first_detour}."
        )
    for action in detours:
        play(action)
        if household.is_shut(game.destinations[action]):
            play(action.replace("go to", "open"))

    last_verb = ""
    held = ""
    while not household.won:
        action = oracle(household)
        verb = action.split()[0]
        name = " ".join(action.split()[1:3])
        if last_verb == "take":
            think(f"Now I have {held}. Next, I need to {goal}.")
        elif last_verb in REQUIRED_STATE:
            think(f"Now {held} is {REQUIRED_STATE[last_verb]}. Next, I need to put it in {target}.")
        elif last_verb == "move":
            think(
                f"Now the first {goal_object} is in its place. Next, I need to find the second one."
            )
        if verb in ("take", "use"):
            think(f"Now I see {name}. Next, I need to {verb} it.")
        if verb == "take":
            held = name
        last_verb = verb
        play(action)
    return "\n".join(lines) + "\n"


def _goal(game: Game, target: str) -> str:
    """Say what must be done with the object of a game once it is taken."""
    if game.kind == "look":
        return "find and use a desklamp"
    if game.kind in REQUIRED_STATE:
        appliance = TREATMENTS[game.kind][0].lower()
        return f"{game.kind} it with a {appliance}, then put it in {target}"
    return f"put it in {target}"


def _detours(game: Game, household: Household) -> list[str]:
    """Return actions that go to the first DETOURS places without an object of the task."""
    actions = []
    for action, receptacle in game.destinations.items():
        contents = set(game.contents.get(receptacle, ()))
        if action in household.admissible and not game.candidates & contents:
            actions.append(action)
    return actions[:DETOURS]


def file_examples(path: Path) -> tuple[str, dict[str, list[str]]]:
    """Return (environment, task type -> episodes) for a file of the ReAct authors.

    The episodes are in the order in which the authors use them. The task type is "" if the
    environment has none. Raises UserError for any other file.
    """
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        if "cells" in content:
            return "webshop", {"": [_webshop_episode(content["cells"])]}
        if HOTPOTQA in content:
            return "search", {"": _hotpotqa_episodes(content[HOTPOTQA])}
        return "alfworld", _alfworld_episodes(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"agent.examples = '{path}': {error}") from None
    except KeyError as error:
        raise UserError(
            f"agent.examples = '{path}': it has no {error}; it must be ReAct's "
            "alfworld_3prompts.json, prompts_naive.json or WebShop.ipynb"
        ) from None


def _webshop_episode(cells: list[Any]) -> str:
    """Return the episode in a cell of WebShop.ipynb."""
    code = "\n".join("".join(cell["source"]) for cell in cells)
    match = re.search(r'^prompt1 = """Webshop *\n(.*?)"""', code, re.M | re.S)
    if match is None:
        raise KeyError("prompt1")
    return _transcript("webshop", match[1])


def _hotpotqa_episodes(text: str) -> list[str]:
    """Return the episodes without the action Lookup, which our environment does not have."""
    episodes = re.split(r"\n(?=Question: )", text)
    return [
        _transcript("search", episode)
        for episode in episodes
        if episode and "Lookup[" not in episode
    ]


def _alfworld_episodes(content: dict[str, str]) -> dict[str, list[str]]:
    """Return the two episodes that the authors show, by task type."""
    texts = {
        kind: [content[f"react_{key}_1"], content[f"react_{key}_0"]]
        for kind, key in FILE_KEYS.items()
    }
    return {kind: [move_for_put(text) for text in pair] for kind, pair in texts.items()}


def _transcript(name: str, text: str) -> str:
    """Turn the authors' transcript for environment `name` into the form of ALFWorld's.

    >>> episode = "Thought 1: Hm.\\nAction 1: Search[me]\\nObservation 1: You.\\n"
    >>> _transcript("search", f"Question: Who?\\n{episode}")
    'Question: Who?\\n> think: Hm.\\nOK.\\n> Search[me]\\nYou.\\n'
    """
    for pattern, replacement in FORM[name]:
        text = re.sub(pattern, replacement, text.strip(), flags=re.M)
    return text + "\n"


def expert_example(name: str) -> str:
    """Return an episode of WebShop or search in a small generated world, played by its expert."""
    env: dict[str, Any] = {"name": name, "eval_split": "test", "max_turns": 15}
    if name == "webshop":
        env["products"] = 200
    else:
        env["entities"] = 100
    factory = make_factory(Config.model_validate({"model": {"path": "-"}, "env": env}))
    (task,) = warmup_tasks(factory, 0, 1, 1)
    environment: Any = factory.make()
    observation = environment.reset(task)  # this also sets the environment's task
    lines = [opening(name, environment.task, observation)]
    has_ended = False
    while not has_ended:
        outcome = environment.step(environment.oracle())
        has_ended = outcome.done
        action = outcome.action
        if name == "search":
            action = action.replace("answer[", "Finish[", 1).replace("search[", "Search[", 1)
        lines += [f"> think: {_thought(outcome.action)}", OK, f"> {action}"]
        if outcome.observation:
            lines.append(outcome.observation)
    return "\n".join(lines) + "\n"


def _thought(action: str) -> str:
    """Return the thought before an action of the WebShop or search environment."""
    verb, _, text = action.rstrip("]").partition("[")
    if verb == "search":
        return f"Next, I need to find out about {text}, so I search for that."
    if verb == "answer":
        return f"Now I have found what the question asks for. The answer is {text}."
    if re.fullmatch("b[0-9a-z]{9}", text):
        return (
            "Of these products this one looks most like what I am asked for. "
            "I open it to see its options."
        )
    if text == "buy now":
        return (
            "This is what I am asked for, the options are chosen, and the price is within the "
            "limit. I buy it."
        )
    return f"I am asked for {text}, so I choose it."


def opening(name: str, task: str, observation: str) -> str:
    """Return a transcript's start: the task, then the first observation unless it is the task."""
    match name:
        case "alfworld":
            room_and_task = observation.partition("\n\n")[2]  # without the welcome
            return room_and_task.replace("\n\n", "\n")
        case "webshop":
            return f"Instruction: {task}\n{observation}"
        case "search":
            return f"Question: {task}"
    return f"Task: {task}\n{observation}"
