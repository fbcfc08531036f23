"""`paw env check`: what training plays keeps every rule, and each rule can fail."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from paw import cli
from paw.config.plugins import import_file
from paw.config.sections import EnvConfig
from paw.envs.conversation import Conversation
from paw.envs.load import UserFactory
from paw.errors import UserError
from paw.tools.env_check.env_calls import valid_call
from paw.tools.env_check.env_check import RULES, check
from paw.tools.env_check.env_replay import Subject
from paw.types import Outcome, Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "number_game.py"
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


def failed(environment) -> dict[str, str]:
    env = EnvConfig(name="x.py:X", max_turns=6)
    subject = Subject(lambda: UserFactory(environment, env, "env"), env)
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


ADD = {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}


def called(response) -> bool:
    return bool(getattr(response, "calls", []))


FAULTS = {
    "members": (
        broken(reward_max="ten"),
        "reward_max = 'ten'; for what it must be see EnvFactory in paw/",
    ),
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
    "looking changes nothing": (
        broken(context=lambda self: f"{count(self)}"),
        "looked at twice in turn 0: ('1",
    ),
    "observations": (
        on_step(lambda self, o: replace(o, observation=self.context())),
        "turn 0: the observation holds",
    ),
    "rewards": (broken(reward_max=0.5), "sum to 1, reward_max is 0.5; raise it"),
    "garbage": (on_step(lambda self, o: replace(o, valid=True)), "the response '' is valid"),
    "well formed answers": (
        broken(admissible_actions=lambda self: ["seven"]),
        "'seven', of oracle() or format_action(),",
    ),
    "tools": (
        broken(
            tools=[ADD],
            step=lambda self, response: (
                Guess.step(self, response) if not called(response) else 1 / 0
            ),
        ),
        'the call add({"n": ',
    ),
    "closes": (broken(close=lambda self: self.server.stop()), "raised AttributeError"),
}
OTHERS = [
    (
        "members",
        broken(fingerprint=lambda self: f"{random.random()}"),
        "it must be one text for the same tasks",
    ),
    (
        "tasks",
        tasks(lambda split, i: {}["mine"]),
        "tasks('train', 0): KeyError: 'mine' (test_env_check.py, line 1",
    ),
    ("tasks", listed(lambda split, seed: ["a"]), "'a'; it must be a paw.Task"),
    ("tasks", listed(lambda split, seed: []), "is empty"),
    (
        "outcomes",
        on_step(lambda self, o: replace(o, observation=None)),
        "Outcome.observation is None; it must be text",
    ),
    ("outcomes", broken(context=lambda self: ""), "context() is empty"),
    ("task ids", tasks(lambda split, i: f"{split}/{i % 5}"), "two tasks of 'valid_unseen'"),
    (
        "task ids",
        listed(lambda split, seed: [Task(f"{split}/1", "All", 1)]),
        "'All', a name that reports use for all",
    ),
    (
        "task ids",
        tasks(lambda split, i: f"{split != 'train'}/{i}"),
        "in 'valid_unseen' and in the warm-up; keep",
    ),
    ("rewards", on_step(lambda self, o: replace(o, won=True)), "won and not done"),
]


@pytest.mark.parametrize(
    ("rule", "environment", "expected"),
    [*((rule, *fault) for rule, fault in FAULTS.items()), *OTHERS],
)
def test_each_rule_can_fail(rule, environment, expected):
    try:
        failures = failed(environment)
    except UserError as error:  # what a run would not begin with either
        failures = {rule: str(error)}
    assert expected in failures.get(rule, ""), failures


def test_the_example_keeps_them(capsys):
    assert cli.main(["env", "check", f"{EXAMPLE}:Guess"]) == 0
    out = capsys.readouterr().out
    lines = re.sub(r"\d+\.\d s", "0.0 s", out)  # each with its seconds
    start = "ok      0.0 s  members                  guess\nok      0.0 s  tasks                    'train': 90, 'valid"
    assert lines.startswith(start)
    assert "tools                    none offered: no call was tried\n" in lines
    assert f"\nall {len(RULES)} rules hold; " in out
    assert out.endswith(" steps/s\n")


@pytest.mark.parametrize(
    "words",
    [
        "alfworld --env.difficulty tiny --env.max_turns 8",
        "search --env.entities 200",
        "webshop --env.products 100",
    ],
)
def test_what_is_built_in_keeps_them(words, capsys):
    assert cli.main(["env", "check", *words.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["env"] == words.split()[0]
    assert report["steps_per_second"] > 100
    assert [rule["rule"] for rule in report["rules"]] == list(FAULTS)  # none is left out
    assert all(rule["seconds"] >= 0 for rule in report["rules"])
    assert not report["stopped"]


def test_a_broken_one_is_reported(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        EXAMPLE.read_text(encoding="utf-8").replace(
            "    tasks =", "    reward_max = 0.5\n    tasks ="
        )
    )
    assert cli.main(["env", "check", f"{path}:Guess"]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"\nFAIL +\d+\.\d s  rewards                  the rewards of an episode sum to 1", out
    )
    assert f"\n1 of {len(RULES)} rules failed; " in out
    # Nobody wins.
    assert cli.main(["env", "check", f"{path}:Guess", "--env.max_turns", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


NUMBERS = {
    "type": "array",
    "items": {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 2, "maximum": 3},
}
TREE = {"leaf": {"type": "boolean"}, "more": {"$ref": "#/$defs/tree"}}
SCHEMAS = {
    "nothing": {},
    "texts": {
        "properties": {
            "a": {"type": "string", "minLength": 30},
            "b": {"enum": ["x", "y"]},
            "c": {"type": ["null", "string"], "format": "date"},
            "d": {"pattern": "^[0-9]+$"},
        },
        "required": ["a", "b", "c", "d"],
        "additionalProperties": False,
    },
    "numbers": {
        "properties": {
            "n": {"type": "integer", "minimum": -5, "maximum": -3},
            "m": {"type": "integer", "exclusiveMaximum": 10, "multipleOf": 7},
            "l": {**NUMBERS, "minItems": 3},
        },
        "required": ["n", "m", "l"],
    },
    "choices": {
        "properties": {"o": {"anyOf": [{"type": "null"}, {"const": 3}]}},
        "required": ["o"],
    },
    "parts": {
        "$defs": {
            "tree": {
                "properties": {"leaf": {"type": "boolean"}, "more": {"$ref": "#/$defs/tree"}},
                "required": ["leaf"],
            }
        },
        "allOf": [{"properties": {"t": {"$ref": "#/$defs/tree"}}}, {"required": ["t"]}],
    },
    "wide": {
        "$defs": {
            "x": {
                "type": "object",
                "properties": {k: {"$ref": "#/$defs/x"} for k in "abcdefghij"},
                "required": [*"abcdefghij"],
            }
        },
        "$ref": "#/$defs/x",
    },
    "huge": {
        "properties": {"n": {"type": "number", "minimum": 1e308, "multipleOf": 1e-300}},
        "required": ["n"],
    },
    "secret": {"properties": {"key": {"pattern": "^sesame-[0-9]{9}$"}}, "required": ["key"]},
}

NONE = ("wide", "huge", "secret")


def tool_named(name):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}}


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in NONE])
def test_calls_are_made_from_schemas(name):
    calls = [valid_call(tool_named(name), number) for number in range(10)]
    assert all(call is not None and call.name == name for call in calls)
    for call in calls:
        jsonschema.validate(call.arguments, SCHEMAS[name])
    assert calls == [valid_call(tool_named(name), number) for number in range(10)]


def test_no_call_is_made_where_no_arguments_are_found():
    """One has no end, of the others no text and no number fits."""
    assert [valid_call(tool_named(name), 0) for name in NONE] == [None] * 3


class Shelf(Conversation):
    """Two things are put on a shelf. Some tools cannot be called."""

    tasks = [Task(str(n)) for n in range(20)]
    tools = [
        {
            "name": "put",
            "inputSchema": {
                "properties": {"thing": {"enum": ["cup", "jug"]}},
                "required": ["thing"],
            },
        },
        {"name": "unlock", "inputSchema": SCHEMAS["secret"]},
        {"name": "look", "description": "?"},
    ]
    calls: list[str] = []

    def begin(self, task):
        self.things = []
        return [{"role": "user", "content": "Put."}]

    def call(self, call):
        Shelf.calls.append(str(call))
        self.things += call.arguments.get("thing", "").split()
        done = len(self.things) == 2
        return Outcome(f"{self.things}", float(done), done=done, won=done, valid=call.name == "put")

    def say(self, text):
        return Outcome("Put.", 0.0, done=False, won=False, action=text)


def test_tools_are_called_and_those_that_are_not_are_named():
    env = EnvConfig(name="x.py:X", max_turns=8)
    findings = {
        finding.rule: finding
        for finding in check(Subject(lambda: UserFactory(Shelf, env, "env"), env))
    }
    assert all(finding.ok for finding in findings.values()), findings
    assert findings["tools"].seen == (
        "2 of 3 called, 1 of the calls valid; not called: unlock (no arguments were found that fit the schema)"
    )
    assert {"put" in call for call in Shelf.calls} == {True, False}
    # Calls win, in the episodes of all rules.
    assert findings["rewards"].seen == "returns up to 1 of 1"


SLOW = """
import time
from paw.types import Outcome, Task

