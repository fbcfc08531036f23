"""`paw env check`: what training plays keeps every rule, and each rule can fail."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paw import cli
from paw.config import EnvConfig
from paw.plugins import import_file
from paw.tools.env_check import RULES, check
from paw.tools.env_replay import Subject
from paw.types import Task

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_environment.py"
example = import_file(str(EXAMPLE), "")
COUNTER = [0]


def broken(environment=None, **members):
    """The example with other members of the factory, and of its environments."""
    game = type("Broken", (example.Game,), environment or {})
    return type("BrokenFactory", (example.Guess,), {"make": lambda self: game(self.config.max_turns), **members})


def on_step(change):
    """A step() that answers change(environment, outcome)."""
    return {"step": lambda self, response: change(self, example.Game.step(self, response))}


def failed(factory) -> dict[str, str]:
    env = EnvConfig(name="x.py:X", max_turns=6)
    return {finding.rule: finding.seen for finding in check(Subject(lambda: factory(env), env)) if not finding.ok}


def fixed(**fields):
    return on_step(lambda self, outcome: replace(outcome, **fields))


def counting_tasks(self, step, count, seed):
    COUNTER[0] += 1
    return [example.new_task(f"train/{COUNTER[0]}/{i}") for i in range(count)]


def step_shared(self, response):
    type(self).guesses = getattr(type(self), "guesses", 0) + 1
    outcome = example.Game.step(self, response)
    if outcome.done:
        type(self).guesses = 0
    return replace(outcome, observation=f"{outcome.observation} Guess {type(self).guesses}.")


def shared_from_reset(self, task):
    type(self).guesses = 0
    return example.Game.reset(self, task)


def prompt_that_counts(self):
    self.turns += 1
    return f"{example.Game.context(self)}"


def raise_error(*_):
    raise KeyError("mine")


def forgetful_reset(self, task):
    self.played = getattr(self, "played", 0) + 1
    return f"{example.Game.reset(self, task)} Game {self.played}."


def step_of_payload(self, response):
    self.mine.append(response)
    return example.Game.step(self, response)


def reset_of_payload(self, task):
    self.mine = task.payload
    example.Game.reset(self, Task(task.id, "guess", task.payload[0]))
    return f"I think of a number. {len(self.mine)}"


def listed(self, step, count, seed):
    return [replace(task, payload=[task.payload]) for task in example.Guess.train_tasks(self, step, count, seed)]


def again_and_again(self, response):
    self.done = False
    return example.Game.step(self, response)


def close_once(self):
    del self.secret


FAULTS = {
    "members": [
        (broken(reward_max="ten"), "BrokenFactory.reward_max = 'ten'; for"),
        (broken(may_block=None), "BrokenFactory.may_block = None; for what it must be see EnvFactory in paw/"),
        (broken(fingerprint=lambda self: str(random.random())), "it must be one text for the same games"),
        (
            broken(make=lambda self: object()),
            "object lacks admissible_actions, anchor, close, context, format_action, oracle,",
        ),
        (broken(__init__=raise_error), "raised KeyError: 'mine' (test_env_check.py, line"),
    ],
    "training tasks": [
        (broken(train_tasks=counting_tasks), "asked again: "),
        (broken(train_tasks=lambda *_: []), "0 tasks instead of 4"),
        (broken(train_tasks=lambda *_: ["a"] * 4), "'a' among the tasks; each must be a Task"),
    ],
    "evaluation tasks": [
        (broken(eval_tasks=lambda self, split, count, seed: counting_tasks(self, 0, count or 9, seed)), "asked again"),
        (
            broken(eval_tasks=lambda self, split, count, seed: example.Guess.eval_tasks(self, split, 9, seed)),
            "9 tasks in",
        ),
    ],
    "outcomes": [
        (broken(on_step(lambda self, outcome: tuple(vars(outcome)))), "step() answered ('observation'"),
        (broken(fixed(won=1)), "Outcome.won = 1; for what it must be see Outcome in paw/types.py"),
        (broken(fixed(reward=float("nan"))), "Outcome.reward = nan"),
        (broken(fixed(score=2.0)), "Outcome.score = 2.0"),
        (broken({"context": lambda self: ""}), "a prompt is empty"),
        (broken({"step": raise_error}), "raised KeyError"),
    ],
    "length": [(broken({"__init__": lambda self, n: setattr(self, "max_turns", n + 1)}), "env.max_turns = 6 turns")],
    "warmup tasks": [
        (
            broken(warmup_tasks=lambda self, start, n, seed: example.Guess.warmup_tasks(self, 0, n, seed)),
            "number `start`",
        )
    ],
    "task ids": [
        (
            broken(eval_tasks=lambda self, split, n, seed: self.train_tasks(0, n or 9, seed)),
            "'train/0/0' is in 'valid_",
        ),
        (broken(eval_tasks=lambda self, split, n, seed: self.warmup_tasks(0, n or 9, seed)), "in the warm-up; keep"),
        (
            broken(eval_tasks=lambda self, *_: [example.new_task("a")] * 4),
            "two tasks of 'valid_unseen' have the id 'a'",
        ),
    ],
    "deterministic": [
        (broken(on_step(lambda self, o: replace(o, observation=str(random.random())))), "global generator"),
    ],
    "starts afresh": [(broken({"reset": forgetful_reset}), "Game 1.' and then 'I think of a number. Game 2.'; in an")],
    "group shares a task": [
        (broken({"reset": reset_of_payload, "step": step_of_payload}, train_tasks=listed), "Task.payload is read-only")
    ],
    "no shared state": [
        (broken({"reset": shared_from_reset, "step": step_shared}), "keep state in self, not in the class"),
    ],
    "looking changes nothing": [
        (broken({"context": prompt_that_counts}), "looked at 0 times a turn; context(), anchor(), oracle()"),
    ],
    "observations": [
        (
            broken(on_step(lambda self, o: replace(o, observation=self.context()))),
            "turn 0: the observation holds the next",
        )
    ],
    "rewards": [
        (broken(reward_max=0.5), "sum to 1, reward_max is 0.5; raise it"),
        (broken(fixed(won=True)), "won and not done"),
    ],
    "garbage": [
        (broken(fixed(valid=True)), "the response '' is valid"),
    ],
    "after the end": [
        (broken({"step": again_and_again}), "step() answers Outcome("),
    ],
    "well formed answers": [
        (
            broken({"admissible_actions": lambda self: ["seven"]}),
            "'seven', of oracle() or format_action(), is not valid",
        ),
        (broken({"oracle": lambda self: "seven"}), "'seven', of oracle()"),
        (broken({"task": 50}), "Broken.task = 50; for what it"),
        (broken({"format_action": lambda self, a: ""}), "'', of "),
    ],
    "closes": [(broken({"close": close_once}), "raised AttributeError")],
}


@pytest.mark.parametrize(("rule", "fault"), [(rule, fault) for rule, faults in FAULTS.items() for fault in faults])
def test_each_rule_can_fail(rule, fault):
    factory, seen = fault
    found = failed(factory)
    assert rule in found, found
    assert seen in found[rule]


def test_no_rule_is_left_out():
    assert FAULTS.keys() == {rule.__name__.replace("_", " ") for rule in RULES}


def test_the_example_keeps_them(capsys):
    assert cli.main(["env", "check", f"{EXAMPLE}:Guess"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ok    members                  Guess and Game: guess 1 to 99\n")
    assert "\nall 18 rules hold; " in out and out.endswith(" steps/s\n")


@pytest.mark.parametrize(
    "words",
    [
        ["alfworld", "--env.difficulty", "tiny", "--env.max_turns", "8"],
        ["search", "--env.entities", "200"],
        ["webshop", "--env.products", "100"],
    ],
)
def test_what_is_built_in_keeps_them(words, capsys):
    assert cli.main(["env", "check", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["env"] == words[0] and found["steps_per_second"] > 100
    assert [rule["rule"] for rule in found["rules"]] == list(FAULTS)


def test_a_broken_one_is_told_of(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace("reward_max = 1.0", "reward_max = 0.5"))
    assert cli.main(["env", "check", f"{path}:Guess"]) == 1
    out = capsys.readouterr().out
    assert "\nFAIL  rewards                  the rewards of an episode sum to 1" in out
    assert out.endswith("\n1 of 18 rules failed; " + out.rpartition("; ")[2])
    assert cli.main(["env", "check", f"{path}:Guess", "--env.max_turns", "1", "--json"]) == 0  # nobody wins
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("def context", "def 1context", "mine.py: SyntaxError: invalid decimal literal (mine.py, line 50)"),
        ("class Game:", "class Game:\n    import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_file_that_cannot_be_imported(old, new, seen, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace(old, new))
    assert cli.main(["env", "check", f"{path}:Guess"]) == 2
    assert seen in capsys.readouterr().err


def test_a_member_that_is_missing_ends_the_check(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace("def context", "def ask"))
    assert cli.main(["env", "check", f"{path}:Guess"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL  members                  Game lacks context; see Env in paw/")
    assert out.endswith("1 of 1 rules failed, 17 not checked\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py:Mine"], "there is no file"),
        ([f"{EXAMPLE}:Gues"], "the file has no 'Gues'; did you mean 'Guess'?"),
        (["webshp"], "did you mean 'webshop'?"),
        (["alfworld", "--env.eval_split", "valid_seen"], "generated games have no split 'valid_seen'"),
        (["alfworld", "--env.max_turn", "3"], "did you mean 'env.max_turns'?"),
    ],
)
def test_a_users_mistake(words, message, capsys):
    assert cli.main(["env", "check", *words]) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
