"""What a newcomer tries in the first week: help, prompts that grow too long, the functions of Python."""

import json

import pytest

from paw import cli
from paw.recipe import recipe_names

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


def test_an_evaluation_in_which_all_run_out_of_context_says_so_and_fails(paw_here, tiny_llm, tmp_path):
    model = tiny_llm(tmp_path / "model")
    settings = {
        "env.name": f"{tmp_path / 'long.py'}:Game", "env.max_turns": 3, "eval.games": 3, "model.dtype": "float32",
        "rollout.max_prompt_tokens": 200, "rollout.max_response_tokens": 4, "run.dir": tmp_path,
    }  # fmt: skip
    game = tmp_path / "long.py"
    reason = "all 3 episodes ran out of context: raise rollout.max_prompt_tokens = 200, or lower env.max_turns = 3"
    game.write_text(f"LENGTH = 40\n{TALKATIVE}")
    done = paw_here("eval", model, settings, code=1)
    assert reason in done.stderr and done.stderr.count("\n") == 1
    assert "success 0.0% of 3 games" in done.stdout
    assert "3 episodes were lost because the context was full" in done.stdout
    done = paw_here("eval", model, settings, "--out", tmp_path / "kept", "--json", code=1)  # the way of agents
    assert reason in done.stderr and json.loads(done.stdout)["context_full"] == 3

    game.write_text(f"LENGTH = 1\n{TALKATIVE}")
    done = paw_here("eval", model, settings, "--json", code=0)
    assert not done.stderr and "context_full" not in json.loads(done.stdout)
