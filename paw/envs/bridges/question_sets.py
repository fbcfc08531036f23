"""Loads question sets from the Hugging Face hub or from files, with the library `datasets`.

Every row is read once at the start, when any row that cannot be asked is reported.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from paw.config.sections import EnvConfig
from paw.config.values import Count, Only, Positive
from paw.envs.base import Sized, every_tenth, means_all_kinds
from paw.errors import UserError, describe, needed, short_repr
from paw.io.hub import unreachable
from paw.types import Task

if TYPE_CHECKING:
    from datasets import Dataset

Row = Mapping[str, Any]
ANSWER = "{answer}"
AUTO = "auto"
HELD_OUT = "held_out"
EVALUATED = ("test", "validation", "valid", "dev")
"""Splits that env.eval_split = "auto" looks for, in this order."""
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
"""Suffix of a file -> the reader of `datasets`."""
DATA = Only("env.data")
"""Marker for keys that apply only if env.data is set."""
GENERATED = Only("env.data", (None,))
"""Marker for keys that apply only if env.data is not set."""


class QuestionsConfig(EnvConfig):
    """Questions whose answers can be checked: your own set, or generated maths problems."""

    name: str = "questions"
    """Which environment."""
    data: Path | None = None
    """Name on the Hugging Face hub, a file (parquet, JSON lines, CSV) or a folder. If unset,
    problems are generated."""
    subset: Annotated[str | None, DATA] = None
    """Configuration of the data set if it has several, such as "main" of openai/gsm8k."""
    eval_split: str = "auto"
    """Split to evaluate on. auto takes test or validation, otherwise every tenth row of
    env.train_split, which is then held out of training."""
    question: Annotated[str, DATA] = "question"
    """Column of questions: text, or messages {"role", "content"}. Here and below, "a.b" means the
    field b of column a."""
    answer: Annotated[str | None, DATA] = "answer"
    """Column of right answers: text, a number, or a list in which each one is right."""
    system: Annotated[str | None, DATA] = None
    """Column of system messages."""
    kind: Annotated[str | None, DATA] = None
    """Column whose values are the kinds by which success is reported."""
    instruction: str = "Reason step by step, then give the final answer as {format}."
    """Added to each question. {format} is env.format with dots instead of the answer."""
    format: str = "<answer>{answer}</answer>"
    """How a response gives its answer. The last one counts."""
    score: str = "exact"
    """exact: equal to a right answer, as SQuAD compares. number: the last number in both is equal.
    regex: the right answer is a regular expression; a match that takes more than a second of CPU
    time ends its episode. Or your own function, "FILE.py:name", which maps (answer, row) to a score
    from 0 to 1, or to (score, feedback)."""
    max_turns: Count = 1
    """Number of tries. After a wrong answer the model is told so, or gets your score's feedback."""
    reward: Positive = 1.0
    """Reward of a right answer, R_max."""
    operations: Annotated[int, Field(ge=1, le=4), GENERATED] = 4
    """Largest number of operations of a generated problem."""
    largest: Annotated[int, Field(ge=5, le=1_000_000), GENERATED] = 1000
    """Largest number of a generated problem."""

    @field_validator("format")
    @classmethod
    def _holds_the_answer(cls, form: str) -> str:
        if form.count(ANSWER) != 1:
            raise ValueError(f"it must contain {ANSWER} once, in place of the answer")
        return form


