"""ReAct (arXiv 2210.03629) and Reflexion. In ReAct, the model writes a transcript of thoughts and
actions and reads the results of its actions. Reflexion is ReAct with several trials.

As in the authors' code for ALFWorld, the prompt is one growing text: examples, the task, then lines
"> think: ..." and "> ACTION", each followed by the answer to it. Only the first non-empty line
after a response's <think> block counts. A thought costs no turn, but an episode with a limit of n
turns ends after 2 n calls.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from paw.agents.examples import (
    OK,
    alfworld_examples,
    expert_example,
    file_examples,
    move_for_put,
    opening,
)
from paw.config.values import Count, Section
from paw.errors import UserError
from paw.rollouts.episode import EnvHandle, Model

HEAD = {
    "alfworld": "Interact with a household to solve a task.",
    "webshop": "Buy in a web shop what the instruction asks for. Actions are search[words], where "
    "there is a search, and click[text] with a text of the page, such as click[buy now].",
    "search": "Answer a question with the help of a search engine. Actions are Search[query], and "
    "Finish[answer] with nothing but the answer.",
}
OTHER = "Solve a task step by step."
FORMAT = (
    "After each '>' stands a thought, 'think: ...', or an action."
    " Write what comes after the last '>', in one line."
)
EXAMPLES = [[], ["Here is an example."], ["Here are two examples."], ["Here are some examples."]]
"""The sentence before no example, one, two and more."""
NO_ACTION = "That is neither a thought nor an action."
STOP = ("\n>",)

REFLECT = """Below is the transcript of an attempt at a task, which failed. Do not retell it: \
think about the strategy behind it and about where it went wrong. Then make a concise new plan \
that avoids the mistake, naming the actions that should be taken instead. It is for the next \
attempt at the same task.

{transcript}
STATUS: FAIL
{past}
New plan:"""
MEMORY = "Plans that you made after failed attempts at the task below:\n{plans}"

REASONING = re.compile(r"<think>.*?(</think>|\Z)", re.S)
LABEL = re.compile(r"^[\s>`*]*(?:act(?:ion)?\s*\d*\s*:)?[\s`*]*", re.I)
THOUGHT = re.compile(r"^(?:think|thought)\s*\d*\s*[:\[]", re.I)
BRACKETS = {
    "webshop": re.compile(r"(search|click)\[(.*)\]", re.I),
    "search": re.compile(r"(search|finish|answer)\[(.*)\]", re.I),
}
"""Environments whose actions have the form verb[text].

In other environments, each line that is not a thought is an action.
"""


def written_line(text: str) -> str:
    """Return the line a response adds to the transcript: its first non-empty line, no markup.

    >>> written_line("<think>Hm.</think>\\n\\n> Action: **go to desk 1**\\nOn the desk 1, you see")
    'go to desk 1'
    """
    for raw_line in REASONING.sub("", text).splitlines():
        line = LABEL.sub("", raw_line).strip().rstrip("`*")
        if line:
            return line
    return ""


def bare_action(line: str, environment: str) -> str:
    """Return a line's action, without the environment's response format; "" without an action."""
    if environment == "alfworld":
        return move_for_put(line)
    if environment not in BRACKETS:
        return line
    match = BRACKETS[environment].search(line)
    if match is None:
        return ""
    verb = match[1].lower().replace("finish", "answer")
    return f"{verb}[{match[2].strip()}]"


class React:
    """Plays with the transcript as the prompt.

    Raises UserError if the file of examples is damaged, or belongs to another environment.
    """

    class Config(Section):
        examples: Path | None = None
        """A file from the ReAct authors' repository, instead of episodes of PaW's own expert:
        alfworld_3prompts.json, prompts_naive.json (search) or WebShop.ipynb."""

    def __init__(self, settings: "React.Config") -> None:
        self.path = settings.examples
        self._file_examples = file_examples(self.path) if self.path else None
        self._alfworld_examples = functools.cache(alfworld_examples)
        self._expert_example = functools.cache(expert_example)

    async def __call__(self, env: EnvHandle, model: Model) -> None:
        await self.trial(env, model)

    async def trial(self, env: EnvHandle, model: Model, memory: str = "") -> str:
        """Play a trial with `memory` before the task. Returns its transcript, from the task on."""
        name = env.config.name
        head = _head(name, self._examples(env), memory)
        observation = await env.reset()
        text = opening(name, env.instruction, observation)
        for _ in range(2 * env.config.max_turns):
            if name not in HEAD:
                actions = await env.admissible_actions()
                if actions:
                    text += f"\n(possible: {', '.join(actions)})"
            response = await model.generate(f"{head}{text}\n>", stop=STOP)
            line = written_line(response)
            if THOUGHT.match(line):
                text += f"\n> {line}\n{OK}"
                continue

            action = bare_action(line, name)
            if action:
                outcome = await env.step(await env.format_action(action))
                answer = outcome.observation
            else:
                outcome = await env.step(response)
                answer = outcome.observation or NO_ACTION
            text += f"\n> {line}\n{answer}".rstrip("\n")
            if outcome.done:
                break
        return text

    def _examples(self, env: EnvHandle) -> Sequence[str]:
        """Return the example episodes for the environment and, if these differ, the task type."""
        name = env.config.name
        kind = env.task.kind
        if self._file_examples:
            file_env, episodes = self._file_examples
            if name != file_env:
                raise UserError(
                    f"agent.examples = '{self.path}' holds episodes of {file_env}, "
                    f"but env.name = '{name}'"
                )
            return episodes[kind if kind in episodes else ""]
        if name == "alfworld":
            return self._alfworld_examples(kind)
        return [self._expert_example(name)] if name in BRACKETS else []


def _head(name: str, examples: Sequence[str], memory: str) -> str:
    """Return the prompt before the task: what to do, the line format, the examples, the memory."""
    sentences = [HEAD.get(name, OTHER), FORMAT, *EXAMPLES[min(len(examples), 3)]]
    paragraphs = [" ".join(sentences), *examples]
    if memory:
        paragraphs.append(memory)
    paragraphs.append("Here is the task.\n")
    return "\n".join(paragraphs)


class Reflexion(React):
    """ReAct again after a failed trial, with plans that the model made from its failures (arXiv
    2303.11366).

    The result is that of the last trial, so an episode is won if any of its agent.trials trials was
    won. Other agents have only one. The environment says whether a trial succeeded, as in the
    paper.
    """

    class Config(React.Config):
        trials: Count = 3
        """Maximum number of episodes per game. All but the first have plans made from failures."""
        memory: Count = 3
        """Number of plans shown to the next trial."""

    def __init__(self, settings: "Reflexion.Config") -> None:
        super().__init__(settings)
        self.trials = settings.trials
        self.memory = settings.memory

    async def __call__(self, env: EnvHandle, model: Model) -> None:
        all_plans = env.episode.notes
        for trial in range(self.trials):
            recent = all_plans[-self.memory :]
            plans = "\n".join(f"Trial {i}: {plan}" for i, plan in enumerate(recent, start=1))
            memory = MEMORY.format(plans=plans) if plans else ""
            transcript = await self.trial(env, model, memory)
            if env.won or trial + 1 == self.trials:
                return

            past = f"\nPlans from past attempts:\n{plans}\n" if plans else ""
            response = await model.generate(REFLECT.format(transcript=transcript, past=past))
            new_plan = REASONING.sub("", response).rpartition("New plan:")[2].strip()
            all_plans.append(new_plan)
