"""Questions whose answers can be checked: a set of one's own, or generated maths word problems, in one or more tries.

What is said to an answer, whether it is right, is the world model's target; a wrong one may be
followed by another try.
"""

import hashlib
import random
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial

from paw import plugins
from paw.envs import limited
from paw.envs.base import Endless, EnvFactory, Tasks
from paw.envs.question_sets import (
    ANSWER,
    AUTO,
    HELD_OUT,
    QuestionsConfig,
    QuestionSet,
    Row,
    answers,
    messages,
)
from paw.envs.search.reward import exact_match
from paw.errors import EnvironmentFailure, NoOracleError, UserError, shown
from paw.types import Outcome, Task

NUMBER = re.compile(r"(?:(?<![\d.])-)?(?:\d[\d,]*)?\.?\d+(?:/\d+)?")
BRACES = r"(?:[^{}]|{(?:[^{}]|{[^{}]*})*})*"
"""Text whose braces, at most two deep, are its own."""
FEW = 100
"""Answers, of which the quickstart's warm-up tries some at random."""
SPLITS = {"test": range(1), "warmup": range(1, 4), "train": range(4, 10)}
"""Last digit of the hash of a generated problem's text: so none is in two."""
STEPS = ("one", "two", "three", "four")
PEOPLE = [
    "Ada",
    "Ben",
    "Chen",
    "Dora",
    "Emil",
    "Fatima",
    "Goran",
    "Hana",
    "Ivan",
    "Jun",
    "Kofi",
    "Lena",
    "Mika",
]
THINGS = [
    "apples",
    "books",
    "coins",
    "eggs",
    "flowers",
    "keys",
    "lamps",
    "marbles",
    "nuts",
    "shells",
    "stamps",
]
STORIES = {
    "add": (
        "{who} finds {k} more.",
        "{who} buys {k} more {things}.",
        "{other} has {k} more {things} than {who}.",
    ),
    "subtract": (
        "{who} loses {k} of them.",
        "{who} sells {k} {things}.",
        "{other} has {k} fewer {things} than {who}.",
    ),
    "multiply": (
        "{other} has {k} times as many {things} as {who}.",
        "{who} then has {k} times as many {things}.",
    ),
    "divide": (
        "{who} shares them equally among {k} friends, one of them {other}.",
        "{who} keeps one in every {k}.",
    ),
}
"""Where {other} is in it, the story goes on with what {other} has."""


def exact(answer: str, right: str) -> bool:
    return exact_match(answer, [right])


def number(answer: str, right: str) -> bool:
    """Whether the last number of both is the same. ValueError where `right` has none.

    >>> number("that makes $1,234.50", "12 * 100 + 34.5 = 1234.5"), number("1/2", "0.5"), number("10-5", "5")
    (True, True, True)
    """
    if (wanted := _last_number(right)) is None:
        raise ValueError(f"the answer {shown(right)} has no number (env.score = 'number')")
    return _last_number(answer) == wanted


def regex(answer: str, right: str) -> bool:
    """Whether the regular expression `right` matches all of the answer.

    EnvironmentFailure if that takes too long: the answer is neither right nor wrong, so the episode
    is dropped.
    """
    try:
        return limited.fullmatch(right, answer)
    except limited.CannotApply as error:
        what = f"env.score = 'regex': the pattern {shown(right)} {error} on an answer of {len(answer)} characters"
        raise EnvironmentFailure(f"{what}; write it without repeats of repeats") from None


def check_pattern(right: str) -> None:
    """ValueError if `right` is no regular expression."""
    if problem := limited.pattern_problem(right):
        raise ValueError(f"the answer {shown(right)} is no regular expression: {problem}")


SCORES: dict[str, Callable[[str, str], bool]] = {"exact": exact, "number": number, "regex": regex}


