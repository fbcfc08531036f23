"""What the prompts of ALFWorld and WebShop share, after verl-agent's SimpleMemory and projections."""

import re
from collections.abc import Collection, Iterable, Sequence

CJK = re.compile("[\u4e00-\u9fff]")
NO_THINK = "You should choose an admissible action for current step and present it within <action> </action> tags."
# The blank before the line break is the reference's.
THINK = (
    "You should first reason step-by-step about the current situation{advice}. "
    "This reasoning process MUST be enclosed within <think> </think> tags. \n"
    "Once you've finished your reasoning, you should choose an admissible action for current step "
    "and present it within <action> </action> tags."
)
LATER = """\
Prior to this step, you have already taken {taken} step(s). Below are the most recent {shown} observations and the \
corresponding actions you took: {history}
You are now at step {step} and y"""
Past = Sequence[tuple[str, str]]
"""(observation, action played on it) of every earlier turn, oldest first."""


class TaggedStyle:
    """The paper's prompts, answered in tags.

    Whether an action is admissible does not matter for validity.
    """

    unparsed: int
    """Characters at the end of a response without tags that are its action."""
    advice = ""
    """How to reason, at the end of a sentence."""

    def __init__(self, *, history: int = 2, think: bool = True) -> None:
        self.history, self.think = history, think

    def fill(self, template: str, past: Past, **values: str) -> str:
        """A template with `values` and what is said of the past and of the answer."""
        taken = len(past)
        shown = range(taken - min(self.history, taken), taken)
        lines = [
            f"[Observation {i + 1}: '{past[i][0]}', Action {i + 1}: '{past[i][1]}']" for i in shown
        ]
        instruction = THINK.format(advice=self.advice) if self.think else NO_THINK
        turns = {
            "taken": taken,
            "shown": len(shown),
            "step": taken + 1,
            "history": "\n".join(lines),
        }
        return template.format(**values, **turns, instruction=instruction)

    def parse_action(self, response: str, admissible: Collection[str]) -> tuple[str, bool]:
        """(action to play, whether the response is well-formed).

        The action is the text between the first <action> and the first </action>, lower-cased.
        <think> is looked for as it is written, <action> in any case.
        """
        text = response.lower()
        start, end = text.find("<action>"), text.find("</action>")
        if start == -1 or end == -1:
            return text[-self.unparsed :], False
        thought = not self.think or ("<think>" in response and "</think>" in response)
        return text[start + len("<action>") : end].strip(), thought and not CJK.search(response)

    def format_action(self, action: str) -> str:
        thought = f"<think>I should {action}.</think>" if self.think else ""
        return f"{thought}<action>{action}</action>"


class LineStyle:
    """Short prompts for a tiny model.

    Actions and the observation fill whole lines, so that each can be one token.
    """

    def __init__(self, *, history: int = 2, think: bool = False) -> None:
        self.history = history

    def fill(
        self, task: Iterable[str], past: Past, observation: str, actions: Iterable[str]
    ) -> str:
        shown = [action for _, action in past[max(0, len(past) - self.history) :]]
        return "\n".join(
            [*task, *(["did:", *shown] if shown else []), "see:", observation, "can:", *actions]
        )

    def parse_action(self, response: str, admissible: Collection[str]) -> tuple[str, bool]:
        """The whole response, stripped; valid only if it is one of the actions shown."""
        action = response.strip()
        return action, action in admissible

    def format_action(self, action: str) -> str:
        """On a line of its own, as the actions of the prompt are: the same characters, so the same token."""
        return f"\n{action}"
