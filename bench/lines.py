"""`make lines`: how long the house is. Lines of files, and beside them those that hold code (no
blanks, comments, docstrings), of the core, of each package, of tests and benchmarks.

The core is what `paw train` imports on a CPU for an environment of one's own: counted by running
it.
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

ROOT = Path(__file__).parents[1]
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
    """What one update of `paw train` on docs/example_environment.py imports; `folder` is for its model and its run."""
    sys.path.append(str(ROOT / "tests" / "support"))  # which conftest.py imports from
    write_tiny_llm = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["write_tiny_llm"]
    settings = {
        "env.name": f"{ROOT / 'docs' / 'example_environment.py'}:Guess", "model.path": write_tiny_llm(folder / "model"),
        "model.device": "cpu", "run.dir": folder, "run.updates": 1, "rollout.tasks": 2, "rollout.group_size": 2,
        "eval.games": 2,
    }  # fmt: skip
    words = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    out = folder / "files.json"
    command = [sys.executable, "-c", TRAIN, "train", "quickstart", *words, str(out)]
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL
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


def main() -> None:
    def files(*folders: str) -> list[Path]:
        return [
            path
            for folder in folders
            for path in (ROOT / folder).rglob("*.py")
            if "build" not in path.parts
        ]

    def show(name: str, paths: Iterable[Path]) -> None:
        paths = list(paths)
        total, code = lines(paths)
        print(f"{name:<28}{len(paths):>6}{total:>8,}{code:>8,}")

    print(f"{'':<28}{'files':>6}{'lines':>8}{'code':>8}")
    with tempfile.TemporaryDirectory() as folder:
        show("core, as imported", core_files(Path(folder)))
    everything = files("paw", "kernels")
    show("paw and kernels", everything)
    for package in sorted({path.parent for path in everything}):
        show(f"  {package.relative_to(ROOT)}", package.glob("*.py"))
    show("tests", files("tests"))
    show("bench", files("bench"))
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in everything}
    longest = max(lengths, key=lambda path: lengths[path])
    middle = sorted(lengths.values())[len(lengths) // 2]
    name = longest.relative_to(ROOT)
    print(f"the longest file is {name} with {lengths[longest]}, the median {middle}")


if __name__ == "__main__":
    main()
