"""Questions from files: Search-R1's parquet or JSON lines, in one file or a folder of files.

Only these columns are read: `question`, `golden_answers` (or, if that is empty,
`reward_model.ground_truth.target`) and `data_source`, which a JSON line may lack.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paw.envs.checked import Strict, checked, json_lines
from paw.errors import UserError, needed
from paw.io.files import cause, reading
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
"""The paper's name for each data_source, in the order of its Table 2."""
SUFFIXES = (".parquet", ".jsonl")
COLUMNS = ("question", "golden_answers", "data_source", "reward_model.ground_truth.target")
FIX = "docs/environments.md has the format"


def _as_list(answers: Any) -> Any:
    return [answers] if isinstance(answers, str) else answers


Text = Annotated[str, Field(pattern=r"\S")]


class Row(Strict):
    """One question of a file."""

    question: Text
    golden_answers: Annotated[list[Text], Field(min_length=1), BeforeValidator(_as_list)]
    data_source: str | None = None


@dataclass(frozen=True)
class Question:
    """A question with its answers, the payload of a task."""

    text: str
    answers: tuple[str, ...]
    """Golden answers; any of them is right."""
    hops: tuple[str, ...] = ()
    """Titles of the documents that answer it, in the order in which to search for them. Only
    generated questions have them."""
    world: int = 0
    """Number of the generated world it refers to."""
    step: int | None = None
    """Update in which it is asked, None outside training. ZeroSearch's noise rises with it."""


def candidates(data: Path, split: str) -> list[Path]:
    """Return the existing files of a split, among `data` itself, SPLIT.parquet and SPLIT.jsonl."""
    data = data.expanduser()
    paths = [data, *(data / f"{split}{suffix}" for suffix in SUFFIXES)]
    return [path for path in paths if path.is_file()]


def find_file(data: Path, split: str) -> Path:
    """Return the only file of a split. Raises UserError if there is none, or more than one."""
    files = candidates(data, split)
    if len(files) == 1:
        return files[0]
    names = " and ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    if not data.expanduser().is_dir():
        problem = "does not exist"
    elif files:
        problem = f"contains both {names}; keep one"
    else:
        problem = f"holds neither {names}"
    raise UserError(f"env.data = '{data}' {problem}; {FIX}")


def load(path: Path) -> list[Task]:
    """Load the questions of a file, in order. Their kind is the data_source or the file's name.

    Raises UserError, which names the line or row, if one is malformed.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"env.data: {path} is neither {' nor '.join(SUFFIXES)}; {FIX}")
    with reading(f"env.data: {path}"):
        if path.suffix == ".parquet":
            question_rows = list(_parquet(path))
        else:
            question_rows = [
                question_row for _, question_row in json_lines(path, Row, f"env.data: {path}")
            ]
    if not question_rows:
        raise UserError(f"env.data: {path} contains no questions; {FIX}")

    tasks = []
    for i, question_row in enumerate(question_rows):
        question = Question(question_row.question.strip(), tuple(question_row.golden_answers))
        kind = short_name(question_row.data_source or "") or path.stem
        tasks.append(Task(f"{path.stem}/{i}", kind, question))
    return tasks


def digest(path: Path) -> str:
    """Return the first 16 hexadecimal digits of the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def short_name(source: str) -> str:
    """Return the name in `SETS` that ends a data_source ("searchR1_nq"), or `source` itself."""
    tail = source.replace("/", "_").rpartition("_")[2].lower()
    return tail if tail in SETS else source


def _parquet(path: Path) -> Iterator[Row]:
    """Yield a parquet file's rows. Raises UserError if it is damaged, or a row is malformed."""
    purpose = f"env.data: reading {path.name}"
    pyarrow = needed("pyarrow", purpose, "search")
    parquet = needed("pyarrow.parquet", purpose, "search")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "question" not in names:
                raise UserError(
                    f"env.data: {path} has no column 'question'; it has {', '.join(names)}"
                )
            for batch in file.iter_batches(columns=COLUMNS):
                for row in batch.to_pylist():
                    number += 1
                    if not row.get("golden_answers"):
                        ground_truth = (row.get("reward_model") or {}).get("ground_truth") or {}
                        row["golden_answers"] = ground_truth.get("target")
                    yield checked(Row, row, f"env.data: {path}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # errors about damage have no number
            raise
        raise UserError(
            f"env.data: {path} is not a complete parquet file: {cause(error)}"
        ) from None
