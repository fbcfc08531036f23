"""Rules that no linter has, for every file of paw/ and kernels/, and what each extra must install.

Who may import what: import-linter's contracts in pyproject.toml. What runs code from files: ruff's
S rules there.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    p
    for folder in ("paw", "kernels")
    for p in (ROOT / folder).rglob("*.py")
    if "build" not in p.parts
)
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES}
LAZY = {  # library -> extra that installs it
    "vllm": "vllm", "alfworld": "alfworld", "textworld": "alfworld", "peft": "lora", "liger_kernel": "liger",
    "rapidfuzz": "webshop", "bm25s": "search", "faiss": "search", "fastapi": "search", "uvicorn": "search",
    "pyarrow": "search", "openai": "agents", "openenv": "openenv", "gymnasium": "gymnasium",
}  # fmt: skip
BRINGS = {"fastapi": "openenv", "uvicorn": "openenv"}
"""Library -> another extra that installs it."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
WANTED = {name: [Requirement(text) for text in texts] for name, texts in EXTRAS.items()}
CONSTRAINTS = [
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
]
ELSEWHERE = {"openenv", "vllm", "bench"}
"""Extras that the tests on a CPU do without, or have in a virtual environment of its own."""
NOT_OURS = {"paw", "paw_kernels", "triton", "flash_attn", "spacy", "tau2", "loguru"}
"""Imported if they are installed: brought by torch's GPU builds, installed apart, or tau2's own."""
PARTS = {
    "pydantic_core": "pydantic", "starlette": "fastapi", "markupsafe": "jinja2", "huggingface_hub": "transformers",
    "websockets": "openenv", "yaml": "transformers",
}  # fmt: skip
"""Packages that another one, a dependency, pins."""
RECORDER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  -c) exit {version} ;;
  -m) [ "$2" != venv ] || {{ mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }} ;;
