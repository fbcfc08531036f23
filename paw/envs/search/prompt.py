"""Makes the text that the agent reads, and parses its response. This does no retrieval.

`PaperStyle` is Figure 9 of the paper, character for character as the reference code (verl-agent,
prompts/search.py and SearchMemory) sends it.
"""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

HEAD = """
You are an expert agent tasked with answering the given question step-by-step.
Your question: {question}
"""
PAST = """
Prior to this step, you have already taken {taken} step(s). Below is the interaction history \
where <search> </search> wrapped your past search queries and <information> </information> \
wrapped the corresponding search results returned by the external search engine. History:
{history}
"""
# The blank before the line break comes from the reference.
THINK = (
    "You should first conduct reasoning process. This process MUST be enclosed within "
    "<think> </think> tags. \n"
    "After completing your reasoning, choose only one of the following actions "
    "(do not perform both):\n"
)
NO_THINK = "Choose only one of the following actions (do not perform both):\n"
INSTRUCTION = (
    "Now it's your turn to respond for the current step.\n{think}"
    "(1) If you find you lack some knowledge, you can call a search engine to get more external "
    "information using format: <search> your query </search>.\n"
    "(2) If you have enough knowledge to answer the question confidently, provide your final "
    "answer within <answer> </answer> tags, without detailed illustrations. For example, "
    "<answer>Beijing</answer>."
)

SYSTEM = (
    "Answer the question of the user. Where you lack knowledge, call the tool search, for one "
    "thing at a time. When you know the answer, give it alone, without detailed illustrations. "
    "For example, Beijing."
)
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches a collection of documents.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to search for."}},
            "required": ["query"],
        },
    },
}

BLOCKS = [
    (verb, re.compile(rf"<{verb}>(.*?)</{verb}>", re.I | re.S)) for verb in ("search", "answer")
]
TAG = re.compile("<(search|answer)>", re.I)
LINE = re.compile(r"(search|answer) (\S[^\n]*)")
BARE = re.compile(r"(search|answer)\[(.*)\]", re.S)


class Action(NamedTuple):
    verb: str
    """ "search" or "answer"; "" if the response contains neither."""
    text: str

    def __str__(self) -> str:
        return f"{self.verb}[{self.text}]" if self.verb else ""

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse text written by `str`. Any other text is not an action, so its verb is ""."""
        match = BARE.fullmatch(text.strip())
        if match is None:
            return cls("", "")
        return cls(match[1], match[2].strip())


class PaperStyle:
    """Figure 9 of the paper.

    With `history` 0, later turns look like the first, as in the reference.
    """

    def __init__(self, *, history: int = 4, think: bool = True) -> None:
        self.history = history
        """Number of past turns that a prompt shows."""
        self.think = think

    def prompt(self, question: str, past: Sequence[tuple[Action, str]]) -> str:
        """Return the user message after `past`, the (action, observation) of earlier turns."""
        text = HEAD.format(question=question)
        if past and self.history:
            steps = []
            for i, (action, observation) in enumerate(past, start=1):
                steps.append(f"Step {i}:{_tagged(action)} {observation}\n")
            text += PAST.format(taken=len(past), history="\n".join(steps[-self.history :]))
        instruction = INSTRUCTION.format(think=THINK if self.think else NO_THINK)
        return f"{text}\n{instruction}\n"

    def parse_action(self, response: str) -> tuple[Action, bool]:
        """Return (the first <search> block, or else the first <answer> block; whether it is valid).

        The text is cut after the first </search>, or else after the first </answer>. The response
        is valid only if exactly one tag is opened in all of it. This is as in the reference's
        search_projection, which does not look for a thought either.
        """
        text = response
        for closing in ("</search>", "</answer>"):
            if closing in response:
                text = response.partition(closing)[0] + closing
                break
        valid = len(TAG.findall(response)) == 1
        for verb, block in BLOCKS:
            if match := block.search(text):
                return Action(verb, match[1].strip()), valid
        return Action("", ""), False

    def format_action(self, action: Action) -> str:
        thought = f"<think>I should {action.verb} {action.text}.</think>" if self.think else ""
        return f"{thought}{_tagged(action)}"

    def observation(self, documents: Sequence[str]) -> str:
        """Return the documents as verl-agent's search tool does: JSON in ASCII, with escapes."""
        lines = _numbered(documents)
        result = "".join(f"{line}\n" for line in lines)
        return f"<information>{json.dumps({'result': result})}</information>"


class ChatStyle(PaperStyle):
    """For conversations. All documents stay in the context unchanged."""

    def __init__(self) -> None:
        super().__init__(history=1_000_000, think=False)

    def observation(self, documents: Sequence[str]) -> str:
        return "\n".join(_numbered(documents))


class CompactStyle:
    r"""Shows the question, the actions so far, and the last search's documents without titles.

    >>> past = [(Action("search", "town 12"), "town 12 lies on river 13.")]
    >>> print(CompactStyle().prompt("Who?", past))
    task: Who?
    did:
    search town 12
    see:
    town 12 lies on river 13.
    """

    history = 1
    """Number of past observations that a prompt shows."""

    def prompt(self, question: str, past: Sequence[tuple[Action, str]]) -> str:
        lines = [f"task: {question}"]
        if past:
            actions = [f"{action.verb} {action.text}".strip() for action, _ in past]
            _, last_observation = past[-1]
            lines += ["did:", *actions, "see:", last_observation]
        return "\n".join(lines)

    def parse_action(self, response: str) -> tuple[Action, bool]:
        """Parse one line, "search NAME" or "answer NAME". Anything else is invalid."""
        match = LINE.fullmatch(response.strip())
        if match is None:
            return Action("", ""), False
        return Action(match[1], match[2]), True

    def format_action(self, action: Action) -> str:
        """Write `action` on its own line, with the characters (and so the token) of the prompt."""
        return f"\n{action.verb} {action.text}"

    def observation(self, documents: Sequence[str]) -> str:
        lines = []
        for document in documents:
            title, _, text = document.partition("\n")
            lines.append(" ".join((text or title).split()))
        return "\n".join(lines)


def title(contents: str) -> str:
    """Return the title of a document "\"Title\"\ntext"."""
    return contents.partition("\n")[0].strip('"')


def _numbered(documents: Sequence[str]) -> list[str]:
    return [f"Doc {i}: {contents.strip()}" for i, contents in enumerate(documents, start=1)]


def _tagged(action: Action) -> str:
    return f"<{action.verb}>{action.text}</{action.verb}>" if action.verb else ""


Style = PaperStyle | CompactStyle
