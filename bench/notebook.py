"""Runs the cells of a notebook in order: python bench/notebook.py examples/compare.ipynb [KEY=VALUE...]

With --save, the outputs are written into the notebook. KEY=VALUE are the `words` of its cell with
the tag "parameters". Needs IPython: pip install 'paw-trainer[test]'.
"""

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

LINES = 6
"""Maximum number of lines of a cell's output that are kept. They are the last ones."""
Cell = dict[str, Any]
Output = dict[str, Any]


def run_notebook(path: Path, words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run all cells. Returns (the notebook with their outputs, the variables at the end).

    Raises the first error of a cell.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with _new_shell() as shell:
        _run_cells(shell, notebook["cells"], words)
        return notebook, dict(shell.user_ns)


@contextmanager
def _new_shell() -> Iterator[InteractiveShell]:
    """Make a shell that leaves this process as it was: it takes the place of `__main__`."""
    main_module = sys.modules["__main__"]
    without_history = Config({"HistoryManager": {"enabled": False}})
    try:
        yield InteractiveShell.instance(config=without_history)
    finally:
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main_module


def _run_cells(shell: InteractiveShell, cells: list[Cell], words: list[str]) -> None:
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        count += 1
        with capture_output() as captured:
            shell.run_cell("".join(cell["source"]), store_history=True).raise_error()
        cell["execution_count"] = count
        cell["outputs"] = _text_output(captured.stdout) + _displayed(captured.outputs)
        if "parameters" in cell["metadata"].get("tags", []):
            shell.push({"words": words})


def _text_output(text: str) -> list[Output]:
    lines = text.splitlines(keepends=True)
    if not lines:
        return []
    left_out = ["...\n"] if len(lines) > LINES else []
    return [{"output_type": "stream", "name": "stdout", "text": left_out + lines[-LINES:]}]


def _displayed(outputs: list[Any]) -> list[Output]:
    """Return what is on display at the end: an update replaces what it updates."""
    on_display: dict[Any, Output] = {}
    for number, output in enumerate(outputs):
        key = (output.transient or {}).get("display_id", number)
        data = {kind: _as_text(value) for kind, value in output.data.items()}
        on_display[key] = {"output_type": "display_data", "data": data, "metadata": {}}
    return list(on_display.values())


def _as_text(value: str | bytes) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def main(arguments: list[str]) -> None:
    path = Path(arguments[0])
    words = [argument for argument in arguments[1:] if argument != "--save"]
    notebook, _ = run_notebook(path, words)
    if "--save" in arguments:
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
