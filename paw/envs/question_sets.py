"""Question sets through the library `datasets`: from the Hugging Face hub, or files; every row is
read once, at the start, so that one that cannot be asked is found then."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from paw.config import EnvConfig
from paw.envs.base import Made, every_tenth, means_all_kinds
from paw.errors import UserError, describe, needed, shown
from paw.hub import unreachable
from paw.types import Task
from paw.values import Count, Only, Positive

if TYPE_CHECKING:
    from datasets import Dataset

Row = Mapping[str, Any]
ANSWER = "{answer}"
AUTO, HELD_OUT = "auto", "held_out"
EVALUATED = ("test", "validation", "valid", "dev")
"""Splits that env.eval_split = "auto" looks for, in this order."""
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


DATA, GENERATED = Only("env.data"), Only("env.data", (None,))


class QuestionsConfig(EnvConfig):
    """Questions whose answers can be checked: a set of your own, or generated maths word problems."""

    name: str = "questions"
    """Which environment."""
    data: Path | None = None
    """Name at the Hugging Face hub, a file (parquet, JSON lines, CSV) or a folder; unset, problems are generated."""
    subset: Annotated[str | None, DATA] = None
    """Configuration of the data set, where it has several: "main" of openai/gsm8k."""
    eval_split: str = "auto"
    """Split to evaluate on; auto takes test or validation, else every tenth row of env.train_split,
    which are held out then."""
    question: Annotated[str, DATA] = "question"
    """Column of questions: text, or messages {"role", "content"}. "a.b" is b within column a, here and below."""
    answer: Annotated[str | None, DATA] = "answer"
    """Column of right answers: text, a number, or a list of which each is right."""
    system: Annotated[str | None, DATA] = None
    """Column of system messages."""
    kind: Annotated[str | None, DATA] = None
    """Column by whose values success is reported."""
    instruction: str = "Reason step by step, then give the final answer as {format}."
    """Said after each question; {format} is env.format, dots in place of the answer."""
    format: str = "<answer>{answer}</answer>"
    """How a response gives its answer. The last one counts."""
    score: str = "exact"
    """exact: equal to a right answer, as SQuAD compares. number: the last number of both is equal.
    regex: the right answer is a regular expression; one that takes more than a second of CPU time
    costs its episode. Or your own, "FILE.py:name": (answer, row) -> 0 to 1, or (that, feedback)."""
    max_turns: Count = 1
    """Tries. A wrong answer is said to be wrong, or what your own score says to it."""
    reward: Positive = 1.0
    """Of a right answer, R_max."""
    operations: Annotated[int, Field(ge=1, le=4), GENERATED] = 4
    """Operations of a generated problem at most."""
    largest: Annotated[int, Field(ge=5, le=1_000_000), GENERATED] = 1000
    """Largest number of a generated problem."""

    @field_validator("format")
    @classmethod
    def _holds_the_answer(cls, form: str) -> str:
        if form.count(ANSWER) != 1:
            raise ValueError(f"it must hold {ANSWER} once, where the answer stands")
        return form


class QuestionSet:
    """The splits that a configuration names; `check` gets each row.

    UserError for whatever cannot be had.
    """

    def __init__(self, config: QuestionsConfig, check: Callable[[Row], object]) -> None:
        self._config, self._check, self._where = config, check, f"env.data = '{config.data}'"
        self._found = self._open()
        self._digests: dict[str, str] = {}
        train, held_out = config.train_split, config.eval_split
        if held_out == AUTO:
            held_out = next(
                (name for name in EVALUATED if name in self._found and name != train), HELD_OUT
            )
        rows = self._rows(train, "train_split")
        if held_out == HELD_OUT and HELD_OUT not in self._found:
            tenth, kept = (every_tenth(range(len(rows)), held) for held in (True, False))
            self.evaluation = self._tasks(train, rows, tenth)
        else:
            asked = self._rows(held_out, "eval_split")
            self.evaluation, kept = (
                self._tasks(held_out, asked, range(len(asked))),
                range(len(rows)),
            )
        self.training = self._tasks(train, rows, kept)
        parts = [f"{name} {digest}" for name, digest in self._digests.items()]
        self.fingerprint = f"{config.data} {', '.join(parts)}, asked in {held_out}"

    def _open(self) -> Mapping[str, "Dataset"]:
        given = str(self._config.data)
        for name, quiet in {
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        }.items():
            os.environ.setdefault(name, quiet)
        datasets = needed("datasets", f"{self._where}: a question set", "data")
        path, why = Path(given).expanduser(), ""
        try:
            if path.is_file():
                if path.suffix not in READERS:
                    raise UserError(f"{self._where}: the file is none of {', '.join(READERS)}")
                found = datasets.load_dataset(READERS[path.suffix], data_files=str(path))
            elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                found = datasets.load_from_disk(path)
            elif path.is_dir():
                found = datasets.load_dataset(str(path))
            elif path.suffix in READERS or given.startswith(("/", ".", "~")):
                raise UserError(f"{self._where}: there is no such file or folder")
            else:
                if why := unreachable():
                    datasets.config.HF_HUB_OFFLINE = True  # what is in the cache is had at once
                found = datasets.load_dataset(given, self._config.subset)
        except UserError:
            raise
        except ConnectionError:
            lacks = "there is no such file or folder, it is not in the cache of datasets"
            raise UserError(
                f"{self._where}: {lacks}, and {why or 'the hub does not answer'}"
            ) from None
        except Exception as error:  # each reader has its own
            raise UserError(f"{self._where}: {describe(error.__cause__ or error)}") from None
        return found if isinstance(found, dict) else {"train": found}  # pyright: ignore[reportReturnType]

    def _tasks(self, split: str, rows: "Dataset", indices: Sequence[int]) -> Made:
        """Those rows, read when they are asked for."""
        kind = self._config.kind
        of_split = Task.kind if means_all_kinds(split) else split

        def task(i: int) -> Task:
            row: Row = rows[indices[i]]
            return Task(f"{split}/{indices[i]}", str(value(row, kind)) if kind else of_split, row)

        return Made(task, len(indices))

    def _rows(self, split: str, key: str) -> "Dataset":
        """A split, its columns and rows checked."""
        if split not in self._found:
            raise UserError(
                f"env.{key} = '{split}': {self._where} has no such split, only {', '.join(self._found)}"
            )
        rows, config = self._found[split], self._config
        for key in ("question", "answer", "system", "kind"):
            name = getattr(config, key)
            if name and not {name, name.partition(".")[0]} & set(rows.column_names):
                columns = ", ".join(rows.column_names)
                raise UserError(
                    f"env.{key} = '{name}': {self._where} has no such column; it has {columns}"
                )
        if not len(rows):
            raise UserError(f"{self._where}: the split '{split}' holds no question")
        if split not in self._digests:
            hashed, number = hashlib.sha256(), 0
            batches: Any = rows.with_format("arrow").iter(1000)
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    try:
                        self._check(row)
                        self._check_kind(row)
                    except ValueError as error:
                        raise UserError(f"{self._where}: {split}, row {number}: {error}") from None
                    hashed.update(repr(row).encode("utf-8", "replace"))
            self._digests[split] = hashed.hexdigest()[:16]
        return rows

    def _check_kind(self, row: Row) -> None:
        """ValueError for a row whose kind has the name of all kinds together."""
        column = self._config.kind
        if column and means_all_kinds(kind := str(value(row, column))):
            fix = "rename it there, or name another column with env.kind"
            raise ValueError(
                f"'{column}' is {shown(kind)}, which reports call all kinds together; {fix}"
            )


def value(row: Row, key: str) -> Any:
    """What a row holds in a column, or, "a.b", within it. ValueError where there is nothing."""
    found: Any = row
    for part in [key] if key in row else key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if found is None or found != found or (isinstance(found, str | list) and not found):
        raise ValueError(f"'{key}' is empty")
    return found


def messages(row: Row, config: QuestionsConfig) -> list[dict[str, str]]:
    """The conversation that a row begins; its last message, the user's, is the question.

    ValueError if it is none.
    """
    given, system = (
        value(row, config.question),
        value(row, config.system) if config.system else None,
    )
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    listed = isinstance(given, list) and all(isinstance(message, Mapping) for message in given)
    texts = [(m.get("role"), m.get("content")) for m in given] if listed else []
    if not texts or not all(
        isinstance(part, str) and part.strip() for pair in texts for part in pair
    ):
        raise ValueError(
            f"'{config.question}' is {shown(given)}; it must be text, or messages of role and content"
        )
    if texts[-1][0] != "user":
        raise ValueError(
            f"the last message of '{config.question}' is of '{texts[-1][0]}'; the question is the user's"
        )
    if system is not None:
        texts = [("system", str(system)), *(pair for pair in texts if pair[0] != "system")]
    return [{"role": str(role), "content": str(content)} for role, content in texts]


def answers(row: Row, config: QuestionsConfig) -> list[str]:
    """The right answers of a row. ValueError where it has none."""
    if config.answer is None:
        return []
    given = value(row, config.answer)
    texts = [_text(one) for one in (given if isinstance(given, list) else [given])]
    if not all(text.strip() for text in texts):
        raise ValueError(f"'{config.answer}' is {shown(given)}, which is no answer")
    return texts


def _text(given: Any) -> str:
    if not isinstance(given, str | int | float):
        return ""
    return str(int(given)) if isinstance(given, float) and given.is_integer() else str(given)
