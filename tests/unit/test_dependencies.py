"""What is installed: every dependency has an upper bound, and a version that the tests ran with."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
WANTED = {name: [Requirement(text) for text in texts] for name, texts in EXTRAS.items()}
CONSTRAINTS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
ELSEWHERE = {"vllm", "trackers", "bench"}
"""Extras that the tests on a CPU do without."""
NOT_OURS = {"paw", "paw_kernels", "triton", "flash_attn", "spacy", "tau2", "loguru"}
"""Imported where they are there: brought by torch's GPU builds, installed apart, or tau2's own."""
PARTS = {"pydantic_core": "pydantic", "starlette": "fastapi", "markupsafe": "jinja2", "huggingface_hub": "transformers"}
"""Packages that another one, a dependency, pins."""


def test_dependencies_have_bounds_and_constraints_a_version_within_them():
    """No address, no path, no local version such as +cpu: another machine installs from it too."""
    for requirement in (requirement for wanted in WANTED.values() for requirement in wanted):
        assert {part.operator for part in requirement.specifier} & {"<", "<=", "==", "~="}, str(requirement)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in CONSTRAINTS)
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in CONSTRAINTS)}
    assert len(pinned) == len(CONSTRAINTS) > 100 and "triton" not in pinned
    for extra in WANTED.keys() - ELSEWHERE:
        for requirement in WANTED[extra]:
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is not {version}"


def test_what_is_imported_is_a_dependency():
    """Not only something that a dependency brings along today."""
    provided = packages_distributions()
    named = {canonicalize_name(requirement.name) for wanted in WANTED.values() for requirement in wanted}
    for path in (path for folder in ("paw", "kernels") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in {module.split(".")[0] for module in modules} - NOT_OURS - set(sys.stdlib_module_names):
                packages = [PARTS.get(module, module), *provided.get(module, [])]
                assert named & set(map(canonicalize_name, packages)), f"{path}: {module}"
