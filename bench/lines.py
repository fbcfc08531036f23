"""`make lines`: how long the core, each package, the tests and the benchmarks are.

Prints the lines of their files, and beside them those that hold code (no blanks, comments,
docstrings). The core is what `paw train` imports on a CPU for an environment of your own; it is
found by running it.
"""

import ast
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import ROOT, flags

TRAIN = """
import atexit, json, sys
def report():
    files = {getattr(module, "__file__", None) for name, module in list(sys.modules.items())
             if name.partition(".")[0] in ("paw", "paw_kernels")}
    with open(sys.argv[-1], "w") as out:
        json.dump(sorted(filter(None, files)), out)
atexit.register(report)
from paw.cli import main
sys.exit(main(sys.argv[1:-1]))
"""
HIDDEN = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
}


def core_files(folder: Path) -> list[Path]:
    """The files that an update of `paw train` on examples/number_game.py imports; model and run
    go to `folder`."""
    sys.path.append(str(ROOT / "tests" / "support"))  # which conftest.py imports from
    write_tiny_llm = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["write_tiny_llm"]
    settings = {
        "env.name": f"{ROOT / 'examples' / 'number_game.py'}:Guess",
        "model.path": write_tiny_llm(folder / "model"),
        "model.device": "cpu",
        "run.dir": folder,
        "run.updates": 1,
        "rollout.tasks": 2,
        "rollout.group_size": 2,
        "eval.games": 2,
    }
    out = folder / "files.json"
    words = [str(word) for word in flags(settings)]
    command = [sys.executable, "-c", TRAIN, "train", "quickstart", *words, str(out)]
    import_path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": import_path}, check=True, stdout=subprocess.DEVNULL
    )
    return [Path(name) for name in json.loads(out.read_text())]


def lines(files: Iterable[Path]) -> tuple[int, int]:
    """(lines, those that hold code) of Python files."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts))


def code_lines(text: str) -> int:
    """Lines of Python `text` that hold code.

    >>> code_lines("x = 1  # one\\n\\n# two\\n'a docstring'\\n")
    1
    """
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in HIDDEN:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            numbers.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(numbers)


def python_files(*folders: str) -> list[Path]:
    """The Python files of folders, without builds."""
    files: list[Path] = []
    for folder in folders:
        files += [path for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts]
    return files


def show(name: str, files: Iterable[Path]) -> None:
    """Prints a line of the table."""
    files = list(files)
    total, code = lines(files)
    print(f"{name:<28}{len(files):>6}{total:>8,}{code:>8,}")


def main() -> None:
    print(f"{'':<28}{'files':>6}{'lines':>8}{'code':>8}")
    with tempfile.TemporaryDirectory() as folder:
        show("core, as imported", core_files(Path(folder)))
    files = python_files("paw", "kernels")
    show("paw and kernels", files)
    for package in sorted({path.parent for path in files}):
        show(f"  {package.relative_to(ROOT)}", package.glob("*.py"))
    show("tests", python_files("tests"))
    show("bench", python_files("bench"))

    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    longest = max(lengths, key=lambda path: lengths[path])
    median = sorted(lengths.values())[len(lengths) // 2]
    name = longest.relative_to(ROOT)
    print(f"the longest file is {name} with {lengths[longest]}, the median {median}")


if __name__ == "__main__":
    main()