class QuestionSet:
    """The splits that a configuration names.

    `check(row)` raises ValueError if a row cannot be asked. Raises UserError if there is such a
    row, or if the set, a split or a column does not exist.
    """

    def __init__(self, config: QuestionsConfig, check: Callable[[Row], object]) -> None:
        self._config = config
        self._check = check
        self._origin = f"env.data = '{config.data}'"
        self._digests: dict[str, str] = {}
        """Hashes of the rows of each checked split."""
        self._splits = self._open()

        train_split = config.train_split
        eval_split = self._choose_eval_split()
        train_rows = self._rows(train_split, "train_split")
        train_indices: Sequence[int] = range(len(train_rows))
        if eval_split == HELD_OUT and HELD_OUT not in self._splits:
            self.evaluation = self._tasks(
                train_split, train_rows, every_tenth(train_indices, held_out=True)
            )
            train_indices = every_tenth(train_indices, held_out=False)
        else:
            eval_rows = self._rows(eval_split, "eval_split")
            self.evaluation = self._tasks(eval_split, eval_rows, range(len(eval_rows)))
        self.training = self._tasks(train_split, train_rows, train_indices)
        hashes = ", ".join(f"{name} {digest}" for name, digest in self._digests.items())
        self.fingerprint = f"{config.data} {hashes}, asked in {eval_split}"

    def _choose_eval_split(self) -> str:
        if self._config.eval_split != AUTO:
            return self._config.eval_split
        for name in EVALUATED:
            if name in self._splits and name != self._config.train_split:
                return name
        return HELD_OUT

    def _open(self) -> Mapping[str, "Dataset"]:
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
        datasets = needed("datasets", f"{self._origin}: a question set", "data")
        name = str(self._config.data)
        path = Path(name).expanduser()
        offline_reason = ""
        try:
            if path.is_file():
                if path.suffix not in READERS:
                    raise UserError(f"{self._origin}: the file must be one of {', '.join(READERS)}")
                dataset = datasets.load_dataset(READERS[path.suffix], data_files=str(path))
            elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                dataset = datasets.load_from_disk(path)
            elif path.is_dir():
                dataset = datasets.load_dataset(str(path))
            elif path.suffix in READERS or name.startswith(("/", ".", "~")):
                raise UserError(f"{self._origin}: there is no such file or folder")
            else:
                offline_reason = unreachable()
                if offline_reason:
                    datasets.config.HF_HUB_OFFLINE = True  # read the cache without retries
                dataset = datasets.load_dataset(name, self._config.subset)
        except UserError:
            raise
        except ConnectionError:
            raise UserError(
                f"{self._origin}: there is no such file or folder, it is not in the cache of "
                f"datasets, and {offline_reason or 'the hub does not answer'}"
            ) from None
        except Exception as error:  # each reader raises its own exceptions
            raise UserError(f"{self._origin}: {describe(error.__cause__ or error)}") from None
        splits: Any = dataset if isinstance(dataset, dict) else {"train": dataset}
        return splits

    def _tasks(self, split: str, rows: "Dataset", indices: Sequence[int]) -> Sized:
        """Return the rows at `indices` as tasks, each read on demand."""
        kind_column = self._config.kind
        default_kind = Task.kind if means_all_kinds(split) else split

        def task(i: int) -> Task:
            row: Row = rows[indices[i]]
            kind = str(value(row, kind_column)) if kind_column else default_kind
            return Task(f"{split}/{indices[i]}", kind, row)

        return Sized(task, len(indices))

    def _rows(self, split: str, key: str) -> "Dataset":
        """Return the rows of the split that env.`key` names, after checking columns and rows."""
        if split not in self._splits:
            raise UserError(
                f"env.{key} = '{split}': {self._origin} has no such split, "
                f"only {', '.join(self._splits)}"
            )
        rows = self._splits[split]
        self._check_columns(rows.column_names)
        if not len(rows):
            raise UserError(f"{self._origin}: the split '{split}' holds no questions")
        if split not in self._digests:
            self._digests[split] = self._check_rows(split, rows)
        return rows

    def _check_columns(self, columns: Sequence[str]) -> None:
        for key in ("question", "answer", "system", "kind"):
            name = getattr(self._config, key)
            if not name:
                continue
            outer_column = name.partition(".")[0]
            if name not in columns and outer_column not in columns:
                raise UserError(
                    f"env.{key} = '{name}': {self._origin} has no such column; "
                    f"it has {', '.join(columns)}"
                )

    def _check_rows(self, split: str, rows: "Dataset") -> str:
        """Hash the rows. Raises UserError, which names the row, if one cannot be asked."""
        digest = hashlib.sha256()
        number = 0
        batches: Any = rows.with_format("arrow").iter(1000)
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                try:
                    self._check(row)
                    self._check_kind(row)
                except ValueError as error:
                    raise UserError(f"{self._origin}: {split}, row {number}: {error}") from None
                digest.update(repr(row).encode("utf-8", "replace"))
        return digest.hexdigest()[:16]

    def _check_kind(self, row: Row) -> None:
        """Raise ValueError if the row's kind is a name that reports use for all kinds together."""
        column = self._config.kind
        if not column:
            return
        kind = str(value(row, column))
        if means_all_kinds(kind):
            raise ValueError(
                f"'{column}' is {short_repr(kind)}, a name that reports use for all kinds; "
                "rename it there, or name another column with env.kind"
            )


def value(row: Row, key: str) -> Any:
    """Return what a row has in the column `key`; for "a.b", in the field b of column a.

    Raises ValueError if that is empty.
    """
    content: Any = row
    path = [key] if key in row else key.split(".")
    for part in path:
        content = content.get(part) if isinstance(content, Mapping) else None
    is_nan = content != content
    if content is None or is_nan or (isinstance(content, str | list) and not content):
        raise ValueError(f"'{key}' is empty")
    return content


def messages(row: Row, config: QuestionsConfig) -> list[dict[str, str]]:
    """Return the messages that begin a row's conversation. The last, the user's, is the question.

    Raises ValueError if the row has no such messages.
    """
    question = value(row, config.question)
    system = value(row, config.system) if config.system else None
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    if not _are_messages(question):
        raise ValueError(
            f"'{config.question}' is {short_repr(question)}; "
            "it must be text, or messages of role and content"
        )
    last_role = question[-1]["role"]
    if last_role != "user":
        raise ValueError(
            f"the last message of '{config.question}' is of '{last_role}'; "
            "it must be the user's question"
        )

    conversation = []
    if system is not None:
        conversation.append({"role": "system", "content": str(system)})
    for message in question:
        if system is not None and message["role"] == "system":
            continue  # replaced by the column of system messages
        conversation.append({"role": message["role"], "content": message["content"]})
    return conversation


def _are_messages(question: Any) -> bool:
    """Whether this is a non-empty list of messages whose role and content are texts."""
    if not isinstance(question, list) or not question:
        return False
    for message in question:
        if not isinstance(message, Mapping):
            return False
        for text in (message.get("role"), message.get("content")):
            if not isinstance(text, str) or not text.strip():
                return False
    return True


def answers(row: Row, config: QuestionsConfig) -> list[str]:
    """Return a row's right answers, [] if env.answer is unset. Raises ValueError if it has none."""
    if config.answer is None:
        return []
    content = value(row, config.answer)
    alternatives = content if isinstance(content, list) else [content]
    texts = [_text(alternative) for alternative in alternatives]
    if not all(text.strip() for text in texts):
        raise ValueError(f"'{config.answer}' is {short_repr(content)}, which is not an answer")
    return texts


def _text(answer: Any) -> str:
    """Return an answer as text, whole numbers without a decimal point; "" for other types."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer) if isinstance(answer, str | int | float) else ""
