"""ReAct (arXiv 2210.03629): the model writes a transcript, thoughts and actions in turn, and reads what comes of them.

As in the authors' code for ALFWorld, all of it is one growing text: examples, the task, then lines "> think: ..." and
"> ACTION" with the answers. For chat models one sentence says what to write, and of an answer the first line that is
not empty counts, without a <think> block before it. A thought costs no turn, but n turns end after 2 n calls.
"""

import functools
import re
from collections.abc import Sequence

from paw.agents.episode import Episode
from paw.agents.examples import OK, alfworld_examples, expert_example, file_examples, move_for_put, opening
from paw.config import Config
from paw.errors import UserError

HEAD = {
    "alfworld": "Interact with a household to solve a task.",
    "webshop": "Buy in a web shop what the instruction asks for. Actions are search[words], where there is a search, "
    "and click[text] with a text of the page, such as click[buy now].",
    "search": "Answer a question with the help of a search engine. Actions are Search[query], and Finish[answer] with "
    "nothing but the answer.",
}
OTHER = "Solve a task step by step."
FORMAT = (
    "After each '>' stands a thought, 'think: ...', or an action. Write what comes after the last '>', in one line."
)
NO_ACTION = "That is neither a thought nor an action."
STOP = ("\n>",)

REASONING = re.compile(r"<think>.*?(</think>|\Z)", re.S)
LABEL = re.compile(r"^[\s>`*]*(?:act(?:ion)?\s*\d*\s*:)?[\s`*]*", re.I)
THOUGHT = re.compile(r"^(?:think|thought)\s*\d*\s*[:\[]", re.I)
BRACKETS = {
    "webshop": re.compile(r"(search|click)\[(.*)\]", re.I),
    "search": re.compile(r"(search|finish|answer)\[(.*)\]", re.I),
}
"""Environments whose actions have a form, verb[text]. In others a line that is no thought is an action."""


def written_line(text: str) -> str:
    """What an answer adds to the transcript: its first line with something in it, without label or markup.

    >>> written_line("<think>Hm.</think>\\n\\n> Action: **go to desk 1**\\nOn the desk 1, you see")
    'go to desk 1'
    """
    lines = (LABEL.sub("", line).strip().rstrip("`*") for line in REASONING.sub("", text).splitlines())
    return next(filter(None, lines), "")


def bare_action(line: str, environment: str) -> str:
    """The action of a line as the environment takes it bare; "" where there is none."""
    if environment == "alfworld":
        return move_for_put(line)
    if environment not in BRACKETS:
        return line
    found = BRACKETS[environment].search(line)
    if found is None:
        return ""
    verb = found[1].lower().replace("finish", "answer")
    return f"{verb}[{found[2].strip()}]"


class React:
    def __init__(self, config: Config) -> None:
        self.env, path = config.env, config.agent.examples
        if path is not None and self.env.name != "alfworld":
            raise UserError(f"agent.examples = '{path}' holds ALFWorld episodes, but env.name = '{self.env.name}'")
        self._of_kind = file_examples(path).__getitem__ if path else functools.cache(alfworld_examples)
        self._example = [expert_example(config)] if self.env.name in BRACKETS else []

    def examples(self, kind: str) -> Sequence[str]:
        return self._of_kind(kind) if self.env.name == "alfworld" else self._example

    def play(self, episode: Episode) -> None:
        self.trial(episode)

    def trial(self, episode: Episode, memory: str = "") -> str:
        """Play one trial, with `memory` before the task; returns its transcript, from the task on."""
        examples = self.examples(episode.task.kind)
        head = [HEAD.get(self.env.name, OTHER), FORMAT]
        if examples:
            head.append(f"Here {'is an example' if len(examples) == 1 else 'are two examples'}.")
        before = "\n".join([" ".join(head), *examples, *([memory] if memory else []), "Here is the task.\n"])
        environment = episode.environment
        text = opening(self.env, environment, episode.reset())
        for _ in range(2 * self.env.max_turns):
            if self.env.name not in HEAD and environment.admissible_actions():
                text += f"\n(possible: {', '.join(environment.admissible_actions())})"
            reply = episode.say(f"{before}{text}\n>", stop=STOP).text
            line = written_line(reply)
            if THOUGHT.match(line):
                text += f"\n> {line}\n{OK}"
                continue
            action = bare_action(line, self.env.name)
            outcome = episode.step(environment.format_action(action) if action else reply, said=reply)
            text += f"\n> {line}\n{outcome.observation if action else outcome.observation or NO_ACTION}".rstrip("\n")
            if outcome.done:
                break
        return text
