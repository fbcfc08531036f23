"""Shared parts of the prompts of ALFWorld and WebShop, after verl-agent's code."""

import re
from collections.abc import Collection, Iterable, Sequence

CJK = re.compile("[\u4e00-\u9fff]")
NO_THINK = (
    "You should choose an admissible action for current step and present it within "
    "<action> </action> tags."
)
# The blank before the line break comes from the reference.
THINK = (
    "You should first reason step-by-step about the current situation{advice}. "
    "This reasoning process MUST be enclosed within <think> </think> tags. \n"
    "Once you've finished your reasoning, you should choose an admissible action for current step "
    "and present it within <action> </action> tags."
)
LATER = """\
Prior to this step, you have already taken {taken} step(s). Below are the most recent {shown} \
observations and the corresponding actions you took: {history}
You are now at step {step} and y"""
Past = Sequence[tuple[str, str]]
"""The (observation, action played on it) of every earlier turn, oldest first."""


class TaggedStyle:
    """The paper's prompts, answered in tags.

    A well-formed response is valid even if its action is not admissible.
    """

    unparsed: int
    """If a response has no tags, this many characters at its end are played as its action."""
    advice = ""
    """How to reason, as the end of a sentence in the prompt."""

    def __init__(self, *, history: int = 2, think: bool = True) -> None:
        self.history = history
        self.think = think

    def fill(self, template: str, past: Past, **values: str) -> str:
        """Fill a template with `values`, the past turns and the instruction on how to answer."""
        taken = len(past)
        shown = min(self.history, taken)
        lines = []
        for number in range(taken - shown + 1, taken + 1):
            observation, action = past[number - 1]
            lines.append(f"[Observation {number}: '{observation}', Action {number}: '{action}']")
        return template.format(
            **values,
            taken=taken,
            shown=shown,
            step=taken + 1,
            history="\n".join(lines),
            instruction=THINK.format(advice=self.advice) if self.think else NO_THINK,
        )

    def parse_action(self, response: str, admissible: Collection[str]) -> tuple[str, bool]:
        """Return (action to play, whether the response is well-formed).

        The action is the text between the first <action> and the first </action>, in lower case.
        The letter case of <think> matters, that of <action> does not.
        """
        text = response.lower()
        tag_start = text.find("<action>")
        tag_end = text.find("</action>")
        if tag_start == -1 or tag_end == -1:
            return text[-self.unparsed :], False
        action = text[tag_start + len("<action>") : tag_end].strip()
        has_thought = "<think>" in response and "</think>" in response
        if self.think and not has_thought:
            return action, False
        return action, not CJK.search(response)

    def format_action(self, action: str) -> str:
        thought = f"<think>I should {action}.</think>" if self.think else ""
        return f"{thought}<action>{action}</action>"


class LineStyle:
    """Short prompts for a tiny model.

    Each action and observation has its own line, so it can be a single token.
    """

    def __init__(self, *, history: int = 2, think: bool = False) -> None:
        self.history = history

    def fill(
        self, task: Iterable[str], past: Past, observation: str, actions: Iterable[str]
    ) -> str:
        """Return the prompt: task, last actions, observation, and the actions to choose from."""
        lines = list(task)
        shown = past[max(0, len(past) - self.history) :]
        if shown:
            lines.append("did:")
            lines += [action for _, action in shown]
        lines += ["see:", observation]
        lines += ["can:", *actions]
        return "\n".join(lines)

    def parse_action(self, response: str, admissible: Collection[str]) -> tuple[str, bool]:
        """Return the whole response, stripped. It is valid only if it is an action shown."""
        action = response.strip()
        return action, action in admissible

    def format_action(self, action: str) -> str:
        """Write `action` on its own line, with the characters (and so the token) of the prompt."""
        return f"\n{action}"
