"""`make lines`: how long the core, each package, the tests and the benchmarks are.

Prints how many lines the files have, and how many of them hold code (no blanks, comments or
docstrings). The core is what `paw train` imports on a CPU for an environment of your own. It is
found by running that command.
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
    """The files imported by an update of `paw train` on examples/number_game.py.

    The model and the run are written to `folder`.
    """
    sys.path.append(str(ROOT / "tests" / "support"))  # conftest.py imports from it
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
    files_json = folder / "files.json"
    overrides = [str(argument) for argument in flags(settings)]
    command = [sys.executable, "-c", TRAIN, "train", "quickstart", *overrides, str(files_json)]
    import_path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": import_path}, check=True, stdout=subprocess.DEVNULL
    )
    return [Path(file_name) for file_name in json.loads(files_json.read_text())]


def lines(files: Iterable[Path]) -> tuple[int, int]:
    """(lines, lines that hold code) of Python files."""
    sources = [file.read_text(encoding="utf-8") for file in files]
    return sum(len(source.splitlines()) for source in sources), sum(map(code_lines, sources))


def code_lines(source: str) -> int:
    """How many lines of Python source hold code.

    >>> code_lines("x = 1  # one\\n\\n# two\\n'a docstring'\\n")
    1
    """
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in HIDDEN:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            numbers.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(numbers)


def python_files(*folders: str) -> list[Path]:
    """The Python files of folders, except builds."""
    files: list[Path] = []
    for folder in folders:
        files += [path for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts]
    return files


def show(label: str, files: Iterable[Path]) -> None:
    """Prints a line of the table."""
    files = list(files)
    total_lines, lines_of_code = lines(files)
    print(f"{label:<28}{len(files):>6}{total_lines:>8,}{lines_of_code:>8,}")


def main() -> None:
    print(f"{'':<28}{'files':>6}{'lines':>8}{'code':>8}")
    with tempfile.TemporaryDirectory() as folder:
        show("core, as imported", core_files(Path(folder)))
    core_and_kernels = python_files("paw", "kernels")
    show("paw and kernels", core_and_kernels)
    for package in sorted({path.parent for path in core_and_kernels}):
        show(f"  {package.relative_to(ROOT)}", package.glob("*.py"))
    show("tests", python_files("tests"))
    show("bench", python_files("bench"))

    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in core_and_kernels
    }
    longest = max(lengths, key=lambda path: lengths[path])
    median = sorted(lengths.values())[len(lengths) // 2]
    longest_name = longest.relative_to(ROOT)
    print(f"the longest file is {longest_name} with {lengths[longest]}, the median {median}")


if __name__ == "__main__":
    main()
