"""Questions whose answers can be checked: your own set, or generated maths word problems.

The feedback to an answer says whether it is right. It is the world model's target. After a wrong
answer there may be further tries.
"""

import hashlib
import random
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cached_property
from typing import Any

from paw.config import plugins
from paw.envs import limited
from paw.envs.base import Endless, EnvFactory, Tasks
from paw.envs.bridges.question_sets import (
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
from paw.errors import EnvironmentFailure, NoOracleError, UserError, short_repr
from paw.types import Outcome, Task

NUMBER = re.compile(r"(?:(?<![\d.])-)?(?:\d[\d,]*)?\.?\d+(?:/\d+)?")
BRACES = r"(?:[^{}]|{(?:[^{}]|{[^{}]*})*})*"
"""Text with balanced braces, nested at most two levels deep."""
FEW = 100
"""Maximum number of possible answers to list. The quickstart's warm-up tries some at random."""
KNOWN = ("exact", "number")
"""Values of env.score for which the questions' own answers are the right ones."""
SPLITS = {"test": range(1), "warmup": range(1, 4), "train": range(4, 10)}
"""Last digits of the hashes of each split's problems. So no problem is in two splits."""
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
"""Sentences by operation. After one with {other}, the story continues with what {other} has."""


def exact(answer: str, right: str) -> bool:
    """Whether the two texts are equal, as SQuAD compares."""
    return exact_match(answer, [right])


def number(answer: str, right: str) -> bool:
    """Whether the last numbers of both are equal. Raises ValueError if `right` has no number.

    >>> number("that makes $1,234.50", "12 * 100 + 34.5 = 1234.5")
    True
    >>> number("1/2", "0.5"), number("10-5", "5")
    (True, True)
    """
    right_number = _last_number(right)
    if right_number is None:
        raise ValueError(f"the answer {short_repr(right)} has no number (env.score = 'number')")
    return _last_number(answer) == right_number


def regex(answer: str, right: str) -> bool:
    """Whether the regular expression `right` matches the whole answer.

    Raises EnvironmentFailure if that takes too long. The answer is then neither right nor wrong, so
    the episode is dropped.
    """
    try:
        return limited.fullmatch(right, answer)
    except limited.CannotApply as error:
        raise EnvironmentFailure(
            f"env.score = 'regex': the pattern {short_repr(right)} {error} on an answer of "
            f"{len(answer)} characters; write it without repeats of repeats"
        ) from None


def check_pattern(right: str) -> None:
    """Raise ValueError if `right` is not a regular expression."""
    pattern_problem = limited.pattern_problem(right)
    if pattern_problem:
        raise ValueError(
            f"the answer {short_repr(right)} is not a regular expression: {pattern_problem}"
        )


SCORES: dict[str, Callable[[str, str], bool]] = {"exact": exact, "number": number, "regex": regex}


class QuestionsFactory(EnvFactory):
    """The questions of env.data, or generated questions.

    Raises UserError if the questions cannot be read, or if one of them cannot be asked.
    """

    Config = QuestionsConfig
    name = "questions"

    def __init__(self, config: QuestionsConfig) -> None:
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        is_users_score = config.score not in SCORES
        self.may_block = is_users_score
        self.runs_others_code = is_users_score
        self._users_score: Callable[[str, Row], Any] | None = None
        if is_users_score:
            try:
                self._users_score = plugins.load("scores", config.score)
            except UserError as error:
                raise UserError(f"env.score = {error}") from None
        elif config.answer is None:
            raise UserError(f"env.score = '{config.score}' needs env.answer, which is not set")

        self._set: QuestionSet | None = None
        if config.data:
            self._set = QuestionSet(config, self._check)
        else:
            _check_generated_split(config.train_split)
            _check_generated_split(config.eval_split)

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the questions of a split. Raises UserError if there is no such split."""
        if self._set:
            if split == "warmup":
                if not self._choices:
                    raise UserError(
                        "model.path = 'quickstart' learns to choose among right answers of "
                        f"env.data: there are more than {FEW}, or env.score is not exact or "
                        "number; use a pretrained model"
                    )
                return self._set.training
            return self._set.evaluation if split == self.config.eval_split else self._set.training

        _check_generated_split(split)
        if split in (AUTO, HELD_OUT):
            split = "test"

        def task(i: int) -> Task:
            row = problem(
                split, seed, i, operations=self.config.operations, largest=self.config.largest
            )
            return Task(f"generated/{split}/{seed}/{i}", row["steps"], row)

        return Endless(task)

    def make(self) -> "QuestionsEnv":
        return QuestionsEnv(self.config, self._judge, self._choices)

    @cached_property
    def _choices(self) -> list[str]:
        """The right answers of all training questions, if they are known and few, else []."""
        if not self._set:
            largest = self.config.largest
            return [str(n) for n in range(1, largest + 1)] if largest <= FEW else []
        if self.config.score not in KNOWN:
            return []

        choices: set[str] = set()
        for index in range(len(self._set.training)):
            choices.update(answers(self._set.training[index].payload, self.config))
            if len(choices) > FEW:
                return []
        return sorted(choices)

    def fingerprint(self) -> str:
        """Hash all questions in use. For generated ones, give their sizes and a hash of a few."""
        if self._set:
            return self._set.fingerprint
        tasks = self.tasks("test", 0)
        samples = repr([tasks[i].payload for i in range(20)])
        digest = hashlib.sha256(samples.encode()).hexdigest()[:16]
        sizes = f"{self.config.operations} steps to {self.config.largest}"
        return f"generated maths, {sizes} {digest}"

    def _check(self, row: Row) -> None:
        """Raise ValueError if a row cannot be asked, or its right answers cannot be compared."""
        messages(row, self.config)
        for right_answer in answers(row, self.config):
            if self.config.score == "regex":
                check_pattern(right_answer)
            elif self._users_score is None:
                SCORES[self.config.score]("", right_answer)

    def _judge(self, answer: str, row: Row) -> tuple[float, str]:
        """Return (score from 0 to 1, feedback or "")."""
        if self._users_score is None:
            compare = SCORES[self.config.score]
            is_right = any(
                compare(answer, right_answer) for right_answer in answers(row, self.config)
            )
            return float(is_right), ""

        returned = self._users_score(answer, row)
        score: Any = returned
        feedback: Any = ""
        if isinstance(returned, tuple) and len(returned) == 2:
            score, feedback = returned
        is_share = isinstance(score, int | float) and 0 <= score <= 1
        if not is_share or not isinstance(feedback, str):
            raise EnvironmentFailure(
                f"env.score = '{self.config.score}' returned {short_repr(returned)}; it must be a "
                "number from 0 to 1, or a pair of that and feedback, a string"
            )
        return float(score), feedback


class QuestionsEnv:
    """One question at a time. The context is a conversation if there is more than one message."""

    task: str = ""

    def __init__(
        self,
        config: QuestionsConfig,
        judge: Callable[[str, Row], tuple[float, str]],
        choices: list[str],
    ) -> None:
        self.config = config
        self._judge = judge
        self._choices = choices
        # Set by `reset`.
        self._row: Row = {}
        self._messages: list[dict[str, str]] = []
        self._tries = 0

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a row. The first observation is the question."""
        self._row = task.payload
        self._messages = messages(self._row, self.config)
        self._tries = 0
        self.task = self._messages[-1]["content"]
        if self.config.instruction:
            instruction = self.config.instruction.replace("{format}", self._answer_format())
            self._messages[-1]["content"] += f"\n\n{instruction}"
        return self.task

    def context(self) -> str | list[dict[str, str]]:
        if len(self._messages) == 1:
            return self._messages[0]["content"]
        return list(self._messages)

    def step(self, response: str) -> Outcome:
        """Answer the question.

        The episode ends when an answer is right, or after env.max_turns tries. The last answer's
        score counts.
        """
        self._tries += 1
        answer = find_answer(response, self.config.format)
        if answer is None:
            score = 0.0
            feedback = f"There is no answer. Give it as {self._answer_format()}."
        else:
            score, feedback = self._judge(answer, self._row)
        won = score >= 1
        has_ended = won or self._tries >= self.config.max_turns
        if not feedback:
            feedback = "That is right." if won else "That is wrong."
        if not has_ended:
            feedback = f"{feedback} Try again."

        self._messages.append({"role": "assistant", "content": response})
        self._messages.append({"role": "user", "content": feedback})
        return Outcome(
            feedback,
            reward=self.config.reward * score if has_ended else 0.0,
            done=has_ended,
            won=won,
            action=answer or "",
            valid=answer is not None,
            score=None if self.config.score in SCORES else score,
        )

    def oracle(self) -> str:
        if self.config.score not in KNOWN:
            raise NoOracleError(f"env.score = '{self.config.score}' does not say what is right")
        return self.format_action(answers(self._row, self.config)[0])

    def admissible_actions(self) -> list[str]:
        """Return the right answers of all training questions if they are few, else []."""
        return self._choices

    def format_action(self, action: str) -> str:
        return self.config.format.replace(ANSWER, action)

    def _answer_format(self) -> str:
        """Return env.format with dots instead of the answer."""
        return self.config.format.replace(ANSWER, "...")


def find_answer(response: str, form: str) -> str | None:
    r"""Return the last answer in a response in the format `form`; None if there is none.

    >>> find_answer("so \\boxed{1}, no: \\boxed{\\frac{1}{2}}.", "\\boxed{{answer}}")
    '\\frac{1}{2}'
    """
    head, tail = map(re.escape, form.split(ANSWER))
    if not head and not tail:
        return response.strip() or None

    if tail.startswith("\\}"):
        inner_pattern = BRACES
    elif tail:
        inner_pattern = f"(?:(?!{head or '(?!)'}).)*?"  # does not begin another answer
    else:
        inner_pattern = "[^\n]+"  # to the end of the line
    matches = re.findall(f"{head}({inner_pattern}){tail}", response, re.DOTALL)
    if not matches:
        return None
    return matches[-1].strip() or None


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    numerator, _, denominator = numbers[-1].replace(",", "").partition("/")
    try:
        return Decimal(numerator) / Decimal(denominator or "1")
    except ArithmeticError:
        return None


# ---- generated maths word problems: a story of one to four operations on a number of things, and
# a question about its end


def _check_generated_split(split: str) -> None:
    """Raise UserError if generated problems have no such split."""
    if split not in (AUTO, HELD_OUT, *SPLITS):
        raise UserError(f"generated problems have no split '{split}', only {', '.join(SPLITS)}")


def problem(split: str, seed: int, i: int, *, operations: int, largest: int) -> dict[str, str]:
    """Make problem number `i` of a split. It depends only on the arguments. Its keys are:

    - "question";
    - "answer", a whole number from 1 to `largest`, like all intermediate results;
    - "steps", the number of operations in words, at most `operations`.
    """
    rng = random.Random(f"maths/{split}/{seed}/{i}")
    while True:
        story = _story(rng, rng.randint(1, operations), largest)
        digest = int(hashlib.sha256(story["question"].encode()).hexdigest(), 16)
        if digest % 10 in SPLITS[split]:
            return story


def _story(rng: random.Random, operations: int, largest: int) -> dict[str, str]:
    who, *others = rng.sample(PEOPLE, operations + 1)
    things = rng.choice(THINGS)
    number = rng.randint(2, largest)
    sentences = [f"{who} has {number} {things}."]
    for other in others:
        operands = {
            "add": range(1, largest - number + 1),
            "subtract": range(1, number),
            "multiply": range(2, largest // number + 1),
            "divide": [k for k in range(2, min(number, 99) + 1) if number % k == 0],
        }
        operation = rng.choice([name for name, values in operands.items() if values])
        k = rng.choice(operands[operation])
        sentence = rng.choice(STORIES[operation])
        number = _apply(operation, number, k)
        sentences.append(sentence.format(who=who, other=other, things=things, k=k))
        if "{other}" in sentence:
            who = other

    question = f"{' '.join(sentences)} How many {things} does {who} have now?"
    return {"question": question, "answer": str(number), "steps": STEPS[operations - 1]}


def _apply(operation: str, number: int, k: int) -> int:
    if operation == "add":
        return number + k
    if operation == "subtract":
        return number - k
    if operation == "multiply":
        return number * k
    return number // k
