"""Environments of one file: the example of the documentation, and what is wrong with others, in one line."""

from pathlib import Path

import pytest

from paw import cli
from paw.config import Config, EnvConfig, ModelConfig
from paw.envs import make_factory
from paw.envs.load import check_reward_max
from paw.errors import UserError

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_environment.py"
NAME = f"{EXAMPLE}:Guess"


@pytest.fixture
def write(tmp_path):
    """Writes the example with `old` replaced by `new`; returns its env.name."""

    def change(old="", new=""):
        text = EXAMPLE.read_text(encoding="utf-8")
        assert old in text
        path = tmp_path / "mine.py"
        path.write_text(text.replace(old, new))
        return f"{path}:Guess"

    return change


def problem(name, config=None) -> str:
    with pytest.raises(UserError) as caught:
        check_reward_max(make_factory(Config(model=ModelConfig(path="-"), env=config or EnvConfig(name=name))), name)
    assert str(caught.value).startswith(f"env.name = '{name}'") and "\n" not in str(caught.value)
    return str(caught.value)


def test_the_example_plays():
    factory = make_factory(
        Config(model=ModelConfig(path="-"), env=EnvConfig(name=NAME, max_turns=7, invalid_penalty=0.5))
    )
    check_reward_max(factory, NAME)
    assert factory.invalid_penalty == 0.5
    assert factory.train_tasks(1, 2, seed=3) == factory.train_tasks(0, 4, seed=3)[2:]
    environment = factory.make()
    for task in factory.eval_tasks("any", 20, seed=0):
        assert environment.reset(task) == "I think of a number."
        outcomes = [environment.step("no idea")]
        assert not outcomes[0].valid
        while not outcomes[-1].done:
            assert environment.oracle() in environment.admissible_actions()
            outcomes.append(environment.step(environment.oracle()))
        assert outcomes[-1].won == (outcomes[-1].reward == factory.reward_max) and len(outcomes) <= 7


def test_a_file_or_a_class_that_is_not_there(write):
    assert "there is no file" in problem("nowhere/mine.py:Guess")
    name = write().replace(":Guess", ":Gues")
    assert problem(name) == f"env.name = '{name}': the file has no class 'Gues'"
    name = write().replace(":Guess", ":random")  # a module
    assert "has no class 'random'" in problem(name)


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("    may_block = False\n", "", "Guess lacks may_block; see EnvFactory in"),
        ("def eval_tasks", "def evaluation_tasks", "Guess lacks eval_tasks; see EnvFactory in"),
        ("def context", "def ask", "Game lacks context; see Env in"),
    ],
)
def test_a_member_that_is_missing_is_named(write, old, new, missing):
    assert missing in problem(write(old, new))


@pytest.mark.parametrize(
    ("value", "found"),
    [("", "missing"), ('reward_max = "ten"', "'ten', which is no"), ("reward_max = 0.0", "0.0, which is no")],
)
def test_the_adaptive_weight_needs_a_largest_return(write, value, found):
    message = problem(write("reward_max = 1.0", value or "pass"))
    assert f"Guess.reward_max is {found}" in message and message.endswith("--wm.weight 1.0")


def test_training_refuses_it_before_anything_is_loaded(write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = write("reward_max = 1.0", "pass")
    words = ["train", "quickstart", "--env.name", name, "--model.path", "."]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "Guess.reward_max is missing" in error and error.count("\n") == 1
    assert cli.main([*words, "--wm.weight", "1.0"]) == 2
    assert "model.path = '.'" in capsys.readouterr().err  # one step further


def test_an_unknown_environment_is_refused(capsys):
    assert cli.main(["train", "quickstart", "--dry-run", "--env.name", "webshp"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("paw: command line: env.name = 'webshp': there is no 'webshp': did you mean 'webshop'")
        and error.count("\n") == 1
    )


@pytest.mark.slow
def test_training_on_the_example(paw, quick, tiny_llm, read_metrics, tmp_path):
    small = {"model.path": tiny_llm(tmp_path / "model"), "env.name": NAME, "env.max_turns": 3, "eval.games": 4}
    small |= {"run.updates": 1, "rollout.max_response_tokens": 3, "run.name": "guess"}
    paw("train", "quickstart", quick, small, cwd=tmp_path)
    last = read_metrics(tmp_path / "runs" / "guess")[-1]
    assert last["step"] == 1 and last["wm/lambda"] > 0.5 and last["wm/selected_frac"] == 0.75