class QuestionsFactory(EnvFactory):
    """The questions of env.data, or generated ones.

    UserError: they cannot be had, or one cannot be asked.
    """

    Config = QuestionsConfig
    name = "questions"

    def __init__(self, config: QuestionsConfig) -> None:
        self.config, self.reward_max, self.invalid_penalty = (
            config,
            config.reward,
            config.invalid_penalty,
        )
        self.may_block = self.runs_others_code = config.score not in SCORES
        try:
            self._own = plugins.load("scores", config.score) if self.may_block else None
        except UserError as error:
            raise UserError(f"env.score = {error}") from None
        if self._own is None and config.answer is None:
            raise UserError(f"env.score = '{config.score}' compares with env.answer, which is none")
        self._set = QuestionSet(config, self._check) if config.data else None
        if self._set is None:
            self.tasks(config.train_split, 0), self.tasks(config.eval_split, 0)

    def tasks(self, split: str, seed: int) -> Tasks:
        """UserError: there is no such split."""
        if self._set:
            if split == "warmup":
                raise UserError(
                    "model.path = 'quickstart' is warmed up on generated questions: leave env.data out"
                )
            return self._set.evaluation if split == self.config.eval_split else self._set.training
        split = "test" if split in (AUTO, HELD_OUT) else split
        if split not in SPLITS:
            raise UserError(f"generated problems have no split '{split}', only {', '.join(SPLITS)}")

        def made(i: int) -> Task:
            sizes = {"operations": self.config.operations, "largest": self.config.largest}
            row = problem(split, seed, i, **sizes)
            return Task(f"generated/{split}/{seed}/{i}", row["steps"], row)

        return Endless(made)

    def make(self) -> "QuestionsEnv":
        return QuestionsEnv(self.config, self._judge)

    def fingerprint(self) -> str:
        """Hash of all questions in use; of generated ones their sizes, and a hash of some."""
        if self._set:
            return self._set.fingerprint
        some = repr([self.tasks("test", 0)[i].payload for i in range(20)]).encode()
        sizes = f"{self.config.operations} steps to {self.config.largest}"
        return f"generated maths, {sizes} {hashlib.sha256(some).hexdigest()[:16]}"

    def _check(self, row: Row) -> None:
        messages(row, self.config)
        for right in answers(row, self.config):
            if self.config.score == "regex":
                check_pattern(right)
            elif self._own is None:
                SCORES[self.config.score]("", right)

    def _judge(self, answer: str, row: Row) -> tuple[float, str]:
        """(Score from 0 to 1, what is said to it or "")."""
        if self._own is None:
            return float(
                any(map(partial(SCORES[self.config.score], answer), answers(row, self.config)))
            ), ""
        returned = self._own(answer, row)
        score, said = (
            returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, "")
        )
        if not (isinstance(score, int | float) and 0 <= score <= 1 and isinstance(said, str)):
            wanted = "it must be a number from 0 to 1, or that and what is said to the answer"
            raise EnvironmentFailure(
                f"env.score = '{self.config.score}' returned {shown(returned)}; {wanted}"
            )
        return float(score), said


