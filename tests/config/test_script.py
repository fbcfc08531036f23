"""A program of one's own takes the configuration's keys on its command line, as `paw` does."""

import sys
from pathlib import Path

import pytest

import paw
from paw.errors import UserError


def run(monkeypatch, main, *words):
    """The exit code of a script that is started with these arguments."""
    monkeypatch.setattr(sys, "argv", ["mine.py", *words])
    with pytest.raises(SystemExit) as exited:
        paw.script(main)
    return exited.value.code


def test_words_set_keys_after_the_programs_own_changes():
    arguments = ["run.updates=3", "--optim.lr", "1e-4", "--env.difficulty=tiny"]
    config = paw.load("quickstart", arguments, **{"run.updates": 9, "run.seed": 5})
    assert config.run.updates == 3
    assert config.run.seed == 5
    assert config.optim.lr == 1e-4
    assert paw.load("quickstart").run.updates != 3

    derived = paw.load(config, ["run.seed=6"], **{"run.name": "second"})
    assert derived.run.updates == 3
    assert derived.run.seed == 6
    assert derived.run.name == "second"
    assert config.run.name == "quickstart"


def test_what_is_no_configuration_and_no_words_is_named():
    for words in ("--optim.lr 1", ["--optim.lr", 1]):
        with pytest.raises(UserError, match="they must be a list of texts"):
            paw.load("quickstart", words)
    for function in (paw.train, paw.warmup):
        with pytest.raises(UserError, match=r"write paw\.\w+\(paw\.load\('quickstart'\)\)"):
            function("quickstart")
        with pytest.raises(UserError, match=r"None is not a configuration; .*\(paw\.load\(RECIPE"):
            function(None)
    with pytest.raises(UserError, match="resume = True: it must be 'auto', or the name"):
        paw.train(paw.load("quickstart"), resume=True)


def test_a_model_is_made_unless_words_name_one():
    calls = []

    def make():
        calls.append(Path("small"))
        return calls[-1]

    changes = {"model.path": make}
    assert paw.load("quickstart", ["--model.path", "other"], **changes).model.path == "other"
    assert not calls
    assert paw.load("quickstart", ["run.seed=1"], **changes).model.path == "small"


def test_a_scripts_mistakes_are_one_line(monkeypatch, capsys):
    def main(words):
        return paw.load("quickstart", words)

    assert run(monkeypatch, main, "run.updates=3") == 0
    for words, message in (
        (["run.update=3"], "paw: command line: unknown key '--run.update'; did you mean"),
        (["fast"], "paw: command line: 'fast' sets no key; write --optim.lr 1e-4 or optim.lr=1e-4"),
        (["--run.updates"], "paw: command line: '--run.updates' needs a value"),
    ):
        assert run(monkeypatch, main, *words) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(message)
        assert errors.count("\n") == 1
    assert run(monkeypatch, main, "--help") == 0
    assert capsys.readouterr().out.startswith("A program of one's own takes")


def test_a_scripts_own_exceptions_keep_their_traceback(monkeypatch):
    def main(words):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        monkeypatch.setattr(sys, "argv", ["mine.py"])
        paw.script(main)
