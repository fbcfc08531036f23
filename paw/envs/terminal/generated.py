"""Generated tasks: a few short files, and something to find, count, edit or repair.

A task's content decides which split it may appear in. So training, warm-up and evaluation share no
tasks, whatever their seeds.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import NamedTuple

from paw.envs.terminal.settings import TaskKind

WORDS = ("red", "blue", "green", "gold")
FILES = ("a", "b", "c")
ANSWER = "out"
"""File for the answer to a question."""
CHECK = "check"
LENGTHS = (3, 6)
"""Minimum and maximum number of lines of a file."""
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
Words = tuple[str, str]
"""The words of a task: a word, and its replacement or any other word."""


class GeneratedTask(NamedTuple):
    kind: TaskKind
    instruction: str
    files: dict[str, str]
    """Content of each file at the start."""
    wanted: dict[str, str]
    """Required content of each file at the end."""
    question: str
    """The command that shows what has to be done; "" if the instruction says it."""
    change: str
    """The command that solves the task."""
    file: str
    """The file that the task is about; "" if finding the file is the task."""
    words: Words
    """The words that the task is about."""


def generate(split: str, seed: int, i: int, kinds: list[TaskKind]) -> GeneratedTask:
    """Return task number i of a split. It depends only on the arguments.

    Raises KeyError if there is no such split.
    """
    tenths = SHARES[split]
    rng = random.Random(f"terminal/{split}/{seed}/{i}")
    kind = kinds[i % len(kinds)]
    while True:
        word, other = rng.sample(WORDS, 2)
        file = rng.choice(FILES)
        task = _MAKERS[kind](rng, (word, other), file)
        content = repr((task.instruction, task.files)).encode()
        if int.from_bytes(hashlib.sha256(content).digest()[:4], "big") % 10 in tenths:
            return task


def _find(rng: random.Random, words: Words, file: str) -> GeneratedTask:
    word, _ = words
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
        words=words,
    )


def _count(rng: random.Random, words: Words, file: str) -> GeneratedTask:
    word, _ = words
    lines = {name: _lines(rng) for name in FILES}
    count = rng.randint(1, len(lines[file]))
    content = [word] * count + _lines(rng, without=word)[: len(lines[file]) - count]
    rng.shuffle(content)
    lines[file] = content
    files = _files(lines)
    return GeneratedTask(
        kind="count",
        instruction=f"count {word} in {file}",
        files=files,
        wanted=files | {ANSWER: f"{count}\n"},
        question=f"grep -c {word} {file}",
        change=f"echo {count} > {ANSWER}",
        file=file,
        words=words,
    )


def _edit(rng: random.Random, words: Words, file: str) -> GeneratedTask:
    wrong, right = words
    lines = {name: _lines(rng) for name in FILES}
    lines[file][rng.randrange(len(lines[file]))] = wrong
    files = _files(lines)
    return GeneratedTask(
        kind="edit",
        instruction=f"change {wrong} to {right} in {file}",
        files=files,
        wanted=files | {file: files[file].replace(wrong, right)},
        question="",
        change=f"sed -i s/{wrong}/{right}/ {file}",
        file=file,
        words=words,
    )


def _fix(rng: random.Random, words: Words, file: str) -> GeneratedTask:
    """Return a task like those of `_edit`, except that only a script says what is wrong."""
    edit = _edit(rng, words, file)
    wrong, right = words
    script = CHECK_SCRIPT.format(file=file, wrong=wrong, right=right)
    return edit._replace(
        kind="fix",
        instruction=f"make sh {CHECK} say fine",
        files=edit.files | {CHECK: script},
        wanted=edit.wanted | {CHECK: script},
        question=f"sh {CHECK}",
        file="",
    )


_MAKERS = {"find": _find, "count": _count, "edit": _edit, "fix": _fix}


def _lines(rng: random.Random, without: str = "") -> list[str]:
    words = [word for word in WORDS if word != without]
    return rng.choices(words, k=rng.randint(*LENGTHS))


def _files(lines: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: "".join(f"{word}\n" for word in words) for name, words in lines.items()}


# ---- the oracle, and commands for random play


def next_command(task: GeneratedTask, *, solved: bool, last: str, output: str) -> str:
    """Return a good command.

    `solved` says whether the files are as they should be, `last` is the last command and `output`
    is its output. The oracle looks before it answers, so that a model can learn to imitate it.
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
