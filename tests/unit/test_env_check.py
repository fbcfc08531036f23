"""`paw env check`: what training plays keeps every rule, and each rule can fail."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paw import cli
from paw.config import EnvConfig
from paw.envs.load import OwnFactory
from paw.errors import UserError
from paw.plugins import import_file
from paw.tools.env_check import RULES, check
from paw.tools.env_replay import Subject
from paw.types import Task

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_environment.py"
Guess = import_file(str(EXAMPLE), "").Guess
COUNTER = iter(range(10**6))


def broken(**members):
    """The example with other members."""
    return type("Broken", (Guess,), members)


def on_step(change):
    """The example with a step() that answers change(environment, outcome)."""
    return broken(step=lambda self, response: change(self, Guess.step(self, response)))


def on_reset(change):
    """The example with what change(environment) says added to the first observation."""
    return broken(reset=lambda self, task: f"{Guess.reset(self, task)} {change(self)}")


def tasks(make):
    """The example with other tasks: those whose ids make(split, i) says."""
    return listed(lambda split, seed: [Task(make(split, i), payload=i) for i in range(9)])


def listed(tasks):
    return broken(tasks=staticmethod(tasks))


def count(owner):
    owner.count = getattr(owner, "count", 0) + 1
    return owner.count


def failed(given) -> dict[str, str]:
    env = EnvConfig(name="x.py:X", max_turns=6)
    subject = Subject(lambda: OwnFactory(given, env, "env"), env)
    return {finding.rule: finding.seen for finding in check(subject) if not finding.ok}


class Payload(Guess):
    tasks = [Task(f"{i}", payload=[i]) for i in range(20)]

    def reset(self, task):
        task.payload.append(1)
        return f"{super().reset(Task(task.id, payload=task.payload[0]))} {len(task.payload)}"


class Shared(Guess):
    def reset(self, task):
        Shared.count = 0
        return super().reset(task)

    def step(self, response):
        return replace(super().step(response), observation=f"Guess {count(Shared)}.")


FAULTS = {
    "members": (broken(reward_max="ten"), "reward_max = 'ten'; for what it must be see EnvFactory in paw/"),
    "tasks": (tasks(lambda split, i: f"{next(COUNTER)}"), "asked again: "),
    "outcomes": (on_step(lambda self, o: replace(o, reward=math.nan)), "Outcome.reward is nan"),
    "task ids": (tasks(lambda split, i: f"{i}"), "in 'valid_unseen' and in training; keep"),
    "deterministic": (
        on_step(lambda self, o: replace(o, observation=f"{random.random()}")),
        "draw from random.Random(",
    ),
    "starts afresh": (on_reset(count), " 1' and then 'I think of a number. 2'; in an"),
    "group shares a task": (Payload, "Task.payload is read-only"),
    "no shared state": (Shared, "keep state in self, not in the"),
    "looking changes nothing": (broken(context=lambda self: f"{count(self)}"), "looked at twice in turn 0: ('1"),
    "observations": (on_step(lambda self, o: replace(o, observation=self.context())), "turn 0: the observation holds"),
    "rewards": (broken(reward_max=0.5), "sum to 1, reward_max is 0.5; raise it"),
    "garbage": (on_step(lambda self, o: replace(o, valid=True)), "the response '' is valid"),
    "well formed answers": (
        broken(admissible_actions=lambda self: ["seven"]),
        "'seven', of oracle() or format_action(),",
    ),
    "closes": (broken(close=lambda self: delattr(self, "secret")), "raised AttributeError"),
}
OTHERS = [
    ("members", broken(fingerprint=lambda self: f"{random.random()}"), "it must be one text for the same tasks"),
    ("tasks", tasks(lambda split, i: {}["mine"]), "tasks('train', 0): KeyError: 'mine' (test_env_check.py, line 1"),
    ("tasks", listed(lambda split, seed: ["a"]), "'a'; it must be a paw.Task"),
    ("tasks", listed(lambda split, seed: []), "is empty"),
    ("outcomes", on_step(lambda self, o: replace(o, observation=None)), "Outcome.observation is None; it must be text"),
    ("outcomes", broken(context=lambda self: ""), "context() is empty"),
    ("task ids", tasks(lambda split, i: f"{split}/{i % 5}"), "two tasks of 'valid_unseen'"),
    ("task ids", listed(lambda split, seed: [Task(f"{split}/1", "All", 1)]), "'All', which reports call all kinds tog"),
    ("task ids", tasks(lambda split, i: f"{split != 'train'}/{i}"), "in 'valid_unseen' and in the warm-up; keep"),
    ("rewards", on_step(lambda self, o: replace(o, won=True)), "won and not done"),
]


@pytest.mark.parametrize(("rule", "given", "seen"), [*((rule, *fault) for rule, fault in FAULTS.items()), *OTHERS])
def test_each_rule_can_fail(rule, given, seen):
    try:
        found = failed(given)
    except UserError as error:  # what a run would not begin with either
        found = {rule: str(error)}
    assert seen in found.get(rule, ""), found


def test_the_example_keeps_them(capsys):
    assert cli.main(["env", "check", f"{EXAMPLE}:Guess"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ok    members                  guess\nok    tasks                    'train': 90, 'valid")
    assert f"\nall {len(RULES)} rules hold; " in out and out.endswith(" steps/s\n")


@pytest.mark.parametrize(
    "words",
    ["alfworld --env.difficulty tiny --env.max_turns 8", "search --env.entities 200", "webshop --env.products 100"],
)
def test_what_is_built_in_keeps_them(words, capsys):
    assert cli.main(["env", "check", *words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["env"] == words.split()[0] and found["steps_per_second"] > 100
    assert [rule["rule"] for rule in found["rules"]] == list(FAULTS)  # none is left out


def test_a_broken_one_is_reported(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace("    tasks =", "    reward_max = 0.5\n    tasks ="))
    assert cli.main(["env", "check", f"{path}:Guess"]) == 1
    out = capsys.readouterr().out
    assert "\nFAIL  rewards                  the rewards of an episode sum to 1" in out
    assert f"\n1 of {len(RULES)} rules failed; " in out
    assert cli.main(["env", "check", f"{path}:Guess", "--env.max_turns", "1", "--json"]) == 0  # nobody wins
    assert json.loads(capsys.readouterr().out)["ok"]
