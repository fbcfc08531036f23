"""Questions from files: parquet as Search-R1 has it, or JSON lines; a whole folder of them, or one file.

Columns are `question`, `golden_answers` (where empty, `reward_model.ground_truth.target`) and
`data_source`; no other is read. A JSON line may lack the last one.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from paw.envs.checked import Strict, checked, json_lines
from paw.errors import UserError, needed
from paw.files import cause, reading
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
COLUMNS = ("question", "golden_answers", "data_source", "reward_model.ground_truth.target")
FIX = "docs/environments.md has the format"


Text = Annotated[str, Field(pattern=r"\S")]


class Row(Strict):
    question: Text
    golden_answers: Annotated[
        list[Text],
        Field(min_length=1),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ]
    data_source: str | None = None


@dataclass(frozen=True)
class Question:
    """What an episode is about: the payload of a task."""

    text: str
    answers: tuple[str, ...]
    """Golden answers; any of them is right."""
    hops: tuple[str, ...] = ()
    """Titles of the documents that answer it, in the order they are found (generated questions)."""
    world: int = 0
    step: int | None = None
    """Update it is asked in, None outside of training: ZeroSearch's noise rises with it."""


def candidates(data: Path, split: str) -> list[Path]:
    """What there is of a split: `data` itself if it is a file, else its SPLIT.parquet and SPLIT.jsonl."""
    data = data.expanduser()
    return [
        path
        for path in (data, *(data / f"{split}{suffix}" for suffix in SUFFIXES))
        if path.is_file()
    ]


def find_file(data: Path, split: str) -> Path:
    """The one file of a split. UserError if there is none, or more than one."""
    found = candidates(data, split)
    if len(found) == 1:
        return found[0]
    names = " and ".join(f"{split}{suffix}" for suffix in SUFFIXES)
    what = f"holds both {names}; keep one" if found else f"holds neither {names}"
    raise UserError(
        f"env.data = '{data}' {what if data.expanduser().is_dir() else 'does not exist'}; {FIX}"
    )


def load(path: Path) -> list[Task]:
    """The questions of a file in order, their kind the data_source.

    UserError, naming line or row, for damage.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"env.data: {path} is neither {' nor '.join(SUFFIXES)}; {FIX}")
    with reading(f"env.data: {path}"):
        lines = json_lines(path, Row, f"env.data: {path}")
        rows = list(_parquet(path)) if path.suffix == ".parquet" else [row for _, row in lines]
    if not rows:
        raise UserError(f"env.data: {path} holds no question; {FIX}")
    tasks = []
    for i, row in enumerate(rows):
        question = Question(row.question.strip(), tuple(row.golden_answers))
        tasks.append(
            Task(f"{path.stem}/{i}", short_name(row.data_source or "") or path.stem, question)
        )
    return tasks


def digest(path: Path) -> str:
    """sha256 of the file's content, its first 16 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def short_name(source: str) -> str:
    """One of `SETS` where the data_source ends in it ("searchR1_nq"), else as it is."""
    tail = source.replace("/", "_").rpartition("_")[2].lower()
    return tail if tail in SETS else source


def _parquet(path: Path) -> Iterator[Row]:
    what = f"env.data: reading {path.name}"
    pyarrow, parquet = needed("pyarrow", what, "search"), needed("pyarrow.parquet", what, "search")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "question" not in names:
                raise UserError(
                    f"env.data: {path} has no column 'question'; it has {', '.join(names)}"
                )
            for row in (
                row for batch in file.iter_batches(columns=COLUMNS) for row in batch.to_pylist()
            ):
                number += 1
                target = ((row.get("reward_model") or {}).get("ground_truth") or {}).get("target")
                answers = row.get("golden_answers") or target
                yield checked(
                    Row, {**row, "golden_answers": answers}, f"env.data: {path}, row {number}"
                )
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # without a number it is pyarrow's way to say: damaged
            raise
        raise UserError(f"env.data: {path} is no whole parquet file: {cause(error)}") from None
