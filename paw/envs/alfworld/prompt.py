"""What the agent reads and how its answer becomes an action: pure text, no game.

`PaperStyle` is Figure 7 of the paper, character for character as the reference code (verl-agent) sends it: the empty
first and last lines and the blank after "tags." included. `CompactStyle` says the same in a few short lines, so that
a tiny model with a vocabulary of whole phrases can learn it in minutes; there the answer is the bare action.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paw.envs.tags import TaggedStyle, choose_style, history_text

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
TASK = "Your task is to: "

FIRST_TURN = """
You are an expert agent operating in the ALFRED Embodied Environment.
Your current observation is: {observation}
Your admissible actions of the current situation are: [{admissible}].

Now it's your turn to take an action.
{instruction}
"""

LATER_TURN = """
You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: {task}
Prior to this step, you have already taken {taken} step(s). Below are the most recent {shown} observations and the \
corresponding actions you took: {history}
You are now at step {step} and your current observation is: {observation}
Your admissible actions of the current situation are: [{admissible}].

Now it's your turn to take an action.
{instruction}
"""

# The blank before the line break is the reference's.
THINK = (
    "You should first reason step-by-step about the current situation. "
    "This reasoning process MUST be enclosed within <think> </think> tags. \n"
    "Once you've finished your reasoning, you should choose an admissible action for current step "
    "and present it within <action> </action> tags."
)
NO_THINK = "You should choose an admissible action for current step and present it within <action> </action> tags."


@dataclass(frozen=True)
class View:
    """What one turn's prompt is made of."""

    task: str
    """The task without "Your task is to: "."""
    past: Sequence[tuple[str, str]]
    """(observation, action played on it) of every earlier turn, oldest first."""
    observation: str
    """Raw text of the environment; the opening one also holds the room and the task."""
    admissible: Sequence[str]


class PaperStyle(TaggedStyle):
    """Figure 7 of the paper.

    One deviation: the reference falls back to the first-turn prompt when `history` is 0, and so never repeats the
    task; here later turns keep theirs, with an empty history.
    """

    unparsed = 30

    def prompt(self, view: View) -> str:
        """The user message of a turn."""
        admissible = "\n ".join(f"'{action}'" for action in view.admissible if action != "help")
        instruction = THINK if self.think else NO_THINK
        if not view.past:
            return FIRST_TURN.format(observation=view.observation, admissible=admissible, instruction=instruction)
        taken = len(view.past)
        shown = min(self.history, taken)
        return LATER_TURN.format(
            task=view.task,
            taken=taken,
            shown=shown,
            history=history_text(view.past, shown),
            step=taken + 1,
            observation=view.observation,
            admissible=admissible,
            instruction=instruction,
        )


class CompactStyle:
    """Task, the last actions without what was seen, the observation, the admissible actions; one line each.

    Actions and the observation fill whole lines, so that a tokenizer can make each action one token wherever it stands.

    >>> print(CompactStyle(history=1).prompt(View("look at a mug.", [("", "open fridge 1")], "It is.", ["look"])))
    task: look at a mug.
    did:
    open fridge 1
    see:
    It is.
    can:
    look
    """

    def __init__(self, *, history: int = 3) -> None:
        self.history = history

    def prompt(self, view: View) -> str:
        shown = min(self.history, len(view.past))
        return "\n".join(
            [
                f"task: {view.task}",
                *(["did:"] if shown else []),
                *(_line(action) for _, action in view.past[len(view.past) - shown :]),
                "see:",
                _scene(view.observation),
                "can:",
                *(action for action in view.admissible if action != "help"),
            ]
        )

    def parse_action(self, response: str, admissible: Sequence[str]) -> tuple[str, bool]:
        """The whole response, stripped and lower-cased; valid only if it is one of the actions shown."""
        action = response.strip().lower()
        return action, action != "help" and action in admissible

    def format_action(self, action: str) -> str:
        """On a line of its own, as the actions of the prompt are: the same characters, so the same token."""
        return f"\n{action}"


Style = PaperStyle | CompactStyle


def make_style(style: str, *, history: int, think: bool) -> Style:
    """The style named by `env.style`, see `tags.choose_style`."""
    return choose_style(style, PaperStyle, CompactStyle, history=history, think=think)


def task_text(opening: str) -> str:
    """The task in an episode's first observation, after "Your task is to: ". ValueError if there is none."""
    _, found, task = opening.partition(TASK)
    if not found:
        raise ValueError(f"no '{TASK.strip()}' in the opening text {opening[:80]!r}")
    return task.strip()


def _scene(observation: str) -> str:
    """The observation in one line; of an opening text only the room, as the task has a line of its own."""
    if TASK in observation:
        observation = observation.partition(TASK)[0].removeprefix(WELCOME)
    return _line(observation)


def _line(text: str) -> str:
    return " ".join(text.split())
