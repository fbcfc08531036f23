"""`paw play` as a program and as a person use it."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paw import cli
from paw.envs import make_factory
from paw.envs.base import eval_tasks
from paw.tools.evaluate.played import load_played

KEYS = ["feedback", "admissible", "won", "reward", "done"]
TINY = {"env.name": "alfworld", "env.difficulty": "tiny"}

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'number_game.py'}:Guess"


def talk(typed: str, *words: str, env: str = "alfworld", **overrides: str) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "stdin", io.StringIO(typed))
        keys = [f"--{key.replace('__', '.')}={value}" for key, value in overrides.items()]
        assert cli.main(["play", env, *words, *keys]) == 0
    return out.getvalue()


def messages(typed: str, *words: str, **options: str) -> list[dict]:
    return [json.loads(line) for line in talk(typed, "--json", *words, **options).splitlines()]


def test_json_wins_with_the_walkthrough_and_stops_there():
    factory = make_factory(load_played(None, TINY, {"env.data": "none"}))
    (task,) = eval_tasks(factory, "valid_unseen", 1, 5)
    game = task.payload
    first, *replies = messages("\n".join(["{}", *game.walkthrough, "look"]), "--seed", "5", **TINY)
    assert first["feedback"].endswith(game.task)
    assert replies[0]["feedback"] == "Nothing happens."
    assert len(replies) == len(game.walkthrough) + 1
    assert all(list(message) == KEYS for message in replies)
    ends = [False] * len(game.walkthrough) + [True]
    assert [reply["done"] for reply in replies] == ends
    assert [reply["won"] for reply in replies] == ends
    assert [reply["reward"] for reply in replies] == [0.0] * len(game.walkthrough) + [10.0]
    for command, before in zip(game.walkthrough, replies, strict=False):
        assert command in before["admissible"]
        assert before["admissible"] == sorted(before["admissible"])


def test_json_nonsense_does_nothing_and_ends_with_the_input():
    replies = messages("</action>\n\nfly away\n{}", **TINY)
    assert [reply["feedback"] for reply in replies[1:]] == ["Nothing happens."] * 4
    assert not replies[-1]["done"]
    assert len(messages("", **TINY)) == 1


def test_json_answers_each_line_before_the_next_is_written():
    command = [
        sys.executable,
        "-m",
        "paw",
        "play",
        "alfworld",
        "--json",
        "--env.difficulty",
        "tiny",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["feedback"].startswith(
            "-= Welcome to TextWorld, ALFRED! =-"
        )
        for typed in (b"inventory\n", b"\xff\xfe\n"):
            child.stdin.write(typed)
            child.stdin.flush()
            assert list(json.loads(child.stdout.readline())) == KEYS
        child.stdin.close()
        assert child.wait(timeout=30) == 0


def test_a_person_sees_numbered_actions_and_the_prompt():
    out = talk("1\nprompt\nquit\nlook\n", "--seed", "3", **TINY)
    first = re.search(r"^   1  (go to (.+))$", out, re.M)
    assert first
    assert f"\n> {first[1]}\n\nYou arrive at {first[2]}." in out
    assert f"Action 1: '{first[1]}']" in out
    assert (
        "You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: "
        in out
    )
    assert out.count("\n> ") == 3  # nothing is read after quit
    assert "> task: " in talk("prompt\n", "--seed", "3", **TINY, env__style="compact")


def test_a_shop():
    replies = messages("search[shoes]\nclick[next >]\nbuy", env="webshop", env__products="50")
    assert replies[0]["task"].startswith("Find me ")
    assert "task" not in replies[1]
    assert "click[next >]" in replies[1]["admissible"]
    assert replies[2]["feedback"].startswith("'Back to Search' [SEP] 'Page 2 ")
    assert list(replies[-1]) == [*KEYS, "score"]
    out = talk("search[shoes]\n2\nquit", "--seed", "3", env="webshop", env__products="50")
    assert out.startswith("Find me ")
    assert "   2  click[next >]\n" in out
    assert "'Page 2 " in out


def test_an_environment_of_ones_own_gets_what_is_typed():
    out = talk(
        "prompt\n50\n" + "\n".join(map(str, range(1, 100))), env=EXAMPLE, env__max_turns="200"
    )
    assert "I think of a number from 1 to 99. Your guess?" in out
    assert "than 50." in out
    assert "Won in " in out
