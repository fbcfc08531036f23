"""The files of .github/ and .ci/ fit the tree, and a tag that does not is refused in a line."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CHECK = runpy.run_path(str(ROOT / ".ci" / "check_release"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a release is checked by: 0.1.0, with everything right."""
    (tmp_path / "paw").mkdir()
    (tmp_path / "paw" / "version.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-12-01)\n\n- It trains.\n")
    (tmp_path / "CITATION.cff").write_text("title: PaW\nversion: 0.1.0\n")
    return tmp_path


def test_a_release_needs_one_version_everywhere(tree):
    fault_of = CHECK["fault_of"]
    assert fault_of("v0.1.0", tree) is None
    assert "the tag has to be v0.1.0" in fault_of("v0.2.0", tree)
    assert "the tag has to be v0.1.0" in fault_of("0.1.0", tree)

    citation = tree / "CITATION.cff"
    citation.write_text("title: PaW\nversion: 0.0.9\n")
    assert fault_of("v0.1.0", tree) == "CITATION.cff names another version than 0.1.0"

    changes = tree / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## 0.1.0 (unreleased)\n\n- It trains.\n")
    assert "needs the day of the release" in fault_of("v0.1.0", tree)
    changes.write_text("# Changelog\n\n## 0.0.9 (2026-11-01)\n\n- Less.\n")
    assert "has no entry '## 0.1.0 (YYYY-MM-DD)'" in fault_of("v0.1.0", tree)


def test_the_notes_of_a_release_are_its_entry_alone(tree):
    text = "# Changelog\n\n## 0.1.1 (2027-01-01)\n\n- A\n\n### More\n\n- B\n\n## 0.1.0 (2026-12-01)\n\n- C\n"
    (tree / "CHANGELOG.md").write_text(text)
    assert CHECK["changelog_entry"]("0.1.1", tree) == ("2027-01-01", "- A\n\n### More\n\n- B")
    assert CHECK["changelog_entry"]("0.1.0", tree) == ("2026-12-01", "- C")


def test_this_tree_has_an_entry_for_its_version():
    heading, notes = CHECK["changelog_entry"](CHECK["version_of"](ROOT))
    assert heading
    assert notes
    tag = f"v{CHECK['version_of'](ROOT)}"
    assert CHECK["fault_of"](tag) is None or heading == "unreleased"


@pytest.mark.parametrize("path", sorted(GITHUB.glob("workflows/*.yml")), ids=lambda p: p.name)
def test_a_workflow_runs_what_exists_and_pins_what_it_uses(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            for words in re.findall(
                r"^make ([a-z ]+?)(?: [A-Z_]+=.*)?$", step.get("run", ""), re.M
            ):
                assert set(words.split()) <= targets, step
            for script in re.findall(r"\.ci/\w+", step.get("run", "")):
                assert (ROOT / script).stat().st_mode & 0o100, script
            action, _, version = step.get("uses", "").partition("@")
            if action and action != "pypa/gh-action-pypi-publish":
                assert re.fullmatch(r"[0-9a-f]{40}", version), action


def test_the_release_uses_the_tools_that_make_dist_uses():
    text = (GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8")
    (tools,) = re.findall(r"^RELEASE_TOOLS := (.+)$", MAKEFILE, re.MULTILINE)
    for tool in ("build", "twine"):
        (pinned,) = {pin for pin in re.findall(rf"{tool}==[\d.]+", text)}
        assert pinned in tools.split()


def test_each_form_asks_something_and_names_its_fields_once():
    forms = [path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.name != "config.yml"]
    assert {path.stem for path in forms} == {"bug", "feature", "gpu-result"}
    for path in forms:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))["body"]
        fields = [field for field in body if field["type"] != "markdown"]
        names = [field["id"] for field in fields]
        assert len(set(names)) == len(names) <= 5
        assert any(field.get("validations", {}).get("required") for field in fields)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_dist_refuses_an_old_python_in_a_line(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    finished = subprocess.run(
        ["make", "-C", ROOT, "dist", f"PYTHON={python}"], capture_output=True, text=True
    )
    assert finished.returncode == 2
    assert "make dist PYTHON=python3.11" in finished.stderr
