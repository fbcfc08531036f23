"""Runs the cells of a notebook in order: python bench/notebook.py examples/compare.ipynb [KEY=VALUE...]

With --save, the outputs are written into the notebook. The KEY=VALUE pairs replace `words`, which
the cell tagged "parameters" defines. Needs IPython: pip install 'paw-trainer[test]'.
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
"""How many lines of a cell's output are kept at most, counted from the end."""
Cell = dict[str, Any]
Output = dict[str, Any]


def run_notebook(path: Path, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run all cells. Returns (the notebook with its outputs, the variables at the end).

    Raises the first error that a cell raises.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with _new_shell() as shell:
        _run_cells(shell, notebook["cells"], overrides)
        return notebook, dict(shell.user_ns)


@contextmanager
def _new_shell() -> Iterator[InteractiveShell]:
    """Make a shell. It replaces the module `__main__`, which is restored at the end."""
    main_module = sys.modules["__main__"]
    without_history = Config({"HistoryManager": {"enabled": False}})
    try:
        yield InteractiveShell.instance(config=without_history)
    finally:
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main_module


def _run_cells(shell: InteractiveShell, cells: list[Cell], overrides: list[str]) -> None:
    executed = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        executed += 1
        with capture_output() as captured:
            shell.run_cell("".join(cell["source"]), store_history=True).raise_error()
        cell["execution_count"] = executed
        cell["outputs"] = _text_output(captured.stdout) + _displayed(captured.outputs)
        if "parameters" in cell["metadata"].get("tags", []):
            shell.push({"words": overrides})


def _text_output(text: str) -> list[Output]:
    output_lines = text.splitlines(keepends=True)
    if not output_lines:
        return []
    left_out = ["...\n"] if len(output_lines) > LINES else []
    return [{"output_type": "stream", "name": "stdout", "text": left_out + output_lines[-LINES:]}]


def _displayed(outputs: list[Any]) -> list[Output]:
    """Return the outputs on display at the end. An update replaces the output that it updates."""
    on_display: dict[Any, Output] = {}
    for number, output in enumerate(outputs):
        display_id = (output.transient or {}).get("display_id", number)
        contents = {mime_type: _as_text(content) for mime_type, content in output.data.items()}
        on_display[display_id] = {"output_type": "display_data", "data": contents, "metadata": {}}
    return list(on_display.values())


def _as_text(content: str | bytes) -> str:
    return base64.b64encode(content).decode() if isinstance(content, bytes) else content


def main(arguments: list[str]) -> None:
    notebook_path = Path(arguments[0])
    overrides = [argument for argument in arguments[1:] if argument != "--save"]
    notebook, _ = run_notebook(notebook_path, overrides)
    if "--save" in arguments:
        notebook_json = json.dumps(notebook, indent=1, ensure_ascii=False)
        notebook_path.write_text(f"{notebook_json}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