esac
"""


@cache
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def calls(text: str) -> list[ast.Call]:
    return [node for node in nodes_of(text) if isinstance(node, ast.Call)]


def trusting(text: str) -> list[int]:
    """Lines that let a model's folder run code, or let transformers ask on standard input whether
    it may."""
    lines = []
    for call in calls(text):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        default = "True" if ast.unparse(call.func).endswith(".from_pretrained") else "False"
        if options.get("trust_remote_code", default) != "False":
            lines.append(call.lineno)
    return lines


@pytest.mark.slow
def test_no_model_folder_runs_code():
    assert trusting("f(trust_remote_code=True)") == [1]
    assert trusting("AutoModel.from_pretrained(path)") == [1]
    for name, text in TEXTS.items():
        assert trusting(text) == [], name


def test_a_library_of_an_extra_is_imported_late_and_named_where_it_is_missing():
    libraries = "|".join(LAZY)
    need_it = {  # imported by the library itself, or late by a module that names the extra
        "paw/rollouts/engines/entropy.py",
        "paw/envs/search/retrieval/app.py",
        "paw/tools/play/openenv_app.py",
    }
    for name, text in TEXTS.items():
        at_top = re.search(rf"^(?:from|import) (?:{libraries})\b", text, re.M)
        assert name in need_it or not at_top, name
        for library in set(re.findall(rf"^ +(?:from|import) ({libraries})\b", text, re.M)):
            extras = (LAZY[library], BRINGS.get(library))
            named = any(f"paw-trainer[{extra}]" in text for extra in extras)
            assert named, f"{name}: a UserError must name the extra of {library}"
        for call in calls(text):
            if isinstance(call.func, ast.Name) and call.func.id == "needed":
                module, _, extra = map(ast.unparse, call.args)
                library = ast.literal_eval(module).partition(".")[0]
                extra_of = LAZY | {"datasets": "data", "flashoptim": "flash", "aiohttp": "servers"}
                assert extra_of[library] == ast.literal_eval(extra), f"{name}: {module}"


def test_the_kernels_folder_is_no_package():
    """If it were one, it would hide the Hugging Face package of that name from transformers."""
    assert "kernels/__init__.py" not in TEXTS


def loaded_after(modules: list[str]) -> set[str]:
    """Top-level packages in a fresh interpreter that imported `modules`."""
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return {module.split(".")[0] for module in result.stdout.split()}


def test_the_command_line_and_environments_start_without_torch():
    light = ["paw", "paw.config.sections", "paw.types", "paw.errors", "paw.cli"]
    light += ["paw.tools.train.start", "paw.distributed.launcher"]
    assert loaded_after(light).isdisjoint({"torch", "transformers", *LAZY})
    modules = [n.removesuffix(".py").replace("/", ".") for n in TEXTS if n.startswith("paw/envs/")]
    # These need what they import, so they are imported late themselves.
    apart = (".embedding", ".retrieval.app", ".retrieval.dense", ".verifiers")
    modules = [m.removesuffix(".__init__") for m in modules if not m.endswith(apart)]
    assert loaded_after(modules).isdisjoint({"torch", "transformers", *LAZY})


IN_PLACE = {"paw/io/files.py", "paw/checkpoint/files.py", "paw/checkpoint/export.py"}
"""`write_file` itself, and those that fill a folder which is renamed as a whole."""


def test_a_runs_files_are_written_whole():
    """With paw.io.files.write_file: a file written in place is cut off if the disk fills up or the
    power fails."""
    for name in TEXTS.keys() - IN_PLACE:
        if name.startswith(("paw/run", "paw/rundir/", "paw/checkpoint/", "paw/model/")):
            for call in calls(TEXTS[name]):
                if isinstance(call.func, ast.Attribute):
                    assert call.func.attr not in ("write_text", "write_bytes", "savefig"), name


def test_dependencies_have_bounds_and_constraints_a_version_within_them():
    """No address, no path, no local version such as +cpu: another machine installs from it too."""
    for requirements in WANTED.values():
        for requirement in requirements:
            operators = {part.operator for part in requirement.specifier}
            assert operators & {"<", "<=", "==", "~="}, str(requirement)
    pinned = {}
    for line in CONSTRAINTS:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", line)
        name, version = line.split("==")
        pinned[canonicalize_name(name)] = version
    assert len(CONSTRAINTS) > 100
    assert len(pinned) == len(CONSTRAINTS)
    assert "triton" not in pinned
    for extra in WANTED.keys() - ELSEWHERE:
        for requirement in WANTED[extra]:
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), (
                f"{requirement} is not {version}"
            )


def test_what_is_imported_is_a_dependency():
    """Not only something that a dependency brings along today."""
    provided = packages_distributions()
    named = set()
    for requirements in WANTED.values():
        named |= {canonicalize_name(requirement.name) for requirement in requirements}
    for path, text in TEXTS.items():
        for module in imported(text) - NOT_OURS - set(sys.stdlib_module_names):
            packages = [PARTS.get(module, module), *provided.get(module, [])]
            assert named & set(map(canonicalize_name, packages)), f"{path}: {module}"


def imported(text: str) -> set[str]:
    """Top-level packages that a file imports anywhere, except by relative imports."""
    modules = []
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
    return {module.split(".")[0] for module in modules}


def test_what_is_in_the_way_of_the_first_run_is_named(tmp_path):
    def make(*words, version=0):
        """`make train` with a Python that only writes down what it is asked to do: (exit code,
        stderr, that)."""
        fake = tmp_path / "python"
        log = tmp_path / "log"
        fake.write_text(RECORDER.format(log=log, version=version))
        fake.chmod(0o755)
        path = os.pathsep.join(
            folder
            for folder in os.environ["PATH"].split(os.pathsep)
            if not Path(folder, "nvidia-smi").exists()
        )
        command = ["make", "-C", ROOT, "train", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}"]
        result = subprocess.run(
            [*command, *words], capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        return result.returncode, result.stderr, log.read_text()

    code, errors, log = make(version=1)
    assert code
    assert "paw needs Python 3.11 or later" in errors
    assert "PYTHON=python3.11" in errors
    assert "pip" not in log
    assert not (tmp_path / "venv").exists()
    index = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    code, errors, log = make()
    assert code == 0
    assert index in errors
    assert "--index-url" not in log
    code, errors, log = make("-B", index)
    assert code == 0
    assert "TORCH_INDEX" not in errors
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in log
