"""Makes the text that the agent reads, and parses its response. This knows no game.

`PaperStyle` is Figure 7 of the paper, character for character as the reference code (verl-agent)
sends it, including the empty first and last lines and the blank after "tags.".
"""

from collections.abc import Collection, Sequence

from paw.envs.tags import LATER, LineStyle, Past, TaggedStyle

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
TASK = "Your task is to: "
HEAD = "\nYou are an expert agent operating in the ALFRED Embodied Environment."
ACTIONS = """\
our current observation is: {observation}
Your admissible actions of the current situation are: [{admissible}].

Now it's your turn to take an action.
{instruction}
"""
FIRST_TURN = f"{HEAD}\nY{ACTIONS}"
LATER_TURN = f"{HEAD} {TASK}{{task}}\n{LATER}{ACTIONS}"


class PaperStyle(TaggedStyle):
    """Figure 7 of the paper.

    With `history` 0, unlike the reference, later turns keep their template, which states the task.
    """

    unparsed = 30

    def prompt(self, task: str, past: Past, observation: str, admissible: Sequence[str]) -> str:
        """Return the user message of a turn. The first observation has the room and task."""
        actions = "\n ".join(f"'{action}'" for action in admissible)
        template = LATER_TURN if past else FIRST_TURN
        return self.fill(template, past, task=task, observation=observation, admissible=actions)


class CompactStyle(LineStyle):
    """Task, last actions (without their observations), observation and admissible actions.

    >>> style = CompactStyle(history=1)
    >>> print(style.prompt("look at a mug.", [("", "open fridge 1")], "It is.", ["look"]))
    task: look at a mug.
    did:
    open fridge 1
    see:
    It is.
    can:
    look
    """

    def prompt(self, task: str, past: Past, observation: str, admissible: Sequence[str]) -> str:
        if TASK in observation:  # opening text: keep only the room, as the task has its own line
            observation = observation.partition(TASK)[0].removeprefix(WELCOME)
        actions = [("", _line(action)) for _, action in past]
        return self.fill([f"task: {task}"], actions, _line(observation), admissible)

    def parse_action(self, response: str, admissible: Collection[str]) -> tuple[str, bool]:
        return super().parse_action(response.lower(), admissible)


Style = PaperStyle | CompactStyle


def _line(text: str) -> str:
    """Put `text` on one line, with single spaces."""
    return " ".join(text.split())
