"""Makes the text that the agent reads, and parses the command in its response."""

import re

from paw.envs.tags import LATER, Past, TaggedStyle
from paw.envs.terminal.sandbox import Result

HEAD = "\nYou are an expert at the command line, working in a bash shell without network access."
TASK = "\nYour task is to: {task}\n"
ACTIONS = """\
our current terminal output is: {observation}

Now it's your turn to run one command. {how}
"""
FIRST_TURN = f"{HEAD}{TASK}Y{ACTIONS}"
LATER_TURN = f"{HEAD}{TASK}{LATER}{ACTIONS}"
THINK = (
    "You should first reason step-by-step about the current situation. "
    "This reasoning process MUST be enclosed within <think> </think> tags.\n"
    "Once you've finished your reasoning, present the command"
)
NO_THINK = "Present it"
TAGS = " within <action> </action> tags. The command exit ends the task: run it when all is done."
IN_TAGS = re.compile("<action>(.*?)</action>", re.I | re.S)
START = "[a new shell]"
"""The first observation."""
COMPACT_LINES = 8
"""Maximum lines of output in a short prompt. Only the first ones are shown."""


class PaperStyle(TaggedStyle):
    """The paper's prompt for other environments, adapted to a terminal.

    Here the letter case of an action matters.
    """

    def prompt(self, task: str, past: Past, observation: str) -> str:
        how = (THINK if self.think else NO_THINK) + TAGS
        template = LATER_TURN if past and self.history else FIRST_TURN
        return self.fill(template, past, task=task, observation=observation, how=how)

    def parse_command(self, response: str) -> tuple[str, bool]:
        """Return (the command in the first <action> tags, whether the response is well-formed).

        Without tags, the command is empty and nothing is run.
        """
        match = IN_TAGS.search(response)
        if match is None:
            return "", False
        command = match[1].strip()
        has_thought = "<think>" in response and "</think>" in response
        return command, bool(command) and (has_thought or not self.think)


class CompactStyle:
    """A short prompt for tiny models: the task, the last commands, the last output."""

    def __init__(self, *, history: int, think: bool) -> None:
        del think
        self.history = history

    def prompt(self, task: str, past: Past, observation: str) -> str:
        lines = ["task:", task]
        shown = past[max(0, len(past) - self.history) :]
        if shown:
            lines.append("did:")
            lines += [command for _, command in shown]
        lines += ["see:", *observation.splitlines()[:COMPACT_LINES]]
        return "\n".join(lines)

    def parse_command(self, response: str) -> tuple[str, bool]:
        """Return (the whole response, whether it is a command)."""
        command = response.strip()
        return command, command != ""

    def format_action(self, action: str) -> str:
        """Write a command on its own line, with the characters (and so the token) of the prompt."""
        return f"\n{action}"


Style = PaperStyle | CompactStyle


def shown(result: Result, limit: int) -> str:
    """Return a command's output as text, with remarks in brackets, such as its exit status.

    Bytes that are not UTF-8 become Unicode's replacement characters. If there are more than `limit`
    characters, the middle is left out.
    """
    text = result.output.decode("utf-8", "replace").rstrip("\n")
    if len(text) > limit:
        half = limit // 2
        left_out = f"\n[{len(text) - 2 * half:,} characters left out]\n"
        text = text[:half] + left_out + text[-half:]
    remarks = []
    if result.stopped:
        remarks.append(f"[stopped: {result.stopped}]")
    elif result.status:
        remarks.append(f"[exit status {result.status}]")
    elif not text:
        remarks.append("[no output]")
    return "\n".join([text, *remarks] if text else remarks)
