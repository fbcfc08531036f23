"""Rules of the house that no linter has, held over every file of paw/ and kernels/.

Who may import what: import-linter's contracts in pyproject.toml. What runs code from files: ruff's S rules there.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for folder in ("paw", "kernels") for p in (ROOT / folder).rglob("*.py") if "build" not in p.parts)
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]
LAZY = {  # library -> extra that installs it
    "vllm": "vllm",
    "alfworld": "alfworld",
    "textworld": "alfworld",
    "peft": "lora",
    "liger_kernel": "liger",
    "rapidfuzz": "webshop",
    "bm25s": "search",
    "faiss": "search",
    "fastapi": "search",
    "uvicorn": "search",
    "httpx": "search",
    "pyarrow": "search",
    "openai": "agents",
}

every_file = pytest.mark.parametrize("name", NAMES)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


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


@every_file
def test_no_model_folder_runs_code(name):
    assert trusting(text_of(name)) == []


@pytest.mark.parametrize("code", ["f(trust_remote_code=True)", "AutoModel.from_pretrained(path)"])
def test_trust_is_seen(code):
    assert trusting(code) == [1]


@every_file
def test_a_library_of_an_extra_is_imported_late_and_named_where_it_is_missing(name):
    text = text_of(name)
    libraries = "|".join(LAZY)
    assert not re.search(rf"^(?:from|import) (?:{libraries})\b", text, re.M)
    for library in set(re.findall(rf"^ +(?:from|import) ({libraries})\b", text, re.M)):
        assert f"paw-trainer[{LAZY[library]}]" in text, f"a UserError must name 'paw-trainer[{LAZY[library]}]'"


@every_file
def test_files_are_short(name):
    assert len(text_of(name).splitlines()) <= (300 if name == "paw/train.py" else 400)


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
    modules = [n.removesuffix(".py").replace("/", ".") for n in NAMES if n.startswith("paw/envs/")]
    modules = [m.removesuffix(".__init__") for m in modules if not m.endswith((".embedding", ".retrieval.dense"))]
    assert loaded_after(modules).isdisjoint({"torch", "transformers", *LAZY})


IN_PLACE = {"paw/files.py", "paw/state/checkpoint.py", "paw/state/export.py"}
"""`write_file` itself, and those that fill a folder which is renamed as a whole."""


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("paw/run", "paw/state/", "paw/model/"))])
def test_a_runs_files_are_written_whole(name):
    """By paw.files.write_file: what is written in place is cut where the disk fills up or the power goes."""
    called = {call.func.attr for call in calls(text_of(name)) if isinstance(call.func, ast.Attribute)}
    assert name in IN_PLACE or not {"write_text", "write_bytes", "savefig"} & called