class QuestionsEnv:
    """One question at a time: a conversation, where there is more than one message."""

    task: str = ""

    def __init__(
        self, config: QuestionsConfig, judge: Callable[[str, Row], tuple[float, str]]
    ) -> None:
        self.config, self._judge = config, judge

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a row; the first observation is the question."""
        self._row: Row = task.payload
        self._messages, self._tries = messages(self._row, self.config), 0
        self.task = self._messages[-1]["content"]
        if self.config.instruction:
            asked = self.config.instruction.replace(
                "{format}", self.config.format.replace(ANSWER, "...")
            )
            self._messages[-1]["content"] += f"\n\n{asked}"
        return self.task

    def context(self) -> str | list[dict[str, str]]:
        return list(self._messages) if len(self._messages) > 1 else self._messages[0]["content"]

    def step(self, response: str) -> Outcome:
        """Answer; the episode ends when it is right, or after env.max_turns tries.

        The last answer's score counts.
        """
        answer, self._tries = find_answer(response, self.config.format), self._tries + 1
        score, said = (0.0, "") if answer is None else self._judge(answer, self._row)
        won = score >= 1
        done = won or self._tries >= self.config.max_turns
        if answer is None:
            said = f"There is no answer. Give it as {self.config.format.replace(ANSWER, '...')}."
        said = said or f"That is {'right' if won else 'wrong'}."
        again = said if done else f"{said} Try again."
        self._messages += [
            {"role": "assistant", "content": response},
            {"role": "user", "content": again},
        ]
        own = score if self.config.score not in SCORES else None
        reward = self.config.reward * score if done else 0.0
        return Outcome(
            again, reward, done, won, action=answer or "", valid=answer is not None, score=own
        )

    def oracle(self) -> str:
        if self.config.score not in ("exact", "number"):
            raise NoOracleError(f"env.score = '{self.config.score}' does not tell what is right")
        return self.format_action(answers(self._row, self.config)[0])

    def admissible_actions(self) -> list[str]:
        """The answers of generated problems, where they are few. Else []."""
        few = self.config.data is None and self.config.largest <= FEW
        return [str(n) for n in range(1, self.config.largest + 1)] if few else []

    def format_action(self, action: str) -> str:
        return self.config.format.replace(ANSWER, action)


def find_answer(response: str, form: str) -> str | None:
    r"""The last answer that a response gives in the form `form`; None where there is none.

    >>> find_answer("so \\boxed{1}, no: \\boxed{\\frac{1}{2}}.", "\\boxed{{answer}}")
    '\\frac{1}{2}'
    """
    head, tail = map(re.escape, form.split(ANSWER))
    if not head + tail:
        return response.strip() or None
    inner = (
        BRACES if tail.startswith("\\}") else f"(?:(?!{head or '(?!)'}).)*?" if tail else "[^\n]+"
    )
    found = re.findall(f"{head}({inner}){tail}", response, re.DOTALL)
    return (found[-1].strip() or None) if found else None


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").partition("/")
    try:
        return Decimal(above) / Decimal(below or "1")
    except ArithmeticError:
        return None


# ---- generated maths word problems: a story of one to four operations on a number of things, whose
# end is asked for


def problem(split: str, seed: int, i: int, *, operations: int, largest: int) -> dict[str, str]:
    """Number `i` of a split: "question", "answer" (a whole number from 1 to `largest`, as all on
    the way there) and "steps", the number of operations, at most `operations`, in words. All
    follows from (split, seed, i)."""
    rng = random.Random(f"maths/{split}/{seed}/{i}")
    while True:
        made = _story(rng, rng.randint(1, operations), largest)
        if int(hashlib.sha256(made["question"].encode()).hexdigest(), 16) % 10 in SPLITS[split]:
            return made


def _story(rng: random.Random, count: int, largest: int) -> dict[str, str]:
    who, *others = rng.sample(PEOPLE, count + 1)
    things, number = rng.choice(THINGS), rng.randint(2, largest)
    text = [f"{who} has {number} {things}."]
    for other in others:
        last = number
        by = {
            "add": range(1, largest - last + 1),
            "subtract": range(1, last),
            "multiply": range(2, largest // last + 1),
            "divide": [k for k in range(2, min(last, 99) + 1) if last % k == 0],
        }
        verb = rng.choice([verb for verb, numbers in by.items() if numbers])
        k, story = rng.choice(by[verb]), rng.choice(STORIES[verb])
        number = {"add": last + k, "subtract": last - k, "multiply": last * k, "divide": last // k}[
            verb
        ]
        text.append(story.format(who=who, other=other, things=things, k=k))
        who = other if "{other}" in story else who
    question = f"{' '.join(text)} How many {things} does {who} have now?"
    return {"question": question, "answer": str(number), "steps": STEPS[count - 1]}
