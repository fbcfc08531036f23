"""A user's own environment: classes, objects and factories, the example of the docs. Each mistake
is one line."""

from pathlib import Path

import pytest

import paw
from paw import cli
from paw.config.recipe import load
from paw.config.sections import Config, EnvConfig, ModelConfig
from paw.envs import make_factory
from paw.envs.base import eval_tasks, train_tasks, warmup_tasks
from paw.envs.load import check_reward_max
from paw.errors import UserError
from paw.tools.env_check.env_check import check
from paw.tools.env_check.env_replay import Subject

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "number_game.py"
PAGE_FILE = ROOT / "docs" / "environments.md"
NAME = f"{EXAMPLE}:Guess"


def read_page() -> dict:
    """The definitions in the code blocks of docs/environments.md, apart from blocks within
    lists."""
    page: dict = {}
    for block in PAGE_FILE.read_text(encoding="utf-8").split("\n```python\n")[1:]:
        code = block.partition("```")[0]
        if "train(" not in code:
            exec(compile(code, "environments.md", "exec"), page)  # noqa: S102
    return page


PAGE = read_page()
Count = PAGE["Count"]
CountFactory = PAGE["CountFactory"]


class CountConfigured(Count):
    def __init__(self, config, extra=None):
        self.most = config.max_turns


class Counting(CountFactory):
    name = "counting"
    reward_max = 5.0
    invalid_penalty = 0.5
    may_block = True
    distinct_eval = False

    def fingerprint(self):
        return "counting 1"


def configure(name=NAME, **env):
    return Config(model=ModelConfig(path="-"), env=EnvConfig(name=name, **env))


@pytest.mark.parametrize("given", [Count(), CountConfigured])
def test_an_environment_alone_is_enough(given):
    factory = make_factory(configure(invalid_penalty=0.3), given)
    assert factory.name == type(factory.make()).__name__.lower()
    assert factory.reward_max == 1.0
    assert factory.may_block is False
    assert factory.invalid_penalty == 0.3
    assert factory.fingerprint() == factory.name
    assert factory.distinct_eval
    held_out = eval_tasks(factory, "valid_unseen", 0, 0)
    assert [task.id for task in held_out] == ["11", "21", "31"]
    assert [task.id for task in eval_tasks(factory, "valid_unseen", 2, 5)] == ["31", "21"]
    drawn_tasks = train_tasks(factory, 0, 35, 0)
    assert {task.id for task in drawn_tasks} == {task.id for task in Count.tasks} - {
        "11",
        "21",
        "31",
    }
    assert train_tasks(factory, 1, 9, 0) == drawn_tasks[9:18] != train_tasks(factory, 1, 9, 1)
    environment = factory.make()
    other_environment = factory.make()
    assert environment is not other_environment
    assert environment.reset(drawn_tasks[0])
    assert not hasattr(other_environment, "left")
    with pytest.raises(
        UserError, match=r"has no oracle\(\), which the quickstart's model imitates; set model.path"
    ):
        warmup_tasks(factory, 0, 1, 0)


def test_a_factory_says_the_rest():
    factory = make_factory(configure(invalid_penalty=0.3), Counting)
    values = (
        factory.name,
        factory.reward_max,
        factory.invalid_penalty,
        factory.may_block,
        factory.fingerprint(),
    )
    assert values == ("counting", 5.0, 0.5, True, "counting 1")
    assert [task.id for task in train_tasks(factory, 2, 2, 7)] == ["train/7/4", "train/7/5"]
    assert len(eval_tasks(factory, "test", 40, 0)) == 40  # drawn with replacement
    assert len(eval_tasks(factory, "train", 0, 0)) == 256  # tasks of an endless split


class Broken(Count):
    def __init__(self):
        raise KeyError("mine")


