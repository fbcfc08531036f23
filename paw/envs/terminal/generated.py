"""Generated tasks: a few short files, and something to find, count, edit or repair.

A task's content decides in which split it may appear, so training, warm-up and evaluation share no
task whatever their seeds.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import NamedTuple

from paw.envs.terminal.settings import TaskKind

WORDS = ("red", "blue", "green", "gold")
FILES = ("a", "b", "c")
ANSWER = "out"
"""File for the answer of a question."""
CHECK = "check"
LENGTHS = (3, 6)
"""Least and most lines of a file."""
SHARES = {"warmup": range(3), "train": range(3, 8), "test": range(8, 10)}
"""Split -> the tenths of all tasks that belong to it."""
EXIT = "exit"
"""The command that ends an episode."""
CHECK_SCRIPT = """\
if grep -q {wrong} {file}; then
  echo {file} has {wrong} not {right}
  exit 1
fi
echo fine
"""


class GeneratedTask(NamedTuple):
    kind: TaskKind
    instruction: str
    files: dict[str, str]
    """Content of each file at the start."""
    wanted: dict[str, str]
    """Content that each file has to have at the end."""
    question: str
    """The command that shows what has to be done. "" if the instruction says it."""
    change: str
    """The command that does it."""
    file: str
    """The file it is about. "" if that is the question."""
    words: tuple[str, str]
    """The words it is about. The second may be any other word."""


def generate(split: str, seed: int, i: int, kinds: list[TaskKind]) -> GeneratedTask:
    """Return task number i of a split. It depends only on the arguments.

    Raises KeyError if there is no such split.
    """
    tenths = SHARES[split]
    rng = random.Random(f"terminal/{split}/{seed}/{i}")
    kind = kinds[i % len(kinds)]
    while True:
        task = _MAKERS[kind](rng)
        content = repr((task.instruction, task.files)).encode()
        if int.from_bytes(hashlib.sha256(content).digest()[:4], "big") % 10 in tenths:
            return task


def _find(rng: random.Random) -> GeneratedTask:
    word, other = rng.sample(WORDS, 2)
    file = rng.choice(FILES)
    lines = {name: _lines(rng, without=word) for name in FILES}
    lines[file][rng.randrange(len(lines[file]))] = word
    files = _files(lines)
    return GeneratedTask(
        kind="find",
        instruction=f"which file has {word}",
        files=files,
        wanted=files | {ANSWER: f"{file}\n"},
        question=f"grep -l {word} *",
        change=f"echo {file} > {ANSWER}",
        file="",
        words=(word, other),
    )


def _count(rng: random.Random) -> GeneratedTask:
    word, other = rng.sample(WORDS, 2)
    file = rng.choice(FILES)
    lines = {name: _lines(rng) for name in FILES}
    count = rng.randint(1, len(lines[file]))
    words = [word] * count + _lines(rng, without=word)[: len(lines[file]) - count]
    rng.shuffle(words)
    lines[file] = words
    files = _files(lines)
    return GeneratedTask(
        kind="count",
        instruction=f"count {word} in {file}",
        files=files,
        wanted=files | {ANSWER: f"{count}\n"},
        question=f"grep -c {word} {file}",
        change=f"echo {count} > {ANSWER}",
        file=file,
        words=(word, other),
    )


def _edit(rng: random.Random) -> GeneratedTask:
    wrong, right = rng.sample(WORDS, 2)
    file = rng.choice(FILES)
    files = _with_word(rng, file, wrong)
    return GeneratedTask(
        kind="edit",
        instruction=f"change {wrong} to {right} in {file}",
        files=files,
        wanted=files | {file: files[file].replace(wrong, right)},
        question="",
        change=f"sed -i s/{wrong}/{right}/ {file}",
        file=file,
        words=(wrong, right),
    )


def _fix(rng: random.Random) -> GeneratedTask:
    wrong, right = rng.sample(WORDS, 2)
    file = rng.choice(FILES)
    files = _with_word(rng, file, wrong)
    wanted = files | {file: files[file].replace(wrong, right)}
    script = CHECK_SCRIPT.format(file=file, wrong=wrong, right=right)
    return GeneratedTask(
        kind="fix",
        instruction=f"make sh {CHECK} say fine",
        files=files | {CHECK: script},
        wanted=wanted | {CHECK: script},
        question=f"sh {CHECK}",
        change=f"sed -i s/{wrong}/{right}/ {file}",
        file="",
        words=(wrong, right),
    )


_MAKERS = {"find": _find, "count": _count, "edit": _edit, "fix": _fix}


def _lines(rng: random.Random, without: str = "") -> list[str]:
    words = [word for word in WORDS if word != without]
    return rng.choices(words, k=rng.randint(*LENGTHS))


def _with_word(rng: random.Random, file: str, word: str) -> dict[str, str]:
    """Draw files of which one surely has the word."""
    lines = {name: _lines(rng) for name in FILES}
    lines[file][rng.randrange(len(lines[file]))] = word
    return _files(lines)


def _files(lines: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: "".join(f"{word}\n" for word in words) for name, words in lines.items()}


# ---- the oracle, and what chance may play


def next_command(task: GeneratedTask, *, solved: bool, last: str, output: str) -> str:
    """Return a good command.

    `solved` says whether the files are as they should be, `last` is the last command and `output`
    what it printed. The oracle asks before it answers, as it must be possible to imitate it.
    """
    if task.kind == "fix":
        if last != task.question:
            return task.question
        return EXIT if "fine" in output else task.change
    if solved:
        return EXIT
    if task.question and last != task.question:
        return task.question
    return task.change


def commands(task: GeneratedTask) -> list[str]:
    """Return commands that make sense in a task, good or not."""
    word, other = task.words
    listed = ["ls", *(f"cat {name}" for name in FILES)]
    for name in FILES:
        listed += [f"grep -c {word} {name}", f"sed -i s/{word}/{other}/ {name}"]
    listed += [f"grep -l {word} *", f"grep -l {other} *"]
    listed += [f"echo {name} > {ANSWER}" for name in FILES]
    listed += [f"echo {number} > {ANSWER}" for number in range(1, LENGTHS[1] + 1)]
    return [*listed, f"cat {ANSWER}", f"sh {CHECK}", EXIT]