class Slow:
    tasks = [Task(str(n)) for n in range(20)]
    resets = 0

    def reset(self, task):
        Slow.resets += 1
        if Slow.resets == 6:
            time.sleep(60)
        return "begin"

    def context(self):
        return "go on"

    def step(self, response):
        return Outcome("end", 0.0, done=True, won=False, valid=bool(response.strip()))
"""


@pytest.mark.parametrize("json_out", [False, True])
def test_ctrl_c_prints_what_was_found_and_what_takes_long_says_so(json_out, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["env", "check", "slow.py:Slow", *["--json"] * json_out]
    code = (
        "import paw.cli, paw.tools.env_check.env_check as c; c.TELL_S = 0.05;"
        f" paw.cli.sys.argv[1:] = {words}; paw.cli.entry()"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=env, cwd=tmp_path, **pipes) as child:
        waiting = r"paw env check: deterministic: 2 episodes begun, 1 turns, \d+ s\n"
        assert any(re.fullmatch(waiting, line) for line in child.stderr)
        child.send_signal(signal.SIGINT)
        # The environment sleeps for a minute.
        out, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "Traceback" not in err
    if json_out:
        report = json.loads(out)
        assert report["stopped"]
        assert not report["ok"]
        assert len(report["rules"]) == 4
    else:
        lines = out.splitlines()
        assert [line.split()[0] for line in lines[:4]] == ["ok"] * 4
        assert lines[4:] == [f"stopped: 0 of 4 rules failed, {len(RULES) - 4} not checked"]