def test_an_object_has_no_settings_of_its_own():
    assert paw.load(
        "own-environment", **{"env.name": Count(), "model.path": "-"}
    ).env.name.startswith("given:Count")
    with pytest.raises(UserError, match="unknown key"):
        paw.load("own-environment", **{"env.name": Count(), "env.most": 3, "model.path": "-"})


def raising(*_):
    raise OSError("no share")


@pytest.mark.parametrize("tasks", [raising, lambda *_: None, lambda *_: iter("ab"), 7, {1, 2}])
def test_tasks_that_cannot_be_had_are_one_line(tasks):
    members = {"tasks": staticmethod(tasks) if callable(tasks) else tasks}
    factory = make_factory(configure(), type("Game", (Count,), members))
    with pytest.raises(UserError, match=r"Game.tasks\('train', 0\): (OSError: no share|TypeError)"):
        train_tasks(factory, 0, 1, 0)


def test_a_task_that_cannot_be_had_later_is_one_line():
    class Lazy(list):
        def __getitem__(self, index):
            return raising() if index else super().__getitem__(index)

    factory = make_factory(
        configure(), type("Game", (Count,), {"tasks": lambda *_: Lazy(Count.tasks)})
    )
    with pytest.raises(
        UserError, match=r"a task of env.name cannot be read: OSError: no share \(test_custom_"
    ):
        train_tasks(factory, 0, 5, 0)


def test_a_penalty_is_a_number():
    for value in ("ten", float("nan"), -1.0):
        with pytest.raises(
            UserError, match=r"invalid_penalty is .*, which is not a number of at least 0"
        ):
            make_factory(configure(), type("Game", (Count,), {"invalid_penalty": value}))


def test_what_is_missing_is_named_in_one_line():
    for incomplete, message in (
        (type("Game", (Count,), {"tasks": property()}), "Game lacks tasks"),
        (
            type("Game", (), {"tasks": [], "context": 1}),
            "Game lacks reset, step; see docs/environments.md",
        ),
        (Broken, "it cannot be made: KeyError: 'mine'"),
        (5, "int lacks tasks, reset"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            make_factory(configure(), incomplete)
        assert str(caught.value).startswith("env = ")
        assert "\n" not in str(caught.value)


def test_the_environment_made_as_a_check_is_closed_again():
    closed = []

    def close(self):
        closed.append("close")

    async def close_later(self):
        closed.append("async")

    def fail(self):
        closed.append("failed")
        raise OSError("never opened")

    for method in (close, close_later, fail):
        make_factory(configure(), type("Game", (Count,), {"close": method}))
    assert closed == ["close", "async", "failed"]


def test_the_adaptive_weight_needs_a_largest_return():
    for value in ("ten", 0.0):
        factory = make_factory(configure(), type("Game", (Count,), {"reward_max": value}))
        with pytest.raises(
            UserError,
            match=f"reward_max is {value!r}, which is not a positive number.*--wm.weight 1.0$",
        ):
            check_reward_max(factory, "mine.py:Game")


def test_training_refuses_it_before_anything_is_loaded(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        EXAMPLE.read_text(encoding="utf-8").replace("def context", "def prompt")
    )
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    command = ["train", "quickstart", "--model.path", ".", "--env.name"]
    assert cli.main([*command, "mine.py:Guess"]) == 2
    error = capsys.readouterr().err
    assert "Guess lacks context; see docs/environments.md" in error
    assert error.count("\n") == 1
    assert cli.main([*command, "number_game:Guess"]) == 2
    assert "model.path = '.'" in capsys.readouterr().err  # fails one step later


@pytest.mark.slow
def test_the_examples_of_the_page_keep_the_rules():
    for environment_class, endless in ((Count, False), (CountFactory, True)):
        config = load(
            "quickstart", {"env.name": environment_class, "model.path": "-", "env.max_turns": 50}
        )
        findings = check(Subject(lambda config=config: make_factory(config), config.env))
        assert [finding.seen for finding in findings if not finding.ok] == []
        assert len(findings) == 15
        assert ("'train': endless" in findings[1].seen) == endless
