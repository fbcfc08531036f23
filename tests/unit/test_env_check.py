"""`paw env check`: what training plays keeps every rule, and each rule can fail."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paw import cli
from paw.config import EnvConfig
from paw.envs.base import Endless
from paw.envs.load import OwnFactory
from paw.plugins import import_file
from paw.tools.env_check import RULES, check
from paw.tools.env_replay import Subject
from paw.types import Task

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_environment.py"
Guess = import_file(str(EXAMPLE), "").Guess
COUNTER = [0]


def broken(**members):
    """The example with other members."""
    return type("Broken", (Guess,), members)


def on_step(change):
    """The example with a step() that answers change(environment, outcome)."""
    return broken(step=lambda self, response: change(self, Guess.step(self, response)))


def fixed(**fields):
    return on_step(lambda self, outcome: replace(outcome, **fields))


def failed(given) -> dict[str, str]:
    env = EnvConfig(name="x.py:X", max_turns=6)
    subject = Subject(lambda: OwnFactory(given, env, "env"), env)
    return {finding.rule: finding.seen for finding in check(subject) if not finding.ok}


def tasks(make):
    """The example with other tasks: those that make(split) lists."""
    return broken(tasks=staticmethod(lambda split, seed: make(split)))


def counting(split):
    COUNTER[0] += 1
    return [Task(f"{COUNTER[0]}/{i}", payload=i) for i in range(9)]


def shared(self, outcome):
    cls = type(self)
    cls.guesses = getattr(cls, "guesses", 0) + 1
    return replace(outcome, observation=f"{outcome.observation} Guess {cls.guesses}.")


def shared_reset(self, task):
    type(self).guesses = 0
    return Guess.reset(self, task)


def forgetful_reset(self, task):
    self.played = getattr(self, "played", 0) + 1
    return f"{Guess.reset(self, task)} Game {self.played}."


def narrowing_context(self):
    self.low += 1
    return Guess.context(self)


def payload_reset(self, task):
    text = Guess.reset(self, Task(task.id, payload=task.payload[0]))
    task.payload.append(1)
    return f"{text} {len(task.payload)}"


def raise_error(*_):
    raise KeyError("mine")


def close_once(self):
    del self.secret


FAULTS = {
    "members": [
        (broken(reward_max="ten"), "reward_max = 'ten'; for what it must be see EnvFactory in paw/"),
        (broken(fingerprint=lambda self: str(random.random())), "it must be one text for the same tasks"),
    ],
    "tasks": [
        (tasks(counting), "asked again: "),
        (tasks(lambda split: ["a"] * 4), "'a'; it must be a paw.Task"),
        (tasks(lambda split: []), "is empty"),
        (tasks(raise_error), "raised KeyError: 'mine' (test_env_check.py, line"),
    ],
    "outcomes": [
        (fixed(reward=float("nan")), "Outcome.reward is nan"),
        (fixed(observation=None), "Outcome.observation is None; it must be text"),
        (broken(context=lambda self: ""), "context() is empty"),
    ],
    "task ids": [
        (tasks(lambda split: [Task(f"{split}/{i % 5}", payload=i) for i in range(9)]), "two tasks of 'valid_unseen'"),
        (tasks(lambda split: [Task(f"{i}", payload=i) for i in range(9)]), "in 'valid_unseen' and in training; keep"),
        (
            tasks(lambda split: Endless(lambda i: Task(f"{split.replace('warmup', 'valid_unseen')}/{i}", payload=i))),
            "in 'valid_unseen' and in the warm-up; keep",
        ),
    ],
    "deterministic": [
        (on_step(lambda self, o: replace(o, observation=f"{random.random()}")), "made and played again; draw from ran"),
    ],
    "starts afresh": [(broken(reset=forgetful_reset), "Game 1.' and then 'I think of a number. Game 2.'; in an")],
    "group shares a task": [
        (
            broken(reset=payload_reset, tasks=[Task(f"{i}", payload=[i]) for i in range(20)]),
            "Task.payload is read-only",
        )
    ],
    "no shared state": [
        (type("Broken", (on_step(shared),), {"reset": shared_reset}), "keep state in self, not in the")
    ],
    "looking changes nothing": [(broken(context=narrowing_context), "looked at twice in turn 0: ('I think")],
    "observations": [
        (on_step(lambda self, o: replace(o, observation=self.context())), "turn 0: the observation holds the next"),
    ],
    "rewards": [
        (broken(reward_max=0.5), "sum to 1, reward_max is 0.5; raise it"),
        (fixed(won=True), "won and not done"),
    ],
    "garbage": [(fixed(valid=True), "the response '' is valid")],
    "well formed answers": [
        (broken(admissible_actions=lambda self: ["seven"]), "'seven', of oracle() or format_action(), is not valid"),
    ],
    "closes": [(broken(close=close_once), "raised AttributeError")],
}


@pytest.mark.parametrize("rule", FAULTS)
def test_each_rule_can_fail(rule):
    for given, seen in FAULTS[rule]:
        try:
            found = failed(given)
        except Exception as error:  # what a run would not begin with either
            found = {rule: str(error)}
        assert seen in found.get(rule, ""), found


def test_no_rule_is_left_out():
    assert FAULTS.keys() == {rule.__name__.replace("_", " ") for rule in RULES}


def test_the_example_keeps_them(capsys):
    assert cli.main(["env", "check", f"{EXAMPLE}:Guess"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "ok    members                  guess\nok    tasks                    'train': 90, 'valid_unseen': 9"
    )
    assert f"\nall {len(RULES)} rules hold; " in out and out.endswith(" steps/s\n")


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


def test_a_broken_one_is_reported(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace("    tasks =", "    reward_max = 0.5\n    tasks ="))
    assert cli.main(["env", "check", f"{path}:Guess"]) == 1
    out = capsys.readouterr().out
    assert "\nFAIL  rewards                  the rewards of an episode sum to 1" in out
    assert out.endswith(f"\n1 of {len(RULES)} rules failed; " + out.rpartition("; ")[2])
    assert cli.main(["env", "check", f"{path}:Guess", "--env.max_turns", "1", "--json"]) == 0  # nobody wins
    assert json.loads(capsys.readouterr().out)["ok"]
