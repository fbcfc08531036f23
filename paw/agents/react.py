"""ReAct (arXiv 2210.03629): the model writes a transcript, thoughts and actions in turn, and reads what comes of them;
and Reflexion, which is that with several trials.

As in the authors' code for ALFWorld, all of it is one growing text: examples, the task, then lines "> think: ..." and
"> ACTION" with the answers. Of an answer the first line that is not empty counts, without a <think> block before it.
A thought costs no turn, but n turns end after 2 n calls.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from paw.agents.examples import OK, alfworld_examples, expert_example, file_examples, move_for_put, opening
from paw.errors import UserError
from paw.rollouts.episode import EnvHandle, Model
from paw.values import Count, Section

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
EXAMPLES = [[], ["Here is an example."], ["Here are two examples."], ["Here are some examples."]]
NO_ACTION = "That is neither a thought nor an action."
STOP = ("\n>",)

REFLECT = """Below is the transcript of an attempt at a task, which failed. Do not retell it: think about the strategy \
behind it and about where it went wrong. Then make a concise new plan that avoids the mistake, naming the actions that \
should be taken instead. It is for the next attempt at the same task.

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
    """Plays by a transcript. UserError for a file of examples that is damaged, or holds another environment's."""

    class Config(Section):
        examples: Path | None = None
        """A file of the ReAct authors, as their repository has it, in place of episodes of our own expert:
        alfworld_3prompts.json, prompts_naive.json (search) or WebShop.ipynb."""

    def __init__(self, settings: "React.Config") -> None:
        self.path = settings.examples
        self._given = file_examples(self.path) if self.path else None
        self._of_kind, self._of_env = functools.cache(alfworld_examples), functools.cache(expert_example)

    async def __call__(self, env: EnvHandle, model: Model) -> None:
        await self.trial(env, model)

    async def trial(self, env: EnvHandle, model: Model, memory: str = "") -> str:
        """Play one trial, with `memory` before the task; returns its transcript, from the task on."""
        name, examples = env.config.name, self._examples(env)
        head = [HEAD.get(name, OTHER), FORMAT, *EXAMPLES[min(len(examples), 3)]]
        before = "\n".join([" ".join(head), *examples, *([memory] if memory else []), "Here is the task.\n"])
        observation = await env.reset()
        text = opening(name, env.instruction, observation)
        for _ in range(2 * env.config.max_turns):
            if name not in HEAD and (actions := await env.admissible_actions()):
                text += f"\n(possible: {', '.join(actions)})"
            response = await model.generate(f"{before}{text}\n>", stop=STOP)
            line = written_line(response)
            if THOUGHT.match(line):
                text += f"\n> {line}\n{OK}"
                continue
            action = bare_action(line, name)
            outcome = await env.step(await env.format_action(action) if action else response)
            text += f"\n> {line}\n{outcome.observation if action else outcome.observation or NO_ACTION}".rstrip("\n")
            if outcome.done:
                break
        return text

    def _examples(self, env: EnvHandle) -> Sequence[str]:
        name, kind = env.config.name, env.task.kind
        if self._given:
            of, episodes = self._given
            if name != of:
                raise UserError(f"agent.examples = '{self.path}' holds episodes of {of}, but env.name = '{name}'")
            return episodes[kind if kind in episodes else ""]
        if name == "alfworld":
            return self._of_kind(kind)
        return [self._of_env(name)] if name in BRACKETS else []


class Reflexion(React):
    """ReAct again after a failed trial, with the last plans that the model made from its failures (arXiv 2303.11366).

    The result is that of the last trial, so an episode is won if any of agent.trials was: more chances than other
    agents get. Whether a trial succeeded is known from the environment, as in the paper.
    """

    class Config(React.Config):
        trials: Count = 3
        """Episodes of a game at most, each but the first with plans made after the failures before."""
        memory: Count = 3
        """Plans kept."""

    def __init__(self, settings: "Reflexion.Config") -> None:
        super().__init__(settings)
        self.trials, self.memory = settings.trials, settings.memory

    async def __call__(self, env: EnvHandle, model: Model) -> None:
        made = env.episode.notes
        for trial in range(self.trials):
            plans = "\n".join(f"Trial {i}: {plan}" for i, plan in enumerate(made[-self.memory :], start=1))
            transcript = await self.trial(env, model, MEMORY.format(plans=plans) if plans else "")
            if env.won or trial + 1 == self.trials:
                return
            past = f"\nPlans from past attempts:\n{plans}\n" if plans else ""
            response = await model.generate(REFLECT.format(transcript=transcript, past=past))
            made.append(REASONING.sub("", response).rpartition("New plan:")[2].strip())
