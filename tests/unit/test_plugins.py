"""Plug-ins by name, and what their settings are; a wrong name or setting is one line."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from paw import plugins, recipe
from paw.config import EnvConfig
from paw.errors import UserError
from paw.values import Section

FILE = """
import math
from paw.config import Section

class Maze:
    class Config(Section):
        depth: int = 3
        \"\"\"How deep it is.\"\"\"

def by_depth(samples, *, depth: int, scale: float = 2.0):
    '''Depth first.

    Args:
        depth: how deep it looks
    '''

class Listed:
    Config = ["depth"]

def untyped(samples, *, depth=3): ...
def odd(samples, *, depth: "Nonesuch" = 3): ...
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which mine.py is a file and a module."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_each_kind_of_name(folder, monkeypatch):
    assert plugins.load("advantages", "gigpo").__module__ == "paw.algo.advantages"
    for name in ("mine.py:Maze", f"{folder}/mine.py:Maze", "mine:Maze"):
        assert plugins.load("envs", name).__name__ == "Maze"
    assert plugins.load("envs", "mine.py:Maze.Config").__name__ == "Config"
    monkeypatch.setattr(plugins, "entry_points", lambda group: [EntryPoint("maze", "mine:Maze", group)])
    plugins._registered.cache_clear()
    try:
        assert plugins.load("rewards", "maze").__name__ == "Maze" and plugins.names("rewards") == ["maze"]
    finally:
        plugins._registered.cache_clear()

    first = plugins.load("envs", "mine.py:Maze")
    assert plugins.load("envs", "mine.py:Maze") is first  # read again where it has changed
    (folder / "mine.py").write_text("Maze = 5  # shorter\n")
    assert plugins.load("envs", "mine.py:Maze") == 5


WRONG = [
    ("advantages", "gigop", "there is no 'gigop': did you mean 'gigpo'? (or give 'module:name' or 'FILE.py:name')"),
    ("envs", "zzz", "there is no 'zzz': there are: alfworld, next_state, search, tau2, webshop (or give"),
    ("envs", "mine.py:Mase", "'mine.py:Mase': the file has no 'Mase'; did you mean 'Maze'?"),
    ("envs", "mime.py:Maze", "'mime.py:Maze': there is no file /"),
    ("envs", "mine.maze:Maze", "'mine.maze:Maze': there is no module 'mine.maze'"),
    ("envs", "broken.py:Maze", "broken.py, line 2: ZeroDivisionError: division by zero"),
    ("envs", "needs:Maze", "'needs:Maze': ModuleNotFoundError: No module named 'nonesuch'"),
    ("envs", ":Maze", "':Maze': the module cannot be imported: ValueError: Empty module name"),
    ("envs", "given:gone", "'given:gone' was handed over by a program; run that again, or name a 'FILE"),
]


def test_a_wrong_name_says_what_is_wrong(folder):
    (folder / "broken.py").write_text("x = 0\n1 / x\n")
    (folder / "needs.py").write_text("import nonesuch\n")
    for kind, name, message in WRONG:
        with pytest.raises(UserError) as caught:
            plugins.load(kind, name)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_are_those_of_a_class_or_of_a_function(folder):
    maze = plugins.settings(plugins.load("envs", "mine.py:Maze"), "maze", EnvConfig)
    assert issubclass(maze, EnvConfig) and maze.model_fields["depth"].description == "How deep it is."
    found = plugins.settings(plugins.load("advantages", "mine.py:by_depth"), "by_depth")
    assert found.model_fields["depth"].is_required() and found.model_fields["depth"].description == "how deep it looks"
    assert found.model_validate({"depth": 1}).model_dump() == {"depth": 1, "scale": 2.0}
    with pytest.raises(ValueError, match="Extra inputs"):
        found.model_validate({"depth": 1, "width": 2})
    assert plugins.settings(len, "len") is Section
    for name, message in (
        ("Listed", "'Listed': Listed.Config must be a subclass of paw.config.Section"),
        ("untyped", "'untyped': the parameter 'depth' is a setting, and needs a type: depth: float = 1.0"),
        ("odd", "'odd': its keyword-only parameters cannot be settings: name 'Nonesuch' is not defined"),
    ):
        with pytest.raises(UserError) as caught:
            plugins.settings(plugins.load("envs", f"mine.py:{name}"), name)
        assert str(caught.value) == message


def test_nothing_is_imported_that_was_not_asked_for():
    code = "import sys, paw.plugins as p; p.names('envs'); p.load('advantages', 'grpo');" + (
        "sys.exit(any(m == 'torch' or m.startswith(('paw.envs', 'paw.agents')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_program_hands_over_what_it_made():
    def ours(samples, *, depth: int = 3):
        return [0.0] * len(samples)

    config = recipe.load("quickstart", {"advantage.type": ours, "advantage.depth": 5})
    assert plugins.load("advantages", config.advantage.type) is ours and config.advantage.settings() == {"depth": 5}
    assert plugins.give(ours) == config.advantage.type != plugins.give(lambda samples: [])
