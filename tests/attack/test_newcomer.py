"""What a newcomer tries in the first week: help, prompts that grow too long, and the functions of
the Python package."""

import importlib
import inspect
import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import paw
from paw import cli
from paw.config.recipe import recipe_names

ROOT = Path(__file__).parents[2]
FUNCTIONS = (
    "evaluate", "export", "load", "metric", "metrics", "plan", "rollout", "script", "sft", "smollm2",
    "train", "warmup",
)  # fmt: skip
CLASSES = (
    "Config", "Conversation", "LivePlot", "Outcome", "Reply", "Task", "ToolCall", "UserError",
)  # fmt: skip

TALKATIVE = """
from paw.types import Outcome, Task

class Game:
    def tasks(self, split, seed):
        return [Task(f"{split}/{n}", "talk", n) for n in range(3)]

    def make(self):
        return Game()

    def reset(self, task):
        self.messages = [{"role": "user", "content": "Say something."}]
        return "go"

    def context(self):
        return self.messages

    def step(self, response):
        said = "And then? " * LENGTH
        self.messages = [*self.messages, {"role": "assistant", "content": response}, {"role": "user", "content": said}]
        return Outcome(said, 0.0, done=False, won=False)
"""


def test_help_of_training_lists_the_recipes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    listed = capsys.readouterr().out.partition("\nrecipes (")[2].split()
    assert set(recipe_names()) <= set(listed)


def test_an_evaluation_in_which_all_run_out_of_context_says_so_and_fails(
    paw_here, tiny_llm, tmp_path
):
    model = tiny_llm(tmp_path / "model")
    settings = {
        "env.name": f"{tmp_path / 'long.py'}:Game", "env.max_turns": 3, "eval.games": 3, "model.dtype": "float32",
        "rollout.max_prompt_tokens": 200, "rollout.max_response_tokens": 4, "run.dir": tmp_path,
    }  # fmt: skip
    game_file = tmp_path / "long.py"
    reason = (
        "all 3 episodes ran out of context: raise rollout.max_prompt_tokens = 200, or lower "
        "env.max_turns = 3"
    )
    game_file.write_text(f"LENGTH = 40\n{TALKATIVE}")
    failed = paw_here("eval", model, settings, code=1)
    assert reason in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert "success 0.0% of 3 games" in failed.stdout
    assert "3 episodes were lost because the context was full" in failed.stdout
    # With --out, the evaluation is the one that agents use.
    failed = paw_here("eval", model, settings, "--out", tmp_path / "kept", "--json", code=1)
    assert reason in failed.stderr
    assert json.loads(failed.stdout)["context_full"] == 3

    game_file.write_text(f"LENGTH = 1\n{TALKATIVE}")
    finished = paw_here("eval", model, settings, "--json", code=0)
    assert not finished.stderr
    assert "context_full" not in json.loads(finished.stdout)


def test_help_of_the_functions_shows_what_they_take():
    for name in FUNCTIONS:
        function = getattr(paw, name)
        assert inspect.isfunction(function)
        assert function.__name__ == name
        assert function.__doc__
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.annotation is not parameter.empty, (name, parameter)
    help_text = pydoc.plain(pydoc.render_doc(paw.train))
    assert "function train in module paw.tools.train.train" in help_text
    assert "resume: str = ''" in help_text
    for name in CLASSES:
        assert inspect.isclass(getattr(paw, name))
        assert getattr(paw, name).__doc__
    assert set(paw.__all__) == {*FUNCTIONS, *CLASSES}
    assert set(paw.__all__) <= set(dir(paw))


def test_functions_stay_functions_whatever_is_imported():
    """No module of the package shares its name with a function, because importing the module would
    hide the function."""
    for module in (
        "paw.trainer",
        "paw.rollouts.scheduler",
        "paw.tools.plan.plan",
        "paw.tools.sft.sft",
        "paw.checkpoint.export",
    ):
        importlib.import_module(module)
    modules = {path.stem for path in (ROOT / "paw").iterdir()}
    for function in FUNCTIONS:
        assert function not in modules
        assert inspect.isfunction(getattr(paw, function))


USER = """
from typing import assert_type, Any
from pathlib import Path
import paw

config = paw.load("quickstart", **{"optim.lr": 3e-4, "run.updates": 120})
assert_type(paw.train(config, resume="auto"), Path)
assert_type(paw.metrics("runs/quickstart"), list[dict[str, Any]])
assert_type(config.optim.lr, float)
paw.evaluate("runs/quickstart", changes={"eval.games": 64})
for group in paw.rollout("runs/quickstart", config, tasks=2):
    assert_type(group.task.kind, str)
assert_type(paw.plan("quickstart", gpus="1x24GB").step_s, float)

from paw_kernels import token_loss
"""
MISTAKES = (
    "paw.trian(config)",
    'paw.train("quickstart")',
    'paw.export("a", chekpoint="b")',
    "config.optim.rl",
)


def editable_install(folder: Path, env: dict[str, str]) -> Path:
    """The Python of a new environment in which a copy of the tree is installed as editable."""
    source = folder / "source"
    build_folder = folder / "built"
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("paw", "kernels", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build_program = (
        f"import setuptools.build_meta as backend; backend.build_editable({str(build_folder)!r})"
    )
    no_compiler = env | {"CC": "false", "CXX": "false"}  # the compiled head is not needed
    subprocess.run(
        [sys.executable, "-c", build_program],
        cwd=source,
        env=no_compiler,
        check=True,
        capture_output=True,
    )

    venv.create(folder / "venv")
    (site_packages,) = (folder / "venv").glob("lib/*/site-packages")
    (wheel,) = build_folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site_packages)
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies))
    return folder / "venv" / "bin" / "python"


@pytest.mark.long
@pytest.mark.slow
def test_type_checkers_resolve_an_editable_install(tmp_path):
    """A user's project gets the real signatures, and no type errors in the code blocks of
    docs/python.md."""
    pytest.importorskip("pyright")
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    python = editable_install(tmp_path, variables)
    project = tmp_path / "project"
    project.mkdir()
    # Inferring types from torch's own code would take most of the time. Nothing here needs them.
    (project / "pyrightconfig.json").write_text('{"useLibraryCodeForTypes": false}')
    (project / "right.py").write_text(USER)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code_blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (project / "page.py").write_text("\n".join(code_blocks))
    first_line = "import paw; config = paw.load('quickstart')"
    (project / "wrong.py").write_text("\n".join([first_line, *MISTAKES]))

    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), "."]
    checked = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True)
    errors = []
    for report in json.loads(checked.stdout)["generalDiagnostics"]:
        if report["severity"] == "error":
            errors.append((Path(report["file"]).name, report["range"]["start"]["line"]))
    expected = [("wrong.py", line) for line in range(1, len(MISTAKES) + 1)]
    assert errors == expected, checked.stdout
