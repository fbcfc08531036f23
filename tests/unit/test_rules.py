"""Rules of the house that no linter has, held over every file of paw/ and kernels/.

Who may import what: import-linter's contracts in pyproject.toml. What runs code from files: ruff's S rules there.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for folder in ("paw", "kernels") for p in (ROOT / folder).rglob("*.py") if "build" not in p.parts)
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES}
LAZY = {  # library -> extra that installs it
    "vllm": "vllm", "alfworld": "alfworld", "textworld": "alfworld", "peft": "lora", "liger_kernel": "liger",
    "rapidfuzz": "webshop", "bm25s": "search", "faiss": "search", "fastapi": "search", "uvicorn": "search",
    "httpx": "search", "pyarrow": "search", "openai": "agents",
}  # fmt: skip


def calls(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def trusting(text: str) -> list[int]:
    """Lines that let a model's folder run code, or let transformers ask on standard input whether it may."""
    found = []
    for call in calls(text):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        default = "True" if ast.unparse(call.func).endswith(".from_pretrained") else "False"
        if options.get("trust_remote_code", default) != "False":
            found.append(call.lineno)
    return found


def test_no_model_folder_runs_code():
    assert trusting("f(trust_remote_code=True)") == trusting("AutoModel.from_pretrained(path)") == [1]
    assert {name: lines for name, text in TEXTS.items() if (lines := trusting(text))} == {}


def test_a_library_of_an_extra_is_imported_late_and_named_where_it_is_missing():
    libraries = "|".join(LAZY)
    for name, text in TEXTS.items():
        assert not re.search(rf"^(?:from|import) (?:{libraries})\b", text, re.M), name
        for library in set(re.findall(rf"^ +(?:from|import) ({libraries})\b", text, re.M)):
            assert f"paw-trainer[{LAZY[library]}]" in text, f"{name}: a UserError must name the extra of {library}"


def test_files_are_short():
    lines = {name: len(text.splitlines()) for name, text in TEXTS.items()}
    assert lines["paw/train.py"] <= 300 and max(lines.values()) <= 400


def test_the_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def loaded_after(modules: list[str]) -> set[str]:
    """Top-level packages in a fresh interpreter that imported `modules`."""
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {module.split(".")[0] for module in done.stdout.split()}


def test_the_command_line_starts_without_torch():
    light = ["paw", "paw.config", "paw.types", "paw.errors", "paw.cli"]
    assert loaded_after(light).isdisjoint({"torch", "transformers", "numpy", *LAZY})


def test_environments_start_without_torch():
    modules = [n.removesuffix(".py").replace("/", ".") for n in TEXTS if n.startswith("paw/envs/")]
    modules = [m.removesuffix(".__init__") for m in modules if not m.endswith((".embedding", ".retrieval.dense"))]
    assert loaded_after(modules).isdisjoint({"torch", "transformers", *LAZY})


IN_PLACE = {"paw/files.py", "paw/state/checkpoint.py", "paw/state/export.py"}
"""`write_file` itself, and those that fill a folder which is renamed as a whole."""


def test_a_runs_files_are_written_whole():
    """By paw.files.write_file: what is written in place is cut where the disk fills up or the power goes."""
    for name in TEXTS.keys() - IN_PLACE:
        if name.startswith(("paw/run", "paw/state/", "paw/model/")):
            called = {call.func.attr for call in calls(TEXTS[name]) if isinstance(call.func, ast.Attribute)}
            assert not {"write_text", "write_bytes", "savefig"} & called, name
