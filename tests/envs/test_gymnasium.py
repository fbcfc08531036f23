"""gymnasium environments: one with text, one with named choices, and some that are neither."""

import pytest
from toyworld import Scripted, make_chat

from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.errors import UserError
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.scheduler import Rollouts
from paw.tools.env_check.env_check import check
from paw.tools.env_check.env_replay import Subject
from paw.tools.evaluate.played import load_played

GAMES = '''
import time

import gymnasium
from gymnasium.spaces import Discrete, Text


class Letter(gymnasium.Env):
    """Name the letter that the seed hides."""
    observation_space, action_space = Text(40, charset="abcdefghilmnorstw :0123456789"), Text(1, charset="abcd")

    def __init__(self, tries=3):
        self.tries = tries

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.hidden, self.left = "abcd"[self.np_random.integers(4)], self.tries
        return f"name a letter tries: {self.left}", {}

    def step(self, action):
        self.left -= 1
        right = action == self.hidden
        return ("right" if right else "wrong"), float(right), right, self.left == 0, {}


class Door(Letter):
    action_space = Discrete(2, start=5)

    def get_action_meanings(self):
        return ["push", "pull"]

    def step(self, action):
        return super().step("abcd"[[5, 6].index(action)])


class Stuck(Letter):
    def step(self, action):
        time.sleep(600)


for kind in (Letter, Door, Stuck):
    gymnasium.registry.pop(f"paw/{kind.__name__}-v0", None)
    gymnasium.register(f"paw/{kind.__name__}-v0", entry_point=kind)
'''


def load(tmp_path, name, **env):
    (tmp_path / "games.py").write_text(GAMES)
    (tmp_path / "rules.txt").write_text("Answer with one letter.")
    settings = {
        "name": "gymnasium",
        "id": name,
        "module": f"{tmp_path}/games.py",
        "instruction": f"{tmp_path}/rules.txt",
    }
    return load_played(None, {f"env.{key}": value for key, value in (settings | env).items()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "actions"), [("paw/Letter-v0", []), ("paw/Door-v0", ["push", "pull"])]
)
def test_it_keeps_the_rules(tmp_path, name, actions):
    config = load(tmp_path, name)
    findings = check(Subject(lambda: make_factory(config), config.env))
    assert len(findings) == 15
    assert not [finding for finding in findings if not finding.ok]
    environment = CheckedEnv(make_factory(config).make(), config.env)
    environment.reset(train_tasks(make_factory(config), 0, 1, 0)[0])
    assert environment.admissible_actions() == actions
    assert not environment.step("5").valid
    assert environment.step((actions or ["d"])[-1]).valid


def test_an_episode_is_a_conversation(tmp_path):
    config = load(tmp_path, "paw/Letter-v0", **{"kwargs.tries": "2"})
    factory = make_factory(config)
    environment = CheckedEnv(factory.make(), config.env)
    returns = set()
    for task in train_tasks(factory, 0, 8, 0):
        assert environment.reset(task) == "name a letter tries: 2"
        invalid = environment.step("the letter a")
        assert not invalid.valid
        assert not invalid.done
        assert "it is not in Text(1, 1" in invalid.observation
        system, *others = environment.context()
        assert system == {"role": "system", "content": "Answer with one letter."}
        assert [message["role"] for message in others] == ["user", "assistant", "user"]
        outcome = environment.step("<think>b?</think> b ")
        outcome = outcome if outcome.done else environment.step("c")
        assert outcome.done
        assert outcome.won == (outcome.observation == "right") == (outcome.reward == 1.0)
        returns.add(outcome.reward)
    assert returns == {0.0, 1.0}


def test_it_plays_in_a_process(tmp_path):
    config = load(tmp_path, "paw/Door-v0", processes="1")
    factory = make_factory(config)
    environment = CheckedEnv(factory.make(), config.env)
    assert environment.reset(train_tasks(factory, 0, 1, 0)[0])
    assert environment.admissible_actions() == ["push", "pull"]
    assert not environment.step("5").valid
    assert environment.step("pull").valid
    with pytest.raises(UserError, match="it cannot be made: NameNotFound"):
        make_factory(load(tmp_path, "paw/Lettre-v0", processes="1"))


def test_one_that_hangs_costs_its_episode(tmp_path):
    config = load(tmp_path, "paw/Stuck-v0", step_timeout_s="0.2")
    chat = make_chat()
    factory = make_factory(config)
    rollouts = Rollouts(factory, Scripted(chat, lambda prompt: "a"), chat, config)
    options = {"group_size": 2, "temperature": 1.0, "seed": 0, "stream": "t"}
    groups, statistics = rollouts.play_tasks(train_tasks(factory, 0, 1, 0), **options)
    assert not groups
    assert len(statistics.failures) == 2
    assert "no answer within 0.2 s" in statistics.failures[0]


@pytest.mark.parametrize(
    ("name", "env", "said"),
    [
        (
            "CartPole-v1",
            {"module": ""},
            r"env\.id = 'CartPole-v1': observations are Box.*observations must be Text",
        ),
        ("paw/Lettre-v0", {}, "it cannot be made: NameNotFound"),
        ("paw/Letter-v0", {"module": "nowhere.py"}, "env.module = 'nowhere.py': there is no file"),
        ("Letter-v0", {"module": "no_such_module"}, "it cannot be made: ModuleNotFoundError"),
        ("paw/Letter-v0", {"kwargs.colour": "red"}, "it cannot be made: TypeError"),
    ],
)
def test_what_cannot_be_played_is_one_line(tmp_path, name, env, said):
    with pytest.raises(UserError, match=said):
        make_factory(load(tmp_path, name, **env))
