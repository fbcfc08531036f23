"""Questions from files: parquet as Search-R1 has it, or JSON lines; a whole folder of them, or one file.

Of a parquet row count `question`, `golden_answers` (where that is empty, `reward_model.ground_truth.target`) and
`data_source`; a JSON line is {"question": ..., "golden_answers": [...], "data_source": ...}, the last one optional.
Columns that are not needed, such as Search-R1's own prompt, are never read.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paw.errors import UserError
from paw.types import Task

SETS = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
"""data_source -> the paper's name, in the order of its Table 2."""
SUFFIXES = (".parquet", ".jsonl")
COLUMNS = ("question", "golden_answers", "data_source")
TARGET = "reward_model.ground_truth.target"
FIX = "docs/environments.md has the format"


@dataclass(frozen=True)
class Question:
    """What an episode is about: the payload of a task."""

    text: str
    answers: tuple[str, ...]
    """Golden answers; any of them is right."""
    hops: tuple[str, ...] = ()
    """Titles of the documents that answer it, in the order they are found (generated questions)."""
    world: int = 0
    """Which of the generated worlds it is about."""
    step: int | None = None
    """Update it is asked in, None outside of training: ZeroSearch's noise rises with it."""


def candidates(data: Path, split: str) -> list[Path]:
    """What there is of a split: `data` itself if it is a file, else its SPLIT.parquet and SPLIT.jsonl."""
    data = data.expanduser()
    return [path for path in (data, *(data / f"{split}{suffix}" for suffix in SUFFIXES)) if path.is_file()]


def find_file(data: Path, split: str) -> Path:
    """The one file of a split. UserError if there is none, or more than one."""
    found = candidates(data, split)
    if len(found) == 1:
        return found[0]
    names = " and ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    what = f"holds both {names}; keep one" if found else f"holds neither {names}"
    raise UserError(f"env.data = '{data}' {what if data.expanduser().is_dir() else 'does not exist'}; {FIX}")


def load(path: Path) -> list[Task]:
    """The questions of a file in order: `Task(id, kind, Question)`, where kind is the data_source.

    Raises:
        UserError: the file is unreadable, damaged or empty, naming the line or row.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"env.data: {path} is neither {' nor '.join(SUFFIXES)}; {FIX}")
    tasks = []
    try:
        for place, row in _parquet(path) if path.suffix == ".parquet" else _lines(path):
            try:
                kind, question = _question(row)
            except ValueError as error:
                raise UserError(f"env.data: {path}: {place}: {error}; {FIX}") from None
            tasks.append(Task(f"{path.stem}/{len(tasks)}", kind or path.stem, question))
    except OSError as error:
        raise UserError(f"env.data: {path}: {error.strerror}") from None
    if not tasks:
        raise UserError(f"env.data: {path} holds no question; {FIX}")
    return tasks


def digest(path: Path) -> str:
    """sha256 of the file's content, its first 16 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def short_name(source: str) -> str:
    """One of `SETS` where the data_source ends in it ("searchR1_nq"), else as it is."""
    tail = source.replace("/", "_").rpartition("_")[2].lower()
    return tail if tail in SETS else source


def _question(row: Any) -> tuple[str, Question]:
    """(data_source, question). ValueError saying what is wrong with the row."""
    if not isinstance(row, dict):
        raise ValueError(f"{_short(row)} is no object")
    text, answers, source = (row.get(column) for column in COLUMNS)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"'question' is {_short(text)}")
    answers = [answers] if isinstance(answers, str) else answers or row.get(TARGET)
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(f"'golden_answers' is {_short(answers)}, not a list of texts")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"'data_source' is {_short(source)}")
    return short_name(source or ""), Question(text.strip(), tuple(answers))


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError among them
                reason = str(error).partition("\n")[0]
                raise UserError(f"env.data: {path}: line {number} is no JSON: {reason}") from None


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"env.data: reading {path.name} needs pyarrow: pip install 'paw-trainer[search]'") from None
    try:
        with ParquetFile(path) as file:
            leaves = [file.schema.column(i).path for i in range(len(file.schema))]
            wanted = [*COLUMNS, TARGET]
            present = [name for name in wanted if any(f"{leaf}.".startswith(f"{name}.") for leaf in leaves)]
            if "question" not in present:
                raise UserError(
                    f"env.data: {path} has no column 'question'; it has {', '.join(file.schema_arrow.names)}"
                )
            number = 0
            for batch in file.iter_batches(columns=present):
                for row in batch.to_pylist():
                    number += 1
                    nested = row.get("reward_model") or {}
                    yield f"row {number}", {**row, TARGET: (nested.get("ground_truth") or {}).get("target")}
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # without a number it is pyarrow's way to say: damaged
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"env.data: {path} is no whole parquet file: {reason}") from None
